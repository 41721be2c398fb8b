"""Invalid bodies: every one gets a 400 or 413 that says where it is wrong."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import tracemalloc
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.datastructures import Headers
from starlette.types import Message

from common.rerank_limits import MOST_DOCUMENTS
from gateway import json_route
from gateway.bodies import BodyMiddleware
from gateway.errors import ApiError
from gateway.exchange import Exchange
from gateway.json_route import DEEPEST, MOST_FIELDS, MOST_OBJECTS
from gateway.openai.completion import MOST_PROMPTS
from gateway.settings import GatewaySettings
from gateway.tagged import MOST_ENTRIES
from tests.gateway.gateway_process import WAIT, GatewayProcess
from tests.gateway.requests_begun import begun

LIMIT = 64 << 10
JSON = Headers({"content-type": "application/json"})


def parse(headers: Headers, body: bytes) -> dict[str, Any]:
    return asyncio.run(json_route.parse(headers, body))


@pytest.fixture(scope="module")
def gateway() -> Iterator[GatewayProcess]:
    """Refusals need no model; a small limit makes large bodies cheap."""
    process = GatewayProcess({}, "--strict", "--max-body-bytes", str(LIMIT))
    yield process
    process.close()


def refusal(gateway: GatewayProcess, body: bytes | str, path: str = "/v1/embeddings") -> Any:
    answer = gateway.client.post(
        path, content=body, headers={"content-type": "application/json; charset=utf-8"}
    )
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/chat/completions", {"messages": [5]}, "messages[0] should be an object, but it is 5"),
        ("/v1/responses", {"input": 5}, "input should be a string or a list, but it is 5"),
        ("/v1/completions", {"prompt": "x", "n": True}, "n should be an integer, but it is true"),
        (
            "/v1/completions",
            {"prompt": "x", "temperature": -1},
            "temperature should be greater than or equal to 0, but it is -1",
        ),
        (
            "/v1/completions",
            {"prompt": "x", "logit_bias": {"a": 1}},
            "logit_bias.a should be a token id",
        ),
        ("/v1/rerank", {"query": "", "documents": ["x"]}, "query should not be empty"),
        ("/v1/completions", {"prompt": [[]]}, "prompt[0] should have at least one entry"),
        *(
            (path, body | {name: ["x"] * (most + 1)}, f"{name} should have at most {most} entries")
            for path, body, name, most in (
                ("/v1/completions", {}, "prompt", MOST_PROMPTS),
                ("/v1/completions", {"prompt": "x"}, "stop", MOST_ENTRIES),
                ("/v1/rerank", {"query": "x"}, "documents", MOST_DOCUMENTS),
            )
        ),
        (
            "/v1/completion",
            {"prompt": "x", "suffix": "y"},
            "suffix is not supported with this value: use /v1/infill with input_suffix",
        ),
        (
            "/v1/messages",
            {"max_tokens": 9, "messages": [{"role": "user", "content": 5}]},
            "messages[0].content should be a string or a list, but it is 5",
        ),
    ],
)
def test_a_value_of_a_wrong_type_is_told_all_types(
    gateway: GatewayProcess, path: str, body: dict[str, Any], message: str
) -> None:
    answer = gateway.client.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)


@pytest.mark.parametrize(
    ("method", "path", "param"),
    [("GET", "/v1/%0eTokens%0f", None), ("POST", "/v1/chat/completions", "messages[0].content[0]")],
)
def test_the_clients_own_words_are_not_mistaken_for_a_field(
    gateway: GatewayProcess, method: str, path: str, param: str | None
) -> None:
    part = {"type": "\x0eTokens\x0f"}
    body = {"messages": [{"role": "user", "content": [part]}]}
    error = gateway.client.request(method, path, json=body).json()["error"]
    assert "Tokens" in error["message"]
    assert error["param"] in (param, f"{param}.type")
    assert not {"\x0e", "\x0f"} & {*error["message"]}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "no body"),
        (b" \n", "no body"),
        (b'{"model": "x",\n "input"; 1}', "line 2 column 9"),
        (b'{"model": NaN}', "line 1 column 11"),
        (b'{"model": -Infinity}', "invalid number"),
        (b'{"model": 1e999}', "a number is too large"),
        (b'{"model": [[1], [2, {"a": -1e999}]]}', "a number is too large"),
        (b'{"model": ' + b"9" * 5000 + b"}", "number out of range"),
        (b'{"model": "\xff"}', "invalid unicode"),
        ('{"model": "ü"}'.encode("utf-16"), "line 1 column 1"),
        (b"[1]", "a list"),
        (b'"text"', "a string"),
        (b"null", "null"),
        (b"1", "a number"),
        (b'{"a":' * 100_0 + b"1" + b"}" * 100_0, "nests deeper"),
        (b"[" * 60_000, "nests deeper"),
    ],
)
def test_a_body_that_is_not_a_json_object_is_refused(
    gateway: GatewayProcess, body: bytes, words: str
) -> None:
    assert words in refusal(gateway, body)["message"]


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (r"\ud83d\ude00", "😀"),
        (r"a \ud83d", "a \ufffd"),
        (r"\uDE00b", "\ufffdb"),
        (r"\ud83d\ud83d\ude00\ude00", "\ufffd😀\ufffd"),
        (r"\\\ud83d\n", "\\\ufffd\n"),
        (r"\\ud83d \ud83d", r"\ud83d" + " \ufffd"),
    ],
)
def test_half_of_a_surrogate_pair_is_replaced(written: str, text: str) -> None:
    """An agent that cuts a tool's output in the middle of an emoji sends it in every request."""
    assert parse(JSON, f'{{"a": "{written}", "{written}": []}}'.encode()) == {"a": text, text: []}


