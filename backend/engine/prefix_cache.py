"""Keeps the KV of earlier conversations and finds the longest prefix that serves a new prompt.

Entries are token sequences with an opaque payload, compared as arrays: a few hundred entries of a
few thousand tokens cost microseconds. A cache that can be cut back serves any common prefix; one
that cannot (recurrent state, a window that has turned over) serves only prompts that go on where
it stopped, so for such models the engine stores checkpoints, also at the places where prompts
were seen to part. At least one token of a prompt is always left to be computed: the model has to
produce its logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
Payload = TypeVar("Payload")


@dataclass(eq=False, slots=True)
class Entry(Generic[Payload]):
    """One stored sequence. `trimmable`: the payload can be cut back to any shorter prefix."""

    tokens: Tokens
    payload: Payload
    nbytes: int
    trimmable: bool
    used: int = 0


@dataclass(frozen=True, slots=True)
class Match(Generic[Payload]):
    """What the store knows of a prompt.

    entry, length: the entry that serves the prompt's first `length` tokens (None and 0: a miss).
    branch: how many tokens the prompt shares with any entry, usable or not; the place where a
    model without trimmable caches gains from a checkpoint.
    """

    entry: Entry[Payload] | None
    length: int
    branch: int


class PrefixCache(Generic[Payload]):
    """Least-recently-used store bounded in bytes, and in entries where `max_entries` > 0."""

    def __init__(self, max_bytes: int, max_entries: int = 0) -> None:
        self.max_bytes = max_bytes
        self._max_entries = max_entries
        self._entries: list[Entry[Payload]] = []
        self._clock = 0

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, prompt: Sequence[int]) -> Match[Payload]:
        """The longest usable prefix, always shorter than the prompt."""
        tokens = np.asarray(prompt, dtype=np.int32)
        best: Entry[Payload] | None = None
        length = branch = 0
        for entry in self._entries:
            usable, shared = _usable(entry, tokens)
            branch = max(branch, shared)
            if usable > length:
                best, length = entry, usable
        if best is not None:
            self._touch(best)
        return Match(best, length, branch)

    def held(self, prompt: Sequence[int]) -> int:
        """How long a prefix would be found; changes nothing, and any thread may ask."""
        tokens = np.asarray(prompt, dtype=np.int32)
        return max((_usable(entry, tokens)[0] for entry in list(self._entries)), default=0)

    def covers(self, tokens: Sequence[int], *, trimmable: bool) -> bool:
        """Whether storing the sequence would add nothing: an entry serves all that it would."""
        wanted = np.asarray(tokens, dtype=np.int32)
        for entry in self._entries:
            if _common_prefix(entry.tokens, wanted) == len(wanted) and (
                entry.trimmable or (not trimmable and len(entry.tokens) == len(wanted))
            ):
                self._touch(entry)
                return True
        return False

    def store(
        self, tokens: Sequence[int], payload: Payload, nbytes: int, *, trimmable: bool
    ) -> None:
        """Keep a sequence. A trimmable one replaces the entries that are prefixes of it."""
        if not len(tokens) or nbytes > self.max_bytes or self.covers(tokens, trimmable=trimmable):
            return
        stored = np.asarray(tokens, dtype=np.int32)
        if trimmable:
            self._entries = [
                entry
                for entry in self._entries
                if _common_prefix(entry.tokens, stored) < len(entry.tokens)
            ]
        entry = Entry(stored, payload, nbytes, trimmable)
        self._touch(entry)
        self._entries.append(entry)
        self.shrink(self.max_bytes)

    def shrink(self, max_bytes: int) -> None:
        """Evict the least recently used until the bounds hold."""
        self._entries.sort(key=lambda entry: entry.used)
        while self._entries and (
            self.nbytes > max_bytes or 0 < self._max_entries < len(self._entries)
        ):
            del self._entries[0]

    def clear(self) -> None:
        self._entries.clear()

    def _touch(self, entry: Entry[Payload]) -> None:
        self._clock += 1
        entry.used = self._clock


def _usable(entry: Entry[Any], prompt: Tokens) -> tuple[int, int]:
    """How many of the prompt's tokens the entry serves, and how many it shares with it."""
    shared = min(_common_prefix(entry.tokens, prompt), len(prompt) - 1)
    return (shared if entry.trimmable or shared == len(entry.tokens) else 0), shared


def _common_prefix(left: Tokens, right: Tokens) -> int:
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if len(different) else length
