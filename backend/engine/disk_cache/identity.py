"""Computes a digest of everything that KV depends on besides the tokens.

Models with equal digests compute the same KV for the same tokens. Everything that can change the KV
must be part of the digest, because answers from another model's KV are nonsense.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import BinaryIO

from backend.engine.loading.shards import PATTERN, read_header
from common.version import VERSION

_FORMAT = 5  # the files' version; after a change, older files match no model
_PACKAGES = ("mlx", "mlx-lm", "mlx-vlm")  # the packages that compute the KV
_TEXTS = ("config.json", "tokenizer.json", "*.py")  # small files, of which all bytes count
_PIECE = 1024  # bytes read at the start, the middle and the end of each tensor

version = cache(metadata.version)  # cached, because each call parses a long file


def model_digest(checkpoint: Path, **facts: str) -> str:
    """Return the digest of a loaded checkpoint, 32 hexadecimal digits. Raises OSError, Unusable.

    The digest includes a sample of every tensor, because a merge or fine-tune may change only some
    tensors, and preserves names and sizes. Reading all data would take as long as a load.

    facts: what KV depends on besides the files and the software: `dtype`, the data type of
        computations (`LoadedModel.arithmetic`); `kv_kind`, the type of the KV cache; `adapter`, the
        digest of the adapters; and `device`, on which MLX computes.
    """
    software = [_FORMAT, VERSION, *map(version, _PACKAGES)]
    return digest_of([json.dumps([software, facts, file_digests(checkpoint)]).encode()])


def file_digests(checkpoint: Path) -> dict[str, str]:
    """Return digests of the files of a checkpoint on which the KV depends, by name.

    Raises OSError, Unusable.
    """
    texts = {path for name in _TEXTS for path in checkpoint.glob(name)}
    digests = {path.name: digest_of([path.read_bytes()]) for path in sorted(texts)}
    for path in sorted(checkpoint.glob(PATTERN)):
        with path.open("rb") as file:
            digests[path.name] = digest_of(_sampled(path.name, file))
    return digests


def digest_of(pieces: Iterable[bytes]) -> str:
    """Return the digest of a series of pieces, 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    for piece in pieces:
        # The length too, so that moving a byte between pieces changes the digest.
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)
    return digest.hexdigest()


def _sampled(name: str, file: BinaryIO) -> Iterator[bytes]:
    """Yield the size, the header, and pieces of each tensor of a safetensors file."""
    handle = file.fileno()
    size = os.fstat(handle).st_size
    tensors, _ = read_header(name, file, size)
    data = file.tell()
    yield json.dumps([size, data, tensors], sort_keys=True).encode()
    for tensor in sorted(tensors):
        start, end = tensors[tensor]["data_offsets"]
        middle = (start + end) // 2
        for offset in (start, middle, max(start, end - _PIECE)):
            yield os.pread(handle, min(_PIECE, end - offset), data + offset)