@pytest.mark.parametrize("size", range(1, 6))
def test_every_mix_of_halves_and_backslashes_is_read_as_a_browser_would(size: int) -> None:
    written = (r"\ud83d", r"\ude00", r"\\", "ude00")
    for parts in itertools.product(written, repeat=size):
        body = f'{{"a": "{"".join(parts)}"}}'
        raw = json.loads(body)["a"].encode("utf-16-le", "surrogatepass")
        assert parse(JSON, body.encode())["a"] == raw.decode("utf-16-le", "replace"), body


@pytest.mark.parametrize("half", [r"\ud83d", r"\udc00"])
def test_half_of_a_surrogate_pair_is_refused_if_strict(strict: Exchange, half: str) -> None:
    with pytest.raises(ApiError, match="not valid JSON"):
        parse(JSON, f'{{"a": "{half}"}}'.encode())


def test_long_runs_of_backslashes_are_read_in_linear_time() -> None:
    body = b'{"a": "' + b"\\" * 2_000_000 + b'\\ud83d"}'
    assert parse(JSON, body)["a"] == "\\" * 1_000_000 + "\ufffd"


def test_brackets_in_a_string_are_not_nesting() -> None:
    text = "[" * 1000 + '\\"' + "{" * 1000
    assert parse(JSON, f'{{"a": "{text}"}}'.encode())["a"].count("[") == 1000


@pytest.mark.parametrize("text", ["[{", '\\\\\\"[', "\\n{"])
def test_many_brackets_in_a_string_do_not_count(text: str) -> None:
    body = f'{{"a": "{text * MOST_OBJECTS}", "b": []}}'.encode()
    assert len(parse(JSON, body)["a"]) > MOST_OBJECTS


@pytest.mark.parametrize("each", [b"[]", b"{}", b'{"\\\\":0}', b'{"a\\"":[]}'])
def test_a_body_of_brackets_is_refused_before_it_is_parsed(each: bytes) -> None:
    body = b'{"a": [' + each + (b"," + each) * MOST_OBJECTS + b"]}"
    with pytest.raises(ApiError, match="more than 200000 lists and objects"):
        parse(JSON, body)


def test_a_body_of_too_many_fields_is_refused() -> None:
    """A million different names were read in one step of half a second."""
    fields = b",".join(b'"%d":1' % at for at in range(MOST_FIELDS))
    with pytest.raises(ApiError, match=f"more than {MOST_FIELDS} fields"):
        parse(JSON, b'{"a":{%b}}' % fields)


