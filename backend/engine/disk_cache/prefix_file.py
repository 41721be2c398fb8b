"""Reads and writes a cached prefix as a safetensors file, which is used only if it is intact.

The tensors of a file are `tokens` and the arrays of the layers, named by their numbers. The
metadata contains the identity of the model and the numbers of the layers as JSON, and the CRC-32 of
everything.
"""

from __future__ import annotations

import json
import stat
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load, save_file

from backend.engine.planning.prefix_index import PrefixKey


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
