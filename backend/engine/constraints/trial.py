"""Tries each grammar in a process of its own before the backend compiles it.

llguidance follows rules and references by recursion, so that a chain of a thousand overflows the
native stack and ends the process. Nor do its limits hold for all of its time and memory: thirty
intersected patterns take minutes and gigabytes between two looks at the fuel. An analysis of the
text would have to foresee all that in every notation; a thread could have a larger stack, but could
not be stopped. So a child reads the grammar, compiles it and fills the first mask, within the
limits of `limits`. The child has the same tokenizer, and the backend then does the same with more
stack, so what passed takes no more there. Filling later masks, taking tokens, copying and freeing a
matcher do not recurse.

The child costs the memory of a second token table from the first grammar on, and each new grammar
the few milliseconds of its compilation twice. A child that a grammar ended is replaced.
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
    """One child, for one tokenizer; asked by one thread at a time. It starts at once."""

    def __init__(self, source: TokenizerSource) -> None:
        self._lock = threading.Lock()
        # A file, not a pipe: nobody has to wait until a starting child has read it.
        self._source = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        json.dump(asdict(source), self._source)
        self._source.flush()
        self._start()

    def ask(self, subject: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """The child's answer.

        subject: what is to blame where the request ends the child. Raises InvalidRequest then.
        """
        line = json.dumps(request).encode() + b"\n"
        with self._lock:
            if self._child.poll() is not None:  # ended from outside, while nothing was tried
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
            start_new_session=True,  # a Ctrl-C in a terminal is the server's to handle
        )
        self._end = weakref.finalize(self, _end, self._child)


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.communicate()