def test_a_body_of_short_strings_is_refused_without_much_memory() -> None:
    body = b'{"a":[' + b'[""],' * 2_000_000 + b"[]]}"
    tracemalloc.start()
    try:
        with pytest.raises(ApiError, match="the body has more than"):
            parse(JSON, body)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(body)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "fields",
    [
        '"t": 0, "t": 5',
        '"t":0,"t" :5',
        '"t": {"u": 0, "u": 5}',
        '"m": [{"t": ":", "t": "\\":"}]',
        '"a\\\\":1,"t":0,"t":5',
        '"t": 0, "\\u0074": 5',
        '"t": "\\ud83d", "t": 5',
        f'"t": "{"x" * 50_000}", "t": 5',
    ],
)
def test_a_field_with_two_values_is_refused(fields: str) -> None:
    """A parser would use the last one, and the client would not learn which."""
    with pytest.raises(ApiError, match="is in the same object twice, with different") as refused:
        parse(JSON, f"{{{fields}}}".encode())
    assert refused.value.status == 400
    assert refused.value.param in ("t", "u")


def test_a_field_that_is_sent_twice_with_one_value_has_that_value() -> None:
    assert parse(JSON, b'{"a": [1], "b": {"a" : 2}, "a": [1]}') == {"a": [1], "b": {"a": 2}}


@given(st.recursive(st.text() | st.integers() | st.none(), st.lists))
def test_serialised_json_is_read_back(value: Any) -> None:
    assert parse(JSON, json.dumps({"a": value}).encode()) == {"a": value}


@given(st.binary(max_size=200) | st.text('[]{}",:\\u0d8e1.-nNI \n', max_size=60).map(str.encode))
def test_anything_else_is_parsed_or_refused(body: bytes) -> None:
    with contextlib.suppress(ApiError):
        found = parse(JSON, body)
        assert isinstance(found, dict)
        json.dumps(found, allow_nan=False, ensure_ascii=False).encode()


@given(st.integers(1, 2 * DEEPEST))
@example(DEEPEST)
@example(DEEPEST + 1)
def test_nesting_is_counted_exactly(depth: int) -> None:
    body = b'{"a":' + b"[" * (depth - 1) + b"1" + b"]" * (depth - 1) + b"}"
    if depth <= DEEPEST:
        parse(JSON, body)
    else:
        with pytest.raises(ApiError, match="nests deeper"):
            parse(JSON, body)


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/v1/embeddings", {"model": "x"}, "input", "missing_required_parameter"),
        ("/v1/embeddings", {"model": "x", "input": "a", "foo": 1}, "foo", "unknown_parameter"),
        ("/v1/embeddings", {"model": "x", "input": ["a", 3]}, "input", None),
        ("/v1/embeddings", {"model": "x", "input": []}, "input", None),
        ("/v1/embeddings", {"model": "x", "input": [[1, -1]]}, "input", None),
        ("/v1/embeddings", {"model": "x", "input": "a", "dimensions": 0}, "dimensions", None),
        ("/v1/embeddings", {"model": 3, "input": "a"}, "model", None),
        (
            "/v1/rerank",
            {"model": "x", "query": "q", "documents": ["a", {"text": "b", "score": 1}]},
            "documents[1].score",
            "unknown_parameter",
        ),
        (
            "/v1/chat/completions",
            {"model": "x", "messages": [{"role": "boss", "content": "a"}]},
            "messages[0].role",
            None,
        ),
        ("/v1/detokenize", {"tokens": [1, "2"]}, "tokens[1]", None),
        # Metadata of a call to the backend, which is limited.
        ("/v1/embeddings", {"input": "x", "prompt_name": "x" * 257}, "prompt_name", None),
    ],
)
def test_an_invalid_field_is_named_by_its_path(
    gateway: GatewayProcess, path: str, body: dict[str, Any], param: str, code: str | None
) -> None:
    error = refusal(gateway, json.dumps(body), path)
    assert (error["param"], error["code"]) == (param, code)
    assert param in error["message"]


def test_a_declared_length_beyond_the_limit_is_refused_at_once(gateway: GatewayProcess) -> None:
    """The answer comes although no part of the body is sent."""
    place = urlsplit(gateway.url)
    with socket.create_connection((place.hostname, place.port), timeout=WAIT) as link:
        head = f"POST /v1/embeddings HTTP/1.1\r\nhost: {place.netloc}\r\n"
        link.sendall(f"{head}content-length: {LIMIT + 1}\r\n\r\n".encode())
        received = link.recv(4096).decode()
    assert received.startswith("HTTP/1.1 413 ")
    assert "connection: close" in received.lower()


