"""Refuses folders in which a library would open a file that is not regular, or far too large.

Opening a pipe waits for a writer that may never come. Reading a device never ends, and neither does
reading some files of the kernel, which look like regular files of size 0. A folder with such a
file, or with a text file far larger than in any published model, is refused before any file is
parsed. Files that no library reads, such as logs, may be of any kind and size.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path

from backend.engine.errors import Unusable
from backend.engine.units import MIB

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
