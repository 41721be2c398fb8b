"""A stream begins when its request is accepted, and sends keep-alive events at fixed intervals."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import pytest

from tests.gateway.asking import body_of, chat_chunks, chunks, joined
from tests.gateway.gateway_process import WAIT, GatewayProcess, roomy, tiny
from tests.gateway.numbers_backend import NumbersBackend
from wire import backend_pb2 as pb

Json = dict[str, Any]
HI = [{"role": "user", "content": "Hi"}]
LONG = "Say tick. " * 200
CHUNK = 64
BODIES: dict[str, Json] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 9},
    "/v1/responses": {"input": "Hi"},
}


class AcceptingBackend(NumbersBackend):
    """Accepts a request, and sends nothing more until it is released."""

    def PredictStream(
        self, request: pb.PredictOptions, context: grpc.ServicerContext
    ) -> Iterator[pb.Reply]:
        assert request.Metadata["mlx.stream_progress"] == "true"
        progress = {"progress": {"total": 3, "cached": 0, "processed": 0}}
        yield pb.Reply(logprobs=json.dumps(progress).encode(), prompt_tokens=3)
        yield from super().PredictStream(request, context)

    def _ended(self) -> None:
        """Do nothing: the end may be reported after the next request has begun."""


@pytest.fixture(params=["3600", "0.05"], ids=["no clock", "clock"])
def asked(request: pytest.FixtureRequest) -> Iterator[tuple[AcceptingBackend, GatewayProcess, str]]:
    backend = AcceptingBackend()
    model = {"parameters": {"model": "m"}, "address": backend.address}
    process = GatewayProcess({"m": model}, "--keepalive-interval", request.param)
    yield backend, process, request.param
    backend.close()
    process.close()


class SlowToLoad(NumbersBackend):
    """Loads a model when the test allows it, and fails to load the one named `torn`."""

    def __init__(self) -> None:
        self.may_load = threading.Semaphore(0)
        super().__init__()

    def LoadModel(self, request: pb.ModelOptions, _context: grpc.ServicerContext) -> pb.Result:
        self.may_load.acquire(timeout=WAIT)
        torn = request.Model == "torn"
        return pb.Result(success=not torn, message="its weights are torn" if torn else "")


@pytest.fixture(scope="module")
def loading() -> Iterator[tuple[SlowToLoad, GatewayProcess]]:
    """A gateway that sends no keep-alive events, and a backend for both of its models."""
    backend = SlowToLoad()
    backend.release.set()
    models = {
        name: {"parameters": {"model": name}, "address": backend.address} for name in ("m", "torn")
    }
    process = GatewayProcess(models, "--keepalive-interval", "3600")
    yield backend, process
    backend.close()
    process.close()


STREAMS: dict[str, Json] = {
    **BODIES,
    "/api/chat": {"messages": HI},
    "/api/generate": {"prompt": "Hi"},
    "/infill": {"input_prefix": "Hi"},
}


@contextmanager
def begun(gateway: GatewayProcess, model: str) -> Iterator[tuple[list[str], list[Iterator[str]]]]:
    """The first line of one stream on each path, and the lines that follow."""
    with ExitStack() as streams:
        answers = [
            streams.enter_context(
                gateway.client.stream("POST", path, json={"model": model, "stream": True, **body})
            )
            for path, body in STREAMS.items()
        ]
        assert all(answer.status_code == 200 for answer in answers)
        lines = [answer.iter_lines() for answer in answers]
        yield [next(each) for each in lines], lines


def test_a_stream_begins_while_its_model_is_loaded(
    loading: tuple[SlowToLoad, GatewayProcess],
) -> None:
    backend, gateway = loading
    with begun(gateway, "m") as (firsts, lines):
        assert firsts[2] == "event: message_start"
        assert firsts[3] == "event: response.created"
        for path, body in STREAMS.items():
            unknown = {"model": "nobody", "stream": True, **body}
            assert gateway.client.post(path, json=unknown).status_code == 404, path
            wrong = {"model": "m", "stream": True, **body, "temperature": "hot"}
            wrong["options"] = {"temperature": "hot"}
            assert gateway.client.post(path, json=wrong).status_code == 400, path
        backend.may_load.release()
        assert all('"b"' in "".join(rest) for rest in lines)


def test_a_load_that_fails_ends_the_stream_with_an_error_of_the_api(
    loading: tuple[SlowToLoad, GatewayProcess],
) -> None:
    backend, gateway = loading
    with begun(gateway, "torn") as (_, lines):
        backend.may_load.release()
        ends = [[line for line in rest if line][-1] for rest in lines]
    for path, end in zip(STREAMS, ends, strict=True):
        events = json.loads(end.removeprefix("data: "))
        if path == "/v1/responses":
            assert events["type"] == "response.failed"
            events = events["response"]
        assert "its weights are torn" in json.dumps(events["error"]), path


def data_of(lines: Iterator[str]) -> Iterator[Json]:
    for line in lines:
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def test_the_first_event_precedes_the_first_token_and_others_follow_by_the_clock(
    asked: tuple[AcceptingBackend, GatewayProcess, str],
) -> None:
    backend, gateway, interval = asked
    for path, body in BODIES.items():
        backend.release.clear()
        whole = {"model": "m", "stream": True, **body}
        with gateway.client.stream("POST", path, json=whole) as answer:
            events = data_of(answer.iter_lines())
            response = [next(events)]
            if path == "/v1/messages":
                assert response[0]["type"] == "message_start"
                counted = response[0]["message"]["usage"]["input_tokens"]
                # The clock may have begun the stream before any of the prompt was computed.
                assert counted == 3 or (interval != "3600" and counted == 0)
            elif path == "/v1/responses":
                assert response[0]["type"] == "response.created"
            else:
                (choice,) = response[0]["choices"]
                assert choice.get("delta", {"role": "assistant"})["role"] == "assistant"
            if interval != "3600":
                beats = 0
                while beats < 3:
                    beats += _waits(next(events))
            assert backend.held.acquire(timeout=240)
            backend.release.set()
            rest = list(events)
        assert '"b"' in json.dumps(rest)


@pytest.fixture(scope="module")
def gateway() -> Iterator[GatewayProcess]:
    model = roomy(engine_args={"prefill_chunk": CHUNK})
    process = GatewayProcess({"tiny": model, "unread": tiny()})
    yield process
    process.close()


def test_an_image_for_a_model_without_sight_is_refused_before_a_load(
    gateway: GatewayProcess,
) -> None:
    url = "data:image/png;base64,iVBORw0KGgoAAA=="
    shown = {"type": "image_url", "image_url": {"url": url}}
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    bodies: dict[str, Json] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": [shown]}]},
        "/v1/messages": {
            "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}],
            "max_tokens": 9,
        },
        "/v1/responses": {
            "input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]
        },
    }
    for path, sent in bodies.items():
        answer = gateway.client.post(path, json={"model": "unread", "stream": True, **sent})
        assert answer.status_code == 400, path
        assert "accepts only text" in answer.text, path
    models = gateway.client.get("/api/status").json()["models"]
    assert {one["name"]: one["state"] for one in models}["unread"] == "stopped"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/completion"])
def test_a_client_that_asks_for_progress_gets_the_state_of_the_prompt(
    gateway: GatewayProcess, path: str
) -> None:
    def asked(text: str) -> list[Json]:
        body: Json = {"model": "tiny", "max_tokens": 4, "return_progress": True, "prompt": text}
        if path.endswith("chat/completions"):
            body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        if path == "/completion":  # its last event has `stop`
            sent = gateway.client.post(path, json=body | {"stream": True}).text
            return [json.loads(line.removeprefix("data: ")) for line in sent.split("\n\n") if line]
        return chunks(gateway, path, body)

    own = f"{path} {LONG}"  # no other test has cached it
    events = asked(own)
    progress = [chunk["prompt_progress"] for chunk in events if "prompt_progress" in chunk]
    first = next(at for at, chunk in enumerate(events) if _says_something(chunk))
    assert all("prompt_progress" not in chunk for chunk in events[first:])
    assert len(progress) > 3
    assert {each["total"] for each in progress} == {progress[0]["total"]}
    processed = [each["processed"] for each in progress]
    assert processed == sorted(set(processed))
    assert processed[0] == 0
    assert processed[-1] >= progress[0]["total"] - CHUNK  # the last pass gives the first token
    again = asked(own + LONG)
    assert max(chunk.get("prompt_progress", {"cache": 0})["cache"] for chunk in again) > 0


def _waits(event: Json) -> bool:
    """Whether the event only keeps the stream alive."""
    if "choices" in event:
        (choice,) = event["choices"]
        return bool(choice.get("delta", {}) == {} and choice.get("text", "") == "")
    return event["type"] in ("ping", "response.in_progress")


def _says_something(chunk: Json) -> bool:
    choice = chunk.get("choices", [{"text": chunk.get("content")}])[0]
    return bool(choice.get("text") or choice.get("delta", {}).get("content"))


def test_other_clients_get_no_progress_events(gateway: GatewayProcess) -> None:
    events = chat_chunks(gateway, max_tokens=4)
    assert not any("prompt_progress" in chunk for chunk in events)
    assert joined(events)["finish"] == ["length"]


@pytest.mark.parametrize("path", list(BODIES))
def test_a_refusal_of_the_prompt_keeps_its_status(gateway: GatewayProcess, path: str) -> None:
    key = "prompt" if path.endswith("/completions") else "input"
    long = "tick " * 300_000
    body: Json = {**BODIES[path], "model": "tiny", "stream": True, "max_tokens": 4}
    if "messages" in body:
        body["messages"] = [{"role": "user", "content": long}]
    else:
        body[key] = long
    answer = gateway.client.post(path, json=body)
    assert answer.status_code == 400, answer.text[:300]
    assert "prompt is too long" in answer.text


def test_each_of_several_choices_begins(gateway: GatewayProcess) -> None:
    body = body_of({"n": 2, "max_tokens": 4})
    events = chunks(gateway, "/v1/chat/completions", body)
    roles = [c["index"] for chunk in events for c in chunk["choices"] if "role" in c["delta"]]
    assert sorted(roles) == [0, 1]
