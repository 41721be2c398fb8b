"""Checks the headers of a checkpoint's weight files before any weight is read.

mlx-lm loads all files that match its pattern and ignores the index, so it would report a missing
file as a list of missing parameters, and a truncated file as an obscure read error. This module
finds both in milliseconds, with the name of the file. A missing file is no error yet, because the
model may not need its weights, such as a head for drafting.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO

from backend.engine.errors import Incomplete
from common.wording import shown

PATTERN = "model*.safetensors"  # what mlx-lm loads
INDEX = "model.safetensors.index.json"

# Files that models are not loaded from: weights under Mistral's names, and adapters.
_OTHERS = ("consolidated", "adapter")
_HEADER_LIMIT = 100_000_000  # bytes; the limit of the safetensors library
_NUMBERED = re.compile(r"(.*-)(\d{5})-of-(\d{5})(\.safetensors)")
_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "U32": 4, "I32": 4, "U64": 8, "I64": 8,
    "F16": 2, "BF16": 2, "F32": 4,
}  # fmt: skip
"""Bytes of one element. Other data types are refused: MLX does not read them."""
_GIT_LFS = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class Shards:
    """The weight files of a checkpoint."""

    files: tuple[Path, ...]
    tensors: frozenset[str]  # the names of all tensors
    bytes: int  # the size of all tensors
    # The names of missing files, as a list for messages; '' if no file is missing.
    missing: str = ""


def weight_files(names: Iterable[str]) -> list[str]:
    """Return the names of a checkpoint's weight files among those of a folder, sorted.

    If no file has a name that mlx-lm looks for, files with other names count, as for mlx-vlm.
    Earlier versions of mlx-lm wrote `weights.00.safetensors`.
    """
    files = sorted(name for name in names if fnmatch(name, "[!.]*.safetensors"))
    usual = [name for name in files if fnmatch(name, PATTERN)]
    return usual or [name for name in files if not name.startswith(_OTHERS)]


def read_shards(directory: Path) -> Shards:
    """Check every weight file of a directory. Raises Incomplete."""
    files = tuple(
        directory / name for name in weight_files(file.name for file in directory.iterdir())
    )
    present = {path.name for path in files}
    missing = sorted(_expected(directory, present) - present)
    # The index names the tensors of missing files too, which may be the model's part for images.
    tensors = set(weight_map(directory)) if missing else set[str]()
    total = 0
    for path in files:
        with path.open("rb") as file:
            header, size = read_header(path.name, file, path.stat().st_size)
        tensors.update(header)
        total += size
    if not (directory / INDEX).is_file():
        tensors |= _beside(directory, present)
    return Shards(files, frozenset(tensors), total, _listed(missing))


def _beside(directory: Path, present: set[str]) -> set[str]:
    """Return the names of tensors in files that mlx-vlm loads and mlx-lm does not."""
    tensors = set[str]()
    for path in all_weight_files(directory):
        if path.name in present:
            continue
        with suppress(Incomplete), path.open("rb") as file:
            tensors.update(read_header(path.name, file, path.stat().st_size)[0])
    return tensors


def all_weight_files(directory: Path) -> list[Path]:
    """Return the weight files of a checkpoint, including files that mlx-lm does not load."""
    files = sorted(directory.glob("[!.]*.safetensors"))
    return [path for path in files if not path.name.startswith(_OTHERS) and path.is_file()]


def weight_map(directory: Path) -> dict[str, str]:
    """Return the file of each tensor by the index; {} without a readable index.

    It also shows, before the weights are downloaded, which tensors there are.
    """
    path = directory / INDEX
    if not path.is_file():
        return {}
    try:
        mapping = json.loads(path.read_bytes())["weight_map"]
        return {str(tensor): str(name) for tensor, name in mapping.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}  # mlx-lm does not read the index at all


def _expected(directory: Path, present: set[str]) -> set[str]:
    """Return the files that belong together, by the index or else by their numbers.

    An index that lacks some of the present files is ignored: a conversion left it behind, and
    mlx-lm loads such a checkpoint.
    """
    indexed = set(weight_map(directory).values())
    if present <= indexed:
        return indexed
    expected: set[str] = set()
    for name in present:
        if match := _NUMBERED.fullmatch(name):
            stem, _, count, suffix = match.groups()
            expected |= {f"{stem}{n + 1:05}-of-{count}{suffix}" for n in range(int(count))}
    return expected


def read_header(name: str, file: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    """Read the header of a weight file, and leave `file` at the beginning of the data.

    Returns the tensors' entries by name, and the size of the data in bytes. Raises Incomplete.
    """
    start = file.read(8)
    if (start + file.read(len(_GIT_LFS) - 8)).startswith(_GIT_LFS):
        raise Incomplete(f"{name} is a Git LFS pointer: fetch the file itself with git lfs pull")
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > size - 8:
        raise Incomplete(f"{name} is truncated, it ends in its header: download it again")
    if length > _HEADER_LIMIT:
        raise Incomplete(
            f"{name} has a header of {length} bytes, and at most {_HEADER_LIMIT} are read"
        )
    file.seek(8)
    try:
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        needed = max((_end(name, *entry) for entry in header.items()), default=0)
    except Incomplete:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        raise Incomplete(f"{name} is not a safetensors file") from None
    if needed > size - 8 - length:
        raise Incomplete(
            f"{name} is truncated, it has {size} of {8 + length + needed} bytes: download it again"
        )
    return header, needed


def _end(name: str, tensor: str, entry: dict[str, Any]) -> int:
    """Return the offset at which the data of a tensor ends.

    Raises Incomplete if the sizes in the entry are inconsistent, and other exceptions if the entry
    has another form.
    """
    dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
        raise ValueError
    if end < start or (dtype in _BYTES and end - start != math.prod(shape) * _BYTES[dtype]):
        raise Incomplete(
            f"{name} is damaged, the tensor {shown(tensor)} of the shape {shown(str(shape))} takes"
            f" {end - start} bytes in it: download it again"
        )
    return int(end)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
