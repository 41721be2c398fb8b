"""The request of the latest load, for a process that takes the place of this one.

The supervisor of ranks names a file for it. A rank that is lost ends them all, and the new rank 0
loads the same model, so that the host need not notice.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from wire import backend_pb2 as pb

FILE = "MLX_BACKEND_LAST_LOAD"


class LastLoad:
    """Remembers nothing where no file is named."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._path = Path(environ[FILE]) if environ.get(FILE) else None

    def remember(self, request: pb.ModelOptions) -> None:
        if self._path is not None:
            self._path.write_bytes(request.SerializeToString())

    def forget(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def request(self) -> pb.ModelOptions | None:
        """What is to be loaded again, if anything was loaded."""
        if self._path is None or not self._path.exists():
            return None
        return pb.ModelOptions.FromString(self._path.read_bytes())
