"""Clients that disconnect, requests that take too long, and backends that die while answering."""

from __future__ import annotations

import json
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from urllib.parse import urlsplit

import httpx
import pytest

from tests.gateway.asking import body_of, chat, user_message
from tests.gateway.gateway_process import WAIT, GatewayProcess, roomy
from tests.polling import until

ENDLESS = {
    "messages": user_message("Tell me a story."),
    "ignore_eos": True,
    "max_tokens": 100_000,
    "temperature": 1,
}
LONG = {"tiny": roomy(), "absent": {"parameters": {"model": "absent"}}}


@pytest.fixture(scope="module")
def gateway() -> Iterator[GatewayProcess]:
    process = GatewayProcess(LONG)
    chat(process)  # loaded
    yield process
    process.close()


def cancelled(gateway: GatewayProcess) -> int:
    """How many answers the backend has cancelled, by its log."""
    return sum("rpc=PredictStream status=CANCELLED" in line for line in gateway.log)


def written(gateway: GatewayProcess) -> float:
    """How many tokens the backend has generated; asked again while it is too busy to answer."""
    series = r'^gateway_model_generated_tokens_total\{model="tiny"\} (\S+)$'
    while not (found := re.search(series, gateway.client.get("/metrics").text, re.M)):
        pass
    return float(found[1])


def data_of(answer: httpx.Response) -> Iterator[str]:
    """The data of a stream's events, without the comments that keep it alive."""
    for line in answer.iter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_a_stream_frees_its_slots(gateway: GatewayProcess, n: int) -> None:
    before = cancelled(gateway)
    body = {**body_of(ENDLESS), "n": n, "stream": True}
    with gateway.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        seen: set[int] = set()
        for event in data_of(answer):
            seen.add(json.loads(event)["choices"][0]["index"])
            if len(seen) == n:
                break
    until(lambda: cancelled(gateway) == before + n)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_client_that_leaves_before_a_whole_answer_frees_its_slot(
    gateway: GatewayProcess, path: str
) -> None:
    before = cancelled(gateway)
    body = body_of(ENDLESS)
    if path.endswith("/v1/completions"):
        body["prompt"] = body.pop("messages")[0]["content"]
    tokens = written(gateway)
    place = urlsplit(gateway.url)
    with closing(HTTPConnection(place.hostname or "", place.port)) as link:
        link.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        # More than the tokens that an earlier, cancelled answer may still add.
        until(lambda: written(gateway) > tokens + 50)
    until(lambda: cancelled(gateway) == before + 1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_its_sending_side_gets_its_answer(
    gateway: GatewayProcess, stream: bool
) -> None:
    place = urlsplit(gateway.url)
    body = json.dumps(body_of({"stream": stream})).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection((place.hostname or "", place.port or 0), WAIT) as link:
        link.sendall(head.replace("x", place.netloc, 1).encode() + body)
        link.shutdown(socket.SHUT_WR)
        with link.makefile("rb") as lines:
            found = lines.read()  # up to the end: the gateway closes the connection
    interim, _, answer = found.rpartition(b"HTTP/1.1 200 OK\r\n")
    assert interim == b"HTTP/1.1 102 Processing\r\n\r\n" * (len(interim) // 27)
    assert b"connection: close" in answer
    assert b"7 + 5 = 12" in answer or b"finish_reason" in answer


def test_a_backend_that_dies_during_a_stream_is_an_error_event(gateway: GatewayProcess) -> None:
    body = {**body_of(ENDLESS), "stream": True}
    with gateway.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        events = data_of(answer)
        next(events)
        for backend in gateway.backends():
            backend.send_signal(signal.SIGKILL)
        parts = list(events)
    assert json.loads(parts[-1])["error"]["type"] == "server_error"
    assert all('"finish_reason":null' in chunk for chunk in parts[:-1])
    assert chat(gateway)["choices"][0]["message"]["content"] == "7 + 5 = 12"


@pytest.mark.parametrize("stream", [False, True])
def test_an_invalid_request_loads_no_model(gateway: GatewayProcess, stream: bool) -> None:
    wrong = {**body_of({"top_logprobs": 2}), "model": "absent", "stream": stream}
    answer = gateway.client.post("/v1/chat/completions", json=wrong)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "top_logprobs")
    wrong = {"model": "absent", "prompt": "x", "best_of": 2, "stream": stream}
    answer = gateway.client.post("/v1/completions", json=wrong)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "best_of")
    assert not any("absent: " in line for line in gateway.log)


def test_a_request_that_takes_too_long_is_a_504() -> None:
    gateway = GatewayProcess(LONG, "--request-timeout", "1", "--keepalive-interval", "0.05")
    try:
        path = "/v1/chat/completions"
        quick = body_of({"max_tokens": 1})
        # The load takes longer than the request may, and continues after it.
        until(lambda: gateway.client.post(path, json=quick).status_code == 200)
        answer = gateway.client.post(path, json=body_of(ENDLESS))
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "timeout"
        body = {**body_of(ENDLESS), "stream": True}
        with gateway.client.stream("POST", path, json=body) as stream:
            assert stream.status_code == 200
            parts = list(data_of(stream))
        assert json.loads(parts[-1])["error"]["code"] == "timeout"
    finally:
        gateway.close()
