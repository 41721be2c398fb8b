"""A rank that is killed, stopped or cut off, in every state: each caller gets an answer, no
process is left, and the next start serves requests.

`make test` tries a few, `make test-long` all of them. The output has a table.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from backend.engine.ranks.rank_info import TIMEOUT, TOKEN
from backend.supervising.supervisor import free_ports
from tests.acceptance.backend import ROOT, TINY_TEXT, WAIT, Backend, chat, text_answer
from tests.acceptance.rank_pair import Pair
from tests.long import TEST_LONG
from tests.polling import PAUSE, until
from tests.unignored_signals import unignored
from wire import backend_pb2 as pb

NOTHING = pb.HealthMessage()
ENDLESS = chat("Count to 60.", IgnoreEOS=True, Tokens=0)
LONG = [chat(f"{number} " + "word " * 2600, Tokens=1) for number in range(4)]
SHORT = chat("What is the capital of France?", Tokens=8)
OPTIONS = ["load_trial:false"]
# Seconds after which a silent rank counts as lost: the test waits for that.
SOON = "rank_timeout:5"
HEALTH_SECONDS = 10.0  # LocalAI's deadline
# joined: the ranks are connected, but the group is not formed; the load begins after the fault.
STATES = ("starting", "joined", "loading", "prefill", "decode", "idle", "freeing")
FAULTS = (("SIGKILL", 0), ("SIGKILL", 1), ("SIGSTOP", 0), ("SIGSTOP", 1), ("cut", 1))
Case = tuple[str, str, int]
EVERY: list[Case] = [(state, *fault) for state in STATES for fault in FAULTS]
FEW: list[Case] = [
    ("decode", "SIGKILL", 1),
    ("decode", "SIGSTOP", 1),
    ("idle", "SIGKILL", 0),
    ("decode", "cut", 1),
]
CASES = EVERY if TEST_LONG else FEW

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("yielding")]


@dataclass
class Row:
    """A line of the table. answer: what the running call got; seconds: until then."""

    case: Case
    answer: str
    seconds: float
    end: str

    def __str__(self) -> str:
        state, what, rank = self.case
        fault = "cut link" if what == "cut" else f"{what} of rank {rank}"
        return f"{state:9} {fault:18} {self.answer:30} {self.seconds:6.1f} s   {self.end}"


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[list[Row]]:
    rows: list[Row] = []
    yield rows
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print("", *rows, sep="\n")


def ranks(*supervisors: psutil.Process) -> dict[int, psutil.Process]:
    """The processes of the ranks that have started so far."""
    found = {}
    for process in itertools.chain(*(one.children() for one in supervisors)):
        with contextlib.suppress(psutil.Error):
            if "MLX_BACKEND_RANK_INFO" in process.environ():
                found[int(process.environ()["MLX_RANK"])] = process
    return found


def bring(backend: Backend, state: str, *options: str) -> Any:
    """Bring the backend into the state; returns the call that is running then, if any."""
    if state == "starting":
        return None
    if state == "joined":
        until(lambda: any("has joined" in line for line in backend.log))
        return None
    load = begin_load(backend, *options)
    if state == "loading":
        until(lambda: formed(backend) or load.done())
        return load
    load.result()
    match state:
        case "prefill":
            calls = [backend.stub.Predict.future(each, timeout=WAIT) for each in LONG]
            until(lambda: not backend.idle())
            return calls[-1]
        case "decode":
            stream = backend.stub.PredictStream(ENDLESS, timeout=WAIT)
            next(stream)
            return stream
        case "freeing":
            return backend.stub.Free.future(NOTHING, timeout=WAIT)
    return None


def begin_load(backend: Backend, *options: str) -> Any:
    options = (*OPTIONS, *options)
    model = pb.ModelOptions(Model="tiny", ModelFile=str(TINY_TEXT), Options=options)
    return backend.stub.LoadModel.future(model, timeout=WAIT)


@contextlib.contextmanager
def asking_for_health(backend: Backend) -> Iterator[list[str]]:
    """Calls Health again and again, with a host's deadline. Yields the answers."""
    answers: list[str] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.wait(PAUSE):
            answers.append(answer_to(backend.stub.Health.future(NOTHING, timeout=HEALTH_SECONDS)))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    try:
        yield answers
    finally:
        stop.set()
        asking.join(WAIT)


