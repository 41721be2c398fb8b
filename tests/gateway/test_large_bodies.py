"""Long messages and large answers: they are served, and use little memory."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from starlette.datastructures import Headers
from starlette.types import Message

from gateway import json_route
from gateway.errors import ApiError
from gateway.json_route import MOST_VALUES, parse
from gateway.openai.answer_format import constraint_of, write_constraint
from gateway.openai.chat_request import ChatCompletionRequest
from gateway.openai.messages import ChatMessage
from gateway.openai.tools import offer_of, write_tools
from gateway.routes.embeddings import in_parts
from gateway.sse import json_parts
from tests.gateway.gateway_process import ROOT, WAIT, GatewayProcess, tiny
from tests.gateway.numbers_backend import NumbersBackend
from tests.polling import until
from wire import backend_pb2 as pb

LONG = 10 << 20
WORDS = "a word and another "
EMOJI = "⛵🌊" * (LONG // 7)
TEXTS = {"words": WORDS * (LONG // len(WORDS)), "code": 'if (x[1]) { y = "a\n"; }\n' * (LONG // 27)}


@pytest.fixture
def gateway() -> Iterator[GatewayProcess]:
    """A gateway for each test, because a long message enlarges the heap."""
    backend = NumbersBackend()
    backend.release.set()
    numbers = {"parameters": {"model": "numbers"}, "address": backend.address}
    process = GatewayProcess({"tiny": tiny(), "numbers": numbers})
    yield process
    process.close()
    backend.close()


def own_process(gateway: GatewayProcess) -> psutil.Process:
    (found,) = [one for one, command in gateway.commands() if command[1:3] == ["-m", "gateway"]]
    return found


def peak(process: psutil.Process) -> int:
    """The peak memory in bytes since the latest reset."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no VmHWM")


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
def test_a_long_message_takes_little_more_memory_than_its_length(
    gateway: GatewayProcess, path: str, kind: str
) -> None:
    def body(text: str) -> bytes:
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
        if path == "responses":
            asked = {"input": text, "store": False}
        return json.dumps({"model": "numbers", **asked}).encode()

    headers = {"content-type": "application/json"}
    post = gateway.client.post
    assert post(f"/v1/{path}", content=body("Hi"), headers=headers).status_code == 200
    process = own_process(gateway)
    long = body(TEXTS[kind])
    before = process.memory_info().rss
    for _ in range(3):
        Path(f"/proc/{process.pid}/clear_refs").write_text("5")
        assert post(f"/v1/{path}", content=long, headers=headers).status_code == 200
        assert peak(process) - before < 5 * len(long)
        # A thread that has read the body may end later than the answer arrives.
        until(lambda: process.memory_info().rss - before < 1.5 * len(long))


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
def test_messages_that_are_far_too_long_take_little_memory_of_the_backend(
    gateway: GatewayProcess,
) -> None:
    """The messages are refused before they are searched for control strings and rendered. Nothing
    keeps them afterwards: neither the refusal, nor gRPC, nor the C library.
    """

    def post(text: str, place: int | None) -> httpx.Response:
        if place is None:
            raw = {"model": "tiny", "prompt": text, "max_tokens": 2}
            return gateway.client.post("/v1/completions", json=raw)
        turns = [("user", "Hi"), ("assistant", "Hello."), ("user", "Bye")]
        messages = [{"role": role, "content": content} for role, content in turns]
        messages[place]["content"] = text
        asked = {"model": "tiny", "messages": messages, "max_tokens": 2}
        return gateway.client.post("/v1/chat/completions", json=asked)

    assert post("Hi", 0).status_code == 200
    (process,) = gateway.backends()
    before = process.memory_info().rss

    def kept() -> int:
        assert gateway.client.get("/api/status").status_code == 200
        return process.memory_info().rss - before

    for text, place in product((TEXTS["code"], EMOJI), (0, 2, None) * 2):
        Path(f"/proc/{process.pid}/clear_refs").write_text("5")
        refused = post(text, place)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        assert peak(process) - before < 5 * LONG
    until(lambda: kept() < LONG)


