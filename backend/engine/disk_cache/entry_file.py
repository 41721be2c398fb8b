"""One stored prefix as a file: written atomically, and used only if its checksums are right.

    8 bytes   magic, with the version of this format
    4 bytes   length of the head
    head      JSON: identity of the model, number of tokens, layers (see `Head`)
    tokens    int32 each
    4 bytes   CRC-32 of everything so far
    arrays    one after the other, in the order of the head, row-major, without padding
    4 bytes   CRC-32 of the arrays, begun with the value above

Numbers are little-endian. Head and tokens have a checksum of their own, so an index need not read
the arrays. CRC-32 (4 GB/s on one core) detects damage, not forgery, so the contents are also
checked against the model's layout.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import stat
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from backend.engine.disk_cache.layout import DTYPES, ArraySpec, StoredLayer
from backend.engine.planning.prefix_index import Tokens

MAGIC = b"mlxkv\x00\x00\x01"

_HEAD_LIMIT = 8 << 20
_PIECE = 8 << 20  # bytes between two calls of `give_up`
_MOST = 1 << 48  # maximum of any number in a head: no file is larger
_UNFINISHED = re.compile(r"\.mlxkv-[0-9a-f]{16}\.part")
# Seconds without a write after which an unfinished file counts as abandoned. One from the future
# does too: the clock has been set back.
FORGOTTEN = 600.0
_CARRIERS = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8"}


class BadEntry(Exception):
    """Why a file cannot be used: a clause for the log, without a path."""


class Abandoned(Exception):
    """Why a write was abandoned: a clause for the log."""


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a file. trimmable: its KV can be cut to any shorter prefix."""

    identity: str
    trimmable: bool
    layers: tuple[StoredLayer, ...]

    @property
    def arrays(self) -> list[ArraySpec]:
        return [array for layer in self.layers for array in layer.arrays]


@dataclass(frozen=True, slots=True)
class Opened:
    """A file whose head was read. size: bytes of the whole file."""

    head: Head
    tokens: Tokens
    size: int
    checksum: int


def entry_size(head: Head, tokens: Tokens) -> int:
    """Bytes of the file that `write_entry` would write."""
    arrays = sum(array.nbytes for array in head.arrays)
    return len(MAGIC) + 4 + len(_encode(head, tokens)) + 4 * len(tokens) + 4 + arrays + 4


def write_entry(
    path: Path,
    head: Head,
    tokens: Tokens,
    arrays: Iterable[NDArray[Any]],
    give_up: Callable[[], bool] = lambda: False,
    has_room: Callable[[], bool] = lambda: True,
) -> None:
    """Write an entry to a temporary file in the same folder, then rename it to `path`.

    After any error or crash, `path` is either unchanged or complete. give_up: called between two
    pieces; True abandons the write. has_room: called when the temporary file has its full length
    but no contents; False abandons the write. Of two processes that write at the same time, at
    least one therefore counts the file of the other. Raises OSError, Abandoned.
    """
    beside = path.parent / f".mlxkv-{secrets.token_hex(8)}.part"
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            os.ftruncate(handle, entry_size(head, tokens))
            if not has_room():
                raise Abandoned("no room")
            _write(file, head, tokens, arrays, give_up)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    _keep_name(path.parent)


def remove_forgotten(folder: Path) -> int:
    """Remove unfinished files of processes that were killed. Raises OSError.

    Returns the bytes of the other unfinished files.
    """
    nbytes = 0
    with os.scandir(folder) as found:
        for file in found:
            if not _UNFINISHED.fullmatch(file.name):
                continue
            with contextlib.suppress(FileNotFoundError):
                facts = file.stat(follow_symlinks=False)
                if abs(time.time() - facts.st_mtime) > FORGOTTEN:
                    Path(file.path).unlink()
                else:
                    nbytes += facts.st_size
    return nbytes


