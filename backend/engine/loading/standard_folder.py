"""Provides a model's folder in the form that mlx-lm, mlx-vlm and transformers read."""

from __future__ import annotations

import codecs
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory

from backend.engine.loading.json_files import first_fault
from backend.engine.loading.shards import INDEX, PATTERN, weight_files
from backend.engine.units import MIB

_log = logging.getLogger(__name__)

_DEFAULTS = "generation_config.json"
_OF_ADAPTERS = "adapter*.safetensors"
_MOST_BYTES = 256 * MIB


@contextmanager
def standard_folder(folder: Path) -> Iterator[Path]:
    """Yield `folder`, or a temporary folder with links to its files if these need a change.

    A byte order mark, which editors on Windows write and Python's parser refuses, is removed from
    JSON files. An invalid generation_config.json is left out, and so are weights of adapters, which
    mlx-vlm would load with the model's. Weight files get names that mlx-lm looks for. A bracket in
    the folder's path would be read as a pattern. Raises OSError.
    """
    entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    marked = [entry for entry in entries if entry.suffix == ".json" and _is_marked(entry)]
    weights = weight_files(entry.name for entry in entries)
    renamed = {name: f"model-{name}" for name in weights if not fnmatch(name, PATTERN)}
    fault = first_fault(folder, (_DEFAULTS,)) if _is_safe(folder / _DEFAULTS) else ""
    if fault:
        _log.warning("%s: it is not used", fault)
    left_out = {entry.name for entry in entries if fnmatch(entry.name, _OF_ADAPTERS)}
    left_out |= {_DEFAULTS} if fault else set()
    if not (marked or renamed or left_out or "[" in str(folder)):
        yield folder
        return
    with TemporaryDirectory(prefix="mlx-model-") as made:
        for entry in entries:
            path = Path(made) / renamed.get(entry.name, entry.name)
            if entry in marked:
                path.write_bytes(entry.read_bytes().removeprefix(codecs.BOM_UTF8))
            # The index has the original names of the weight files, so it is left out too.
            elif not (renamed and entry.name == INDEX) and entry.name not in left_out:
                path.symlink_to(entry.absolute())
        yield Path(made)


def _is_marked(path: Path) -> bool:
    if not _is_safe(path):
        return False
    with path.open("rb") as file:
        return file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8


def _is_safe(path: Path) -> bool:
    """Return whether a file may be read.

    Opening a pipe would wait for a writer, a file of the kernel (of size 0) may have no end, and a
    very large file is refused later.
    """
    return path.is_file() and 0 < path.stat().st_size <= _MOST_BYTES
