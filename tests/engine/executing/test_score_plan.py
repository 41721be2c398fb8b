"""The tokens that are computed for a Score request."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.engine.errors import InvalidRequest
from backend.engine.executing.score_plan import (
    MOST_CANDIDATES,
    MOST_CHARACTERS,
    MOST_TOKENS,
    ScoreRequest,
    plan,
    require_bounded,
)

TEXT = st.text("ab ", max_size=8)
BOS = 1


def _encode(text: str) -> list[int]:
    """Each run of a letter is one token, so a text's last token changes with what follows."""
    return [BOS, *(2 + 3 * len(run[0]) + "ab ".index(run[1]) for run in _runs(text))]


def _runs(text: str) -> list[tuple[str, str]]:
    return [(found[0], found[1]) for found in re.finditer(r"([ab ])\1*", text)]


def _plan(prompt: str, *candidates: str, stable: int = 0, context: int = 99) -> Any:
    request = ScoreRequest("1", prompt, candidates, stable)
    return plan(request, _encode, context, lambda: True)


@given(TEXT, st.lists(TEXT, min_size=1, max_size=5), st.data())
def test_it_returns_the_tokens_of_each_candidate(
    prompt: str, candidates: list[str], data: st.DataObject
) -> None:
    stable = data.draw(st.integers(0, len(prompt)))
    made = _plan(prompt, *candidates, stable=stable)
    for candidate, one in zip(candidates, made.continuations, strict=True):
        whole, alone = _encode(prompt + candidate), _encode(prompt)
        parted = next(
            (at for at in range(len(alone)) if whole[at : at + 1] != alone[at : at + 1]), len(alone)
        )
        assert one.tokens[one.scored_from :] == tuple(whole[parted:])
        if one.tokens:
            assert [*made.prefix, *one.tokens] == whole
        else:
            assert candidate == ""
    assert made.prefix[: made.stable] == _encode(prompt[:stable])[: made.stable]
    assert made.longest == max(len(one.tokens) for one in made.continuations)


def test_tokenising_stops_when_the_caller_has_left() -> None:
    asked: list[str] = []

    def encode(text: str) -> list[int]:
        asked.append(text)
        return _encode(text)

    plan(ScoreRequest("1", "a", ("b", "a", "b")), encode, 99, lambda: len(asked) < 2)
    assert asked == ["a", "ab"]


def test_a_first_token_without_context_has_no_probability() -> None:
    request = ScoreRequest("1", "", ("", "a"))
    with pytest.raises(InvalidRequest, match=r"first token of candidates\[1\]"):
        plan(request, lambda text: _encode(text)[1:], 99, lambda: True)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (ScoreRequest("1", "a", ()), "candidates is empty"),
        (ScoreRequest("1", "a", ("b",) * (MOST_CANDIDATES + 1)), "send at most 1024"),
        (ScoreRequest("1", "a" * (MOST_CHARACTERS // 2), ("b", "b")), "fewer candidates"),
        (ScoreRequest("1", "é", ("b",), 3), "stable_prefix_len is 3, but prompt has 2 bytes"),
        (ScoreRequest("1", "é", ("b",), -1), "stable_prefix_len is -1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_too_many_candidates_are_refused_before_they_are_tokenised(
    request_: ScoreRequest, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(words)):
        require_bounded(request_)


def test_a_candidate_that_is_too_long_is_named() -> None:
    with pytest.raises(InvalidRequest, match=r"7 tokens > 6 maximum \(with candidates\[1\]\)"):
        _plan("ab", "a", "abab", context=6)
    with pytest.raises(InvalidRequest, match=r"candidates have .* tokens together"):
        _plan("a", "ba" * (MOST_TOKENS // 2 + 1), context=1 << 20)