def open_entry(path: Path) -> BufferedReader:
    """Open a regular file (no link, pipe or device) for reading. Raises OSError, BadEntry."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    file = os.fdopen(handle, "rb")
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        file.close()
        raise BadEntry("it is not a regular file")
    return file


def is_entry(path: Path) -> bool:
    """Whether a file begins like an entry, intact or not, of any model. Never raises."""
    try:
        with open_entry(path) as file:
            return file.read(len(MAGIC)) == MAGIC
    except (OSError, BadEntry):
        return False


def read_head(file: BufferedReader) -> Opened:
    """Read head and tokens, up to where the arrays begin. Raises OSError, BadEntry."""
    size = os.fstat(file.fileno()).st_size
    front = file.read(len(MAGIC) + 4)
    if not front.startswith(MAGIC):
        raise BadEntry("it is not a prompt cache of this version")
    length = int.from_bytes(front[len(MAGIC) :], "little")
    if length > min(_HEAD_LIMIT, size):
        raise BadEntry("its header is damaged")
    text = file.read(length)
    head, count = _decode(text)
    if count > size // 4:
        raise BadEntry("it is cut short or damaged")
    ids = file.read(4 * count)
    checksum = zlib.crc32(ids, zlib.crc32(text, zlib.crc32(front)))
    if file.read(4) != checksum.to_bytes(4, "little"):
        raise BadEntry("its header is damaged")
    expected = file.tell() + sum(array.nbytes for array in head.arrays) + 4
    if size != expected:
        raise BadEntry(f"it has {size} bytes and should have {expected}")
    return Opened(head, np.frombuffer(ids, "<i4").astype(np.int32), size, checksum)


def read_arrays(file: BufferedReader, opened: Opened) -> list[NDArray[Any]]:
    """Read the arrays, in their shapes, as unsigned integers of their item size.

    Raises OSError, BadEntry.
    """
    arrays: list[NDArray[Any]] = []
    checksum = opened.checksum
    for spec in opened.head.arrays:
        array = np.empty(spec.shape, _CARRIERS[DTYPES[spec.dtype].size])
        data = array.reshape(-1).view(np.uint8).data
        if file.readinto(data) != len(data):
            raise BadEntry("it is cut short")
        checksum = zlib.crc32(data, checksum)
        arrays.append(array)
    if file.read(4) != checksum.to_bytes(4, "little"):
        raise BadEntry("its data is damaged")
    return arrays


def _write(
    file: BinaryIO,
    head: Head,
    tokens: Tokens,
    arrays: Iterable[NDArray[Any]],
    give_up: Callable[[], bool],
) -> None:
    text = _encode(head, tokens)
    front = MAGIC + len(text).to_bytes(4, "little") + text + tokens.astype("<i4").tobytes()
    checksum = zlib.crc32(front)
    file.write(front + checksum.to_bytes(4, "little"))
    for array in arrays:
        data = array.reshape(-1).view(np.uint8).data
        for start in range(0, len(data), _PIECE):
            if give_up():
                raise Abandoned("the process ends")
            piece = data[start : start + _PIECE]
            checksum = zlib.crc32(piece, checksum)
            file.write(piece)
    file.write(checksum.to_bytes(4, "little"))
    file.flush()
    if give_up():
        raise Abandoned("the process ends")
    os.fsync(file.fileno())


def _keep_name(folder: Path) -> None:
    """Sync the folder if the file system can, so that the new name survives a power failure."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _encode(head: Head, tokens: Tokens) -> bytes:
    layers = [
        [layer.kind, layer.scalars, [[array.dtype, array.shape] for array in layer.arrays]]
        for layer in head.layers
    ]
    fields = {
        "identity": head.identity,
        "tokens": len(tokens),
        "trimmable": head.trimmable,
        "layers": layers,
    }
    return json.dumps(fields, separators=(",", ":")).encode()


def _decode(text: bytes) -> tuple[Head, int]:
    """The head and the number of tokens. Raises BadEntry."""
    try:
        fields = json.loads(text)
        layers = tuple(
            StoredLayer(
                _text(kind),
                tuple(map(_whole, scalars)),
                tuple(_array(dtype, shape) for dtype, shape in arrays),
            )
            for kind, scalars, arrays in fields["layers"]
        )
        head = Head(_text(fields["identity"]), fields["trimmable"] is True, layers)
        return head, _whole(fields["tokens"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise BadEntry("its header is not valid") from None


def _array(dtype: Any, shape: Any) -> ArraySpec:
    spec = ArraySpec(_text(dtype), tuple(map(_whole, shape)))
    if spec.dtype not in DTYPES or len(spec.shape) > 8 or spec.nbytes > _MOST:
        raise ValueError
    return spec


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MOST:
        raise ValueError
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value
