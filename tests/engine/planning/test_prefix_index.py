"""The index against a simple model that compares each entry token by token."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from backend.engine.planning import prefix_index
from backend.engine.planning.prefix_index import BLOCK, Match, PrefixIndex, PrefixKey
from tests.counted_work import instructions
from tests.long import examples

Tokens = tuple[int, ...]

# Runs of one token with lengths around block boundaries, so that most sequences share much.
RUNS = st.tuples(
    st.sampled_from([-(1 << 31), 0, 1, (1 << 31) - 1]),
    st.sampled_from([1, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1]),
)


@st.composite
def sequences(draw: st.DrawFn) -> Tokens:
    runs = draw(st.lists(RUNS, max_size=5))
    return tuple(token for token, count in runs for _ in range(count))


LOOKED_AT = 3  # entries that a new one may replace, fewer than the machine below stores

SEQUENCES = sequences()
SHORT = st.lists(st.integers(0, 1), max_size=3).map(tuple)


def common(left: Tokens, right: Tokens) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(left), len(right)))


def whole_blocks(key: PrefixKey) -> list[bytes]:
    return key.digests[: len(key) // BLOCK]


# Keys


@given(SEQUENCES, SEQUENCES)
def test_keys_share_the_common_prefix_of_their_tokens(left: Tokens, right: Tokens) -> None:
    shared = common(left, right)
    assert PrefixKey(left).shared(PrefixKey(right)) == shared
    assert PrefixKey(right).shared(PrefixKey(left)) == shared


@given(SEQUENCES, SEQUENCES, st.data())
def test_a_key_cut_and_extended_is_the_key_of_its_tokens(
    tokens: Tokens, more: Tokens, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(tokens)))
    whole = PrefixKey(tokens)
    key = whole.prefix(cut).extended(more)
    expected = PrefixKey((*tokens[:cut], *more))
    assert key.tokens.tolist() == expected.tokens.tolist()
    assert whole_blocks(key) == whole_blocks(expected)
    assert whole.tokens.tolist() == list(tokens)
    assert whole_blocks(whole) == whole_blocks(PrefixKey(tokens))


@given(SEQUENCES, SEQUENCES, st.data())
def test_prefixes_of_keys_share_no_more_than_their_length(
    left: Tokens, right: Tokens, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(left)))
    assert PrefixKey(left).prefix(cut).shared(PrefixKey(right)) == common(left[:cut], right)


def test_a_prefix_copies_nothing() -> None:
    key = PrefixKey(range(10 * BLOCK))
    prefix = key.prefix(7 * BLOCK + 3)
    assert len(prefix) == 7 * BLOCK + 3
    assert np.shares_memory(prefix.tokens, key.tokens)
    assert prefix.digests is key.digests


def test_a_key_does_not_change_with_its_source_array() -> None:
    array = np.arange(3, dtype=np.int32)
    key = PrefixKey(array)
    array[0] = 9
    assert key.tokens.tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="read-only"):
        key.prefix(2).tokens[0] = 9


@pytest.mark.parametrize("token", [1 << 31, -(1 << 31) - 1, 1 << 32])
def test_a_token_that_does_not_fit_is_refused_and_never_wrapped(token: int) -> None:
    for tokens in ([token], np.array([token], dtype=np.int64)):
        with pytest.raises(ValueError, match="32 bits"):
            PrefixKey(tokens)
        with pytest.raises(ValueError, match="32 bits"):
            PrefixKey([1]).extended(tokens)


# The index


@dataclass
class Stored:
    """positions: lengths at which it is usable, including its end; None: any length."""

    tokens: Tokens
    nbytes: int
    positions: frozenset[int] | None

    def serves(self, prompt: Tokens) -> int:
        shared = min(common(self.tokens, prompt), max(len(prompt) - 1, 0))
        return shared if self.positions is None else self.longest_within(shared)

    def longest_within(self, shared: int) -> int:
        return max((place for place in self.positions or () if place <= shared), default=0)

    def replaces(self, old: Stored) -> bool:
        """Whether an older entry saves few tokens or none beyond this one, at any position."""
        if old.positions is None:
            return self.positions is None and common(self.tokens, old.tokens) == len(old.tokens)
        return self.nearly_serves_all(old, old.positions)

    def passes(self, old: Stored) -> bool:
        """Whether this entry replaces an older one at all of its positions except its end."""
        before = (old.positions or frozenset()) - {len(old.tokens)}
        return bool(before) and self.nearly_serves_all(old, before) and not self.replaces(old)

    def nearly_serves_all(self, old: Stored, positions: Collection[int]) -> bool:
        shared = common(self.tokens, old.tokens)
        if not any(place <= shared for place in old.positions or ()):
            return False
        return all(self.nearly_serves(place, shared) for place in positions)

    def nearly_serves(self, place: int, shared: int) -> bool:
        most = min(place, shared)
        if self.positions is not None:
            most = self.longest_within(most)
        return place - most <= max(16, min(place, len(self.tokens) - place) // 2)


class Model:
    """The expected behaviour. entries: by id, the least recently used first."""

    def __init__(self, max_bytes: int, max_entries: int) -> None:
        self.max_bytes, self.max_entries = max_bytes, max_entries
        self.entries: dict[int, Stored] = {}

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries.values())

    def touch(self, entry: int) -> None:
        self.entries[entry] = self.entries.pop(entry)

    def covering(self, tokens: Tokens, trimmable: bool) -> set[int]:
        def covers(entry: Stored) -> bool:
            if entry.positions is None:
                return True
            return not trimmable and len(tokens) in entry.positions

        return {
            number
            for number, entry in self.entries.items()
            if entry.tokens[: len(tokens)] == tokens and covers(entry)
        }

    def add(self, number: int, new: Stored) -> set[int]:
        near = self.nearest(new)
        looked_at = {old for old, entry in self.entries.items() if entry.positions is None} | {
            *near
        }
        replaced = {
            old for old, entry in self.entries.items() if old in looked_at and new.replaces(entry)
        }
        for old in replaced:
            del self.entries[old]
        passed = [old for old in near if old in self.entries and new.passes(self.entries[old])]
        first = {old: self.entries[old] for old in reversed(passed)}
        self.entries = first | self.entries | {number: new}
        return replaced | set(self.evict(self.max_bytes, {number}))

    def nearest(self, new: Stored) -> list[int]:
        """The entries with positions and the longest prefixes of a new one, then the newest."""
        longest = {
            old: entry.longest_within(common(entry.tokens, new.tokens))
            for old, entry in self.entries.items()
            if entry.positions is not None
        }
        near = sorted((old for old in longest if longest[old]), reverse=True)
        return sorted(near, key=lambda old: -longest[old])[:LOOKED_AT]

    def evict(self, max_bytes: int, pinned: Collection[int]) -> list[int]:
        gone = []
        for number in list(self.entries):
            if self.nbytes <= max_bytes and not 0 < self.max_entries < len(self.entries):
                break
            if number not in pinned:
                del self.entries[number]
                gone.append(number)
        return gone


class IndexMachine(RuleBasedStateMachine):
    """Any order of calls. Most keys are trimmed and extended from earlier ones, as in chats."""

    @initialize(
        max_bytes=st.integers(40, 400),
        max_entries=st.sampled_from([0, 0, 3, 6]),
        kinds=st.sampled_from([(False,), (True,), (False, True)]),
    )
    def start(self, max_bytes: int, max_entries: int, kinds: tuple[bool, ...]) -> None:
        self.kinds = kinds
        self.bounds = max_bytes, max_entries
        self.index, self.model = PrefixIndex(max_bytes, max_entries), Model(max_bytes, max_entries)
        self.next = 0
        self.course: list[tuple[Callable[[PrefixIndex], object], object]] = []

    def ask(self, call: Callable[[PrefixIndex], Any]) -> Any:
        answer = call(self.index)
        self.course.append((call, answer))
        return answer

    def teardown(self) -> None:
        """Replaying the same calls gives the same answers."""
        if hasattr(self, "course"):
            index = PrefixIndex(*self.bounds)
            assert [call(index) for call, _ in self.course] == [answer for _, answer in self.course]

    def key(self, data: st.DataObject) -> tuple[Tokens, PrefixKey]:
        known = [entry.tokens for entry in self.model.entries.values()]
        start = data.draw(st.sampled_from([(), *known]))
        start = start[: data.draw(st.integers(0, len(start)) | st.just(len(start)))]
        more = data.draw(SHORT | SEQUENCES)
        return (*start, *more), PrefixKey(start).extended(more)

    def pins(self, data: st.DataObject) -> set[int]:
        if not self.model.entries:
            return set()
        return data.draw(st.sets(st.sampled_from(list(self.model.entries)), max_size=3))

    def one(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(list(self.model.entries)))

    @rule(data=st.data(), nbytes=st.integers(1, 40), covered=st.booleans())
    def add(self, data: st.DataObject, nbytes: int, covered: bool) -> None:
        tokens, key = self.key(data)
        trimmable = data.draw(st.sampled_from(self.kinds))
        # Callers skip covered entries; the index must stay consistent if one does not.
        if not tokens or (not covered and self.model.covering(tokens, trimmable)):
            return
        positions = None
        if not trimmable:
            positions = frozenset(data.draw(st.sets(st.integers(1, len(tokens)), max_size=4)))
        number, self.next = self.next, self.next + 1
        gone = self.ask(lambda index: index.add(number, key, nbytes, positions=positions))
        assert len(gone) == len(set(gone))
        served = None if positions is None else positions | {len(tokens)}
        assert set(gone) == self.model.add(number, Stored(tokens, nbytes, served))

    @rule(data=st.data())
    def find(self, data: st.DataObject) -> None:
        self.compare_find(*self.key(data))
        for entry in self.model.entries.values():
            prompt = (*entry.tokens, *data.draw(SHORT))
            self.compare_find(prompt, PrefixKey(prompt))

    def compare_find(self, tokens: Tokens, key: PrefixKey) -> None:
        entries = self.model.entries
        length = max((entry.serves(tokens) for entry in entries.values()), default=0)
        limit = max(len(tokens) - 1, 0)
        shared = max((common(entry.tokens, tokens) for entry in entries.values()), default=0)
        match = self.ask(lambda index: index.find(key))
        assert (match.length, match.shared) == (length, min(shared, limit))
        assert (match.entry is None) == (length == 0)
        assert match.entry is None or entries[match.entry].serves(tokens) == length

    @rule(data=st.data(), trimmable=st.booleans())
    def cover(self, data: st.DataObject, trimmable: bool) -> None:
        tokens, key = self.key(data)
        covering = self.model.covering(tokens, trimmable)
        found = self.ask(lambda index: index.covers(key, trimmable=trimmable))
        assert found in covering if covering else found is None

    @precondition(lambda self: self.model.entries)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        number = self.one(data)
        self.ask(lambda index: index.touch(number))
        self.model.touch(number)

    @precondition(lambda self: self.model.entries)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        number = self.one(data)
        self.ask(lambda index: index.remove(number))
        del self.model.entries[number]

    @rule(data=st.data(), max_bytes=st.integers(0, 400))
    def shrink(self, data: st.DataObject, max_bytes: int) -> None:
        pinned = self.pins(data)
        gone = self.ask(lambda index: index.shrink(max_bytes, pinned))
        assert gone == self.model.evict(max_bytes, pinned)

    @rule(data=st.data())
    def clear_sometimes(self, data: st.DataObject) -> None:
        if data.draw(st.integers(0, 19)) == 19:
            assert self.ask(lambda index: index.clear()) == list(self.model.entries)
            self.model.entries.clear()

    @invariant()
    def what_is_stored(self) -> None:
        assert (self.index.nbytes, len(self.index)) == (self.model.nbytes, len(self.model.entries))
        for number, entry in self.model.entries.items():
            assert len(self.index[number].key) == len(entry.tokens)
            assert self.index[number].nbytes == entry.nbytes
            positions = None if entry.positions is None else tuple(sorted(entry.positions))
            assert self.index[number].positions == positions


@pytest.fixture
def _few_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index, "_MOST_COMPARED", LOOKED_AT)


@pytest.mark.usefixtures("_few_looked_at")
def test_any_order_of_calls_gives_the_results_of_the_model() -> None:
    run_state_machine_as_test(
        IndexMachine,
        settings=settings(max_examples=examples(150), stateful_step_count=40, deadline=None),
    )


ANYWHERE = None
AT_ITS_END = ()


def index_of(
    *entries: tuple[Iterable[int], Collection[int] | None], max_bytes: int = 1000
) -> PrefixIndex:
    index = PrefixIndex(max_bytes)
    for number, (tokens, positions) in enumerate(entries):
        index.add(number, PrefixKey(list(tokens)), 10, positions=positions)
    return index


def test_an_empty_index_finds_nothing() -> None:
    for tokens in ([], [1], [1, 2]):
        assert PrefixIndex(10).find(PrefixKey(tokens)) == Match(None, 0, 0)


def test_the_last_token_of_a_prompt_is_never_served() -> None:
    index = index_of(([1, 2, 3], ANYWHERE))
    assert index.find(PrefixKey([1, 2, 3])) == Match(0, 2, 2)
    index = index_of(([1, 2, 3], AT_ITS_END))
    assert index.find(PrefixKey([1, 2, 3])) == Match(None, 0, 2)
    assert index.find(PrefixKey([1, 2, 3, 4])) == Match(0, 3, 3)


def test_an_entry_serves_its_longest_place_within_the_shared_prefix() -> None:
    index = index_of((range(1, 101), [20, 60]))
    assert index[0].positions == (20, 60, 100)
    for shared, length in ((100, 100), (99, 60), (60, 60), (59, 20), (20, 20), (19, 0)):
        found = index.find(PrefixKey([*range(1, shared + 1), 500, 501]))
        assert (found.length, found.shared) == (length, shared)


def test_an_entry_with_the_same_positions_and_more_replaces_another() -> None:
    index = index_of((range(1, 101), [30, 60]), (range(201, 301), [30]))
    assert index.add(
        7, PrefixKey([*range(1, 101), *range(500, 600)]), 10, positions=[30, 60, 99]
    ) == [0]
    assert index.add(8, PrefixKey([*range(201, 301), 1]), 10, positions=[90]) == []


def test_a_chat_beside_another_replaces_it_only_if_memory_is_short() -> None:
    start = [*range(1, 41)]
    one, other = [*start, *range(500, 600)], [*start, *range(700, 800)]
    index = index_of((range(2000, 2010), AT_ITS_END), (one, [30, 40]), max_bytes=30)
    assert index.add(7, PrefixKey(other), 10, positions=[30, 40]) == []
    assert index.find(PrefixKey([*one, 1])).length == len(one)
    assert index.find(PrefixKey([*other, 1])).length == len(other)
    assert index.add(8, PrefixKey([3000]), 10) == [1]


def test_a_longer_conversation_replaces_its_prefixes() -> None:
    index = index_of(([1, 2], ANYWHERE), ([1], AT_ITS_END))
    assert set(index.add(7, PrefixKey([1, 2, 3]), 10)) == {0, 1}
    assert index.add(8, PrefixKey([1, 2, 3, 4]), 10) == [7]


def test_the_last_used_entry_is_evicted_last() -> None:
    index = index_of(([1], ANYWHERE), ([2], ANYWHERE), max_bytes=20)
    index.find(PrefixKey([2, 2]))
    index.touch(0)
    assert index.add(2, PrefixKey([3]), 10) == [1]


def test_one_entry_may_use_the_whole_budget() -> None:
    index = index_of(([1], ANYWHERE), ([2], ANYWHERE), max_bytes=20)
    assert index.add(2, PrefixKey([3]), 20) == [0, 1]


def test_an_id_is_stored_once_and_unknown_ones_are_errors() -> None:
    index = index_of(([1], ANYWHERE))
    with pytest.raises(ValueError, match="0"):
        index.add(0, PrefixKey([2]), 10)
    for call in (index.touch, index.remove, index.__getitem__):
        with pytest.raises(KeyError):
            call(5)
    assert index.find(PrefixKey([1, 2])) == Match(0, 1, 1)


# Cost, in comparisons


class CountedDigest(bytes):
    """Counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        CountedDigest.compared += 1
        return bytes.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        CountedDigest.compared += 1
        return bytes.__ne__(self, other)

    __hash__ = bytes.__hash__


