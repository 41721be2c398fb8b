"""The process that starts a backend: what it is sent, what it survives, and its own end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from common.child_environment import backend_environ
from gateway.supervisor import process as warden_module
from gateway.supervisor.failures import LoadFailed
from gateway.supervisor.process import PROGRAM, BackendProcess
from tests.gateway.gateway_process import WAIT, tiny
from tests.gateway.supervising import (
    ask,
    children,
    has_ended,
    process_of,
    refusal,
    script,
    status_of,
    supervising,
    until,
    warden,
)
from tests.tasks import begun


async def test_a_killed_warden_ends_the_backend_and_is_replaced(tmp_path: Path) -> None:
    async with supervising(tmp_path, {"tiny": tiny()}) as supervisor:
        text = await ask(supervisor, "tiny")
        first, backend = warden(), process_of(supervisor, "tiny")
        first.kill()
        await until(lambda: status_of(supervisor, "tiny").pid is None)
        await until(lambda: has_ended(backend))
        assert "the process that starts it was killed" in status_of(supervisor, "tiny").error
        assert await ask(supervisor, "tiny") == text
        assert warden() != first


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A FIFO: every warden waits at its start until something has opened it to write."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    held = tmp_path / PROGRAM.name
    held.write_text(
        f"import runpy\nopen({str(gate)!r}).close()\n"
        f"runpy.run_path({str(PROGRAM)!r}, run_name='__main__')\n"
    )
    monkeypatch.setattr(warden_module, "PROGRAM", held)
    return gate


async def test_a_start_whose_warden_is_killed_fails_and_the_next_one_does_not(
    tmp_path: Path, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = children()
    quick = Path(script(tmp_path, "exit 3"))
    lost = await begun(BackendProcess.start(quick, "quick", {}))
    warden().kill()
    with pytest.raises(LoadFailed, match="the process that starts it was killed"):
        await lost
    monkeypatch.setattr(warden_module, "PROGRAM", PROGRAM)
    process = await BackendProcess.start(quick, "quick", {})
    assert await process.exited == "the backend ended with exit code 3"
    await until(lambda: set(children()) <= set(before))


def blocked_signals(pid: int) -> int:
    """The set of signals that the process blocks, as a bit mask."""
    return int(Path(f"/proc/{pid}/status").read_text().partition("SigBlk:")[2].split()[0], 16)


async def test_a_signal_to_all_processes_while_it_starts_does_not_end_it(
    tmp_path: Path, gate: Path
) -> None:
    start = await begun(BackendProcess.start(Path(script(tmp_path, "exit 3")), "quick", {}))
    starting = warden()
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        starting.send_signal(number)
    await asyncio.to_thread(gate.write_bytes, b"")
    assert await (await start).exited == "the backend ended with exit code 3"


async def test_a_signal_to_all_processes_does_not_end_it(tmp_path: Path) -> None:
    models = {"tiny": tiny(), "other": tiny(backend=script(tmp_path, "kill -TERM $$"))}
    async with supervising(tmp_path, models) as supervisor:
        text = await ask(supervisor, "tiny")
        process, backend = warden(), process_of(supervisor, "tiny")
        if sys.platform == "linux":
            assert [blocked_signals(pid) for pid in (process.pid, backend.pid)] == [0, 0]
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            process.send_signal(number)
        # The warden's children do not ignore these signals.
        assert "ended by SIGTERM" in (await refusal(supervisor, "other")).message
        assert await ask(supervisor, "tiny") == text
        assert (warden(), process_of(supervisor, "tiny")) == (process, backend)


async def test_a_start_that_the_system_refuses_says_why(tmp_path: Path) -> None:
    before = children()
    missing = Path(script(tmp_path, "exit 3")).with_name("missing.sh")
    with pytest.raises(LoadFailed, match=r"missing\.sh: No such file or directory"):
        await BackendProcess.start(missing, "missing", {})
    with pytest.raises(LoadFailed, match="null byte"):
        await BackendProcess.start(missing, "missing", {"ODD": "a\0b"})
    await until(lambda: set(children()) <= set(before))


async def test_command_and_environment_arrive_unchanged(tmp_path: Path) -> None:
    odd = "two\nlines 'and' \"quotes\" \\ é €"
    run = script(tmp_path, 'printf %s "$ODD" > odd; pwd > folder; ls /dev/fd > files')
    async with supervising(tmp_path, {"tiny": tiny(backend=run, env={"ODD": odd})}) as supervisor:
        await refusal(supervisor, "tiny")
    assert (tmp_path / "odd").read_text() == odd
    assert (tmp_path / "folder").read_text().strip() == str(tmp_path)
    # the last one is opened by ls
    assert (tmp_path / "files").read_text().split() == ["0", "1", "2", "3"]


@pytest.mark.parametrize("text", ["sleep 1000; exit 0", "trap '' TERM; sleep 1000 & wait; exit 0"])
def test_a_gateway_that_exits_during_a_start_leaves_nothing(tmp_path: Path, text: str) -> None:
    run = script(tmp_path, text)
    gateway, stdin = socket.socketpair()
    with stdin:
        program = [sys.executable, "-I", "-S", str(PROGRAM), str(tmp_path), run]
        process = subprocess.Popen(program, stdin=stdin.fileno(), stderr=subprocess.PIPE)
    gateway.close()
    _, errors = process.communicate(timeout=WAIT)
    assert (process.returncode, errors) == (0, b"")
    assert [left for left in psutil.process_iter() if run in _command(left)] == []


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_backends_do_not_inherit_the_gateways_settings() -> None:
    given = {"MLX_GATEWAY_API_KEYS": "secret", "MLX_GATEWAY_LOG": "debug", "HOME": "/root"}
    assert backend_environ(given, {"A": "1"}) == {"HOME": "/root", "A": "1"}