def test_a_body_without_a_length_is_counted_while_it_arrives(gateway: GatewayProcess) -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield b" " * 4096

    with contextlib.suppress(httpx.WriteError):  # the gateway stopped reading
        answer = gateway.client.post(
            "/v1/embeddings", content=endless(), headers={"content-type": "application/json"}
        )
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "request_too_large"
    assert gateway.client.get("/health").status_code == 200


def test_a_body_of_exactly_the_limit_is_read(gateway: GatewayProcess) -> None:
    body = b'{"model": "' + b"x" * (LIMIT - 13) + b'"}'
    assert len(body) == LIMIT
    assert refusal(gateway, body)["param"] == "input"


@pytest.mark.parametrize("path", ["/v1/models/", "/v1//models", "//v1/models", "/v1/v1/models"])
def test_what_a_base_url_adds_to_a_path_changes_nothing(gateway: GatewayProcess, path: str) -> None:
    """Xcode asks for `/v1/models/`; a program may put its own `/v1` behind that of the setting."""
    assert gateway.client.get(path).json() == gateway.client.get("/v1/models").json()


LONG = "é" * 4096
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        *(
            ("POST", path, {"model": LONG, "input": "a", "prompt": "a", "max_tokens": 1} | more)
            for path in ("/v1/chat/completions", "/v1/messages", "/api/chat")
            for more in ({"messages": [{"role": "user", "content": "a"}]},)
        ),
        ("POST", "/v1/responses", {"model": LONG, "input": "a"}),
        ("POST", "/v1/responses", {"input": "a", "previous_response_id": LONG}),
        ("POST", "/v1/embeddings", {"model": LONG, "input": "a"}),
        ("POST", "/models/load", {"model": LONG}),
        ("POST", "/api/show", {"model": LONG}),
        ("POST", "/api/copy", {"source": LONG, "destination": LONG}),
        ("GET", f"/v1/models/{LONG[:2000]}", None),
        ("GET", f"/props?model={LONG[:2000]}", None),
        ("GET", f"/page/{LONG[:2000]}", None),
        ("GET", f"/v1/models?after_id={LONG[:2000]}", None),
        ("GET", f"/{LONG[:2000]}", None),
        ("PUT", f"/v1/models/{LONG[:2000]}", None),
        *(
            (
                "POST",
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": "a"}]} | more,
            )
            for more in (
                {"logit_bias": {LONG: 1}},
                {LONG: 1},
                {"tools": [_TOOL], "tool_choice": {"type": "tool", "name": LONG}},
                {"tools": [{"type": LONG}], "tool_choice": LONG},
                {"response_format": {"type": LONG}},
                {"reasoning_effort": LONG},
                {"temperature": LONG},
                {"chat_template_kwargs": {"enable_thinking": LONG}, "reasoning_effort": "none"},
                {"messages": [{"role": LONG, "content": "a"}]},
                {"messages": [{"role": "user", "content": [{"type": LONG}]}]},
            )
        ),
    ],
)
def test_no_refusal_repeats_a_long_value(
    gateway: GatewayProcess, method: str, path: str, body: Any
) -> None:
    answer = gateway.client.request(method, path, json=body)
    assert 400 <= answer.status_code < 500, answer.text
    assert len(answer.text) < 900
    assert answer.text.count("é") + answer.text.count("\\u00e9") <= 200


