"""Clients that disconnect, requests that take too long, and SIGTERM during requests."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx
import pytest

from tests.gateway.gateway_process import WAIT, GatewayProcess, roomy
from tests.gateway.numbers_backend import NumbersBackend
from tests.polling import until

BLOCKING = {"model": "numbers", "input": "hold"}


@pytest.fixture
def backend() -> Iterator[NumbersBackend]:
    numbers = NumbersBackend()
    yield numbers
    numbers.close()


Start = Callable[..., GatewayProcess]


@pytest.fixture
def start(backend: NumbersBackend) -> Iterator[Start]:
    """Starts a gateway before its backend; both are stopped at the end."""
    started: list[GatewayProcess] = []

    def begin(*arguments: str) -> GatewayProcess:
        model = {"parameters": {"model": "numbers"}, "address": backend.address}
        started.append(GatewayProcess({"numbers": model}, *arguments))
        return started[-1]

    yield begin
    for process in started:
        if process.child.poll() is None:
            process.close()


def test_a_disconnected_client_cancels_its_call(backend: NumbersBackend, start: Start) -> None:
    gateway = start()
    place = urlsplit(gateway.url)
    body = b'{"model": "numbers", "input": ["hold", "more"]}'
    head = (
        f"POST /v1/embeddings HTTP/1.1\r\nhost: {place.netloc}\r\nx-request-id: leaver\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((place.hostname, place.port), timeout=WAIT) as link:
        link.sendall(head.encode() + body)
        assert backend.held.acquire(timeout=WAIT)
    assert backend.cancelled.acquire(timeout=WAIT)

    gateway.line_with("request=leaver", "status=499")
    assert 'status="499"' in gateway.client.get("/metrics").text


def test_a_stream_is_counted_while_it_is_open(backend: NumbersBackend, start: Start) -> None:
    gateway = start()
    question = {
        "model": "numbers",
        "messages": [{"role": "user", "content": "x"}],
        "stream": True,
    }

    def running() -> bool:
        return "gateway_running_streams 1.0" in gateway.client.get("/metrics").text

    assert not running()
    with gateway.client.stream("POST", "/v1/chat/completions", json=question) as answer:
        lines = answer.iter_lines()
        assert "a" in next(line for line in lines if '"content":"a"' in line.replace(" ", ""))
        assert backend.held.acquire(timeout=WAIT)
        assert running()
        backend.release.set()
        assert "data: [DONE]" in list(lines)
    until(lambda: not running())


def test_a_request_that_takes_too_long_is_a_504(backend: NumbersBackend, start: Start) -> None:
    client = start("--request-timeout", "2").client
    plain = {"model": "numbers", "input": "plain"}
    # The time includes connecting: the request must reach the backend before its time is up.
    until(lambda: client.post("/v1/embeddings", json=plain).status_code == 200)
    answer = client.post("/v1/embeddings", json=BLOCKING)
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "timeout"
    assert backend.cancelled.acquire(timeout=WAIT)


def test_sigterm_waits_for_running_requests_and_refuses_new_ones(
    backend: NumbersBackend, start: Start
) -> None:
    gateway = start("--drain-timeout", str(WAIT))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(gateway.client.post, "/v1/embeddings", json=BLOCKING)
        assert backend.held.acquire(timeout=WAIT)
        gateway.child.send_signal(signal.SIGTERM)
        until(lambda: gateway.client.get("/ready").status_code == 503)
        assert gateway.client.get("/ready").json() == {"status": "draining"}
        assert gateway.client.get("/health").status_code == 200
        refused = gateway.client.get("/v1/models")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        assert refused.headers["retry-after"]
        assert refused.headers["x-should-retry"] == "true"
        backend.release.set()
        answer = running.result(WAIT)
    assert answer.status_code == 200
    assert gateway.child.wait(WAIT) == 0
    assert gateway.processes() == []


def test_a_request_that_outlasts_the_drain_is_cancelled(
    backend: NumbersBackend, start: Start
) -> None:
    gateway = start("--drain-timeout", "0.2")
    failed = threading.Event()

    def ask() -> None:
        with contextlib.suppress(httpx.TransportError):
            assert gateway.client.post("/v1/embeddings", json=BLOCKING).status_code >= 500
        failed.set()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    assert backend.held.acquire(timeout=WAIT)
    assert gateway.terminate() == 0
    assert failed.wait(WAIT)
    assert backend.cancelled.acquire(timeout=WAIT)


def test_a_second_sigterm_does_not_wait(backend: NumbersBackend, start: Start) -> None:
    gateway = start("--drain-timeout", "86400")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(gateway.client.post, "/v1/embeddings", json=BLOCKING)
        assert backend.held.acquire(timeout=WAIT)
        gateway.child.send_signal(signal.SIGTERM)
        until(lambda: gateway.client.get("/ready").status_code == 503)
        while gateway.child.poll() is None:  # an immediate second signal counts as an echo
            gateway.child.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                gateway.child.wait(0.1)
        assert gateway.child.returncode == 1
        with pytest.raises(httpx.TransportError):
            running.result(WAIT)
    until(lambda: gateway.processes() == [])


def test_a_stream_that_outlasts_the_drain_ends_with_an_error() -> None:
    """A truncated answer must not look like a whole one."""
    gateway = GatewayProcess({"tiny": roomy()}, "--drain-timeout", "0.2")
    endless = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Count to 60."}],
        "stream": True,
        "ignore_eos": True,
        "max_tokens": 100_000,
    }
    try:
        with gateway.client.stream("POST", "/v1/chat/completions", json=endless) as answer:
            lines = (line for line in answer.iter_lines() if line.startswith("data: "))
            next(lines)
            gateway.child.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["type"] == "server_error"
        assert not any('"finish_reason":"' in line for line in rest)
        assert gateway.child.wait(WAIT) == 0
    finally:
        gateway.close()
