"""The cached prefixes of one model, in a folder that other models and processes may share.

Each prefix is a safetensors file, which is used only if it is intact. The tensors of a file are
`tokens` and the arrays of the layers, named by their numbers. The metadata contains the identity of
the model and the numbers of the layers as JSON, and the CRC-32 of everything.

Files may appear and disappear at any time. Only files whose names have the pattern `_NAME` are
counted, read or removed. A damaged file of this model is removed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import stat
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save_file

from backend.engine.disk_cache.layout import Layers, fits
from backend.engine.planning.prefix_index import PrefixKey
from common.wording import shown

_log = logging.getLogger(__name__)
_NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}\.safetensors")
_UNFINISHED = ".unfinished"  # a subfolder
_ABANDONED = 600.0  # seconds without a write after which an unfinished file counts as abandoned
# Minimum share of a file's tokens that a prompt must use, because all of them are read and copied.
_LEAST_SHARE = 1 / 16


class BadFile(Exception):
    """A file cannot be used. The error's text is a clause for the log, without a path."""


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """A token sequence whose KV is in a file or queued for writing."""

    key: PrefixKey
    trimmable: bool  # whether the KV can be cut to any prefix

    def reusable(self, prompt: PrefixKey) -> int:
        """Return how many tokens of a prompt need no prefill. The last token always needs it."""
        shared = min(self.key.shared(prompt), len(prompt) - 1)
        return shared if self.trimmable or shared == len(self.key) else 0

    def covers(self, other: Prefix) -> bool:
        """Return whether this prefix can replace the other for every prompt."""
        return self.key.shared(other.key) == len(other.key) and (
            self.trimmable or (not other.trimmable and len(self.key) == len(other.key))
        )


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class StoredPrefix:
    """A prefix with its KV, packed for a file or read from a file."""

    prefix: Prefix
    # The layers' arrays and numbers, as `layout.pack` returns them.
    arrays: Sequence[Any]
    numbers: Sequence[int]
    path: Path | None = None  # the folder that a request names; None means the model's folder
    length: int = 0  # number of tokens of a prompt that need no prefill

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


def write_file(path: Path, identity: str, stored: StoredPrefix) -> None:
    """Write a file. Raises OSError, SafetensorError."""
    facts = {
        "identity": identity,
        "trimmable": stored.prefix.trimmable,
        "numbers": list(stored.numbers),
    }
    # The arrays are evaluated, so any thread can read them.
    arrays = map(np.ascontiguousarray, map(np.asarray, stored.arrays))
    tensors = {str(at): array for at, array in enumerate(arrays)}
    tensors["tokens"] = stored.prefix.key.tokens
    written = json.dumps(facts)
    save_file(tensors, path, {"facts": written, "check": _check(written, tensors)})


def read_prefix(path: Path, identity: str) -> Prefix:
    """Return the prefix in a file. Raises whatever a missing, foreign or damaged file causes."""
    facts, _, _ = _metadata(path, identity)
    with safe_open(path, "np") as file:
        return Prefix(PrefixKey(file.get_tensor("tokens")), facts["trimmable"])


def read_file(path: Path, identity: str) -> StoredPrefix:
    """Read a whole file. Raises the same exceptions as `read_prefix`.

    The file is not mapped into memory, because a disk that fails would then kill the process.
    """
    facts, written, check = _metadata(path, identity)
    tensors = load(path.read_bytes())
    if check != _check(written, tensors):
        raise BadFile("it is damaged")
    prefix = Prefix(PrefixKey(tensors.pop("tokens")), facts["trimmable"])
    arrays = [tensors[str(at)] for at in range(len(tensors))]
    numbers = facts["numbers"]
    if any(array.dtype.kind != "u" for array in arrays) or any(type(n) is not int for n in numbers):
        raise BadFile("its arrays or numbers have a wrong type")
    return StoredPrefix(prefix, arrays, numbers)


def _metadata(path: Path, identity: str) -> tuple[dict[str, Any], str, str]:
    """Return the facts, their JSON and the checksum. Only regular files are opened."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise BadFile("it is not a regular file")
    with safe_open(path, "np") as file:
        metadata = file.metadata()
    facts: dict[str, Any] = json.loads(metadata["facts"])
    if facts["identity"] != identity:
        raise BadFile("it has the KV of another model")
    return facts, metadata["facts"], metadata["check"]


def _check(facts: str, tensors: Mapping[str, NDArray[Any]]) -> str:
    check = zlib.crc32(facts.encode())
    for name in sorted(tensors):
        check = zlib.crc32(tensors[name].reshape(-1).view(np.uint8).data, check)
    return f"{check:08x}"


@dataclass(frozen=True, slots=True, eq=False)
class PrefixFile:
    """A prefix in a file of this model, and the file's size in bytes."""

    path: Path
    prefix: Prefix
    size: int


