"""Tries many grammars in one fork, because a fork for each would make fuzzing too slow."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Mapping
from typing import Any

from backend.engine.constraints.matching import TokenizerSource
from backend.engine.constraints.trial import Trial, answer_of


class KeptTrial(Trial):
    """A fork is replaced when a grammar has ended it. For one thread."""

    def __init__(self, source: TokenizerSource) -> None:
        super().__init__(source)
        self._fork: tuple[socket.socket, subprocess.Popen[bytes]] | None = None

    def attempt(self, subject: str, request: Mapping[str, Any], *, quick: bool) -> dict[str, Any]:
        fork, self._fork = self._fork or self.fork(), None
        try:
            answer = answer_of(*fork, subject, request, quick=quick)
        except BaseException:
            fork[0].close()
            raise
        self._fork = fork
        return answer
