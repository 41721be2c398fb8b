"""Finds the cached prefix that has the most tokens in common with a new prompt.

In this module, a cached prefix is called an entry. The index stores the ids, tokens and sizes of
entries, but not their KV: the executor frees the KV of entries that the index evicts. The entries
form a radix tree. So the time of a lookup, an addition or a removal depends on the number of
branches along the tokens, and not on the number of entries. A lookup compares the prompt with a
single entry: a binary search over cumulative digests finds the block in which they diverge, and a
comparison of the tokens in that block finds the position.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]

# Tokens per block. Smaller blocks mean more digests per key, larger ones more tokens to compare.
BLOCK = 256
_TOKEN_BITS = 24  # enough for any vocabulary; the other bits of a first token number the adapter
_FEW = 16  # tokens; computing so few is as fast as a lookup
# A new entry is compared with this many others at most: thousands may share its first tokens.
_MOST_COMPARED = 32


class PrefixKey:
    """The tokens of a sequence, with digests of its whole blocks. Immutable and thread-safe.

    Equal digests count as equal tokens. A wrong match would show a user the conversation of another
    user, but SHA-256 has no known collisions.

    tokens: int32, shape (length,), read-only. Images and audio have negative ids.
    digests: SHA-256 digests. The digest at index i covers the first (i + 1) * BLOCK tokens. There
        is a digest for each whole block, and there are more if the key is a prefix of a longer key.
    """

    __slots__ = ("digests", "tokens")

    tokens: Tokens
    digests: list[bytes]

    def __init__(self, tokens: Sequence[int] | NDArray[np.integer]) -> None:
        """Copy and hash the tokens. Raises ValueError if a token does not fit into 32 bits."""
        self.tokens = _as_tokens(tokens)
        self.tokens.flags.writeable = False
        self.digests = _with_digests([], self.tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def extended(self, more: Sequence[int] | NDArray[np.integer]) -> PrefixKey:
        """Return the key of these tokens followed by `more`; only new blocks are hashed."""
        tokens = np.concatenate((self.tokens, _as_tokens(more)))
        tokens.flags.writeable = False
        return self._of(tokens, _with_digests(self.digests[: len(self) // BLOCK], tokens))

    def computed_by(self, adapter: int) -> PrefixKey:
        """Return the key of these tokens for KV that was computed with an adapter, from 1.

        It matches only keys of the same adapter. For this, a changed first token suffices, because
        keys are compared from their first token on.
        """
        tokens = self.tokens.copy()
        tokens[:1] += adapter << _TOKEN_BITS
        return PrefixKey(tokens)

    def prefix(self, length: int) -> PrefixKey:
        """Return the key of the first `length` tokens, which shares the arrays of this key."""
        return self._of(self.tokens[:length], self.digests)

    def shared(self, other: PrefixKey) -> int:
        """Return the length of the common prefix."""
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

    Neither length counts the last token of the prompt, which must be computed to get logits.

    entry: id of the entry with usable KV; None for a miss.
    length: number of the prompt's first tokens for which this KV can be used.
    shared: number of the prompt's first tokens that any entry has too, usable or not. A model whose
        caches cannot be truncated should take a snapshot at this length.
    """

    entry: int | None
    length: int
    shared: int


