"""Stores what a load finds by measuring and trying a model, so that the next load need not.

Measuring and trying a model take longer than reading its weights, and have the same results for the
same files, versions and device. If the file with the findings is missing, damaged or made for other
facts, the load measures again. A folder that cannot be written to is no error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from backend.engine.disk_cache.identity import digest_of, model_digest
from backend.engine.errors import Unusable
from backend.engine.ranks.rank_info import Value
from common.cache_folder import cache_folder
from common.version import VERSION

_MOST_BYTES = 1 << 16  # maximum size of a file
_MOST_FILES = 256  # the oldest are deleted first
_CODE = Path(__file__).parents[2]


class Findings:
    """The findings of one checkpoint.

    folder: where to store the file; None if there is no such folder.
    """

    def __init__(self, folder: Path | None, key: str) -> None:
        self._key = key
        self._path = None if folder is None else folder / f"{key}.json"

    def read(self) -> Value:
        """Return what an earlier load found; {} if nothing is stored."""
        if self._path is None:
            return {}
        try:
            with self._path.open("rb") as file:
                stored = json.loads(file.read(_MOST_BYTES))
            found: Value = stored["found"]
            if stored["check"] == self._check(found) and isinstance(found, dict):
                return found
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            pass
        return {}

    def write(self, found: Value) -> None:
        """Replace what is stored, if the folder can be written to."""
        if self._path is None:
            return
        text = json.dumps({"check": self._check(found), "found": found})
        if len(text) > _MOST_BYTES:
            return
        fresh = self._path.with_suffix(f".{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_text(text)
            fresh.replace(self._path)
            files = self._path.parent.iterdir()
            by_age = sorted(files, key=lambda path: path.stat().st_mtime, reverse=True)
            for old in by_age[_MOST_FILES:]:
                old.unlink()
        except OSError:
            with suppress(OSError):
                fresh.unlink()

    def _check(self, found: Value) -> str:
        return digest_of([self._key.encode(), json.dumps(found, sort_keys=True).encode()])


def findings_of(checkpoint: Path, facts: Sequence[str], *, dtype: str, kv_kind: str) -> Findings:
    """Return the findings of a checkpoint.

    facts: what else the findings depend on, such as the device.
    dtype, kv_kind: as for `model_digest`.
    """
    folder = cache_folder()
    try:
        identity = model_digest(checkpoint, dtype=dtype, kv_kind=kv_kind)
        text = json.dumps([identity, VERSION, _code(), *facts])
    except (OSError, Unusable, ImportError):  # a file cannot be read, or a package has no version
        return Findings(None, "")
    return Findings(None if folder is None else folder / "findings", digest_of([text.encode()]))


@cache
def _code() -> str:
    """Return a digest of the backend's code, which may change without a new version."""
    states = ((path, path.stat()) for path in sorted(_CODE.glob("**/*.py")))
    return digest_of(
        f"{path.relative_to(_CODE)} {state.st_size} {state.st_mtime_ns}".encode()
        for path, state in states
    )
