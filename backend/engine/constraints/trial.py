"""Tries each grammar in a child process before the backend compiles it.

llguidance follows rules and references recursively, so a chain of a thousand overflows the native
stack and kills the process. llguidance's limits do not cover all of its time and memory either:
thirty intersected patterns take minutes and gigabytes between two checks. Predicting the cost from
the text would need an analysis for every notation, and a thread with a larger stack could not be
stopped. So a child process forks for each grammar. The fork parses the grammar, compiles it and
computes the first mask within the limits in this module. If that succeeds, the backend does the
same with the same tokenizer and a larger stack. Later work (masks, accepting tokens, copying and
freeing a matcher) does not recurse.

The cost is the memory of a second token table, from the first grammar on, and a few milliseconds to
compile each new grammar twice. Grammars are tried in parallel, so a slow grammar does not delay the
others.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from backend.engine.constraints.matching import TokenizerSource
from backend.engine.errors import REFUSED, EngineFailed, InvalidRequest, NotQuick, Overloaded
from backend.engine.units import MIB
from common.process_end import end_of
from common.unnamed_file import unnamed_file

STACK: Final = 32 * MIB
"""Bytes; enough for a few thousand nested rules or references."""
MARGIN: Final = 8 * MIB
"""Bytes of stack that the backend adds, so that a grammar that passed the trial also compiles
there."""
QUICK_SECONDS: Final = 0.1
"""Processor time after which a quick trial is stopped; the grammar is then tried as a slow one."""
CPU_SECONDS: Final = 3.0
MEMORY: Final = 512 * MIB
MEMORY_TOGETHER: Final = 1024 * MIB
"""Bytes of all grammars that are in use by requests, as measured in their trials."""
MEMORY_KEPT: Final = 128 * MIB
"""Bytes of the grammars that are remembered for later requests."""
READING_DEPTH: Final = 10_000
"""Recursion limit in Python frames. Hashing and JSON encoding recurse on the C stack too."""
TOO_LARGE: Final = 70
"""Exit code of a process whose grammar needed more than MEMORY."""
NO_PROCESS: Final = 71
"""Exit code where the system allows no more processes or threads."""

_ROOT = Path(__file__).parents[3]
_PROGRAM = "backend.engine.constraints.trial_process"
_DEEP = "its rules or references are nested too deeply"
_SLOW = f"compiling it takes more than {CPU_SECONDS:g} seconds"
_LARGE = f"compiling it takes more than {MEMORY // MIB} MiB of memory"
_CAUSES = {
    -signal.SIGSEGV: _DEEP,
    -signal.SIGBUS: _DEEP,
    -signal.SIGABRT: _DEEP,
    -signal.SIGPROF: _SLOW,
    -signal.SIGKILL: _LARGE,
    TOO_LARGE: _LARGE,
}


class Trial:
    """The child process for one tokenizer. Any number of threads may use it."""

    def __init__(self, source: TokenizerSource) -> None:
        self._lock = threading.Lock()
        # A file and not a pipe, because writing to a pipe would wait until the child reads it.
        self._source = os.fdopen(unnamed_file("tokenizer"), "w+", encoding="utf-8")
        json.dump(asdict(source), self._source)
        self._source.flush()
        self._start()

    def attempt(self, subject: str, request: Mapping[str, Any], *, quick: bool) -> dict[str, Any]:
        """Run a request in a fork and return the reply.

        `bytes` in the reply is the memory that the fork needed.
        subject: the words for the grammar in error messages.
        request: JSON data; `trial_process` lists the kinds.
        quick: whether to allow QUICK_SECONDS instead of CPU_SECONDS.

        Raises InvalidRequest if the request exceeds a limit, and NotQuick if it needs more than
        QUICK_SECONDS and is quick.
        """
        fork, child = self.fork()
        with fork:
            return answer_of(fork, child, subject, request, quick=quick)

    def fork(self) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        """Return the socket of a new fork, and the child process that made the fork.

        Raises Overloaded if the system does not pass the socket to the child process.
        """
        own, forks = socket.socketpair()
        with forks, self._lock:
            if self._child.poll() is not None:  # something killed it between two trials
                self.end()
                self._start()
            try:
                socket.send_fds(self._channel, [b"?"], [forks.fileno()])
            except ConnectionError:
                pass  # the child has just ended: `answer_of` learns how
            except OSError:
                own.close()
                raise Overloaded(REFUSED) from None
            return own, self._child

    def _start(self) -> None:
        self._channel, other = socket.socketpair()
        descriptors = [self._source.fileno(), other.fileno()]
        with other:
            self._child = subprocess.Popen(
                [sys.executable, "-m", _PROGRAM, *map(str, descriptors)],
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
                env={**os.environ, "PYTHONPATH": str(_ROOT), "PYTHONSAFEPATH": "1"},
                process_group=0,  # Ctrl-C in a terminal is handled by the server
            )
        self.end = weakref.finalize(self, _end, self._child, self._channel)


def answer_of(
    fork: socket.socket,
    child: subprocess.Popen[bytes],
    subject: str,
    request: Mapping[str, Any],
    *,
    quick: bool,
) -> dict[str, Any]:
    """Run a request as `Trial.attempt` does, in a fork that `child` has made."""
    reply = b""
    with fork.makefile("rb") as replies:
        with suppress(OSError):  # fails if the child could not fork and has closed its end
            fork.sendall(json.dumps({"quick": quick, **request}).encode() + b"\n")
        with suppress(OSError):
            reply = replies.readline()
    answer: dict[str, Any] = json.loads(reply) if reply else {"ended": child.wait()}
    if (code := answer.get("ended")) is None:
        return answer
    if quick and code == -signal.SIGPROF:
        raise NotQuick
    if code == NO_PROCESS:
        raise Overloaded(REFUSED)
    if code not in _CAUSES:
        raise EngineFailed(end_of("the process that tries grammars", code))
    raise InvalidRequest(
        f"{subject} cannot be enforced: {_CAUSES[code]}; make it smaller or simpler"
    )


def _end(child: subprocess.Popen[bytes], channel: socket.socket) -> None:
    channel.close()
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # its forks too
    child.wait()
