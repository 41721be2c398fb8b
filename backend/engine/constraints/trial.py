"""Tries each grammar in a process of its own before the backend compiles it.

llguidance follows rules and references by recursion, so that a chain of a thousand overflows the
native stack and ends the process. Nor do its limits hold for all of its time and memory: thirty
intersected patterns take minutes and gigabytes between two looks at the fuel. An analysis of the
text would have to foresee all that in every notation; a thread could have a larger stack, but could
not be stopped. So a child has the same tokenizer, and forks for each grammar: the fork reads the
grammar, compiles it and fills the first mask, within the limits of `grammar_limits`. The backend
then does the same with more stack, so what passed takes no more there. Filling later masks, taking
tokens, copying and freeing a matcher do not recurse.

The child costs the memory of a second token table from the first grammar on, and each new grammar
a fork and the few milliseconds of its compilation twice. Grammars are tried beside each other, so
a slow one holds up none of the others.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from backend.engine.constraints.grammar_limits import (
    CPU_SECONDS,
    MEMORY,
    TOO_LARGE,
)
from backend.engine.constraints.matching import TokenizerSource
from backend.engine.errors import EngineFailed, InvalidRequest, NotQuick
from backend.engine.units import MIB

_ROOT = Path(__file__).parents[3]
_PROGRAM = "backend.engine.constraints.trial_process"
_DEEP = "its rules or references lead into each other too deeply"
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
    """One child, for one tokenizer; asked by any number of threads. It starts at once."""

    def __init__(self, source: TokenizerSource) -> None:
        self._lock = threading.Lock()
        # A file, not a pipe: nobody has to wait until a starting child has read it.
        self._source = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        json.dump(asdict(source), self._source)
        self._source.flush()
        self._start()

    def ask(self, subject: str, request: Mapping[str, Any], *, quick: bool) -> dict[str, Any]:
        """The answer of a fork of the child.

        subject: what is to blame where the request ends the fork. quick: whether it may take
        QUICK_SECONDS, not CPU_SECONDS. Raises NotQuick where those were too few, and InvalidRequest
        where the request costs too much.
        """
        own, forks = socket.socketpair()
        with own, own.makefile("rb") as replies:
            with forks, self._lock:
                if self._child.poll() is not None:  # ended from outside
                    self._end()
                    self._start()
                child = self._child
                with suppress(OSError):
                    socket.send_fds(self._channel, [b"?"], [forks.fileno()])
            reply = b""
            with suppress(OSError):
                own.sendall(json.dumps({"quick": quick, **request}).encode() + b"\n")
                reply = replies.readline()
        answer: dict[str, Any] = json.loads(reply) if reply else {"ended": child.wait()}
        if (code := answer.get("ended")) is None:
            return answer
        if quick and code == -signal.SIGPROF:
            raise NotQuick
        if code not in _CAUSES:
            raise EngineFailed(f"the process that tries grammars ended with the code {code}")
        raise InvalidRequest(
            f"{subject} cannot be enforced: {_CAUSES[code]}; make it smaller or simpler"
        )

    def _start(self) -> None:
        self._channel, other = socket.socketpair()
        given = [self._source.fileno(), other.fileno()]
        with other:
            self._child = subprocess.Popen(
                [sys.executable, "-m", _PROGRAM, *map(str, given)],
                stdin=subprocess.DEVNULL,
                pass_fds=given,
                env={**os.environ, "PYTHONPATH": str(_ROOT), "PYTHONSAFEPATH": "1"},
                start_new_session=True,  # a Ctrl-C in a terminal is the server's to handle
            )
        self._end = weakref.finalize(self, _end, self._child, self._channel)


def _end(child: subprocess.Popen[bytes], channel: socket.socket) -> None:
    channel.close()
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # its forks too
    child.wait()
