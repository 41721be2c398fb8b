"""The decisions against an obvious model of them, token by token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from backend.engine.disk_cache.index import (
    Entry,
    StoredFile,
    candidates,
    covering,
    replaced,
    to_evict,
    usable,
)
from backend.engine.prefix_index import Tokens

TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=8)
STORED = st.lists(st.tuples(TEXTS, st.booleans(), st.integers(1, 5)), max_size=12)
SIZES = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=12)


def ids(text: list[int]) -> Tokens:
    return np.array(text, dtype=np.int32)


def entries(stored: list[tuple[list[int], bool, int]]) -> list[Entry]:
    return [
        Entry(Path(str(at)), ids(text), trimmable, size)
        for at, (text, trimmable, size) in enumerate(stored)
    ]


def spared(stored: list[int], trimmable: bool, prompt: list[int]) -> int:
    """The longest beginning of the prompt, but its last token, that the stored text can become."""
    lengths = range(len(stored) + 1) if trimmable else [len(stored)]
    return max([n for n in lengths if n < len(prompt) and stored[:n] == prompt[:n]], default=0)


@given(STORED, TEXTS, st.integers(0, 4))
def test_candidates_are_what_spares_most(
    stored: list[tuple[list[int], bool, int]], prompt: list[int], more_than: int
) -> None:
    found = candidates(entries(stored), ids(prompt), more_than)
    lengths = [spared(entry.tokens.tolist(), entry.trimmable, prompt) for entry in found]
    expected = [spared(text, trimmable, prompt) for text, trimmable, _ in stored]
    assert lengths == sorted((n for n in expected if n > more_than), reverse=True)
    order = [(-length, entry.size) for length, entry in zip(lengths, found, strict=True)]
    assert order == sorted(order), "of equals the smaller file comes first"
    for length, entry in zip(lengths, found, strict=True):
        assert usable(entry.tokens, ids(prompt), trimmable=entry.trimmable) == length


@given(STORED, TEXTS, st.booleans(), TEXTS)
def test_what_is_covered_would_have_served_nobody_better(
    stored: list[tuple[list[int], bool, int]], text: list[int], trimmable: bool, prompt: list[int]
) -> None:
    cover = covering(entries(stored), ids(text), trimmable=trimmable)
    if cover is not None:
        mine = spared(text, trimmable, prompt)
        assert spared(cover.tokens.tolist(), cover.trimmable, prompt) >= mine


@given(STORED, TEXTS, st.booleans(), TEXTS)
def test_what_is_replaced_served_nobody_better(
    stored: list[tuple[list[int], bool, int]], text: list[int], trimmable: bool, prompt: list[int]
) -> None:
    for entry in replaced(entries(stored), ids(text), trimmable=trimmable):
        theirs = spared(entry.tokens.tolist(), entry.trimmable, prompt)
        assert spared(text, trimmable, prompt) >= theirs


def test_a_longer_text_replaces_and_covers_its_beginning() -> None:
    (short,) = entries([([1, 2], True, 1)])
    assert replaced([short], ids([1, 2, 0]), trimmable=True) == [short]
    assert covering([short], ids([1]), trimmable=True) is short
    assert covering([short], ids([1, 2, 0]), trimmable=True) is None
    (whole,) = entries([([1, 2], False, 1)])
    assert covering([whole], ids([1, 2]), trimmable=False) is whole
    assert covering([whole], ids([1, 2]), trimmable=True) is None


@given(SIZES, st.sets(st.integers(0, 11)), st.integers(0, 60), st.integers(0, 200))
def test_eviction_makes_room_and_no_more_than_that(
    sizes: list[tuple[int, int]], useless: set[int], needed: int, bound: int
) -> None:
    files = [StoredFile(Path(str(at)), size, used) for at, (size, used) in enumerate(sizes)]
    going = to_evict(files, [Path(str(at)) for at in useless], needed, bound)
    staying = [file for file in files if file not in going]
    left = sum(file.size for file in staying) + needed
    assert left <= bound or not staying
    if going:
        assert left + going[-1].size > bound, "the last one need not have gone"

    def rank(file: StoredFile) -> tuple[bool, int]:
        return file.path.name not in set(map(str, useless)), file.used

    assert all(rank(gone) <= rank(stayed) for gone in going for stayed in staying)