def formed(backend: Backend) -> bool:
    backend.stub.Health(NOTHING, timeout=WAIT)
    return any("is formed" in line for line in backend.log)


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


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}")
def test_the_ranks_start_again_and_serve(case: Case, table: list[Row], tmp_path: Path) -> None:
    state, what, rank = case
    with contextlib.ExitStack() as stack:
        if what == "cut":
            pair = Pair(tmp_path)
            stack.callback(pair.close)
            backend, supervisors = pair.backend, [psutil.Process(pair.worker.pid)]
        else:
            backend, supervisors = Backend(arguments=["--ranks", "2"]), []
            stack.callback(backend.close)
        supervisors.append(backend.process())
        until(lambda: len(ranks(*supervisors)) == 2)
        before = ranks(*supervisors)
        options = [] if what == "SIGKILL" else [SOON]
        call = bring(backend, state, *options)
        began = time.monotonic()
        with asking_for_health(backend) as healths:
            if what == "cut":
                pair.cut()
            else:
                before[rank].send_signal(signal.Signals[what])
            if state == "joined":
                call = begin_load(backend, *options)
            answer = drained(call) if state == "decode" else answer_to(call)
            seconds = time.monotonic() - began
        assert answer in {"-", "OK", "UNAVAILABLE"}
        assert rank == 0 or "DEADLINE_EXCEEDED" not in healths
        assert answer != "OK" or state in ("loading", "prefill", "freeing")
        if (state, what) != ("starting", "cut"):  # otherwise there is no connection to cut yet
            _, alive = psutil.wait_procs([*before.values()], WAIT)
            assert not alive, "a rank is left"
        if state in ("prefill", "decode", "idle"):
            serves_again(backend)
            if rank == 1:
                lost = [line for line in backend.log if "event=exit" in line]
                assert any("rank 1 (127.0.0.1)" in line for line in lost), backend.log
        else:
            serves(backend)
        table.append(Row(case, answer, seconds, "serves again"))


def serves(backend: Backend) -> None:
    """The next load of a client is answered; rank 0 may still be starting again."""
    end = time.monotonic() + 2 * WAIT
    while True:
        try:
            backend.stub = type(backend.stub)(backend.connect())
            bring(backend, "idle")
            break
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.UNAVAILABLE or time.monotonic() > end:
                raise
            time.sleep(PAUSE)
    assert text_answer(backend, SHORT)


def serves_again(backend: Backend) -> None:
    """The model is loaded again without a request to load it."""
    until(lambda: any("event=loaded_again" in line for line in backend.log))
    backend.stub = type(backend.stub)(backend.connect())
    assert text_answer(backend, SHORT)


@pytest.mark.skipif(not TEST_LONG, reason="a rank is stopped for longer than the default time-out")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_may_be_stopped_for_as_long_as_the_model_allows(rank: int) -> None:
    """Neither rank 0 nor the rank's supervisor ends the rank before that time."""
    backend = Backend(arguments=["--ranks", "2"])
    try:
        bring(backend, "idle", "rank_timeout:60")
        processes = ranks(backend.process())
        processes[rank].suspend()
        time.sleep(TIMEOUT + 5)  # the fault lasts this long
        processes[rank].resume()
        assert text_answer(backend, SHORT)
        assert ranks(backend.process()) == processes
    finally:
        backend.close()


def test_the_ranks_exit_with_the_option_for_it() -> None:
    backend = Backend(arguments=["--ranks", "2", "--rank-loss", "exit"])
    try:
        stream = bring(backend, "decode")
        processes = ranks(backend.process())
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
            until(lambda: len(supervisor.children()) == 2 or not supervisor.is_running())
            processes = [supervisor, *supervisor.children()]
            host.kill()
            _, alive = psutil.wait_procs(processes, WAIT)
            assert not alive
        finally:
            with contextlib.suppress(psutil.Error):
                supervisor.kill()


