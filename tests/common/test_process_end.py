"""What is said of a process that ended: the signal, its meaning, and what to do."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.process_end import cause_of, end_of, tells_fault
from tests.acceptance.test_machine_limits import group

ADVICE = {
    signal.SIGILL: ("lacks an instruction", "MLX_BACKEND_OPENBLAS=0", "make doctor"),
    signal.SIGSEGV: ("fault", "MLX_BACKEND_OPENBLAS=0", "make doctor"),
    signal.SIGABRT: ("fault", "MLX_BACKEND_OPENBLAS=0", "make doctor"),
    signal.SIGFPE: ("fault", "MLX_BACKEND_OPENBLAS=0", "make doctor"),
    signal.SIGTRAP: ("fault", "MLX_BACKEND_OPENBLAS=0", "make doctor"),
    signal.SIGKILL: ("probably", "smaller model or context_size", "journalctl -k"),
    signal.SIGBUS: ("cut short", "disk", "download"),
}
HUNGRY = """
import subprocess, sys
from common.machine_memory import kills_for_memory
from common.process_end import end_of
before = kills_for_memory()
child = subprocess.run([sys.executable, "-c", "bytearray(200 << 20)"])
print(end_of("it", child.returncode, out_of_memory=kills_for_memory() > before))
"""


@pytest.mark.parametrize("number", ADVICE)
def test_a_process_that_a_signal_ended_and_its_shell_mean_the_same(number: signal.Signals) -> None:
    killed = subprocess.run(["sh", "-c", f"kill -{number} $$"], check=False)
    shell = subprocess.run(["sh", "-c", f"sh -c 'kill -{number} $$'; exit $?"], check=False)
    assert shell.returncode == 128 + number
    said = end_of("the backend", killed.returncode, "level=error event=call rpc=Predict")
    assert said.startswith(f"the backend was ended by {number.name}")
    assert all(words in said for words in ADVICE[number])
    assert said == end_of("the backend", shell.returncode)


@pytest.mark.parametrize(
    ("code", "line", "said"),
    [
        (0, "", "it ended with exit code 0"),
        (1, 'level=error event=exit cause="no \\"room\\""', 'it ended with exit code 1: no "room"'),
        (1, "level=error event=exit cause=misuse", "it ended with exit code 1: misuse"),
        (-9, "time=2026Z level=error event=exit cause=x", "it was ended by SIGKILL: x"),
        (127, "sh: /x: not found", "it ended with exit code 127: sh: /x: not found"),
        (128 + signal.SIGTERM, "", "it ended with exit code 143"),
        (255, "", "it ended with exit code 255"),
        (-signal.SIGTERM, "", "it was ended by SIGTERM"),
        (-250, "", "it was ended by signal 250"),
        (-9, 'level=error event=exit cause="it hangs"', "it was ended by SIGKILL: it hangs"),
    ],
)
def test_other_ends(code: int, line: str, said: str) -> None:
    assert end_of("it", code, line) == said


@given(st.integers(-300, 300), st.text(), st.booleans())
def test_every_end_is_one_line_about_its_subject(code: int, line: str, killed: bool) -> None:
    said = end_of("it", code, line, out_of_memory=killed)
    assert said.startswith("it ")
    assert killed is False or "probably" not in said or "probably" in line


@given(st.text())
def test_any_line_has_a_cause(line: str) -> None:
    assert isinstance(cause_of(line), str)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("level=info event=log message=loaded", False),
        ("level=warning event=ranks", False),
        ("time=2026Z level=warning event=ranks", False),
        ("level=error event=exit cause=misuse", True),
        ("ImportError: libgfortran.so.5: cannot open shared object file", True),
        ("terminate called after throwing an instance of 'std::bad_alloc'", True),
    ],
)
def test_an_innocent_line_tells_no_fault(line: str, told: bool) -> None:
    assert tells_fault(line) == told


def test_a_kill_for_lack_of_memory_is_known_as_one() -> None:
    with group(64 << 20) as folder:
        confined = ["-m", "tests.acceptance.confined", "--group", str(folder), "--"]
        done = subprocess.run(
            [sys.executable, *confined, sys.executable, "-c", HUNGRY],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.stdout.startswith("it was ended by SIGKILL: memory ran out"), done