@dataclass(eq=False)
class Folder:
    """The files of one model in a folder.

    The methods wait for the disk, and may be called on any thread.
    """

    path: Path
    identity: str
    layout: Layers
    max_bytes: int  # maximum size of all files in the folder, of any model
    # The dictionary is never changed, only replaced, so threads need no lock.
    _files: dict[str, PrefixFile] = field(default_factory=dict, init=False)
    _refused: set[str] = field(default_factory=set, init=False)  # files whose fault was logged

    def refresh(self) -> list[PrefixFile]:
        """List the folder again, and return the files of this model."""
        names: list[str] = []
        with suppress(OSError):
            names = os.listdir(self.path)  # noqa: PTH208, names only: no Path for each of them
        mine = [name for name in names if name.startswith(self.identity) and _NAME.fullmatch(name)]
        looked = {name: self._files.get(name) or self._look_at(name) for name in mine}
        self._files = {name: file for name, file in looked.items() if file}
        return list(self._files.values())

    def read(self, file: PrefixFile, prompt: PrefixKey) -> StoredPrefix | None:
        """Read a file for a prompt, and mark it as used; None if the file is damaged or gone."""
        try:
            stored = read_file(file.path, self.identity)
            if not fits(self.layout, stored.arrays, stored.numbers, len(stored.prefix.key)):
                raise BadFile("it does not have this model's kind of KV")
            _touch(file.path)
            return replace(stored, length=stored.prefix.reusable(prompt))
        except Exception as fault:
            self._files = {n: known for n, known in self._files.items() if known is not file}
            self._refuse(file.path.name, fault)
            return None

    def write(self, stored: StoredPrefix) -> None:
        """Write a prefix, and remove prefixes that it replaces. Raises OSError, SafetensorError.

        If a file already covers the prefix, that file is only marked as used.
        """
        prefix, files = stored.prefix, self.refresh()
        if covering := next(
            (candidate for candidate in files if candidate.prefix.covers(prefix)), None
        ):
            _touch(covering.path)
            return
        # Every process gives the same content the same name.
        key = b"\1" if prefix.trimmable else b"\0"
        digest = hashlib.blake2b(prefix.key.tokens.tobytes(), digest_size=16, key=key).hexdigest()
        name = f"{self.identity}-{digest}.safetensors"
        beside = self.path / _UNFINISHED / secrets.token_hex(8)
        beside.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            self.evict(stored.nbytes)
            write_file(beside, self.identity, stored)
            for file in files:
                if prefix.covers(file.prefix):
                    file.path.unlink(missing_ok=True)
            self.evict()
            beside.replace(self.path / name)
        finally:
            beside.unlink(missing_ok=True)
        self._refused.discard(name)

    def evict(self, needed: int = 0) -> None:
        """Remove files of any model, the least recently used first, until the rest fits.

        Files that are being written count. Unfinished files of killed processes are removed. Raises
        OSError.
        """
        now, excess = time.time(), needed - self.max_bytes
        files: list[tuple[float, int, Path]] = []
        for path in [*self.path.iterdir(), *(self.path / _UNFINISHED).glob("*")]:
            with suppress(FileNotFoundError):
                facts = path.lstat()
                # A time in the future, from before the clock was set back, counts as long ago.
                # Otherwise each new file would be evicted for the next.
                used = facts.st_mtime if facts.st_mtime < now + _ABANDONED else 0.0
                if path.parent != self.path and used < now - _ABANDONED:
                    path.unlink()
                elif path.parent != self.path:
                    excess += facts.st_size
                elif _NAME.fullmatch(path.name) and stat.S_ISREG(facts.st_mode):
                    excess += facts.st_size
                    files.append((used, facts.st_size, path))
        for _, size, path in sorted(files):
            if excess > 0:
                path.unlink(missing_ok=True)
                excess -= size

    def _look_at(self, name: str) -> PrefixFile | None:
        path = self.path / name
        try:
            return PrefixFile(path, read_prefix(path, self.identity), path.stat().st_size)
        except Exception as fault:
            self._refuse(name, fault)
            return None

    def _refuse(self, name: str, fault: Exception) -> None:
        """Log why a file is not used, and remove the file unless the fault may be temporary."""
        if name not in self._refused and not isinstance(fault, FileNotFoundError):
            self._refused.add(name)
            _log.warning("prompt cache %s is not used: %s", shown(name), reason(fault))
        if not isinstance(fault, (OSError, MemoryError)):
            with suppress(OSError):
                (self.path / name).unlink()


def candidates(
    files: Iterable[PrefixFile], prompt: PrefixKey, in_memory: int, least: int, most_bytes: float
) -> list[PrefixFile]:
    """Return the files worth reading, by the number of tokens that need no prefill, then by size.

    A file is worth reading if the prompt uses a sufficient share of its tokens.

    least: minimum number of tokens that a file must save beyond these.
    """
    saved = [(file.prefix.reusable(prompt), file) for file in files if file.size <= most_bytes]
    serving = [
        (length, file)
        for length, file in saved
        if length - in_memory >= max(least, _LEAST_SHARE * len(file.prefix.key))
    ]
    return [file for _, file in sorted(serving, key=lambda pair: (-pair[0], pair[1].size))]


def _touch(path: Path) -> None:
    """Mark a file as used now, if its folder can be written to."""
    with suppress(OSError):
        os.utime(path)


def reason(fault: Exception) -> str:
    """Return the reason of a fault as a clause, without a path."""
    if isinstance(fault, OSError):
        return (fault.strerror or type(fault).__name__).lower()
    known = isinstance(fault, (BadFile, SafetensorError))
    return str(fault).lower() if known else "it is not a prompt cache"