def test_ranks_that_are_still_starting_end_with_their_supervisor() -> None:
    """The supervisor may end before the ranks have read the id of their parent."""
    command = [str(ROOT / "run.sh"), "--addr", "127.0.0.1:0", "--ranks", "2"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as child:
        supervisor = psutil.Process(child.pid)
        until(lambda: len(supervisor.children()) == 2)
        processes = supervisor.children()
        child.kill()
        _, alive = psutil.wait_procs(processes, WAIT)
        for process in alive:
            process.kill()
        assert not alive


def test_ranks_end_with_their_supervisor() -> None:
    """LOCALAI_BACKEND_PARENT_WATCH=off concerns only the supervisor's parent, so they still end."""
    unset = {"LOCALAI_BACKEND_PARENT_WATCH": "off", TOKEN: ""}
    backend = Backend((), ["--ranks", "2"], **unset)
    try:
        processes = ranks(backend.process())
        assert all(process.environ()[TOKEN] for process in processes.values())
        backend.child.kill()
        _, alive = psutil.wait_procs([*processes.values()], WAIT)
        assert not alive
    finally:
        backend.close()


def test_ranks_end_in_order_when_their_terminal_is_closed() -> None:
    """All processes get SIGHUP, and end as a backend without ranks does."""
    with unignored(signal.SIGHUP):
        backend = Backend(arguments=["--ranks", "2"])
    try:
        stream = bring(backend, "decode")
        folder = Path(
            next(iter(ranks(backend.process()).values())).environ()["MLX_HOSTFILE"]
        ).parent
        processes = backend.process().children(recursive=True)
        for process in (*processes, backend.process()):
            process.send_signal(signal.SIGHUP)
        assert drained(stream) in ("CANCELLED", "UNAVAILABLE")
        assert backend.child.wait(WAIT) == 0
        _, alive = psutil.wait_procs(processes, WAIT)
        assert not alive
        assert not folder.exists()
        until(lambda: any("event=stopped" in line for line in backend.log))
    finally:
        backend.close()


@pytest.mark.parametrize(
    ("rank", "number", "code"),
    [(None, "SIGTERM", 0), (0, "SIGKILL", 128 + signal.SIGKILL), (1, "SIGILL", 1)],
)
def test_the_exit_code_and_the_last_line_if_a_rank_ends_while_it_starts(
    rank: int | None, number: str, code: int
) -> None:
    command = [str(ROOT / "run.sh"), "--addr", "127.0.0.1:0", "--ranks", "2", "--rank-loss", "exit"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        supervisor = psutil.Process(child.pid)
        until(lambda: len(supervisor.children()) == 2)
        processes = supervisor.children()
        target = child if rank is None else sorted(processes, key=lambda one: one.pid)[rank]
        target.send_signal(signal.Signals[number])
        _, log = child.communicate(timeout=WAIT)
        assert child.returncode == code
        _, alive = psutil.wait_procs(processes, WAIT)
        assert not alive
    if rank is not None:
        last = log.splitlines()[-1]
        assert f'level=error event=exit cause="rank {rank} was ended by {number}: ' in last


def test_rank_0_of_a_hostfile_stays_ended_if_it_is_asked_to_stop(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text(json.dumps([f"127.0.0.1:{port}" for port in free_ports(2)]))
    (control,) = free_ports(1)
    arguments = ["--hostfile", str(hostfile), "--control", f"127.0.0.1:{control}"]
    backend = Backend((), arguments)
    try:
        (rank,) = backend.process().children()
        rank.terminate()
        assert backend.child.wait(WAIT) == 0
    finally:
        backend.close()


def test_a_worker_ends_at_once_when_asked_to(tmp_path: Path) -> None:
    """Rank 0 notices by the connection; there is no call to wait for."""
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text(json.dumps([f"127.0.0.1:{port}" for port in free_ports(2)]))
    arguments = ["--worker", "--rank", "1", "--hostfile", str(hostfile)]
    with subprocess.Popen([ROOT / "run.sh", *arguments], stderr=subprocess.PIPE) as worker:
        assert worker.stderr is not None
        assert b"cannot be reached" in worker.stderr.readline()
        (rank,) = psutil.Process(worker.pid).children()
        worker.terminate()
        assert worker.wait(WAIT) == 0
        assert not rank.is_running()
