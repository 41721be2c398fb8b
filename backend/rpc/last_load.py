"""Stores the request of the latest load in a file, for a process that replaces this one.

The supervisor of ranks sets the file's name. If a rank is lost, all ranks are restarted, and the
new rank 0 loads the same model again, so that the host need not do it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from backend.rpc import logs
from wire import backend_pb2 as pb

FILE = "MLX_BACKEND_LAST_LOAD"


class LastLoad:
    """The stored request. Without a file name, nothing is stored."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._path = Path(environ[FILE]) if environ.get(FILE) else None

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
