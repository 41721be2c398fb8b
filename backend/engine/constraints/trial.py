"""Tries each grammar in a child process before the backend compiles it.

llguidance follows rules and references recursively, so a chain of a thousand overflows the native
stack and ends the process. Its limits do not cover all of its time and memory either: thirty
intersected patterns take minutes and gigabytes between two checks. Analysing the text instead would
have to predict all that for every notation; a thread could have a larger stack but could not be
stopped. So a child parses the grammar, compiles it and computes the first mask, within the limits
in `grammar_limits`. The backend then does the same with the same tokenizer and more stack, so what
passed in the child needs no more there. Computing later masks, accepting tokens, and copying and
freeing a matcher do not recurse.

The cost is the memory of a second token table from the first grammar on, and compiling each new
grammar twice, a few milliseconds. If a grammar ends the child, a new one is started.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from backend.engine.constraints.grammar_limits import CPU_SECONDS, MEMORY, TOO_LARGE
from backend.engine.constraints.matching import TokenizerSource
from backend.engine.errors import EngineFailed, InvalidRequest
from backend.engine.units import MIB

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
    """One child for one tokenizer, used by one thread at a time. It starts immediately."""

    def __init__(self, source: TokenizerSource) -> None:
        self._lock = threading.Lock()
        # A file instead of a pipe, so that nothing waits until the child has read it.
        self._source = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        json.dump(asdict(source), self._source)
        self._source.flush()
        self._start()

    def ask(self, subject: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """The child's answer. Raises InvalidRequest if the grammar ends the child.

        subject: how that error names the grammar.
        """
        line = json.dumps(request).encode() + b"\n"
        with self._lock:
            if self._child.poll() is not None:  # ended from outside between two trials
                self._replace()
            child = self._child
            try:
                assert child.stdin is not None
                assert child.stdout is not None
                child.stdin.write(line)
                child.stdin.flush()
                reply = child.stdout.readline()
            except OSError:
                reply = b""
            if reply:
                return dict(json.loads(reply))
            code = child.wait()
            self._replace()
        if code not in _CAUSES:
            raise EngineFailed(f"the process that tries grammars ended with the code {code}")
        raise InvalidRequest(
            f"{subject} cannot be enforced: {_CAUSES[code]}; make it smaller or simpler"
        )

    def _replace(self) -> None:
        self._end()
        self._start()

    def _start(self) -> None:
        fd = self._source.fileno()
        self._child = subprocess.Popen(
            [sys.executable, "-m", _PROGRAM, str(fd)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[fd],
            env={**os.environ, "PYTHONPATH": str(_ROOT), "PYTHONSAFEPATH": "1"},
            start_new_session=True,  # Ctrl-C in a terminal is handled by the server
        )
        self._end = weakref.finalize(self, _end, self._child)


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.communicate()
