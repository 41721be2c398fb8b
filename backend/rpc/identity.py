"""Remembers which model was loaded last, and refuses calls meant for another one.

In a cluster, a port may be taken over by another model between the host's look-up and its call.
LocalAI looks the model up again if it gets NOT_FOUND with the phrase `model identity mismatch`.
"""

from __future__ import annotations

from typing import Any

from backend.rpc.statuses import IdentityMismatch

QUEUED = frozenset({
    "Predict", "PredictStream", "Embedding", "Rerank", "Score", "TokenClassify",
    "AudioTranscription", "AudioTranscriptionStream",
})  # fmt: skip
"""The methods whose requests wait for the engine, and are refused while its queue is full."""
GUARDED = QUEUED | {"TokenizeString"}


class Identity:
    """The `Model` field of the last successful load, verbatim. Free does not clear it."""

    def __init__(self) -> None:
        self._loaded = ""

    def check(self, method: str, request: Any) -> None:
        """Raise IdentityMismatch if both names are set and differ."""
        if method not in GUARDED:
            return
        requested: str = request.ModelIdentity
        if self._loaded and requested and requested != self._loaded:
            raise IdentityMismatch(self._loaded, requested)

    def learn(self, name: str) -> None:
        self._loaded = name
