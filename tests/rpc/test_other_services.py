"""Health checks and reflection hold against clients that send, or read, what they should not."""

from __future__ import annotations

import contextlib
import signal
import socket
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.polling import until
from tests.rpc import frames
from tests.rpc.client import failure_of, raw_call
from tests.rpc.conftest import CHANNEL_OPTIONS, Running
from tests.rpc.process import WAIT, Process

HEALTH = "/grpc.health.v1.Health"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
METHODS = (f"{HEALTH}/Check", f"{HEALTH}/Watch", f"{HEALTH}/List", REFLECTION)
NAMED = health_pb2.HealthCheckRequest(service="backend.Backend")
SERVING = health_pb2.HealthCheckResponse.SERVING
MIB = 1 << 20
messages: Any = health_pb2  # the published types lack `List`


@pytest.mark.parametrize("method", METHODS[:3])
def test_a_call_without_a_message_is_refused(running: Running, method: str) -> None:
    call: Any = running.channel.stream_stream(method)
    code, sentence = failure_of(lambda: call(iter(()), timeout=WAIT))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert sentence == f"{method} was called without a request: send one message"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("raw", [b"\xff\xff\xff", b"\x0a\x02\xff\xfe", b"\x0a\x05a"])
def test_damaged_bytes_are_refused_in_a_sentence(running: Running, method: str, raw: bytes) -> None:
    if method.endswith("List") and raw.startswith(b"\x0a\x02"):
        return  # an unknown field
    code, sentence = failure_of(lambda: raw_call(running.channel, method, raw))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    reason = "a string in it is not valid UTF-8, or its bytes are cut short"
    assert sentence == f"the request of {method} cannot be read: {reason}"


@pytest.mark.parametrize("method", METHODS)
def test_a_long_message_is_refused(running: Running, method: str) -> None:
    raw = NAMED.SerializeToString() * 1000
    code, sentence = failure_of(lambda: raw_call(running.channel, method, raw))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert sentence == f"the request of {method} has {len(raw)} bytes: it may have at most 4096"


def test_odd_names_are_not_found(running: Running) -> None:
    health: Any = health_pb2_grpc.HealthStub(running.channel)
    reflection: Any = reflection_pb2_grpc.ServerReflectionStub(running.channel)
    for name in (".", "a\0b", "é", "backend.Backend.", "x" * 4000):
        code, sentence = failure_of(
            lambda: health.Check(health_pb2.HealthCheckRequest(service=name))  # noqa: B023
        )
        assert code is grpc.StatusCode.NOT_FOUND
        assert sentence.endswith("ask for one of '', 'backend.Backend'")
        asked = (
            reflection_pb2.ServerReflectionRequest(file_by_filename=name),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=name),
            reflection_pb2.ServerReflectionRequest(all_extension_numbers_of_type=name),
            reflection_pb2.ServerReflectionRequest(
                file_containing_extension=reflection_pb2.ExtensionRequest(
                    containing_type=name, extension_number=-1
                )
            ),
        )
        answers = list(reflection.ServerReflectionInfo(iter(asked), timeout=WAIT))
        codes = [answer.error_response.error_code for answer in answers]
        assert codes == [grpc.StatusCode.NOT_FOUND.value[0]] * len(asked)


def test_the_services_are_listed(running: Running) -> None:
    health: Any = health_pb2_grpc.HealthStub(running.channel)
    statuses = health.List(messages.HealthListRequest()).statuses
    assert {name: each.status for name, each in statuses.items()} == {
        "": SERVING,
        "backend.Backend": SERVING,
    }


def test_a_watch_that_nobody_reads_holds_up_neither_others_nor_the_end() -> None:
    process = Process("--addr", "127.0.0.1:0")
    with contextlib.closing(process):
        port = process.port()
        with socket.create_connection(("127.0.0.1", port), WAIT) as client:
            client.sendall(
                frames.PREFACE
                + frames.frame(frames.SETTINGS, 0, 0, frames.setting(frames.INITIAL_WINDOW, 0))
                + frames.frame(frames.HEADERS, frames.END_HEADERS, 1, frames.head(METHODS[1]))
                + frames.frame(
                    frames.DATA, frames.END_STREAM, 1, frames.message(NAMED.SerializeToString())
                )
                + frames.frame(frames.PING, 0, 0, b"accepted")
            )
            while b"accepted" not in client.recv(65_536):
                pass
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                health: Any = health_pb2_grpc.HealthStub(channel)
                watch = health.Watch(NAMED, timeout=WAIT)
                assert next(watch).status == SERVING
                process.signal(signal.SIGTERM)
                assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert process.wait() == 0


def test_watches_with_long_names_do_not_fill_memory() -> None:
    process = Process("--addr", "127.0.0.1:0")
    with contextlib.closing(process):
        address = f"127.0.0.1:{process.port()}"
        memory = psutil.Process(process.child.pid).memory_info
        with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            health.Check(NAMED)
            before = memory().rss
            for _ in range(8):
                long = health_pb2.HealthCheckRequest(service="x" * (40 * MIB))
                assert failure_of(lambda: health.Watch(long)).code is (  # noqa: B023
                    grpc.StatusCode.INVALID_ARGUMENT
                )
            until(lambda: memory().rss - before < 100 * MIB)
