"""Bodies of many small entries: the work grows with their number, and streams go on meanwhile."""

from __future__ import annotations

import gc
import json
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from gateway import fields, repairs
from gateway.anthropic.request import MessagesRequest
from gateway.app import create_app
from gateway.exchange import Traffic
from gateway.models.reading import ModelFolder
from gateway.openai import answering, chat_request, messages_to_wire
from gateway.openai.chat_request import ChatCompletionRequest
from gateway.openai.field_names import names_of
from gateway.openai.thinking import write_template_arguments
from gateway.responses.request import chat_request as chat_of
from gateway.responses.store import Store, Stored, items_of
from gateway.routes import responses
from gateway.routes.tokenize import DetokenizeRequest
from gateway.settings import GatewaySettings
from gateway.supervisor.supervisor import Supervisor
from tests.gateway.many_entries import MODEL, Case, Schemas, Served, served
from tests.long import TEST_LONG

Json = dict[str, Any]
MANY = 4_000  # entries, less than the limit of 10,000
LITTLE = 0.03  # CPU seconds: less cannot be compared, and harms nobody
TIMES = 4  # a linear work takes 4 times as long for 4 times the entries, a quadratic one 16 times
BOUND = 9.0  # less than 3 for each doubling
ROUNDS = 6


@cache
def schemas() -> Schemas:
    """Those of the gateway's document, which takes a second to write."""
    settings = GatewaySettings(Path(__file__).parent)  # without a model
    supervisor = Supervisor(settings, ModelFolder())
    return Schemas(create_app(settings, supervisor, Traffic()).openapi())


@cache
def cases() -> list[Case]:
    return list(schemas().cases())


PATHS = (
    *("/api/chat", "/api/embed", "/api/generate", "/v1/chat/completions", "/v1/completion"),
    *("/v1/completions", "/v1/detokenize", "/v1/embeddings", "/v1/infill", "/v1/lora-adapters"),
    *(
        "/v1/fim/completions",
        "/v1/messages",
        "/v1/rerank",
        "/v1/responses",
        "/v1/responses/compact",
        "/v1/embed",
        "/v1/score",
    ),
)
"""What accepts lists, except requests that only count tokens, which are parts of others."""


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Served]:
    async with served(tmp_path) as gateway:
        yield gateway


async def _growth(gateway: Served, path: str, few: bytes, many: bytes) -> float:
    """How many times as much CPU time `many` takes: the least of several rounds, or 0 if little."""
    least, most = [], []
    gc.disable()  # a full collection searches all objects of the tests, and takes 0.1 s
    try:
        for _ in range(ROUNDS):
            most.append(await gateway.cost(path, many))
            if min(most) < LITTLE:
                return 0
            least.append(await gateway.cost(path, few))
            if min(most) / min(least) < BOUND:
                break
    finally:
        gc.enable()
    return min(most) / min(least)


def _bytes(body: Json) -> bytes:
    return json.dumps(body).encode()


def _sample(path: str) -> list[Case]:
    """The cases of a path; without TEST_LONG, every kind of entry is in messages of one role."""
    found = [case for case in cases() if case.path == path]
    if TEST_LONG:
        return found
    kinds: dict[Any, list[Case]] = defaultdict(list)
    for case in found:
        kinds[case.steps, case.kind].append(case)
    return [alike[at % len(alike)] for at, alike in enumerate(kinds.values())]


def test_every_path_that_accepts_lists_is_tried() -> None:
    found = {case.path for case in cases() if not case.path.endswith("_tokens")}
    assert found == set(PATHS)
    assert len(cases()) > 250


