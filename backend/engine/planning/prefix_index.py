"""Finds the entry whose KV shares the longest prefix with a new prompt.

The index stores ids, tokens and sizes; the owner of the KV frees the entries that the index evicts.
Entries are sorted lexicographically by tokens, so the one that shares the longest prefix with a
prompt is next to the prompt's insertion point, and a lookup is one binary search. Two sequences are
compared by cumulative digests of their blocks, again with a binary search, and then token by token
in the one block where they diverge.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]

# Tokens per block. Smaller blocks mean more digests per key, larger ones more tokens to compare.
BLOCK = 256
_FEW = 16  # tokens; computing them is as fast as finding them


class PrefixKey:
    """The tokens of a sequence, with digests of its whole blocks. Immutable and thread-safe.

    tokens: int32, shape (length,), read-only. Images and sounds have negative ids.
    digests: SHA-256; the one at index i covers the first (i + 1) * BLOCK tokens. There is one for
    each whole block, and more if the key is a prefix of a longer one. Equal digests count as equal
    tokens. A wrong match would show one user the conversation of another, but SHA-256 has no known
    collisions.
    """

    __slots__ = ("digests", "tokens")

    tokens: Tokens
    digests: list[bytes]

    def __init__(self, tokens: Sequence[int] | NDArray[np.integer]) -> None:
        """Pack the tokens. Raises ValueError if one does not fit into 32 bits."""
        self.tokens = _as_tokens(tokens)
        self.tokens.flags.writeable = False
        self.digests = _with_digests([], self.tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def __lt__(self, other: PrefixKey) -> bool:
        """Lexicographic order of the tokens: a prefix comes before its continuations."""
        shared = self.shared(other)
        if shared == min(len(self), len(other)):
            return len(self) < len(other)
        return bool(self.tokens[shared] < other.tokens[shared])

    def extended(self, more: Sequence[int] | NDArray[np.integer]) -> PrefixKey:
        """The key of these tokens followed by `more`; only new blocks are hashed."""
        tokens = np.concatenate((self.tokens, _as_tokens(more)))
        tokens.flags.writeable = False
        return self._of(tokens, _with_digests(self.digests[: len(self) // BLOCK], tokens))

    def prefix(self, length: int) -> PrefixKey:
        """The key of the first `length` tokens. It shares the arrays, so it keeps them alive."""
        return self._of(self.tokens[:length], self.digests)

    def shared(self, other: PrefixKey) -> int:
        """The length of the common prefix."""
        mine, theirs = self.digests, other.digests
        shorter = min(len(self), len(other))
        same = bisect_left(
            range(shorter // BLOCK), True, key=lambda block: mine[block] != theirs[block]
        )
        start = same * BLOCK
        stop = min(start + BLOCK, shorter)
        differs = self.tokens[start:stop] != other.tokens[start:stop]
        first = differs.tobytes().find(True)
        return stop if first < 0 else start + first

    @classmethod
    def _of(cls, tokens: Tokens, digests: list[bytes]) -> PrefixKey:
        key = cls.__new__(cls)
        key.tokens, key.digests = tokens, digests
        return key


@dataclass(frozen=True, slots=True)
class Match:
    """The result of a lookup.

    entry, length: the entry with usable KV of the prompt's first `length` tokens (None and 0 for a
    miss). shared: how many tokens the prompt shares with any entry, usable or not; a model whose
    caches cannot be truncated should take a snapshot there. Both lengths exclude the last token of
    the prompt, which must be run to get logits.
    """

    entry: int | None
    length: int
    shared: int


class PrefixIndex:
    """The stored sequences, limited in bytes and, if `max_entries` > 0, in number.

    An entry without `places` can be truncated, so any prefix that it shares with a prompt is
    usable. Others (recurrent state, a full sliding window) are usable only up to one of their
    places, where a snapshot was taken, or up to their end. The least recently used entry is evicted
    first; `add` and `touch` count as use, `find` does not. `pinned` entries are never evicted, even
    if the limits are exceeded. Any thread may call `find`; all else is for one thread.
    """

    def __init__(self, max_bytes: int, max_entries: int = 0) -> None:
        self.max_bytes = max_bytes
        self._max_entries = max_entries
        self._nbytes = 0
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._whole = _Order()  # every entry, at its full length
        self._trimmable = _Order()
        self._marks = _Order()  # entries that cannot be truncated, once for each place

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: PrefixKey) -> Match:
        """The entry with the longest usable prefix of the prompt."""
        served = key.prefix(max(len(key) - 1, 0))
        shared = self._whole.closest(served)[1]
        best, length = self._trimmable.closest(served)
        mark = next(_prefixes(*self._marks.closest(served)), None)
        if mark is not None and len(mark.key) > length:
            best, length = mark, len(mark.key)
        return Match(best.id if best is not None and length else None, length, shared)

    def length(self, entry: int) -> int:
        """How many tokens an entry has. Raises KeyError for an id that is not stored."""
        return len(self._entries[entry].whole.key)

    def size(self, entry: int) -> int:
        """The bytes of an entry. Raises KeyError as `length` does."""
        return self._entries[entry].nbytes

    def places(self, entry: int) -> tuple[int, ...] | None:
        """The lengths at which an entry is usable.

        None means any. Raises KeyError as `length` does.
        """
        marks = self._entries[entry].marks
        return None if marks is None else tuple(len(mark.key) for mark in marks)

    def touch(self, entry: int) -> None:
        """Mark an entry as used now. Raises KeyError for an id that is not stored."""
        self._entries.move_to_end(entry)

    def covers(self, key: PrefixKey, *, trimmable: bool) -> int | None:
        """A stored entry that makes an entry with this key superfluous, or None."""
        entry, shared = self._trimmable.closest(key)
        if entry is not None and shared == len(key):
            return entry.id
        if not trimmable:
            mark = next(_prefixes(*self._marks.closest(key)), None)
            if mark is not None and len(mark.key) == len(key):
                return mark.id
        return None

    def add(
        self,
        entry: int,
        key: PrefixKey,
        nbytes: int,
        *,
        places: Collection[int] | None = None,
        pinned: Collection[int] = (),
    ) -> list[int]:
        """Store a sequence of at most `max_bytes`; returns the evicted ids, never the new one.

        places: the lengths at which it is usable besides its end; None means any. The new entry
        replaces entries that would save only a few tokens more than it does. If that is true of an
        old entry except at its end, the old one is evicted before all others: its end belongs
        either to an answer that later turns of the same chat render differently, or to another
        chat. Then the least recently used entries are evicted until the limits hold. Raises
        ValueError if the id is already stored.
        """
        if entry in self._entries:
            raise ValueError(f"entry {entry} is already stored")
        replaced, passed = self._replaced(key, places)
        replaced = [old for old in replaced if old not in pinned]
        for old in replaced:
            self.remove(old)
        for old in [old for old in reversed(self._entries) if old in passed]:
            self._entries.move_to_end(old, last=False)
        whole = _Mark(entry, key)
        marks = None
        if places is not None:
            marks = tuple(_Mark(entry, key.prefix(at)) for at in sorted({*places, len(key)}))
        self._entries[entry] = _Entry(entry, whole, nbytes, marks)
        self._whole.insert(whole)
        if marks is None:
            self._trimmable.insert(_Mark(entry, key))
        for mark in marks or ():
            self._marks.insert(mark)
        self._nbytes += nbytes
        return replaced + self.shrink(self.max_bytes, {*pinned, entry})

    def _replaced(
        self, key: PrefixKey, places: Collection[int] | None
    ) -> tuple[list[int], set[int]]:
        """The entries that a new one replaces, and those that are then useful only at their end."""
        known = {*places, len(key)} if places is not None else None
        if known is None:
            replaced = [mark.id for mark in _prefixes(*self._trimmable.closest(key))]
        else:
            replaced = []
        passed: set[int] = set()
        for old in {mark.id for mark in _prefixes(*self._marks.closest(key))}:
            marks = self._entries[old].marks or ()
            shared = self._entries[old].whole.key.shared(key)
            *lengths, end = (len(mark.key) for mark in marks)
            if all(_covers(key, known, shared, at) for at in lengths):
                if _covers(key, known, shared, end):
                    replaced.append(old)
                elif lengths:
                    passed.add(old)
        return replaced, passed

    def remove(self, entry: int) -> None:
        """Remove an entry. Raises KeyError for an id that is not stored."""
        removed = self._entries.pop(entry)
        self._whole.remove(entry, removed.whole.key)
        if removed.marks is None:
            self._trimmable.remove(entry, removed.whole.key)
        for mark in removed.marks or ():
            self._marks.remove(entry, mark.key)
        self._nbytes -= removed.nbytes

    def shrink(self, max_bytes: int, pinned: Collection[int] = ()) -> list[int]:
        """Evict until at most `max_bytes` bytes and `max_entries` entries are left.

        Returns their ids.
        """
        evicted: list[int] = []
        nbytes, count = self._nbytes, len(self._entries)
        for entry in self._entries.values():
            if nbytes <= max_bytes and not 0 < self._max_entries < count:
                break
            if entry.id not in pinned:
                evicted.append(entry.id)
                nbytes, count = nbytes - entry.nbytes, count - 1
        for old in evicted:
            self.remove(old)
        return evicted

    def clear(self) -> list[int]:
        """Remove all entries; returns their ids."""
        evicted = list(self._entries)
        for old in evicted:
            self.remove(old)
        return evicted


@dataclass(frozen=True, slots=True)
class _Entry:
    """One stored sequence. marks: the lengths at which it is usable; None means any."""

    id: int
    whole: _Mark
    nbytes: int
    marks: tuple[_Mark, ...] | None


@dataclass(eq=False, slots=True)
class _Mark:
    """An element of `_Order`: an entry at one length.

    parent: the last mark before this one whose key is a prefix of this one's or equal to it.
    """

    id: int
    key: PrefixKey
    parent: _Mark | None = None


_key = attrgetter("key")


class _Order:
    """Marks sorted by their tokens, equal ones by age.

    Every change creates a new list, because other threads may be searching the old one.
    """

    def __init__(self) -> None:
        self._marks: list[_Mark] = []

    def closest(self, key: PrefixKey) -> tuple[_Mark | None, int]:
        """The mark that shares the longest prefix with the key, and the length of that prefix."""
        marks = self._marks
        place = bisect_right(marks, key, key=_key)
        beside = marks[max(place - 1, 0) : place + 1]
        lengths = [(mark, mark.key.shared(key)) for mark in beside]
        return max(lengths, key=lambda pair: pair[1], default=(None, 0))

    def insert(self, mark: _Mark) -> None:
        key, marks = mark.key, self._marks
        mark.parent = next(_prefixes(*self.closest(key)), None)
        place = bisect_right(marks, key, key=_key)
        # The continuations of the new mark's key come right after it.
        end = bisect_left(marks, True, lo=place, key=lambda later: later.key.shared(key) < len(key))
        for later in marks[place:end]:
            if later.parent is mark.parent:
                later.parent = mark
        self._marks = [*marks[:place], mark, *marks[place:]]

    def remove(self, entry: int, key: PrefixKey) -> None:
        marks = self._marks
        place = bisect_left(marks, key, key=_key)
        while marks[place].id != entry:
            place += 1
        mark = marks[place]
        for later in marks[place + 1 :]:
            if later.parent is mark:
                later.parent = mark.parent
        self._marks = [*marks[:place], *marks[place + 1 :]]


def _covers(key: PrefixKey, places: Collection[int] | None, shared: int, at: int) -> bool:
    """Whether an entry nearly replaces another one at the length `at`.

    key, places: of the entry; None means usable at any length. shared: tokens that both share.
    Nearly means that the tokens to recompute are at most half of those before or after that length,
    or few.
    """
    most = min(at, shared)
    if places is not None:
        most = max((place for place in places if place <= most), default=0)
    return at - most <= max(_FEW, min(at, len(key) - at) // 2)


def _prefixes(closest: _Mark | None, shared: int) -> Iterator[_Mark]:
    """The marks whose keys are prefixes of a key, longest first, given the result of `closest`.

    They are also prefixes of the closest mark, so its parents are followed and no tokens compared.
    """
    while closest is not None:
        if len(closest.key) <= shared:
            yield closest
        closest = closest.parent


def _as_tokens(tokens: Sequence[int] | NDArray[np.integer]) -> Tokens:
    """A copy as int32. Raises ValueError for larger numbers, which NumPy would wrap around."""
    given = np.asarray(tokens)
    copied = given.astype(np.int32)
    if not np.array_equal(copied, given):
        raise ValueError("a token id does not fit into 32 bits")
    return copied


def _with_digests(digests: list[bytes], tokens: Tokens) -> list[bytes]:
    """Append the missing digests of whole blocks to the list; returns it.

    A digest covers its block and the digest before it, and so all tokens up to its end.
    """
    for start in range(len(digests) * BLOCK, len(tokens) - BLOCK + 1, BLOCK):
        before = digests[-1] if digests else b""
        block = tokens[start : start + BLOCK].tobytes()
        digests.append(hashlib.sha256(before + block).digest())
    return digests
