"""A process cannot hang: an operation that takes too long ends it; waiting alone does not."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from backend.engine.device import LEAST_STEP_TIMEOUT
from backend.rpc.interceptors import SERVICE
from backend.rpc.monitor import GRACE
from tests.acceptance.backend import TINY_TEXT, chat
from tests.long import TEST_LONG
from tests.polling import PAUSE
from tests.rpc.client import failure_of
from tests.rpc.process import Process
from wire import backend_pb2 as pb
from wire.backend_pb2_grpc import BackendStub

WAIT = 240.0  # seconds, on a busy machine too
LIMIT = 3
# seconds; longer than the time-outs of the process and its monitor
PAST_BOTH = LIMIT + GRACE + 3
ENDLESS = chat("Count to 60.", IgnoreEOS=True, Tokens=0)
NOTHING = pb.HealthMessage()
PTRACE_ATTACH, PTRACE_DETACH, WAIT_FOR_THREADS = 16, 17, 0x40000000


class Faulty:
    """A loaded backend with a fault that SIGUSR1 sets off. timeout: the option `step_timeout`."""

    def __init__(self, process: Process, timeout: str) -> None:
        self.process = process
        self.options = ["parallel:2", f"step_timeout:{timeout}"]
        port = process.port()
        self.engine_thread = int(self.says())
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self.stub = BackendStub(self.channel)
        self.load()

    def load(self, timeout: float = WAIT) -> None:
        request = pb.ModelOptions(
            Model="tiny", ModelFile=str(TINY_TEXT), ContextSize=100_000, Options=self.options
        )
        self.stub.LoadModel(request, timeout=timeout)

    def says(self) -> str:
        """The next line on stdout."""
        assert self.process.child.stdout is not None
        return self.process.child.stdout.readline().strip()

    def go_wrong(self) -> None:
        self.process.signal(signal.SIGUSR1)

    def stream(self) -> Any:
        """A running stream."""
        stream = self.stub.PredictStream(ENDLESS, timeout=WAIT)
        next(stream)
        return stream

    def states(self) -> set[int]:
        """All states that Status reports until it fails."""
        reported = set()
        try:
            while True:
                reported.add(self.stub.Status(NOTHING).state)
                time.sleep(PAUSE)
        except grpc.RpcError:
            return reported

    def ended(self) -> tuple[int, str]:
        """The exit code and the last line on stderr."""
        return self.process.wait(), self.process.lines[-1]


@contextmanager
def faulty(way: str, timeout: str = str(LIMIT), least: int = LIMIT) -> Iterator[Faulty]:
    program = "tests.acceptance.hanging_backend"
    with ExitStack() as stack:
        with _starting:
            process = Process(way, str(least), "--addr=127.0.0.1:0", module=program)
            stack.callback(process.close)
            backend = Faulty(process, timeout)
        yield backend
        backend.channel.close()


# Few start at the same time, because a step that waits too long for a processor counts as hanging.
_starting = threading.Semaphore(2)
Scenario = Callable[[], None]
_scenarios: dict[str, Scenario] = {}


@pytest.fixture(scope="module")
def running() -> Iterator[dict[str, Future[None]]]:
    """All scenarios run at the same time, because they wait for seconds and compute little."""
    with ThreadPoolExecutor(len(_scenarios)) as pool:
        yield {name: pool.submit(scenario) for name, scenario in _scenarios.items()}


def beside(scenario: Scenario) -> Callable[[dict[str, Future[None]]], None]:
    """A test that waits for a scenario, which runs at the same time as the others of this file."""
    name = scenario.__name__
    _scenarios[name] = scenario

    def test(running: dict[str, Future[None]]) -> None:
        running[name].result()

    return test


@beside
def test_a_load_with_a_waiting_caller_has_no_time_limit() -> None:
    with faulty("slow-load") as backend:
        backend.go_wrong()
        backend.load()
        next(backend.stream())


@beside
def test_an_idle_process_is_not_ended() -> None:
    with faulty("released") as backend:
        time.sleep(PAST_BOTH)  # the test is that time passes without an effect
        next(backend.stream())


@beside
def test_a_process_that_was_stopped_by_a_signal_is_not_ended() -> None:
    with faulty("released") as backend:
        stream = backend.stream()
        backend.process.signal(signal.SIGSTOP)
        time.sleep(PAST_BOTH)
        backend.process.signal(signal.SIGCONT)
        for _ in range(100):
            next(stream)


@beside
def test_a_process_with_slow_steps_is_not_ended() -> None:
    with faulty("slow") as backend:
        stream = backend.stream()
        backend.go_wrong()
        for _ in range(2 * PAST_BOTH):
            next(stream)


@beside
def test_a_step_that_hangs_ends_the_calls_and_the_process() -> None:
    with faulty("released") as backend:
        health: Any = health_pb2_grpc.HealthStub(backend.channel)
        served = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=WAIT)
        assert next(served).status == health_pb2.HealthCheckResponse.SERVING
        running = [backend.stream() for _ in range(2)]
        waiting = backend.stub.PredictStream(ENDLESS, timeout=WAIT)
        backend.stub.Health(NOTHING)  # it was sent after the stream, so the stream has arrived
        with ThreadPoolExecutor(1) as pool:
            states = pool.submit(backend.states)
            backend.go_wrong()
            failures = [failure_of(partial(iter, stream)) for stream in (*running, waiting)]
            probe = failure_of(lambda: backend.stub.Health(NOTHING))
            assert pb.StatusResponse.ERROR in states.result()
        assert {failure.code for failure in failures} == {grpc.StatusCode.UNAVAILABLE}
        assert all("send the request again" in failure.sentence for failure in failures)
        assert probe.code is grpc.StatusCode.UNAVAILABLE
        assert next(served).status == health_pb2.HealthCheckResponse.NOT_SERVING
        code, line = backend.ended()
        assert code == 1
        step = "decode step of 2 sequences"
        cause = f"the engine hangs: {step} has not ended within {LIMIT} s"
        assert line == f'level=error event=exit cause="{cause}"'


@beside
def test_without_a_limit_of_the_users_a_short_step_that_hangs_is_noticed_early() -> None:
    with faulty("released", "auto") as backend:
        stream = backend.stream()
        backend.go_wrong()
        assert failure_of(lambda: stream).code is grpc.StatusCode.UNAVAILABLE
        code, line = backend.ended()
        assert code == 1
        assert f"decode step of 1 sequence has not ended within {LIMIT} s" in line


@beside
def test_a_thread_that_is_stopped_for_75_seconds_is_noticed_within_72() -> None:
    if not TEST_LONG:
        pytest.skip("it takes more than a minute")
    with faulty("stopped", "auto", LEAST_STEP_TIMEOUT) as backend:
        stream = backend.stream()
        backend.go_wrong()
        assert backend.says() == "wrong"
        began = time.monotonic()
        assert failure_of(lambda: stream).code is grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - began <= 72
        assert backend.ended()[0] == 1


@beside
def test_callers_that_wait_for_a_command_get_an_error_too() -> None:
    with faulty("released") as backend:
        stream = backend.stream()
        backend.go_wrong()
        assert backend.says() == "wrong"
        freed = failure_of(lambda: backend.stub.Free(NOTHING, timeout=WAIT))
        assert freed.code is grpc.StatusCode.UNAVAILABLE
        assert "send the request again" in freed.sentence
        assert failure_of(lambda: stream).code is grpc.StatusCode.UNAVAILABLE
        assert backend.ended()[0] == 1


@beside
def test_a_step_that_hangs_holding_the_interpreters_lock_ends_the_process() -> None:
    with faulty("held") as backend:
        stream = backend.stream()
        backend.go_wrong()
        assert failure_of(lambda: stream).code is grpc.StatusCode.UNAVAILABLE
        code, line = backend.ended()
        assert code == -signal.SIGKILL
        assert "the engine hangs: decode step of 1 sequence has not ended" in line


@beside
def test_an_engine_thread_that_is_stopped_from_outside_ends_the_process() -> None:
    if sys.platform != "linux":
        pytest.skip("only Linux stops one thread of a process")
    with faulty("slow") as backend:
        stream = backend.stream()
        ptrace: Any = ctypes.CDLL(None, use_errno=True).ptrace
        if ptrace(PTRACE_ATTACH, backend.engine_thread, 0, 0):
            pytest.skip(f"no thread may be stopped here: {os.strerror(ctypes.get_errno())}")
        os.waitpid(backend.engine_thread, WAIT_FOR_THREADS)
        assert failure_of(lambda: stream).code is grpc.StatusCode.UNAVAILABLE
        # this process traces the thread, so it must collect its exit status
        os.waitpid(backend.engine_thread, WAIT_FOR_THREADS)
        code, line = backend.ended()
        assert code in (1, -signal.SIGKILL)  # whether or not the thread held the interpreter's lock
        assert "the engine hangs: " in line


@beside
def test_an_abandoned_load_may_not_hang() -> None:
    with faulty("hung-load") as backend:
        backend.go_wrong()
        failure = failure_of(lambda: backend.load(timeout=LIMIT))
        assert failure.code is grpc.StatusCode.DEADLINE_EXCEEDED
        code, line = backend.ended()
        assert code == 1
        assert f"command Load has not ended within {LIMIT} s" in line


@beside
def test_a_hanging_step_is_noticed_while_a_load_is_queued_behind_it() -> None:
    with faulty("released") as backend:
        stream = backend.stream()
        backend.go_wrong()
        assert backend.says() == "wrong"
        failure = failure_of(backend.load)
        assert failure.code is grpc.StatusCode.UNAVAILABLE
        assert failure_of(lambda: stream).code is grpc.StatusCode.UNAVAILABLE
        code, line = backend.ended()
        assert code == 1
        assert "the engine hangs: " in line
        assert "command Load" not in line