def test_all_garbage_is_collected_only_after_a_long_body(tmp_path: Path) -> None:
    """A full collection searches all objects of the body, and stops every stream meanwhile."""
    program = (
        "import gc, sys; gc.callbacks.append(lambda phase, about: phase == 'start'"
        " and about['generation'] == 2 and print('collected', file=sys.stderr, flush=True));"
        " from gateway import __main__ as shell; shell.main()"
    )
    parts = [{"type": "tool_use", "id": f"c{at}", "name": "f", "input": {}} for at in range(9000)]
    turns = [{"role": "assistant", "content": parts}, {"role": "user", "content": "x"}]
    body = {"max_tokens": 1, "messages": turns * 3}
    child = subprocess.Popen(
        [
            *(str(ROOT / "scripts" / "python"), "-c", program),
            *("--models-dir", str(tmp_path), "--port", "0", "--forget-prompts"),
        ],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stderr is not None
    try:
        url = next(line for line in child.stderr if "listening on" in line).split()[-1]
        httpx.post(f"{url}/v1/messages", json=body, timeout=WAIT, trust_env=False)
        marks = (line for line in child.stderr if "collected" in line or "event=request" in line)
        assert [next(marks).split()[0].startswith("time=") for _ in range(2)] == [True, False]
    finally:
        child.terminate()
        child.communicate(timeout=WAIT)


async def test_a_long_body_is_read_in_several_steps() -> None:
    """Between two steps every other task of the gateway has a turn."""
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.ensure_future(take_turns())
    body = json.dumps({"input": TEXTS["code"]}).encode()
    assert await parse(Headers({"content-type": "application/json"}), body)
    other.cancel()
    assert turns >= 3


async def test_a_large_answer_is_written_in_small_steps() -> None:
    """Between two pieces of at most 64 KiB, other tasks of the gateway run."""
    vector = [n / 1024 for n in range(1024)]
    entries = ({"index": place, "embedding": vector} for place in range(256))
    answer = in_parts("data", entries, {"object": "list"})
    turns = 0
    pieces: list[tuple[int, int]] = []

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def send(message: Message) -> None:
        if body := message.get("body"):
            pieces.append((turns, len(body)))

    async def receive() -> Message:
        return await asyncio.Event().wait()  # type: ignore[return-value]  # nobody leaves

    other = asyncio.ensure_future(take_turns())
    await answer({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)
    other.cancel()
    assert len(pieces) == 256 + 1
    assert max(length for _, length in pieces) < 64 << 10
    assert all(after > before for (before, _), (after, _) in pairwise(pieces))


async def test_the_tokens_of_a_long_text_are_written_in_small_steps() -> None:
    """They are neither copied nor written all at once, which would stop every stream."""
    tokens = pb.TokenizationResponse(tokens=range(100_000)).tokens
    parts = list(json_parts({"tokens": tokens, "count": len(tokens)}))
    assert json.loads("".join(parts)) == {"tokens": list(tokens), "count": 100_000}
    assert max(map(len, parts)) < 64 << 10


async def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parsing millions of numbers is one step, in which no other task has a turn."""
    headers = Headers({"content-type": "application/json"})
    parsed: list[int] = []

    def parse_body(body: bytes, **_: bool) -> dict[str, int]:
        parsed.append(len(body))
        return {}

    monkeypatch.setattr(json_route, "from_json", parse_body)
    for value in (b"1", b'","', b"1.5", b"null"):
        with pytest.raises(ApiError, match="more than 1100000 values"):
            await parse(headers, b'{"prompt":[%b1]}' % ((value + b",") * (MOST_VALUES + 1)))
    assert parsed == []
    text = b'{"prompt":"%b"}' % (b"," * 2 * MOST_VALUES)  # commas of a text are not values
    await parse(headers, text)
    assert parsed == [len(text)]


@pytest.mark.parametrize("place", ["tools", "response_format"])
def test_a_long_schema_is_written_without_slow_steps(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The standard library needs ten times as long for floats, and lets no thread run meanwhile."""
    monkeypatch.setattr(json, "dumps", _not_for_schemas)
    schema = {"type": "object", "properties": {"x": {"enum": [1.5, "é"]}}}
    function = {"type": "function", "function": {"name": "f", "parameters": schema}}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    fields = {"tools": [function]} if place == "tools" else {"response_format": form}
    messages = [{"role": "user", "content": "x"}]
    chat = ChatCompletionRequest.model_validate({"messages": messages, **fields})
    options = pb.PredictOptions()
    if place == "tools":
        write_tools(options, offer_of(chat), chat)
        assert json.loads(options.Tools) == [function]
    else:
        write_constraint(options, constraint_of(chat))
        assert json.loads(options.Grammar) == schema


def _not_for_schemas(value: Any) -> str:
    assert isinstance(value, str)
    return f'"{value}"'


class _Text(str):
    """A text whose single characters must not be read."""

    __slots__ = ()

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("read character by character")


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_reasoning_is_not_looked_for_in_the_characters_of_a_text(role: str) -> None:
    """Looking for it in 10 MB stopped all streams for seconds."""
    assert ChatMessage.model_construct(role=role, content=_Text("x" * 9)).thought == ""
