"""Finds which stored sequence holds the KV that a new prompt can start from.

The index knows ids, tokens and sizes; whoever owns the KV frees what the index says goes. Entries
stand in the lexicographic order of their tokens, where the one that shares the longest prefix with
a prompt is a neighbour of the place the prompt would take: a lookup is one binary search. Two
sequences are compared by cumulative digests of their blocks, again with a binary search, and then
token by token in the one block where they part.
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

# Tokens in a block. Smaller ones cost more digests a key, larger ones more tokens a comparison.
BLOCK = 256
_FEW = 16  # tokens; they are computed as fast as they are found


class PrefixKey:
    """The tokens of a sequence, with digests of its whole blocks. Immutable; any thread may ask.

    tokens: int32, shape (length,), read-only. Images and sounds have negative ids.
    digests: SHA-256, the one at index i of the first (i + 1) * BLOCK tokens; at least those of
    the whole blocks, and more where the key is a prefix of a longer one. Equal digests count as
    equal tokens: a wrong match would show one user the conversation of another, and nobody can
    make two sequences with one SHA-256, so the tokens need no second comparison.
    """

    __slots__ = ("digests", "tokens")

    tokens: Tokens
    digests: list[bytes]

    def __init__(self, tokens: Sequence[int] | NDArray[np.integer]) -> None:
        """Raises ValueError where a token does not fit into 32 bits."""
        self.tokens = _as_tokens(tokens)
        self.tokens.flags.writeable = False
        self.digests = _with_digests([], self.tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def __lt__(self, other: PrefixKey) -> bool:
        """The order of the tokens: a prefix comes before what continues it."""
        shared = self.shared(other)
        if shared == min(len(self), len(other)):
            return len(self) < len(other)
        return bool(self.tokens[shared] < other.tokens[shared])

    def extended(self, more: Sequence[int] | NDArray[np.integer]) -> PrefixKey:
        """The key of these tokens and `more`; only the blocks that are new get digests."""
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
    """What the index knows of a prompt.

    entry, length: the entry that serves the prompt's first `length` tokens (None and 0: a miss).
    shared: how many tokens the prompt shares with any entry, usable or not: the place where a
    model whose cache cannot be trimmed gains from a checkpoint. Both lengths leave out the last
    token of the prompt, which the model has to read for its logits.
    """

    entry: int | None
    length: int
    shared: int


class PrefixIndex:
    """The stored sequences, bounded in bytes, and in entries where `max_entries` > 0.

    An entry without `places` serves any prefix that it has in common with a prompt. Others
    (recurrent state, a sliding window that has turned over) serve only their first tokens up to
    one of their places, where a snapshot was taken, or up to their end. What was used least
    recently goes first; adding and `touch` are use, looking is not. Entries that are `pinned`
    never go, so the bounds may be exceeded while they are.
    """

    def __init__(self, max_bytes: int, max_entries: int = 0) -> None:
        self.max_bytes = max_bytes
        self._max_entries = max_entries
        self._nbytes = 0
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._whole = _Order()  # every entry with all of its tokens
        self._trimmable = _Order()
        self._marks = _Order()  # the others, once for each place

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: PrefixKey) -> Match:
        """The entry that serves most of the prompt."""
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
        """The lengths at which an entry serves; None: any. Raises KeyError as `length` does."""
        marks = self._entries[entry].marks
        return None if marks is None else tuple(len(mark.key) for mark in marks)

    def touch(self, entry: int) -> None:
        """Count as used now. Raises KeyError for an id that is not stored."""
        self._entries.move_to_end(entry)

    def covers(self, key: PrefixKey, *, trimmable: bool) -> int | None:
        """An entry that serves all that an entry with this key would."""
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
        """Store a sequence of at most `max_bytes`; returns the ids that go, never the new one.

        places: where it can be cut besides its end; None: anywhere. It replaces the entries that
        serve little that it does not serve: a whole entry is too much for a few tokens. An end that
        another conversation has passed counts for nothing once every place before it is covered.
        Then the least recently used go until the bounds hold. Raises ValueError for an id that is
        stored.
        """
        if entry in self._entries:
            raise ValueError(f"entry {entry} is stored already")
        replaced = [old for old in self._replaced(key, places) if old not in pinned]
        for old in replaced:
            self.remove(old)
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

    def _replaced(self, key: PrefixKey, places: Collection[int] | None) -> list[int]:
        known = {*places, len(key)} if places is not None else None
        if known is None:
            replaced = [mark.id for mark in _prefixes(*self._trimmable.closest(key))]
        else:
            replaced = []
        for old in {mark.id for mark in _prefixes(*self._marks.closest(key))}:
            marks = self._entries[old].marks or ()
            shared = self._entries[old].whole.key.shared(key)
            lengths = [len(mark.key) for mark in marks]
            if all(_covers(key, known, shared, at) for at in lengths[:-1] or lengths):
                replaced.append(old)
        return replaced

    def remove(self, entry: int) -> None:
        """Forget an entry. Raises KeyError for an id that is not stored."""
        removed = self._entries.pop(entry)
        self._whole.remove(entry, removed.whole.key)
        if removed.marks is None:
            self._trimmable.remove(entry, removed.whole.key)
        for mark in removed.marks or ():
            self._marks.remove(entry, mark.key)
        self._nbytes -= removed.nbytes

    def shrink(self, max_bytes: int, pinned: Collection[int] = ()) -> list[int]:
        """Evict until at most `max_bytes` and `max_entries` are left; returns the ids that go."""
        going: list[int] = []
        nbytes, count = self._nbytes, len(self._entries)
        for entry in self._entries.values():
            if nbytes <= max_bytes and not 0 < self._max_entries < count:
                break
            if entry.id not in pinned:
                going.append(entry.id)
                nbytes, count = nbytes - entry.nbytes, count - 1
        for old in going:
            self.remove(old)
        return going

    def clear(self) -> list[int]:
        """Forget all; returns the ids."""
        going = list(self._entries)
        for old in going:
            self.remove(old)
        return going


@dataclass(frozen=True, slots=True)
class _Entry:
    """One stored sequence. marks: where it can serve; None: anywhere."""

    id: int
    whole: _Mark
    nbytes: int
    marks: tuple[_Mark, ...] | None


@dataclass(eq=False, slots=True)
class _Mark:
    """A place in the order. parent: the last mark before this one that is a prefix of it, or
    equal."""

    id: int
    key: PrefixKey
    parent: _Mark | None = None


_key = attrgetter("key")


class _Order:
    """Marks by their tokens, equal ones by age."""

    def __init__(self) -> None:
        self._entries: list[_Mark] = []

    def closest(self, key: PrefixKey) -> tuple[_Mark | None, int]:
        """The mark that shares the longest prefix with the key, and its length."""
        place = bisect_right(self._entries, key, key=_key)
        beside = self._entries[max(place - 1, 0) : place + 1]
        lengths = [(mark, mark.key.shared(key)) for mark in beside]
        return max(lengths, key=lambda pair: pair[1], default=(None, 0))

    def insert(self, mark: _Mark) -> None:
        key, entries = mark.key, self._entries
        mark.parent = next(_prefixes(*self.closest(key)), None)
        place = bisect_right(entries, key, key=_key)
        # What continues the new one stands right behind it.
        end = bisect_left(
            entries, True, lo=place, key=lambda later: later.key.shared(key) < len(key)
        )
        for later in entries[place:end]:
            if later.parent is mark.parent:
                later.parent = mark
        entries.insert(place, mark)

    def remove(self, entry: int, key: PrefixKey) -> None:
        place = bisect_left(self._entries, key, key=_key)
        while self._entries[place].id != entry:
            place += 1
        mark = self._entries.pop(place)
        for later in self._entries[place:]:
            if later.parent is mark:
                later.parent = mark.parent


def _covers(key: PrefixKey, places: Collection[int] | None, shared: int, at: int) -> bool:
    """Whether an entry serves a place of another, with which it shares so many tokens, or nearly.

    places: of the entry with that key; None: any. Nearly: no more than half of what comes before
    the place, or after it, has to be computed again.
    """
    most = min(at, shared)
    if places is not None:
        most = max((place for place in places if place <= most), default=0)
    return at - most <= max(_FEW, min(at, len(key) - at) // 2)


def _prefixes(closest: _Mark | None, shared: int) -> Iterator[_Mark]:
    """The marks that are prefixes of a key, longest first, given what `closest` said of it.

    They are prefixes of the closest one too, and shared with it, so no tokens are compared.
    """
    while closest is not None:
        if len(closest.key) <= shared:
            yield closest
        closest = closest.parent


def _as_tokens(tokens: Sequence[int] | NDArray[np.integer]) -> Tokens:
    """A copy in 32 bits, checked because NumPy wraps what does not fit."""
    given = np.asarray(tokens)
    copied = given.astype(np.int32)
    if not np.array_equal(copied, given):
        raise ValueError("a token id does not fit into 32 bits")
    return copied


def _with_digests(digests: list[bytes], tokens: Tokens) -> list[bytes]:
    """The list, with what is missing of the digests of all whole blocks appended to it.

    A digest covers its block and the digest before it, and with that all tokens up to its end.
    """
    for start in range(len(digests) * BLOCK, len(tokens) - BLOCK + 1, BLOCK):
        before = digests[-1] if digests else b""
        block = tokens[start : start + BLOCK].tobytes()
        digests.append(hashlib.sha256(before + block).digest())
    return digests