class PrefixIndex:
    """The entries, limited in bytes and, if `max_entries` > 0, in number.

    An entry without `positions` can be truncated, so it is usable up to any length at which it
    still equals the prompt. Other entries (with recurrent state or a full sliding window) are
    usable only up to their end, or up to a checkpoint position, where a snapshot was taken.

    The least recently used entry is evicted first; `add` and `touch` count as use, `find` does not.
    `shrink` keeps `pinned` entries, even if the limits are exceeded. Any thread may call `find`;
    all other methods are for one thread.
    """

    def __init__(self, max_bytes: int, max_entries: int = 0) -> None:
        self.max_bytes = max_bytes
        self._max_entries = max_entries
        self._nbytes = 0
        self._entries: OrderedDict[int, Entry] = OrderedDict()
        self._trimmable = _Node(0)  # entries that can be truncated, by all of their tokens
        self._at_positions = _Node(0)  # other entries, by the tokens before each usable position

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: PrefixKey) -> Match:
        """Return the entry with the longest usable prefix of the prompt."""
        served = key.prefix(max(len(key) - 1, 0))
        best, length, _ = self._trimmable.closest(served)
        _, shared, path = self._at_positions.closest(served)
        shared = max(length, shared)
        for node in reversed(path):
            if node.depth > length and node.newest is not None:
                best, length = node.newest, node.depth
                break
        return Match(best.id if best is not None and length else None, length, shared)

    def __getitem__(self, entry: int) -> Entry:
        """Return the entry with this id. Raises KeyError for an id that is not stored."""
        return self._entries[entry]

    def touch(self, entry: int) -> None:
        """Mark an entry as used now. Raises KeyError for an id that is not stored."""
        self._entries.move_to_end(entry)

    def covers(self, key: PrefixKey, *, trimmable: bool) -> int | None:
        """Return the id of an entry that makes a new entry with this key superfluous, or None.

        trimmable: whether the new entry could be truncated to any length.
        """
        entry, shared, _ = self._trimmable.closest(key)
        if entry is None or shared < len(key):
            if trimmable:
                return None
            node = self._at_positions.closest(key)[2][-1]
            entry = node.newest if node.depth == len(key) else None
        return None if entry is None else entry.id

    def add(
        self,
        entry: int,
        key: PrefixKey,
        nbytes: int,
        *,
        positions: Collection[int] | None = None,
    ) -> list[int]:
        """Store an entry of at most `max_bytes`; returns the ids of evicted entries.

        The new entry replaces entries that would save only a few more tokens than it. An old entry
        that saves more tokens only at its end is the next to be evicted: its end belongs either to
        an answer that later turns of the same chat render differently, or to another chat. Then the
        least recently used entries are evicted until the limits hold.

        entry: the id. Raises ValueError if it is already stored.
        nbytes: size of the entry's KV and snapshots.
        positions: checkpoint positions at which the entry is usable besides its end; None means any
            length.
        """
        if entry in self._entries:
            raise ValueError(f"entry {entry} is already stored")
        known = None if positions is None else tuple(sorted({*positions, len(key)}))
        new = Entry(entry, key, nbytes, known)
        replaced, passed = self._replaced(new)
        for old in replaced:
            self.remove(old)
        for old in passed:
            self._entries.move_to_end(old, last=False)
        self._entries[entry] = new
        for tree, at in self._where(new):
            tree.insert(new, at)
        self._nbytes += nbytes
        return replaced + self.shrink(self.max_bytes, {entry})

    def _replaced(self, new: Entry) -> tuple[list[int], list[int]]:
        """Return the ids of entries to replace, and of entries that are useful only at their end.

        Among entries that cannot be truncated, only those that share the longest prefixes with the
        new entry are compared, the newest first.
        """
        replaced: list[int] = []
        passed: list[int] = []
        if new.positions is None:
            replaced += [old.id for old in self._trimmable.prefixes(new.key)]
        near: dict[int, Entry] = {}
        for old in self._at_positions.prefixes(new.key):
            near[old.id] = old
            if len(near) == _MOST_COMPARED:
                break
        for old in near.values():
            shared = old.key.shared(new.key)
            *lengths, end = old.positions or ()
            if all(_covers(new, shared, at) for at in lengths):
                if _covers(new, shared, end):
                    replaced.append(old.id)
                elif lengths:
                    passed.append(old.id)
        return replaced, passed

    def _where(self, entry: Entry) -> Iterator[tuple[_Node, int]]:
        """Yield the tree that stores an entry and each length of its keys there, longest first."""
        if entry.positions is None:
            yield self._trimmable, len(entry.key)
        for at in reversed(entry.positions or ()):
            yield self._at_positions, at

    def remove(self, entry: int) -> None:
        """Remove an entry. Raises KeyError for an id that is not stored."""
        removed = self._entries.pop(entry)
        for tree, at in self._where(removed):
            tree.remove(removed, at)
        self._nbytes -= removed.nbytes

    def shrink(self, max_bytes: int, pinned: Collection[int] = ()) -> list[int]:
        """Evict entries until both limits hold, and return their ids."""
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
        evicted, self._nbytes = list(self._entries), 0
        self._entries.clear()
        self._trimmable, self._at_positions = _Node(0), _Node(0)
        return evicted


@dataclass(frozen=True, eq=False, slots=True)
class Entry:
    """A cached prefix, with its checkpoint positions in order; None means any length."""

    id: int
    key: PrefixKey
    nbytes: int
    positions: tuple[int, ...] | None