def counted(tokens: list[int]) -> PrefixKey:
    key = PrefixKey(tokens)
    key.digests[:] = [CountedDigest(digest) for digest in key.digests]
    return key


@pytest.mark.parametrize("blocks", [4, 64, 1024])
def test_two_keys_are_compared_in_a_logarithm_of_their_blocks(blocks: int) -> None:
    left = counted([1] * (blocks * BLOCK))
    for parted in (0, blocks // 2, blocks - 1):
        tokens = [1] * (blocks * BLOCK)
        tokens[parted * BLOCK + 5] = 2
        right = counted(tokens)
        CountedDigest.compared = 0
        assert left.shared(right) == parted * BLOCK + 5
        assert 0 < CountedDigest.compared <= blocks.bit_length()


# The tokens of entry `number`, and the lengths at which it is usable; entry 0 is stored first.
SHAPES: dict[str, Callable[[int], tuple[list[int], list[int] | None]]] = {
    "apart": lambda number: ([number + 2, *range(20)], None),
    "one start": lambda number: ([*[1] * 300, number, *range(20)], None),
    "one start, where all are usable": lambda number: (
        [*[1] * 300, number, *[7] * 400],
        [300, 600],
    ),
    "one start, and each passes the others": lambda number: (
        [*[1] * 100, number, *[7] * 79],
        [100, 120],
    ),
    "many branches": lambda number: ([1] * 40 + [2] * (number % 9) + [number] * 60, [40]),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_no_call_takes_longer_with_more_entries(shape: str) -> None:
    entries = SHAPES[shape]

    def costs(count: int) -> dict[str, int]:
        index = PrefixIndex(1 << 30)
        for number in range(count):
            tokens, positions = entries(number)
            index.add(number, PrefixKey(tokens), 1, positions=positions)
        assert len(index) == count
        tokens, positions = entries(count)
        key = PrefixKey(tokens)
        return {
            "find": instructions(lambda: index.find(key)),
            "covers": instructions(lambda: index.covers(key, trimmable=False)),
            "add": instructions(lambda: index.add(count, key, 1, positions=positions)),
            "touch": instructions(lambda: index.touch(count // 3)),
            "remove": instructions(lambda: index.remove(count // 2)),
            "evict": instructions(lambda: index.shrink(index.nbytes - 1)),
            "clear": instructions(index.clear),
        }

    costs(180)  # Python 3.13 counts only a part of a function's first call that is traced
    fewer, more = costs(180), costs(360)
    assert {call: more[call] for call in more if more[call] > 1.1 * fewer[call] + 20} == {}


@pytest.mark.parametrize("trimmable", [True, False])
@pytest.mark.parametrize("entries", [8, 64, 512])
def test_a_prompt_is_compared_with_one_entry(
    monkeypatch: pytest.MonkeyPatch, entries: int, trimmable: bool
) -> None:
    prefix = PrefixKey([1] * (2 * BLOCK))
    index = PrefixIndex(1 << 20)
    for number in range(entries):
        # Every other key extends the one before it.
        key = prefix.extended([2] * (number // 2) + [3] * (number % 2))
        index.add(number, key, 1, positions=None if trimmable else ())
    calls = 0
    shared = PrefixKey.shared

    def counting(self: PrefixKey, other: PrefixKey) -> int:
        nonlocal calls
        calls += 1
        return shared(self, other)

    monkeypatch.setattr(PrefixKey, "shared", counting)
    for number in range(0, entries, max(1, entries // 16)):
        calls = 0
        match = index.find(prefix.extended([2] * (number // 2) + [4, 4]))
        assert match.length == 2 * BLOCK + number // 2
        assert calls == 1


@pytest.mark.parametrize("positions", [None, [10, 30]])
def test_lookups_on_another_thread_are_safe_during_changes(positions: list[int] | None) -> None:
    """Prompt threads look while the engine thread stores and evicts."""
    index = PrefixIndex(1 << 20, max_entries=20)
    prompts = [[1] * (9 + at % 5) + [2 + at % 7] * 11 + [at] * 20 for at in range(60)]
    keys = list(map(PrefixKey, prompts))
    stored: dict[int, Tokens] = {}
    over = threading.Event()
    found = [threading.Event(), threading.Event()]

    def look(matched: threading.Event) -> None:
        while not over.is_set():
            for prompt, key in zip(prompts, keys, strict=True):
                match = index.find(key)
                assert 0 <= match.length <= match.shared < len(prompt)
                if match.entry is not None:
                    assert stored[match.entry][: match.length] == tuple(prompt[: match.length])
                    matched.set()

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as threads:
            looking = [threads.submit(look, matched) for matched in found]
            try:
                for entry in itertools.count():
                    ended = any(one.done() for one in looking)  # by a failure
                    if ended or (entry >= 3000 and all(matched.is_set() for matched in found)):
                        break
                    stored[entry] = tuple(prompts[entry * 7 % 60])
                    index.add(entry, keys[entry * 7 % 60], 1, positions=positions)
                    if entry % 100 == 99:
                        index.clear()
            finally:
                over.set()
            for one in looking:
                one.result()
    finally:
        sys.setswitchinterval(switch)
