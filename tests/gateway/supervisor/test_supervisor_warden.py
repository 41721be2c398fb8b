"""The start of a backend, and the process that ends it if the gateway cannot."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from common.child_environment import backend_environ
from gateway.supervisor.failures import LoadFailed
from gateway.supervisor.process import PROGRAM, BackendProcess
from tests.gateway.gateway_process import WAIT, tiny
from tests.gateway.supervising import (
    ask,
    children,
    is_warden,
    process_of,
    refusal,
    script,
    supervising,
    until,
    warden,
)


async def test_a_killed_warden_disturbs_no_answer(tmp_path: Path) -> None:
    async with supervising(tmp_path, {"tiny": tiny()}) as supervisor:
        text = await ask(supervisor, "tiny")
        first, backend = warden(), process_of(supervisor, "tiny")
        first.kill()
        assert await ask(supervisor, "tiny") == text
        assert process_of(supervisor, "tiny") == backend
        await until(lambda: any(is_warden(child) and child != first for child in children()))


def blocked_signals(pid: int) -> int:
    """The set of signals that the process blocks, as a bit mask."""
    return int(Path(f"/proc/{pid}/status").read_text().partition("SigBlk:")[2].split()[0], 16)


async def test_a_signal_to_all_processes_does_not_end_it(tmp_path: Path) -> None:
    models = {"tiny": tiny(), "other": tiny(backend=script(tmp_path, "kill -TERM $$"))}
    async with supervising(tmp_path, models) as supervisor:
        text = await ask(supervisor, "tiny")
        process, backend = warden(), process_of(supervisor, "tiny")
        if sys.platform == "linux":
            assert [blocked_signals(pid) for pid in (process.pid, backend.pid)] == [0, 0]
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            process.send_signal(number)
        # Backends do not ignore these signals.
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
    backend = subprocess.Popen([run], process_group=0)
    program = [sys.executable, "-I", "-S", str(PROGRAM)]
    left = subprocess.run(
        program, input=b"%d\n" % backend.pid, capture_output=True, timeout=WAIT, check=False
    )
    assert (left.returncode, left.stdout, left.stderr) == (0, b"", b"")
    assert backend.wait(WAIT) < 0
    assert [left for left in psutil.process_iter() if run in _command(left)] == []


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_backends_do_not_inherit_the_gateways_settings() -> None:
    given = {"MLX_GATEWAY_API_KEYS": "secret", "MLX_GATEWAY_LOG": "debug", "HOME": "/root"}
    assert backend_environ(given, {"A": "1"}) == {"HOME": "/root", "A": "1"}