class _Node:
    """A node of a radix tree, for the first `depth` tokens that some entries have in common.

    Every node except the root stores an entry or has at least two children. Another thread may call
    `closest` during a change. So a node is complete before its parent refers to it, `depth` never
    changes, and `closest` reads `children` only by key.

    here: the entries that the tree stores at this length, by id, oldest first.
    newest: the newest of these entries; None if there are none.
    sample: any entry of this node or of a node below; None only in an empty tree.
    children: the nodes below, by the next token.
    """

    __slots__ = ("children", "depth", "here", "newest", "sample")

    def __init__(self, depth: int, sample: Entry | None = None) -> None:
        self.depth = depth
        self.sample = sample
        self.newest: Entry | None = None
        self.here: dict[int, Entry] = {}
        self.children: dict[int, _Node] = {}

    def _descend(self, key: PrefixKey, length: int) -> list[_Node]:
        """Return the path of nodes, from the root, for the first `length` tokens of a key.

        Only the tokens at which branches diverge are compared, so the other tokens may differ.
        """
        tokens, node, path = key.tokens, self, [self]
        while node.depth < length:
            child = node.children.get(tokens.item(node.depth))
            if child is None:
                break
            node = child
            path.append(node)
        return path

    def closest(self, key: PrefixKey) -> tuple[Entry | None, int, list[_Node]]:
        """Return an entry with the longest common prefix, its length, and the nodes along it."""
        path = self._descend(key, len(key))
        entry = path[-1].sample
        # All entries below the last node have the same common prefix with the key.
        shared = 0 if entry is None else min(entry.key.shared(key), path[-1].depth)
        while path[-1].depth > shared:
            path.pop()
        return entry, shared, path

    def prefixes(self, key: PrefixKey) -> Iterator[Entry]:
        """Yield each entry that is stored at a length, once per length up to which it equals `key`.

        The longest lengths come first and, at the same length, the newest entries.
        """
        for node in reversed(self.closest(key)[2]):
            yield from reversed(node.here.values())

    def insert(self, entry: Entry, length: int) -> None:
        """Store an entry at a length. Only for the root."""
        key = entry.key.prefix(length)
        _, shared, path = self.closest(key)
        node = path[-1]
        if node.depth < shared:
            token = key.tokens.item(node.depth)
            child = node.children[token]
            assert child.sample is not None
            branch = _Node(shared, entry)
            branch.children[child.sample.key.tokens.item(shared)] = child
            node.children[token] = node = branch
        if node.depth < length:
            leaf = _Node(length, entry)
            node.children[key.tokens.item(node.depth)] = leaf
            node = leaf
        node.here[entry.id] = node.newest = entry
        for above in path:
            above.sample = entry

    def remove(self, entry: Entry, length: int) -> None:
        """Remove an entry that is stored at this length. Only for the root."""
        path = self._descend(entry.key, length)
        del path[-1].here[entry.id]
        path[-1].newest = next(reversed(path[-1].here.values()), None)
        while len(path) > 1 and not path[-1].here and len(path[-1].children) < 2:
            children = path.pop().children
            token = entry.key.tokens.item(path[-1].depth)
            if children:
                (path[-1].children[token],) = children.values()
                break
            del path[-1].children[token]
        for node in reversed(path):
            if node.sample is not entry:
                break
            below = (child.sample for child in node.children.values())
            node.sample = node.newest or next(below, None)


def _covers(entry: Entry, shared: int, at: int) -> bool:
    """Return whether an entry saves nearly as many tokens as another entry of the length `at`.

    This is true if few tokens must be recomputed: at most _FEW, or at most half of the tokens
    before `at` and at most half of the entry's tokens after `at`.

    shared: length of the common prefix of both entries.
    """
    most = min(at, shared)
    if entry.positions is not None:
        most = max((length for length in entry.positions if length <= most), default=0)
    return at - most <= max(_FEW, min(at, len(entry.key) - at) // 2)


def _as_tokens(tokens: Sequence[int] | NDArray[np.integer]) -> Tokens:
    """Return a copy of the tokens as int32. Raises ValueError for numbers that do not fit."""
    original = np.asarray(tokens)
    copied = original.astype(np.int32)  # wraps around numbers that do not fit
    if not np.array_equal(copied, original):
        raise ValueError("a token id does not fit into 32 bits")
    return copied


def _with_digests(digests: list[bytes], tokens: Tokens) -> list[bytes]:
    """Append the missing digests, each of a block and the previous digest, and return all."""
    for start in range(len(digests) * BLOCK, len(tokens) - BLOCK + 1, BLOCK):
        before = digests[-1] if digests else b""
        block = tokens[start : start + BLOCK].tobytes()
        digests.append(hashlib.sha256(before + block).digest())
    return digests
