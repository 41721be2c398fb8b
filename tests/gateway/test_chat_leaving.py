"""A client that leaves, a request that takes too long, a backend that dies in the middle."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.gateway.asking import body_of, chat, said
from tests.gateway.gateway_process import GatewayProcess, tiny

ENDLESS = {
    "messages": said("Tell me a story."),
    "ignore_eos": True,
    "max_tokens": 100_000,
    "temperature": 1,
}
LONG = {"tiny": tiny(context_size=200_000), "absent": {"parameters": {"model": "absent"}}}


@pytest.fixture(scope="module")
def gateway() -> Iterator[GatewayProcess]:
    process = GatewayProcess(LONG)
    chat(process)  # loaded
    yield process
    process.close()


def until(gateway: GatewayProcess, true: Callable[[], bool]) -> None:
    """Ask for its health, which takes a moment, until it is true; the test has a time limit."""
    while not true():
        gateway.client.get("/health")


def cancelled(gateway: GatewayProcess) -> int:
    """How many answers the backend has given up, as its log tells."""
    return sum("rpc=PredictStream status=CANCELLED" in line for line in gateway.log)


@pytest.mark.parametrize("n", [1, 3])
def test_who_leaves_a_stream_frees_its_slots(gateway: GatewayProcess, n: int) -> None:
    before = cancelled(gateway)
    body = {**body_of(ENDLESS), "n": n, "stream": True}
    with gateway.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        seen: set[int] = set()
        for line in answer.iter_lines():
            if line:
                seen.add(json.loads(line.removeprefix("data: "))["choices"][0]["index"])
            if len(seen) == n:
                break
    until(gateway, lambda: cancelled(gateway) == before + n)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_who_leaves_before_a_whole_answer_frees_its_slot(
    gateway: GatewayProcess, path: str
) -> None:
    before = cancelled(gateway)
    body = body_of(ENDLESS)
    if path.endswith("/v1/completions"):
        body["prompt"] = body.pop("messages")[0]["content"]
    with pytest.raises(httpx.ReadTimeout):
        gateway.client.post(path, json=body, timeout=httpx.Timeout(30, read=1))
    until(gateway, lambda: cancelled(gateway) == before + 1)


def test_a_backend_that_dies_in_mid_stream_is_an_error_event(gateway: GatewayProcess) -> None:
    body = {**body_of(ENDLESS), "stream": True}
    with gateway.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        for backend in gateway.backends():
            backend.send_signal(signal.SIGKILL)
        told = [line.removeprefix("data: ") for line in lines if line]
    assert json.loads(told[-1])["error"]["type"] == "server_error"
    assert all('"finish_reason":null' in chunk for chunk in told[:-1])
    assert chat(gateway)["choices"][0]["message"]["content"] == "7 + 5 = 12"


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_is_wrong_loads_no_model(gateway: GatewayProcess, stream: bool) -> None:
    wrong = {**body_of({"top_logprobs": 2}), "model": "absent", "stream": stream}
    answer = gateway.client.post("/v1/chat/completions", json=wrong)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "top_logprobs")
    wrong = {"model": "absent", "prompt": "x", "best_of": 2, "stream": stream}
    answer = gateway.client.post("/v1/completions", json=wrong)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "best_of")
    assert not any("absent: " in line for line in gateway.log)


def test_a_request_that_takes_too_long_is_a_504() -> None:
    gateway = GatewayProcess(LONG, "--request-timeout", "2")
    try:
        path = "/v1/chat/completions"
        quick = body_of({"max_tokens": 1})
        # A load takes longer than that, and goes on after the request that began it.
        until(gateway, lambda: gateway.client.post(path, json=quick).status_code == 200)
        answer = gateway.client.post(path, json=body_of(ENDLESS))
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "timeout"
        body = {**body_of(ENDLESS), "stream": True}
        with gateway.client.stream("POST", path, json=body) as stream:
            assert stream.status_code == 200
            told = [line for line in stream.iter_lines() if line]
        assert json.loads(told[-1].removeprefix("data: "))["error"]["code"] == "timeout"
    finally:
        gateway.close()