def test_a_byte_order_mark_before_the_body_is_skipped() -> None:
    """Windows' shells write one into a file that curl then sends."""
    assert parse(JSON, b'\xef\xbb\xbf{"a": 1}') == {"a": 1}


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "unknown_url"),
        ("POST", "/v1/nowhere", 404, "unknown_url"),
        ("GET", "/v1/models/none/", 404, "model_not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("PUT", "/v1/models", 405, "method_not_allowed"),
    ],
)
def test_other_paths_and_methods_are_refused(
    gateway: GatewayProcess, method: str, path: str, status: int, code: str
) -> None:
    answer = gateway.client.request(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert answer.headers["x-request-id"] == answer.headers["x-request-id"].strip() != ""


@pytest.mark.parametrize("path", ["/v1/messages/batches", "/v1/models/nobody", "/v1/files"])
def test_clients_of_anthropic_read_its_errors_at_every_path(
    gateway: GatewayProcess, path: str
) -> None:
    answer = gateway.client.get(path, headers={"anthropic-version": "2023-06-01"})
    response = answer.json()
    assert (answer.status_code, response["type"]) == (404, "error")
    assert response["error"]["type"] == "not_found_error"


def test_ollamas_clients_read_its_errors_at_every_path(gateway: GatewayProcess) -> None:
    answer = gateway.client.post("/api/create", json={})
    assert answer.status_code == 404
    assert "there is no endpoint /api/create" in answer.json()["error"]


@pytest.mark.parametrize(
    ("path", "taken"),
    [
        ("/v1/responses/resp_1", "HEAD, GET, DELETE"),
        ("/responses/resp_1", "HEAD, GET, DELETE"),
        ("/v1/responses/input_tokens", "HEAD, GET, POST, DELETE"),
        ("/v1/chat/completions", "POST"),
        ("/openapi.json", "HEAD, GET"),
        ("/docs/static/x", "HEAD, GET"),
    ],
)
def test_a_wrong_method_is_answered_with_the_allowed_ones(
    gateway: GatewayProcess, path: str, taken: str
) -> None:
    answer = gateway.client.put(path)
    assert (answer.status_code, answer.headers["allow"]) == (405, taken)
    assert answer.headers.get_list("allow") == [taken]
    assert answer.json()["error"]["message"].endswith(f"it accepts {taken}")


def test_websockets_are_refused_with_the_status_that_makes_codex_use_post(
    gateway: GatewayProcess,
) -> None:
    headers = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-key": "eA=="}
    answer = gateway.client.get("/v1/responses", headers=headers)
    assert (answer.status_code, answer.headers["allow"]) == (426, "POST")


def test_probes_may_use_head_requests(gateway: GatewayProcess) -> None:
    for path in ("/health", "/ready", "/v1/models", "/metrics", "/"):
        got, asked = gateway.client.get(path), gateway.client.head(path)
        assert (asked.status_code, asked.content) == (200, b""), path
        assert asked.headers["content-type"] == got.headers["content-type"]
    assert gateway.client.head("/nowhere").status_code == 404
    assert gateway.client.head("/v1/chat/completions").status_code == 405


def test_a_request_keeps_its_id_if_that_is_harmless(gateway: GatewayProcess) -> None:
    kept = gateway.client.get("/health", headers={"x-request-id": "trace-1.a:b"})
    assert kept.headers["x-request-id"] == "trace-1.a:b"
    for bad in (b"a b", b"x" * 200, b'a"b=c', "ü".encode()):
        given = gateway.client.get("/nowhere", headers={b"x-request-id": bad})
        assert given.headers["x-request-id"].startswith("req_")


async def test_a_body_that_arrives_too_slowly_is_refused() -> None:
    """A client that sends one byte at a time would occupy the gateway as long as it likes."""

    async def receive() -> Message:
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b" ", "more_body": True}

    begun()
    settings = GatewaySettings(max_body_bytes=1 << 40, request_timeout=0.05)
    with pytest.raises(ApiError, match=r"the body took longer than 0\.05 s to") as caught:
        await BodyMiddleware(FastAPI(), settings).read(Headers(), receive)
    assert caught.value.status == 408


async def test_many_bodies_at_once_are_refused_before_memory_is_short() -> None:
    """Nine clients send eleven twelfths of the largest body each, and wait."""
    bodies = BodyMiddleware(FastAPI(), GatewaySettings(max_body_bytes=1200))
    released, sent = asyncio.Event(), [asyncio.Event() for _ in range(8)]

    async def body(number: int) -> bytearray:
        parts = iter((b" " * 1100, b""))

        async def receive() -> Message:
            part = next(parts)
            if not part:
                sent[number].set()  # the first part was counted
                await released.wait()
            return {"type": "http.request", "body": part, "more_body": bool(part)}

        begun()
        return await bodies.read(Headers(), receive)

    waiting = [asyncio.ensure_future(body(number)) for number in range(8)]
    async with asyncio.timeout(60):
        for each in sent:
            await each.wait()
    with pytest.raises(
        ApiError, match="other requests are sending 8800 bytes at the mom"
    ) as caught:
        await body(0)
    assert (caught.value.status, caught.value.retry_after) == (503, 1)
    waiting[0].cancel()
    released.set()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert bodies.arriving == 0
    assert len(await body(0)) == 1100
