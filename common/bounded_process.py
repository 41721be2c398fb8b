"""Reads untrusted files in child processes with limits.

Parsers do not limit all of their time and memory, and some files crash them. So the process that
has received a file starts another program of this project for it (`output_of`). That program first
limits its own time and memory (`limit_own_process`).
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.peak_memory import peak_memory
from common.unnamed_file import unnamed_file

TOO_LARGE = 70  # exit code of a process that used too much memory
_ROOT = Path(__file__).parents[1]
_WATCH_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a child process.

    code: exit code, negative for a signal; None if the process was killed after its time limit.
    output: what the process wrote to standard output.
    """

    code: int | None
    output: bytes


def output_of(
    program: str,
    task: Mapping[str, Any],
    content: bytes,
    seconds: float,
    environ: Mapping[str, str],
    on_start: Callable[[subprocess.Popen[bytes]], None] = lambda _: None,
) -> Ended:
    """Run a module of this project in a child process until it ends.

    Raises OSError if the process cannot be started.

    program: name of the module.
    task: argument of the program, passed as JSON.
    content: what the program reads from standard input.
    seconds: limit of the wall time.
    environ: environment of the process.
    on_start: called with the process, so that the caller can kill it.
    """
    with os.fdopen(unnamed_file("file"), "w+b") as file:
        file.write(content)
        file.seek(0)
        # Without close_fds (no descriptors are inheritable), subprocess uses posix_spawn, which
        # runs no fork handlers: those of gRPC may crash the child.
        child = subprocess.Popen(
            [sys.executable, "-m", program, json.dumps(task)],
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**environ, "PYTHONPATH": str(_ROOT), "PYTHONSAFEPATH": "1"},
            close_fds=False,
        )
    try:
        on_start(child)
        output, _ = child.communicate(timeout=seconds)
        return Ended(child.returncode, output)
    except subprocess.TimeoutExpired:
        child.kill()
        return Ended(None, child.communicate()[0])
    finally:
        child.kill()
        child.wait()


def limit_own_process(cpu_seconds: int, memory: int) -> None:
    """Limit this process, so that SIGXCPU or the exit code TOO_LARGE ends it.

    cpu_seconds: limit of the processor time.
    memory: bytes that the process may use in addition to what it uses now.
    """
    with suppress(PermissionError):  # it leads a session
        os.setpgid(0, 0)  # Ctrl-C in a terminal is handled by the parent
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
    with suppress(OSError):  # if memory runs out, this process is killed before its parent
        Path("/proc/self/oom_score_adj").write_text("1000")
    threading.Thread(target=_watch, args=[peak_memory() + memory], daemon=True).start()


def _watch(limit: int) -> None:
    """Exit when memory exceeds a limit in bytes. Parsers in C release the GIL for this thread."""
    while peak_memory() <= limit:
        time.sleep(_WATCH_SECONDS)
    os._exit(TOO_LARGE)
