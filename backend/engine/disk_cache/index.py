"""What is stored, and the decisions about it: pure functions over entries and files.

An index is a tuple of entries that is replaced as a whole, so the engine thread reads it without
a lock that somebody might hold while waiting for the disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from backend.engine.prefix_index import Tokens


class Prefix(Protocol):
    """A sequence that is stored or waits to be. trimmable: it serves any shorter prefix too."""

    @property
    def tokens(self) -> Tokens: ...

    @property
    def trimmable(self) -> bool: ...


Some = TypeVar("Some", bound=Prefix)


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A prefix in a file of this model. size: bytes of the file."""

    path: Path
    tokens: Tokens
    trimmable: bool
    size: int


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file in the folder, of any model. used: when it was written or read last, in ns."""

    path: Path
    size: int
    used: int


Index = tuple[Entry, ...]


def shared_prefix(left: Tokens, right: Tokens) -> int:
    """How many tokens two sequences have in common at their beginning."""
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if len(different) else length


def usable(tokens: Tokens, prompt: Tokens, *, trimmable: bool) -> int:
    """How many tokens of a prompt a stored sequence spares; the last is always computed."""
    shared = min(shared_prefix(tokens, prompt), len(prompt) - 1)
    return shared if trimmable or shared == len(tokens) else 0


def candidates(entries: Iterable[Entry], prompt: Tokens, more_than: int) -> list[Entry]:
    """The entries that spare more than so many tokens: best first, the smaller file of equals."""
    lengths = [
        (usable(entry.tokens, prompt, trimmable=entry.trimmable), entry) for entry in entries
    ]
    serving = [(length, entry) for length, entry in lengths if length > more_than]
    return [entry for _, entry in sorted(serving, key=lambda pair: (-pair[0], pair[1].size))]


def covering(entries: Iterable[Some], tokens: Tokens, *, trimmable: bool) -> Some | None:
    """One that serves all that a new one with these tokens would."""
    for entry in entries:
        if shared_prefix(entry.tokens, tokens) == len(tokens) and (
            entry.trimmable or (not trimmable and len(entry.tokens) == len(tokens))
        ):
            return entry
    return None


def replaced(entries: Iterable[Some], tokens: Tokens, *, trimmable: bool) -> list[Some]:
    """Those that a new one with these tokens makes useless: its own beginnings."""
    if not trimmable:
        return []
    return [entry for entry in entries if shared_prefix(entry.tokens, tokens) == len(entry.tokens)]


def to_evict(
    files: Sequence[StoredFile], first: Iterable[Path], needed: int, bound: int
) -> list[StoredFile]:
    """What must go before `needed` bytes are written, so that at no time more than `bound` is used.

    What will be useless goes first, then what was used least recently.
    """
    useless = frozenset(first)
    order = sorted(files, key=lambda file: (file.path not in useless, file.used))
    excess = sum(file.size for file in files) + needed - bound
    going: list[StoredFile] = []
    for file in order:
        if excess <= 0:
            break
        going.append(file)
        excess -= file.size
    return going
