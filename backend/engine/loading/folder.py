"""Checks a model's folder, and provides it in the form that the libraries read.

Opening a pipe waits for a writer that may never come. Reading a device never ends, and neither does
reading some files of the kernel, which look like regular files of size 0. A folder with such a
file, or with a text file far larger than in any published model, is refused before any file is
parsed. Files that no library reads, such as logs, may be of any kind and size.

The libraries that read JSON files later report a broken file by the position of a character, by a
Python exception, or not at all. Errors here name the file and its fault.
"""

from __future__ import annotations

import codecs
import json
import logging
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from backend.engine.errors import Unusable
from backend.engine.loading.shards import INDEX, PATTERN, weight_files
from backend.engine.units import MIB
from common.wording import json_fault

# The largest size in MiB, and patterns (fnmatch) of the files that a load reads. The first pattern
# that matches decides. A vocabulary may be large; _MOST_COMMAS limits the time to parse it.
_BY_SIZE: dict[int | None, str] = {
    256: "tokenizer.json tekken.json *.model *.tiktoken",
    64: "model.safetensors.index.json vocab.json vocab.txt merges.txt tokenizer*.jsonl",
    16: "config.json generation_config.json *tokenizer*.json *processor_config.json modules.json"
    " hf_quant_config.json config_sentence_transformers.json sentence_*_config.json"
    " special_tokens_map.json added_tokens.json chat_template.json *.py",
    1: "adapter_config.json chat_template.jinja additional_chat_templates/*.jinja",
    None: "*.safetensors",
}
_MOST_MIB = {pattern: most for most, patterns in _BY_SIZE.items() for pattern in patterns.split()}
_MOST_COMMAS = 4_000_000
"""The limit of commas in a tokenizer.json, which has one for each token, and one or two for each
merge. Published files have up to 1,340,000. All other threads wait while the file is parsed, 4 s
for the maximum.
"""
_log = logging.getLogger(__name__)
_DEFAULTS = "generation_config.json"
_OF_ADAPTERS = "adapter*.safetensors"
OF_TOKENIZER = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
OF_MEDIA = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
TEMPLATE = "chat_template.jinja"


@contextmanager
def readable(folder: Path) -> Iterator[None]:
    """Turn an OSError that is raised inside into Unusable, which names the file in the folder."""
    try:
        yield
    except OSError as error:
        file = Path(error.filename or folder)
        name = "its files" if file == folder else file.name
        raise Unusable(f"{name} cannot be read: {error.strerror}") from None


def require_regular_files(folder: Path) -> None:
    """Check a folder and its subfolders. Raises Unusable, OSError."""
    for path in _files(folder):
        inner = f"{path.parent.name}/{path.name}"
        pattern = next(
            (glob for glob in _MOST_MIB if fnmatch(inner if "/" in glob else path.name, glob)), None
        )
        if pattern is None:
            continue
        try:
            found = path.stat()
        except FileNotFoundError:  # a dangling link counts as missing
            continue
        if stat.S_ISDIR(found.st_mode):
            continue
        if not stat.S_ISREG(found.st_mode) or (found.st_size == 0 and _is_of_kernel(path)):
            raise Unusable(f"{path.name} is not a regular file")
        most = _MOST_MIB[pattern]
        if most is not None and found.st_size > most * MIB:
            raise Unusable(
                f"{path.name} is {found.st_size // MIB} MiB large, and at most {most} MiB"
                " are read of such a file"
            )
        if path.name == "tokenizer.json" and _commas(path) > _MOST_COMMAS:
            raise Unusable(
                f"{path.name} lists more than {_MOST_COMMAS} tokens and merges, which would take"
                " too long to read"
            )


def _commas(path: Path) -> int:
    with path.open("rb") as file:
        return sum(part.count(b",") for part in iter(lambda: file.read(MIB), b""))


def _is_of_kernel(path: Path) -> bool:
    """Return whether a file of size 0 has content, as files in /proc have."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False  # it cannot be read later either
    try:
        return bool(os.read(file, 1))
    except OSError:
        return True
    finally:
        os.close(file)


def _files(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        yield path
        if path.is_dir() and not path.name.startswith("."):
            with suppress(PermissionError):  # such as lost+found, which nothing reads either
                yield from path.iterdir()


@contextmanager
def standard_folder(folder: Path) -> Iterator[Path]:
    """Yield `folder`, or a temporary folder with links to its files if these need a change.

    A byte order mark, which editors on Windows write and Python's parser refuses, is removed from
    JSON files. An invalid generation_config.json is left out, and so are weights of adapters, which
    mlx-vlm would load with the model's. Weight files get names that mlx-lm looks for. A bracket in
    the folder's path would be read as a pattern. Raises Unusable, OSError.
    """
    require_regular_files(folder)
    entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    marked = [entry for entry in entries if entry.suffix == ".json" and _is_marked(entry)]
    weights = weight_files(entry.name for entry in entries)
    renamed = {name: f"model-{name}" for name in weights if not fnmatch(name, PATTERN)}
    fault = first_fault(folder, (_DEFAULTS,))
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
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        return file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises Unusable, OSError."""
    try:
        value = json.loads(_text(path, "valid JSON"))
    except (ValueError, RecursionError) as error:
        raise Unusable(f"{path.name} is not valid JSON: {json_fault(error)}") from None
    if not isinstance(value, dict):
        raise Unusable(f"{path.name} is not a JSON object")
    return value


def first_fault(folder: Path, names: Iterable[str]) -> str:
    """Return a clause for a message about the first broken file; '' if no file is broken.

    Callers ask only after a load has failed, because not every broken file makes a load fail.
    """
    for path in (folder / name for name in names):
        try:
            if path.suffix != ".json" and path.is_file():
                _text(path, "a chat template")
            elif path.is_file():
                read_object(path)
        except Unusable as error:
            return error.message
    return ""


def _text(path: Path, kind: str) -> str:
    content = path.read_bytes()
    if not content.strip():
        raise Unusable(f"{path.name} is not {kind}: it is empty")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise Unusable(f"{path.name} is not {kind}: it is not UTF-8 text") from None
