"""A rank that is killed or stopped, in every state: whoever waits gets an answer, no process is
left, and the next start serves.

`make test` tries a few, `make test-long` all of them. The output has a table.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import psutil
import pytest

from tests.acceptance.backend import ROOT, TINY_TEXT, WAIT, Backend, chat, said
from tests.long import TEST_LONG
from wire import backend_pb2 as pb

NOTHING = pb.HealthMessage()
ENDLESS = chat("Count to 60.", IgnoreEOS=True, Tokens=0)
LONG = chat("word " * 6000, Tokens=1)
SHORT = chat("What is the capital of France?", Tokens=8)
OPTIONS = ["load_trial:false", "rank_timeout:15"]
STATES = ("starting", "loading", "prefill", "decode", "idle", "freeing")
KILLED, STOPPED = signal.SIGKILL, signal.SIGSTOP
Case = tuple[str, signal.Signals, int]
EVERY: list[Case] = list(itertools.product(STATES, (KILLED, STOPPED), (0, 1)))
FEW: list[Case] = [("decode", KILLED, 1), ("decode", STOPPED, 1), ("idle", KILLED, 0)]
CASES = EVERY if TEST_LONG else FEW

pytestmark = pytest.mark.timeout(600)


@dataclass
class Row:
    """A line of the table. answer: what the running call got; seconds: until then."""

    case: Case
    answer: str
    seconds: float
    end: str

    def __str__(self) -> str:
        state, number, rank = self.case
        fault = f"{number.name} of rank {rank}"
        return f"{state:9} {fault:18} {self.answer:30} {self.seconds:6.1f} s   {self.end}"


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[list[Row]]:
    rows: list[Row] = []
    yield rows
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print("", *rows, sep="\n")


def ranks(backend: Backend) -> dict[int, psutil.Process]:
    """The processes that are ranks, as far as they have come."""
    found = {}
    for process in backend.process().children():
        with contextlib.suppress(psutil.Error):
            if "MLX_BACKEND_RANK_PLACE" in process.environ():
                found[int(process.environ()["MLX_RANK"])] = process
    return found


def bring(backend: Backend, state: str) -> Any:
    """Bring the backend into the state; returns the call that runs then, if there is one."""
    model = pb.ModelOptions(
        Model="tiny", ModelFile=str(TINY_TEXT), ContextSize=50_000, Options=OPTIONS
    )
    if state == "starting":
        return None
    if state == "loading":
        call = backend.stub.LoadModel.future(model, timeout=WAIT)
        backend.until(lambda: any("is formed" in line for line in backend.log) or call.done())
        return call
    backend.stub.LoadModel(model, timeout=WAIT)
    match state:
        case "prefill":
            call = backend.stub.Predict.future(LONG, timeout=WAIT)
            backend.until(lambda: not backend.idle())
            return call
        case "decode":
            stream = backend.stub.PredictStream(ENDLESS, timeout=WAIT)
            next(stream)
            return stream
        case "freeing":
            return backend.stub.Free.future(NOTHING, timeout=WAIT)
    return None


def answer_to(call: Any) -> str:
    if call is None:
        return "-"
    try:
        call.result()
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def drained(stream: Any) -> str:
    try:
        for _ in stream:
            pass
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1].name}-{case[2]}")
def test_the_ranks_start_again_and_serve(case: Case, table: list[Row]) -> None:
    state, number, rank = case
    backend = Backend(arguments=["--ranks", "2"])
    try:
        before = ranks(backend)
        assert set(before) == {0, 1}
        call = bring(backend, state)
        began = time.monotonic()
        before[rank].send_signal(number)
        answer = drained(call) if state == "decode" else answer_to(call)
        seconds = time.monotonic() - began
        assert answer in {"-", "OK", "UNAVAILABLE"}
        assert answer != "OK" or state in ("loading", "prefill", "freeing")
        _, alive = psutil.wait_procs([*before.values()], WAIT)
        assert not alive, "a rank is left"
        if state in ("prefill", "decode", "idle"):
            serves_again(backend)
            if rank == 1:
                lost = [line for line in backend.log if "event=exit" in line]
                assert any("rank 1 (127.0.0.1)" in line for line in lost), backend.log
        table.append(Row(case, answer, seconds, "started again"))
    finally:
        backend.close()


def serves_again(backend: Backend) -> None:
    """The model is loaded again without being asked for."""
    until = time.monotonic() + 5 * WAIT
    while not any("event=loaded_again" in line for line in backend.log):
        assert time.monotonic() < until, backend.log
        time.sleep(0.05)
    backend.stub = type(backend.stub)(backend.connect())
    assert said(backend, SHORT)


def test_the_ranks_exit_if_they_are_told_to() -> None:
    backend = Backend(arguments=["--ranks", "2", "--rank-loss", "exit"])
    try:
        stream = bring(backend, "decode")
        processes = ranks(backend)
        processes[1].kill()
        assert drained(stream) == "UNAVAILABLE"
        assert backend.child.wait(WAIT) == 1
        _, alive = psutil.wait_procs([*processes.values()], WAIT)
        assert not alive
    finally:
        backend.close()


def test_ranks_end_with_their_host() -> None:
    script = f'"{ROOT}/run.sh" --addr 127.0.0.1:0 --ranks 2 & echo $!; wait'
    with subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        supervisor = psutil.Process(int(host.stdout.readline()))
        try:
            while len(supervisor.children()) < 2:
                assert supervisor.is_running()
            processes = [supervisor, *supervisor.children()]
            host.kill()
            _, alive = psutil.wait_procs(processes, WAIT)
            assert not alive
        finally:
            with contextlib.suppress(psutil.Error):
                supervisor.kill()


def test_ranks_end_with_their_supervisor() -> None:
    backend = Backend(arguments=["--ranks", "2"])
    try:
        processes = ranks(backend)
        backend.child.kill()
        _, alive = psutil.wait_procs([*processes.values()], WAIT)
        assert not alive
    finally:
        backend.close()
