"""Remembers the latest load: its name, and its request for a process that replaces this one.

In a cluster, a port may be taken over by another model between the host's look-up and its call.
LocalAI looks the model up again if it gets NOT_FOUND with the phrase `model identity mismatch`.

The supervisor of ranks sets the name of a file for the request. If a rank is lost, all ranks are
restarted, and the new rank 0 loads the same model again, so that the host need not do it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backend.engine.ranks.rank_info import LAST_LOAD
from backend.rpc import logs
from backend.rpc.statuses import IdentityMismatch
from wire import backend_pb2 as pb

QUEUED = frozenset({
    "Predict", "PredictStream", "Embedding", "Rerank", "Score", "TokenClassify",
    "AudioTranscription", "AudioTranscriptionStream",
})  # fmt: skip
"""The methods whose requests wait for the engine, and are refused while its queue is full."""
GUARDED = QUEUED | {"TokenizeString"}


class LastLoad:
    """The latest load that succeeded.

    name: its `Model` field, verbatim. Free does not clear it.

    Without a file name in the environment, the request is not stored.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.name = ""
        self._path = Path(environ[LAST_LOAD]) if environ.get(LAST_LOAD) else None

    def check(self, method: str, request: Any) -> None:
        """Raise IdentityMismatch if a call names another model."""
        if method in GUARDED and self.name and request.ModelIdentity not in ("", self.name):
            raise IdentityMismatch(self.name, request.ModelIdentity)

    def remember(self, request: pb.ModelOptions) -> None:
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)  # the system may have cleaned /tmp
            self._path.write_bytes(request.SerializeToString())
        except OSError as fault:
            logs.warning("last_load", stored=False, why=fault.strerror)

    def forget(self) -> None:
        if self._path is not None:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self._path.unlink()

    def request(self) -> pb.ModelOptions | None:
        """Return the request to load again; None if no model was loaded."""
        if self._path is None or not self._path.exists():
            return None
        return pb.ModelOptions.FromString(self._path.read_bytes())
