"""Describes how a process ended, what that means, and what a person can do about it.

All programs of this project that start other processes use `end_of` for their messages.
"""

from __future__ import annotations

import re
import signal
import subprocess
from typing import Any

_CAUSE = re.compile(r'\bcause=(?:"((?:[^"\\]|\\.)*)"|(\S+))')
_TIME = r"(?:time=\S+ )?"
# The beginning of the last log line of this project's processes.
_FINAL = re.compile(rf"{_TIME}level=error event=exit ")
_HARMLESS = re.compile(rf"{_TIME}level=(info|warning|debug)\b")
_SHELL = 128  # shells return this plus the signal's number for a command that a signal ended
_OPENBLAS = "MLX_BACKEND_OPENBLAS=0, which turns OpenBLAS off"
_REPORT = "report it with the output of `make doctor` (`mlx-backend doctor`)"
_FAULT = f"a native library has a fault: {_REPORT}; you can also try {_OPENBLAS}"
_SMALLER = "choose a smaller model or context_size"
_OUT_OF_MEMORY = f"memory ran out: {_SMALLER}"
_PROBABLY = (
    f"memory probably ran out: {_SMALLER}; on Linux, `dmesg` or `journalctl -k` shows"
    " whether the kernel killed it"
)
MEANINGS: dict[int, str] = {
    signal.SIGILL: (
        "this CPU lacks an instruction that a library uses: start it again with"
        f" {_OPENBLAS}, and {_REPORT}"
    ),
    signal.SIGBUS: (
        "a file of the model was cut short while it was in use, or the disk failed: check the"
        " files and the disk, and download the model again"
    ),
    signal.SIGKILL: _PROBABLY,
    **dict.fromkeys((signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGTRAP), _FAULT),
}


def end_of(subject: str, code: int, line: str = "", *, out_of_memory: bool = False) -> str:
    """Return a message that says how a process ended and why.

    subject: the name of the process, with which the message begins.
    code: the exit code, negative for a signal, or 128 plus the signal's number, as from a shell.
    line: the last line of the process's log that reports a fault (see `tells_fault`).
    out_of_memory: whether the kernel has killed a process for lack of memory.
    """
    cause = cause_of(line)
    if (number := _signal_of(code)) is None:
        return f"{subject} ended with exit code {code}{cause and f': {cause}'}"
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    if not _FINAL.match(line):  # otherwise the process itself has written the cause
        cause = MEANINGS.get(number, "")
        if out_of_memory and number == signal.SIGKILL:
            cause = _OUT_OF_MEMORY
    return f"{subject} was ended by {name}{cause and f': {cause}'}"


def _signal_of(code: int) -> int | None:
    """Return the number of the signal that ended a process; None if the process exited."""
    if code < 0:
        return -code
    return code - _SHELL if code - _SHELL in MEANINGS else None


def tells_fault(line: str) -> bool:
    """Return whether a log line may be the reason why a process ended.

    This is true of errors, and of lines in another format.
    """
    return _HARMLESS.match(line) is None


def cause_of(line: str) -> str:
    """Return the value of `cause=` in a log line; if there is none, the line."""
    if (match := _CAUSE.search(line)) is None:
        return line
    quoted, plain = match.groups()
    return plain if quoted is None else re.sub(r"\\(.)", r"\1", quoted)


def wait_or_kill(process: subprocess.Popen[Any], seconds: float) -> int:
    """Wait until a process ends, and return its exit code; kill the process after `seconds`."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
