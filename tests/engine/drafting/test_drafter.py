"""Lookup finds what a search through all tokens finds, and is used as long as it saves time."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.engine.drafting.drafter import (
    CHUNK,
    NGRAM_SIZES,
    DraftLength,
    DraftRequest,
    LookupDrafter,
    NgramIndex,
    continued,
)

FEW_WORDS = st.lists(st.integers(0, 3), max_size=60)


def searched(tokens: list[int], sizes: Sequence[int]) -> int | None:
    """The position after the latest earlier occurrence of the longest possible end of `tokens`."""
    for size in sorted(sizes, reverse=True):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[len(tokens) - size :]:
                return end
    return None


@given(
    st.lists(FEW_WORDS, max_size=12),
    st.sets(st.integers(1, 5), min_size=1).map(sorted),
    st.integers(1, 40),
)
def test_the_index_finds_what_a_search_finds(
    parts: list[list[int]], sizes: list[int], chunk: int
) -> None:
    index, tokens = NgramIndex(sizes), list[int]()
    for part in parts:
        tokens = tokens + part
        for _ in range(len(part) // chunk + 1):
            index.extend(tokens, chunk)
        assert index.follow(tokens) == searched(tokens, sizes)


@given(FEW_WORDS, st.integers(1, 10))
def test_only_indexed_tokens_are_searched(tokens: list[int], known: int) -> None:
    index = NgramIndex((1,))
    index.extend(tokens, known)
    place = index.follow(tokens)
    assert place is None or place <= known
    assert place == next(
        (end for end in range(min(known, len(tokens) - 1), 0, -1) if tokens[end - 1] == tokens[-1]),
        None,
    )


@given(st.lists(st.integers(), min_size=1, max_size=20), st.data())
def test_a_repeat_continues_with_itself(tokens: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(tokens) - 1))
    count = data.draw(st.integers(1, 30))
    grown = list(tokens)
    for at in range(count):
        grown.append(grown[place + at])
    assert continued(tokens, place, count) == grown[len(tokens) :]


def looked_up(tokens: Sequence[int], most: int, drafter: LookupDrafter | None = None) -> list[int]:
    (found,) = (drafter or LookupDrafter()).propose([DraftRequest(1, tokens, most)])
    assert found is not None
    return found


def test_quotations_and_loops_are_guessed_at_full_length() -> None:
    assert looked_up([5, 6, 7, 8, 9, 1, 5, 6, 7], 2) == [8, 9]
    assert looked_up([5, 6, 7, 8, 9, 1, 5, 6, 7, 8, 9, 1], 4) == [5, 6, 7, 8]
    assert looked_up([3, 4, 4, 4], 4) == [4, 4, 4, 4]


def test_each_sequence_is_searched_separately() -> None:
    drafter = LookupDrafter()
    both = [DraftRequest(1, [5, 6, 7, 5], 2), DraftRequest(2, [5, 8, 9, 5], 2)]
    assert drafter.propose(both) == [[6, 7], [8, 9]]
    drafter.forget([1])
    assert drafter.propose(
        [DraftRequest(1, [1, 2, 3, 1], 1), DraftRequest(2, [5, 8, 9, 5], 1)]
    ) == [[2], [8]]


@pytest.mark.parametrize("length", [0, 1, 2])
def test_a_row_of_very_few_tokens_has_no_guess(length: int) -> None:
    assert looked_up(list(range(length)), 8) == []


class Watched(Sequence[int]):
    """A list that counts how many of its tokens are read."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.read = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, place: int | slice) -> int | list[int]:  # type: ignore[override]
        found = self.tokens[place]
        self.read += len(found) if isinstance(found, list) else 1
        return found


def test_no_call_reads_more_than_a_chunk() -> None:
    dice = random.Random(1)
    tokens = [dice.randrange(50) for _ in range(5 * CHUNK)]
    drafter, reads = LookupDrafter(), list[int]()
    for end in range(4 * CHUNK, 4 * CHUNK + 40):
        watched = Watched(tokens[:end])
        looked_up(watched, 8, drafter)
        reads.append(watched.read)
    assert max(reads) <= CHUNK * sum(NGRAM_SIZES) + 20
    assert max(reads[5:]) < 40, (
        "once it knows all, a step costs the same however long the sequence is"
    )


def play(
    length: DraftLength, at: int, tokens: int, *, right: bool, most: int = 8
) -> tuple[int, int]:
    """The passes and guesses that `tokens` tokens take if all guesses are right, or all wrong."""
    end, passes, guesses = at + tokens, 0, 0
    while at < end:
        count = length.begin(at, most)
        passes, guesses = passes + 1, guesses + count
        if count:
            length.record(count, count if right else 0)
        at += 1 + (count if right else 0)
    return passes, guesses


def test_right_guesses_lengthen_drafts_up_to_the_limit() -> None:
    length = DraftLength()
    assert play(length, 10, 900, right=True)[0] < 900 / 8
    assert length.begin(1000, 8) == 8
    assert length.begin(1000, 64) == 16, "a larger bound is approached, not jumped to"


def test_wrong_guesses_reduce_drafting_to_one_in_sixteen_tokens() -> None:
    assert play(DraftLength(), 10, 1600, right=False)[1] < 110


def test_drafting_resumes_when_text_becomes_predictable() -> None:
    length = DraftLength()
    play(length, 0, 1000, right=False)
    assert play(length, 1000, 100, right=True)[0] < 16 + 100 / 4


def test_the_next_draft_is_as_long_as_the_last_one_was_right() -> None:
    length = DraftLength()
    play(length, 0, 100, right=True)
    length.begin(100, 8)
    length.record(8, 3)
    assert length.begin(104, 8) == 4


def test_a_callers_limit_does_not_count_as_a_wrong_guess() -> None:
    length = DraftLength()
    play(length, 0, 100, right=True)
    before = length.begin(100, 64)
    length.record(1, 1)
    assert length.begin(102, 64) == before


def test_empty_proposals_cause_short_pauses() -> None:
    length = DraftLength()
    asked = 0
    for at in range(160):
        if length.ready(at):
            asked += 1
            length.begin(at, 8)
            length.record_none()
    assert 10 <= asked <= 20


@given(st.lists(st.tuples(st.integers(1, 8), st.floats(0, 1), st.booleans()), max_size=200))
def test_drafts_stay_within_limits_and_pauses_stay_short(
    story: list[tuple[int, float, bool]],
) -> None:
    length, at = DraftLength(), 0
    for most, share, empty in story:
        resting = 0
        while not length.ready(at):
            assert length.begin(at, most) == 0
            at, resting = at + 1, resting + 1
        assert resting <= 16
        count = length.begin(at, most)
        assert 1 <= count <= most
        if empty:
            length.record_none()
        else:
            length.record(count, round(count * share))
        at += 1
