"""The process as a host sees it: start, probes, signals, exit codes and last log lines."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from backend.rpc import parent_watch
from tests.log_text import untimed
from tests.long import TEST_LONG
from tests.rpc.client import failure_of
from tests.rpc.process import ROOT, WAIT, Process
from tests.unignored_signals import unignored
from wire import backend_pb2 as pb
from wire.backend_pb2_grpc import BackendStub

Start = Callable[..., Process]
ANYWHERE = "--addr=127.0.0.1:0"
SCRIPTED = "tests.rpc.scripted_process"
HEAVY = ("mlx", "mlx_lm", "numpy", "transformers", "tokenizers", "huggingface_hub")


@pytest.fixture
def start() -> Iterator[Start]:
    processes: list[Process] = []

    def begin(
        *arguments: str, module: str = "backend", env: dict[str, str] | None = None
    ) -> Process:
        processes.append(Process(*arguments, module=module, env=env))
        return processes[-1]

    yield begin
    for process in processes:
        process.close()


def stub_of(port: int, host: str = "127.0.0.1") -> BackendStub:
    return BackendStub(grpc.insecure_channel(f"{host}:{port}"))


def healthy(stub: BackendStub) -> bool:
    reply = stub.Health(pb.HealthMessage(), timeout=WAIT, wait_for_ready=True)
    return bool(reply.message == b"OK")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--addr", "127.0.0.1:0"),
        ("--addr=127.0.0.1:0",),
        ("--addr", "localhost:0"),
        ("--addr=0.0.0.0:0",),
    ],
)
def test_every_spelling_of_the_address_works(start: Start, arguments: tuple[str, ...]) -> None:
    assert healthy(stub_of(start(*arguments).port()))


def test_ipv6_works(start: Start) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    assert healthy(stub_of(start("--addr=[::1]:0").port(), "[::1]"))


def test_health_is_answered_before_anything_heavy_is_imported(start: Start) -> None:
    process = start(ANYWHERE)
    assert healthy(stub_of(process.port()))
    maps = Path(f"/proc/{process.child.pid}/maps")
    if not maps.exists():
        pytest.skip("only Linux lists what a process has loaded")
    assert not [line for line in maps.read_text().splitlines() if "/mlx/" in line]


def test_importing_the_server_imports_nothing_heavy() -> None:
    code = (
        "import sys, backend.__main__, backend.rpc.lifetime, backend.engine.engine\n"
        f"sys.exit(repr([name for name in {HEAVY!r} if name in sys.modules]))"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=WAIT
    )
    assert child.stderr.strip() == "[]"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_an_idle_process_exits_with_zero(start: Start, number: signal.Signals) -> None:
    with unignored(number):
        process = start(ANYWHERE)
    assert healthy(stub_of(process.port()))
    process.signal(number)
    assert process.wait() == 0
    assert process.stdout() == ""


def test_signals_for_other_purposes_do_not_end_the_process(start: Start) -> None:
    process = start(ANYWHERE)
    stub = stub_of(process.port())
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE, signal.SIGALRM, signal.SIGIO):
        process.signal(number)
    assert healthy(stub)


def test_a_running_stream_is_cancelled_when_the_process_exits(start: Start) -> None:
    process = start(ANYWHERE, module=SCRIPTED)
    stream = stub_of(process.port()).PredictStream(pb.PredictOptions(Prompt="x"))
    assert next(stream).message == b"a"
    process.signal(signal.SIGTERM)
    failure = failure_of(lambda: list(stream))
    assert failure.code is grpc.StatusCode.CANCELLED
    assert failure.sentence == "the backend is shutting down"
    assert process.wait() == 0


@pytest.mark.parametrize("closed", [False, True])
def test_what_a_library_prints_is_logged_although_nobody_reads_stdout(
    start: Start, closed: bool
) -> None:
    process = start(ANYWHERE, module=SCRIPTED)
    stub = stub_of(process.port())
    if closed:
        assert process.child.stdout is not None
        process.child.stdout.close()
    stream = stub.PredictStream(pb.PredictOptions(Prompt="print"), timeout=WAIT)
    assert next(stream).message == b"a"
    process.line_with('event=output text="from a library"')
    process.signal(signal.SIGTERM)
    assert process.wait() == 0


def test_new_calls_are_refused_while_the_process_exits(start: Start) -> None:
    process = start(ANYWHERE, module=SCRIPTED)
    stub = stub_of(process.port())
    next(stub.PredictStream(pb.PredictOptions(Prompt="held")))
    process.signal(signal.SIGTERM)
    process.line_with("event=stopping")
    failure = failure_of(lambda: stub.Predict(pb.PredictOptions(Prompt="x")))
    assert failure.code is grpc.StatusCode.UNAVAILABLE
    assert failure.sentence == "the backend is shutting down"


def test_a_stuck_engine_is_abandoned_within_the_grace_period(start: Start) -> None:
    process = start(ANYWHERE, module=SCRIPTED)
    next(stub_of(process.port()).PredictStream(pb.PredictOptions(Prompt="stuck")))
    process.signal(signal.SIGTERM)
    assert process.child.wait(WAIT) == 0


def test_a_second_signal_exits_at_once(start: Start) -> None:
    process = start(ANYWHERE, module=SCRIPTED)
    next(stub_of(process.port()).PredictStream(pb.PredictOptions(Prompt="held")))
    process.signal(signal.SIGTERM)
    process.line_with("event=stopping")
    while process.child.poll() is None:  # the process ignores a signal right after the first
        process.signal(signal.SIGINT)
        try:
            process.child.wait(0.2)
        except subprocess.TimeoutExpired:
            continue
    assert process.wait() == 128 + signal.SIGINT
    assert "event=exit" in process.lines[-1]


@pytest.mark.skipif(not TEST_LONG, reason="an engine that is stuck is abandoned after 6 seconds")
def test_under_a_supervisor_a_second_signal_has_no_effect(start: Start) -> None:
    """The second signal may be the first one, forwarded late by a supervisor on a busy machine."""
    process = start(ANYWHERE, module=SCRIPTED, env={parent_watch.PARENT: str(os.getpid())})
    next(stub_of(process.port()).PredictStream(pb.PredictOptions(Prompt="stuck")))
    process.signal(signal.SIGTERM)
    process.line_with("event=stopping")
    while process.child.poll() is None:
        process.signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.child.wait(0.2)
    assert process.wait() == 0


def test_a_fatal_engine_error_ends_the_process_with_its_cause(start: Start) -> None:
    process = start(ANYWHERE, module=SCRIPTED)
    failure_of(lambda: stub_of(process.port()).Predict(pb.PredictOptions(Prompt="die")))
    assert process.wait() == 1
    cause = "the scripted engine was told to die"
    assert process.lines[-1] == f'level=error event=exit cause="{cause}"'


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_a_port_in_use_is_one_line_and_a_failure(start: Start, host: str) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        process = start(f"--addr={host}:{port}")
        assert process.wait() == 1
    cause = f"{host}:{port} is in use by another process: stop it or choose another port"
    assert process.lines == [f'level=error event=exit cause="{cause}"']


def test_two_backends_do_not_share_a_port(start: Start) -> None:
    port = start("--addr=localhost:0").port()
    second = start(f"--addr=localhost:{port}")
    assert second.wait() == 1
    assert "is in use" in second.lines[-1]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--addr",),
        ("--addr=",),
        ("--addr=127.0.0.1",),
        ("--addr=:50051",),
        ("--addr=127.0.0.1:",),
        ("--addr=127.0.0.1:65536",),
        ("--addr=127.0.0.1:-1",),
        ("--addr=a b:1",),
        ("--addr=::1:50051",),
        ("--addr=http://x:1",),
        ("--addr=nowhere.invalid:50051",),
        ("--port=1",),
        ("serve",),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_two(
    start: Start, arguments: tuple[str, ...]
) -> None:
    process = start(*arguments)
    assert process.wait() == 2
    assert len(process.lines) == 1
    assert process.lines[0].startswith("level=error event=exit cause=")
    assert process.stdout() == ""


def test_the_token_from_the_environment_is_required(start: Start) -> None:
    process = start(ANYWHERE, env={"LOCALAI_GRPC_AUTH_TOKEN": "s3cret"})
    stub = stub_of(process.port())
    failure = failure_of(lambda: stub.Health(pb.HealthMessage(), wait_for_ready=True, timeout=WAIT))
    assert failure.code is grpc.StatusCode.UNAUTHENTICATED
    metadata = (("authorization", "Bearer s3cret"),)
    assert stub.Health(pb.HealthMessage(), metadata=metadata).message == b"OK"
    process.signal(signal.SIGTERM)
    process.wait()
    assert "s3cret" not in "\n".join(process.lines)


def test_the_preload_is_not_inherited_by_children() -> None:
    code = (
        "import os, sys, runpy\n"
        "os._exit = lambda code: sys.exit(3 if 'LD_PRELOAD' in os.environ else 4)\n"
        "sys.argv = ['backend', '--help']\n"
        "runpy.run_module('backend', run_name='__main__')"
    )
    child = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "LD_PRELOAD": "", "MLX_BACKEND_LD_PRELOAD_BEFORE": ""},
        capture_output=True,
        text=True,
        timeout=WAIT,
    )
    assert child.returncode == 4


PARENT = """
import os, subprocess, sys
child = subprocess.Popen(
    [sys.executable, "-m", "backend", "--addr=127.0.0.1:0"], start_new_session=True
)
print(child.pid, flush=True)
sys.stdin.read()
os._exit(0)
"""


@pytest.mark.parametrize(("switch", "fires"), [("", True), ("off", False)])
def test_the_process_ends_with_its_host(switch: str, fires: bool) -> None:
    environ = {
        **os.environ,
        "LOCALAI_BACKEND_PARENT_WATCH": switch,
        "LOCALAI_BACKEND_PARENT_WATCH_INTERVAL": "50ms",
    }
    host = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        cwd=ROOT,
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert host.stdin is not None
    assert host.stdout is not None
    assert host.stderr is not None
    child = int(host.stdout.readline())
    listening = host.stderr.readline()
    assert f"parent_watch={str(fires).lower()}" in listening
    host.stdin.close()
    host.wait(WAIT)
    if not fires:
        port = int(listening.split("addr=127.0.0.1:")[1].split()[0])
        assert healthy(stub_of(port))
        os.kill(child, signal.SIGTERM)
    # the child's end of the pipe is closed when it exits
    last = untimed(host.stderr.read()).splitlines()[-1]
    assert (last == f'level=error event=exit cause="the host process {host.pid} is gone"') is fires
    host.stdout.close()
    host.stderr.close()


def test_help_whose_reader_has_left_is_no_error() -> None:
    """As in `run.sh --help | head -1`."""
    theirs, ours = os.pipe()
    os.close(theirs)
    try:
        done = subprocess.run(
            [ROOT / "scripts/python", "-m", "backend", "--help"],
            stdout=ours,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(ours)
    assert (done.returncode, done.stderr) == (0, "")
