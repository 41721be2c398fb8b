"""One stored prefix as a safetensors file, which is used only if it is intact.

Its tensors are `tokens` and the arrays of the layers, named by their numbers. The metadata has
identity and layers as JSON, and the CRC-32 of everything.
"""

from __future__ import annotations

import json
import stat
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load, save_file

from backend.engine.disk_cache.layout import Arrays, ArraySpec, Layer, Layers, PackedRow, buffers
from backend.engine.planning.prefix_index import PrefixKey


class BadEntry(Exception):
    """Why a file cannot be used: a clause for the log, without a path."""


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """A token sequence that is stored or queued. trimmable: its KV can be cut to any prefix."""

    key: PrefixKey
    trimmable: bool

    def reusable(self, prompt: PrefixKey) -> int:
        """How many tokens of a prompt would need no prefill; the last one always needs it."""
        shared = min(self.key.shared(prompt), len(prompt) - 1)
        return shared if self.trimmable or shared == len(self.key) else 0

    def covers(self, other: Prefix) -> bool:
        """Whether this prefix can replace the other for every prompt."""
        return self.key.shared(other.key) == len(other.key) and (
            self.trimmable or (not other.trimmable and len(self.key) == len(other.key))
        )

    def replaces(self, other: Prefix) -> bool:
        """Whether the other prefix is the beginning of this one, and no longer needed."""
        return self.trimmable and self.key.shared(other.key) == len(other.key)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class StoredPrefix:
    """The contents of a file, in plain memory; `arrays` as unsigned integers of their item size.

    length: the tokens of a prompt whose prefill it can replace.
    """

    identity: str
    prefix: Prefix
    layers: Layers
    arrays: Arrays = ()
    length: int = 0

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


def write_entry(path: Path, identity: str, prefix: Prefix, packed: PackedRow) -> None:
    """Write a file, which appears complete or not at all. Raises OSError, SafetensorError."""
    facts = {"identity": identity, "trimmable": prefix.trimmable, "layers": packed.layers}
    tensors = {str(at): array for at, array in enumerate(buffers(packed))}
    tensors["tokens"] = prefix.key.tokens
    entry = json.dumps(facts)
    save_file(tensors, path, {"entry": entry, "check": _check(entry, tensors)})


def read_head(path: Path) -> StoredPrefix:
    """A file without its arrays. Raises whatever a missing, foreign or damaged file causes."""
    entry, _ = _metadata(path)
    with safe_open(path, "np") as file:
        return _head(entry, file.get_tensor("tokens"))


def read_entry(path: Path) -> StoredPrefix:
    """A whole file. It is not mapped: a disk that fails would kill the process.

    Raises as `read_head` does.
    """
    entry, check = _metadata(path)
    tensors = load(path.read_bytes())
    if check != _check(entry, tensors):
        raise BadEntry("it is damaged")
    head = _head(entry, tensors.pop("tokens"))
    arrays = [tensors[str(at)] for at in range(len(tensors))]
    parts = [part for layer in head.layers for part in layer.parts.values()]
    specs = [part for part in parts if isinstance(part, ArraySpec)]
    if not all(spec.describes(array) for spec, array in zip(specs, arrays, strict=True)):
        raise BadEntry("its arrays are not those that it describes")
    return replace(head, arrays=arrays)


def _metadata(path: Path) -> tuple[str, str]:
    """Links are not followed, and a pipe would never end."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise BadEntry("it is not a regular file")
    with safe_open(path, "np") as file:
        facts = file.metadata()
        return facts["entry"], facts["check"]


def _head(entry: str, tokens: NDArray[np.int32]) -> StoredPrefix:
    facts = json.loads(entry)
    layers = [
        Layer(kind, {name: _part(part) for name, part in parts.items()})
        for kind, parts in facts["layers"]
    ]
    return StoredPrefix(facts["identity"], Prefix(PrefixKey(tokens), facts["trimmable"]), layers)


def _part(part: Any) -> Any:
    return ArraySpec(part[0], tuple(part[1])) if isinstance(part, list) else part


def _check(entry: str, tensors: Mapping[str, NDArray[Any]]) -> str:
    check = zlib.crc32(entry.encode())
    for name in sorted(tensors):
        check = zlib.crc32(tensors[name].reshape(-1).view(np.uint8).data, check)
    return f"{check:08x}"