@pytest.mark.parametrize("path", PATHS)
async def test_the_work_grows_with_the_number_of_entries(gateway: Served, path: str) -> None:
    for case in _sample(path):
        many = min(MANY, schemas().most(case) or MANY)
        bodies = [_bytes(schemas().body(case, count)) for count in (many // TIMES, many)]
        growth = await _growth(gateway, path, *bodies)
        assert growth < BOUND, f"{case}: {TIMES} times the entries take {growth:.1f} times as long"


@pytest.mark.parametrize(
    ("schema", "fields"),
    [
        (ChatCompletionRequest, {"stop": [1] * 400_000}),
        (ChatCompletionRequest, {"lora": [1] * 400_000}),
        (ChatCompletionRequest, {"stop_token_ids": ["a"] * 200_000}),
        (MessagesRequest, {"max_tokens": 1, "stop_sequences": [1] * 400_000}),
        (DetokenizeRequest, {"tokens": ["a"] * 200_000}),
    ],
)
def test_not_every_wrong_value_of_a_long_list_is_reported(
    schema: type[BaseModel], fields: Json
) -> None:
    """A report of all of them takes long, and only one is shown."""
    body = {"messages": [{"role": "user", "content": "x"}]} if "tokens" not in fields else {}
    with pytest.raises(ValidationError) as refused:
        schema.model_validate(body | fields)
    assert refused.value.error_count() <= 2  # one for each alternative


def _called(count: int, name: str) -> list[Json]:
    """Calls, and as many results that do not say whose they are."""
    calls = [{"id": f"c{at}", "function": {"name": "look"}} for at in range(count)]
    results = [{"role": "tool", "name": name, "content": "x"} for _ in range(count)]
    return [{"role": "assistant", "tool_calls": calls}, *results]


def _used(count: int) -> list[Json]:
    """Calls among the parts of a content, of which the same message has some already."""
    calls = [{"id": f"c{at}", "function": {"name": "look"}} for at in range(count)]
    parts = [{"type": "tool_use", "id": f"c{at}", "name": "look"} for at in range(2 * count)]
    return [{"role": "assistant", "content": parts, "tool_calls": calls}]


def _anthropic(count: int) -> list[Json]:
    parts = [{"type": "tool_use", "id": f"c{at}", "name": "look"} for at in range(count)]
    return [{"role": "assistant", "content": parts}, {"role": "user", "content": "x"}]


def _items(count: int) -> list[Json]:
    called = {"type": "function_call", "name": "look", "arguments": "{}"}
    calls = [{**called, "call_id": f"c{at}"} for at in range(count)]
    return [*calls, *({"type": "function_call_output", "output": "x"} for _ in range(count))]


def _tools(count: int) -> Json:
    few = [{"type": "function", "function": {"name": f"t{at}"}} for at in range(count // 8)]
    return {
        "messages": [{"role": "user", "content": "x"}],
        "tools": few,
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": few},
        },
    }


SEVERAL: dict[str, tuple[str, Callable[[int], Json]]] = {
    "results of other calls": (
        "/v1/chat/completions",
        lambda count: {"messages": _called(count, "other")},
    ),
    "results without an id": (
        "/v1/chat/completions",
        lambda count: {"messages": _called(count, "look")},
    ),
    "calls in both forms": ("/v1/chat/completions", lambda count: {"messages": _used(count // 2)}),
    "calls and results": ("/v1/responses", lambda count: {"input": _items(count // 2)}),
    "allowed tools": ("/v1/chat/completions", _tools),
    "unknown fields": (
        "/v1/chat/completions",
        lambda count: (
            {"messages": [{"role": "user", "content": "x"}]}
            | {f"unknown{at}": 1 for at in range(count)}
        ),
    ),
    "biases": (
        "/v1/completions",
        lambda count: {"prompt": "x", "logit_bias": {str(at): 1 for at in range(count)}},
    ),
    "calls of an earlier turn": (
        "/v1/messages",
        lambda count: {"messages": _anthropic(count), "max_tokens": 1},
    ),
}


@pytest.mark.parametrize("name", SEVERAL)
async def test_the_work_for_several_lists_grows_with_their_length(
    gateway: Served, name: str
) -> None:
    path, body = SEVERAL[name]
    few, many = (_bytes({"model": MODEL, **body(count)}) for count in (MANY // TIMES, MANY))
    assert await gateway.post(path, few) == 200
    growth = await _growth(gateway, path, few, many)
    assert growth < BOUND, f"{TIMES} times the entries take {growth:.1f} times as long"


def _case(path: str, place: str) -> Case:
    return next(case for case in cases() if str(case).strip().startswith(f"{path} {place}"))


LIMITED = [
    ("/v1/chat/completions", "messages.[].content.[1] (0,) user", 10_000),
    ("/v1/chat/completions", "messages.[].tool_calls.[0]  assistant", 10_000),
    ("/v1/chat/completions", "messages  user", 10_000),
    ("/v1/messages", "messages.[].content.[1] (0,) user", 10_000),
    ("/v1/messages", "messages  user", 10_000),
    ("/v1/messages", "tools.[0]", 1024),
    ("/v1/responses", "input.[1].[].[0].content.[1] (0,) user", 10_000),
    ("/v1/responses", "input.[1] (0,) user", 10_000),
    ("/api/chat", "messages  user", 10_000),
]


@pytest.mark.parametrize(("path", "place", "most"), LIMITED)
async def test_a_list_is_limited(gateway: Served, path: str, place: str, most: int) -> None:
    case = _case(path, place)
    statuses = [
        await gateway.post(path, _bytes(schemas().body(case, count))) for count in (most, most + 1)
    ]
    assert statuses == [200, 400]


@pytest.mark.parametrize("path", PATHS)
async def test_a_long_body_is_checked_and_translated_on_a_thread(
    gateway: Served, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short one is not, because a thread would only cost time."""
    here = threading.get_ident()
    places: list[bool] = []

    def checked(body: Any, check: Callable[[Any], Any]) -> Any:
        if isinstance(body, dict):  # not an object that is valid already
            places.append(threading.get_ident() == here)
        return unchanged(body, check)

    unchanged = repairs.checked
    monkeypatch.setattr(fields, "checked", checked)
    case = next(case for case in cases() if case.path == path)
    body = _bytes(schemas().body(case, 2))
    for given, on_the_loop in ((body, True), (body + b" " * (1 << 15), False)):
        places.clear()
        await gateway.post(path, given)
        assert set(places) == {on_the_loop}


def _on_the_loop(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, function: Callable[..., Any]
) -> list[bool]:
    """For each call that the module makes of the function, whether it is on this thread."""
    here, places = threading.get_ident(), []

    def called(*given: Any) -> Any:
        places.append(threading.get_ident() == here)
        return function(*given)

    monkeypatch.setattr(module, function.__name__, called)
    return places


async def test_a_short_body_that_continues_a_long_conversation_is_translated_on_a_thread(
    gateway: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = _on_the_loop(monkeypatch, responses, chat_of)
    stored = Stored({"id": "resp_1", "output": []}, (), ())
    gateway.app.state.responses = Store()
    gateway.app.state.responses.put(stored)
    for path in ("responses", "responses/input_tokens", "responses/compact"):
        body = {"model": MODEL, "input": "x", "previous_response_id": "resp_1"}
        assert await gateway.post(f"/v1/{path}", _bytes(body)) == 200
    assert places
    assert not any(places)


async def test_the_fields_of_a_long_chat_are_written_on_a_thread(
    gateway: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variables of a chat template, and the ids of stop tokens, may be long too."""
    places = _on_the_loop(monkeypatch, chat_request, write_template_arguments)
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
    for long in ("x", "x" * (1 << 16)):
        body = {**chat, "chat_template_kwargs": {"long": long}}
        assert await gateway.post("/v1/chat/completions", _bytes(body)) == 200
    assert places == [True, False]


async def test_the_calls_of_a_long_chat_are_written_on_a_thread(
    gateway: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single message may have thousands of them."""
    places = _on_the_loop(monkeypatch, messages_to_wire, messages_to_wire.calls_of)
    for long in ("{}", json.dumps({"long": "x" * (1 << 16)})):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": long}}
        messages = [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "x"},
        ]
        body = _bytes({"model": MODEL, "messages": messages})
        assert await gateway.post("/v1/chat/completions", body) == 200
    assert places == [True, True, False, False]


async def test_stored_items_are_validated_on_a_thread(
    gateway: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short request may refer to items that are as long as any."""
    places = _on_the_loop(monkeypatch, responses, items_of)
    gateway.app.state.responses = Store()
    message = {"type": "message", "role": "user", "content": "x", "id": "msg_1"}
    gateway.app.state.responses.put(Stored({"id": "resp_1", "output": [message]}, (), ()))
    body = {"model": MODEL, "input": [{"type": "item_reference", "id": "msg_1"}]}
    assert await gateway.post("/v1/responses", _bytes(body)) == 200
    assert places == [False]


async def test_the_names_of_fields_are_listed_once_for_all_answers(
    gateway: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list takes as long as the request is: once for each answer would be too much."""
    calls = []

    def counted(request: Any) -> dict[str, str]:
        calls.append(request)
        return names_of(request)

    monkeypatch.setattr(answering, "names_of", counted)
    asked = {"model": MODEL, "prompt": ["x"] * 20, "n": 2}
    assert await gateway.post("/v1/completions", _bytes(asked)) == 200
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": ["x"] * 2048, "n": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 128}),
    ],
)
async def test_the_copies_of_a_long_request_are_limited(
    gateway: Served, path: str, prompt: Json
) -> None:
    long = {"model": MODEL, "grammar": "x" * 1_100_000, **prompt}
    assert await gateway.post(path, _bytes(long)) == 400
    assert await gateway.post(path, _bytes({**long, "grammar": "x"})) == 200
