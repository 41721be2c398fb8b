"""Runs a command under limits of the system, or with what a careless host lets it inherit.

It is a separate program because `preexec_fn` would make the test's process fork: then gRPC's fork
handlers (1.85) crash about one process in fifty, and hang others.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import signal
from pathlib import Path

OF_CHILDREN = (signal.SIGCHLD, signal.SIGPROF, signal.SIGXCPU)
_STACK = 128 << 10  # bytes
_DROP_FROM_BOUNDS, _MAY_RAISE_LIMITS = 24, 24


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--files", type=int, nargs=2, help="soft and hard limit of open files")
    parser.add_argument("--address-space", type=int, help="its limit in bytes")
    parser.add_argument("--file-size", type=int, help="its limit in bytes")
    parser.add_argument("--processes", type=int, help="its limit, which counts threads")
    parser.add_argument("--group", type=Path, help="the folder of a control group to enter")
    parser.add_argument("--leftovers", type=Path, help="a folder to start in, and to remove")
    parser.add_argument("command", nargs="+")
    chosen = parser.parse_args()
    # Python ignores these at its start, and the command would inherit that.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    if chosen.files:
        resource.setrlimit(resource.RLIMIT_NOFILE, tuple(chosen.files))
        # so that the command cannot raise the limit again
        ctypes.CDLL(None).prctl(_DROP_FROM_BOUNDS, _MAY_RAISE_LIMITS, 0, 0, 0)
    if chosen.address_space:
        resource.setrlimit(resource.RLIMIT_AS, (chosen.address_space,) * 2)
    if chosen.file_size is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (chosen.file_size,) * 2)
    if chosen.processes:
        resource.setrlimit(resource.RLIMIT_NPROC, (chosen.processes,) * 2)
    if chosen.group:
        (chosen.group / "cgroup.procs").write_text(str(os.getpid()))
    if chosen.leftovers:
        os.chdir(chosen.leftovers)
        chosen.leftovers.rmdir()
        resource.setrlimit(resource.RLIMIT_STACK, (_STACK, resource.RLIM_INFINITY))
        for number in OF_CHILDREN:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    os.execvp(chosen.command[0], chosen.command)


if __name__ == "__main__":
    _main()
