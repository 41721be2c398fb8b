"""The store against an obvious model of it: compare with every entry, token by token."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backend.engine.prefix_cache import PrefixCache

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=8)


def _shared(left: list[int], right: list[int]) -> int:
    length = 0
    while length < min(len(left), len(right)) and left[length] == right[length]:
        length += 1
    return length


@given(st.lists(st.tuples(TOKENS, st.booleans()), max_size=12), TOKENS)
def test_the_longest_usable_prefix_is_found(
    stored: list[tuple[list[int], bool]], prompt: list[int]
) -> None:
    store: PrefixCache[list[int]] = PrefixCache(1 << 20)
    for tokens, trimmable in stored:
        store.store(tokens, tokens, 10, trimmable=trimmable)
    most = len(prompt) - 1
    usable = [0]
    for tokens, trimmable in stored:
        shared = min(_shared(tokens, prompt), most)
        usable.append(shared if trimmable or shared == len(tokens) else 0)
    match = store.find(prompt)
    assert match.length == max(usable)
    assert match.branch == max([min(_shared(tokens, prompt), most) for tokens, _ in stored] + [0])
    if match.entry is not None:
        assert match.entry.payload[: match.length] == prompt[: match.length]


@given(
    st.lists(st.tuples(TOKENS, st.booleans(), st.integers(1, 40)), max_size=20),
    st.integers(0, 100),
    st.integers(0, 4),
)
def test_the_bounds_hold_after_every_step(
    stored: list[tuple[list[int], bool, int]], max_bytes: int, max_entries: int
) -> None:
    store: PrefixCache[None] = PrefixCache(max_bytes, max_entries)
    for tokens, trimmable, nbytes in stored:
        store.store(tokens, None, nbytes, trimmable=trimmable)
        assert store.nbytes <= max_bytes
        assert not max_entries or len(store) <= max_entries


def test_a_longer_conversation_replaces_its_beginning() -> None:
    store: PrefixCache[str] = PrefixCache(100)
    store.store([1, 2], "short", 10, trimmable=True)
    store.store([1, 2, 3], "long", 10, trimmable=True)
    assert len(store) == 1
    store.store([1, 2], "short again", 10, trimmable=True)
    assert len(store) == 1


def test_a_checkpoint_survives_its_continuation() -> None:
    store: PrefixCache[str] = PrefixCache(100)
    store.store([1, 2], "checkpoint", 10, trimmable=False)
    store.store([1, 2, 3], "later", 10, trimmable=False)
    match = store.find([1, 2, 9])
    assert match.entry is not None
    assert match.entry.payload == "checkpoint"


def test_what_was_used_last_is_evicted_last() -> None:
    store: PrefixCache[str] = PrefixCache(20)
    store.store([1, 1], "a", 10, trimmable=True)
    store.store([2, 2], "b", 10, trimmable=True)
    assert store.find([1, 1, 1]).length == 2
    store.store([3, 3], "c", 10, trimmable=True)
    assert store.find([2, 2, 2]).length == 0
    assert store.find([1, 1, 1]).length == 2


def test_an_entry_larger_than_the_store_evicts_nothing() -> None:
    store: PrefixCache[str] = PrefixCache(20)
    store.store([1, 1], "a", 10, trimmable=True)
    store.store([2, 2], "b", 21, trimmable=True)
    assert store.find([1, 1, 1]).length == 2
    assert store.find([2, 2, 2]).length == 0
