"""The files of a cache folder: names, listing, writing whole or not at all, removing.

Several processes, for several models, may share a folder, so a file may come or go at any time.
Only files with our name and our first bytes are counted, read or removed; all others are left
alone. Every function here may raise OSError.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from backend.engine.disk_cache.entry_file import is_entry
from backend.engine.disk_cache.index import StoredFile
from backend.engine.prefix_index import Tokens

_NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}\.mlxkv")
_UNFINISHED = re.compile(r"\.mlxkv-[0-9a-f]{16}\.part")
_FORGOTTEN = 3600.0  # seconds after which nobody is still writing


def entry_name(identity: str, tokens: Tokens, *, trimmable: bool) -> str:
    """Equal names hold equal content, so it does not matter which of two processes wrote last."""
    digest = hashlib.blake2b(tokens.tobytes(), digest_size=16, key=b"\1" if trimmable else b"\0")
    return f"{identity}-{digest.hexdigest()}.mlxkv"


def names_of(folder: Path, identity: str) -> frozenset[str]:
    """The names of a model's entries."""
    return frozenset(
        name
        for name in os.listdir(folder)  # noqa: PTH208, names only: no Path for each of them
        if name.startswith(identity) and _NAME.fullmatch(name)
    )


def stored_files(folder: Path) -> list[StoredFile]:
    """All entries in the folder, of every model."""
    files = []
    with os.scandir(folder) as found:
        for file in found:
            if not _NAME.fullmatch(file.name):
                continue
            with contextlib.suppress(FileNotFoundError):
                facts = file.stat(follow_symlinks=False)
                if is_entry(Path(file.path)):
                    files.append(StoredFile(Path(file.path), facts.st_size, facts.st_mtime_ns))
    return files


def touch(path: Path) -> None:
    """Note that a file was used; the least recently used is evicted first."""
    with contextlib.suppress(OSError):
        os.utime(path)


def remove(path: Path) -> None:
    """Remove a file if it is one of ours; whoever was first to remove it has done it for all."""
    if is_entry(path):
        path.unlink(missing_ok=True)


def remove_forgotten(folder: Path) -> None:
    """Remove what a process that was killed left half-written."""
    with os.scandir(folder) as found:
        for file in found:
            if not _UNFINISHED.fullmatch(file.name):
                continue
            with contextlib.suppress(FileNotFoundError):
                if time.time() - file.stat(follow_symlinks=False).st_mtime > _FORGOTTEN:
                    Path(file.path).unlink()


def write_whole(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Let `write` fill a file beside `path`, then put it in its place in one step.

    After any error, and after a crash at any moment, `path` is as it was or whole.
    """
    beside = path.parent / f".mlxkv-{secrets.token_hex(8)}.part"
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    _keep_name(path.parent)


def _keep_name(folder: Path) -> None:
    """Where the file system can: a name survives a power cut once its folder was written out."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
