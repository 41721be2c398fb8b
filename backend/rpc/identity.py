"""Remembers which model was asked for last, and refuses calls meant for another one.

In a cluster a port can come to belong to another model between the host's look-up and its call
(contract 1.9); the host re-routes when it reads the sentinel phrase under NOT_FOUND.
"""

from __future__ import annotations

from typing import Any

from backend.rpc.statuses import IdentityMismatch

GUARDED = frozenset(
    {"Predict", "PredictStream", "Embedding", "TokenizeString", "Rerank", "TokenClassify", "Score"}
)


class Identity:
    """The `Model` of the last load that went well, word for word. Free does not clear it."""

    def __init__(self) -> None:
        self._loaded = ""

    def check(self, method: str, request: Any) -> None:
        """Raise IdentityMismatch if both sides have a name and the names differ."""
        if method not in GUARDED:
            return
        requested: str = request.ModelIdentity
        if self._loaded and requested and requested != self._loaded:
            raise IdentityMismatch(self._loaded, requested)

    def learn(self, name: str) -> None:
        """Take the name of a model that has just been loaded."""
        self._loaded = name
