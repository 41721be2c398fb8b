"""Guessing changes the speed and nothing else: the output, and the cache after every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.engine import kv
from backend.engine.cache_form import use_cache_kind
from backend.engine.cache_kind import CacheKind
from backend.engine.drafting.drafter import Drafter, FirstOf, LookupDrafter
from backend.engine.drafting.verify import accepted_count, cut_back, verify_step
from backend.engine.request import Sampling
from tests.engine.drafting.rows import RowSampler, Tally, decode, prefilled
from tests.engine.drafting.tiny import VOCABULARY as TINY_VOCABULARY
from tests.engine.drafting.tiny import load, model_drafter, prompts, text_model
from tests.engine.random_models import VOCABULARY, random_model

PROMPT = [5, 17, 3, 80, 41, 9, 9, 23]
LENGTH = 270  # crosses the step by which caches grow
ALL_COUNTS = [(guesses, right) for guesses in range(7) for right in range(guesses + 1)]


@pytest.fixture(autouse=True)
def _no_compiler() -> None:
    mx.disable_compile()


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), min_size=7, max_size=7))
def test_what_counts_is_the_longest_equal_beginning(draft: list[int], sampled: list[int]) -> None:
    count = accepted_count(draft, sampled[: len(draft) + 1])
    assert draft[:count] == sampled[:count]
    assert count == len(draft) or draft[count] != sampled[count]


@given(st.lists(st.integers(0, 3), max_size=6), st.lists(st.integers(0, 3), min_size=7, max_size=7))
def test_an_end_is_the_last_token_of_all(draft: list[int], sampled: list[int]) -> None:
    count = accepted_count(draft, sampled, {0})
    assert 0 not in draft[:count]
    assert count <= accepted_count(draft, sampled)


def _guesses(plain: list[int], right: int, length: int) -> list[int]:
    """`length` guesses of which the first `right` are."""
    wrong = [(token + 1) % VOCABULARY for token in plain]
    return [*plain[:right], *wrong[right:length]]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, top_p=0.9, seed=3)])
def test_any_count_of_right_guesses_leaves_the_state_of_plain_steps(sampling: Sampling) -> None:
    model = random_model("full")
    _check_every_count(model, sampling)


def test_a_quantised_cache_is_cut_back_as_well() -> None:
    model, _ = load("tiny_text")
    use_cache_kind(model, CacheKind(8, 32))
    # Rounding to 8 bits magnifies what the order of a sum does to the last bit.
    drawn = Sampling(temperature=2.0, seed=1)
    _check_every_count(model, drawn, length=90, tolerance=0.05)


def _check_every_count(
    model: Any,
    sampling: Sampling,
    length: int = LENGTH,
    tolerance: float = 1e-3,
) -> None:
    sampler = RowSampler(sampling, kv.vocabulary_size(model))
    plain, _ = decode(model, prefilled(model, PROMPT), PROMPT, length, sampler)
    assert len(set(plain)) > 5, "the text should tell places apart"
    cache = prefilled(model, PROMPT)
    step, token, turn = 0, PROMPT[-1], 0
    while step < length - 8:
        guesses, right = ALL_COUNTS[turn % len(ALL_COUNTS)]
        draft = _guesses(plain[step:], right, guesses)
        found = verify_step(model, cache, token, draft, sampler, step)
        assert found == plain[step : step + right + 1]
        step, token, turn = step + len(found), found[-1], turn + 1
        row = kv.clone(cache)
        assert all(layer.size() == len(PROMPT) - 1 + step for layer in row)
        if turn % 10 == 0:
            _check_content(model, row, [*PROMPT, *plain[: step - 1]], tolerance)


def _check_content(model: Any, row: kv.RowCache, tokens: list[int], tolerance: float) -> None:
    """The cache holds the keys of exactly these tokens: it gives the logits of a fresh one."""
    fresh = kv.new_row(model)
    model(mx.array([tokens]), cache=fresh)
    probe = mx.array([[7]])
    ours, theirs = model(probe, cache=row), model(probe, cache=fresh)
    assert mx.allclose(ours, theirs, rtol=tolerance, atol=tolerance).item()
    assert mx.argmax(ours).item() == mx.argmax(theirs).item()


def test_an_end_among_the_guesses_ends_the_row_there() -> None:
    model = random_model("full")
    sampler = RowSampler(Sampling(), VOCABULARY)
    plain, _ = decode(model, prefilled(model, PROMPT), PROMPT, 8, sampler)
    at = next(place for place, token in enumerate(plain) if plain.index(token) == place > 1)
    cache = prefilled(model, PROMPT)
    found = verify_step(model, cache, PROMPT[-1], plain[:7], sampler, 0, {plain[at]})
    assert found == plain[: at + 1]
    assert cache[0].size() == len(PROMPT) + at


def test_a_step_does_not_grow_the_cache_anew() -> None:
    """Cutting the room off would copy the whole cache at every step."""
    model = random_model("full")
    sampler = RowSampler(Sampling(), VOCABULARY)
    cache = prefilled(model, PROMPT)
    verify_step(model, cache, PROMPT[-1], [1, 2, 3], sampler, 0)
    room = cache[0].keys.shape[2]
    assert room > cache[0].size()
    for step in range(1, 20):
        verify_step(model, cache, 4, [1, 2, 3], sampler, step)
        assert cache[0].keys.shape[2] == room


def test_more_than_there_is_cannot_be_cut_back() -> None:
    cache = prefilled(random_model("full"), PROMPT)
    with pytest.raises(ValueError, match="cannot give back 8 tokens"):
        cut_back(cache, len(PROMPT))


PROMPTS = 50
LENGTH = 12
DRAWN = Sampling(top_p=0.95, top_k=40)


@cache
def _prefilled(at: int) -> kv.RowCache:
    return prefilled(text_model()[0], prompts(PROMPTS)[at])


@cache
def _plain(temperature: float) -> list[list[int]]:
    return [_decode(at, temperature, None)[0] for at in range(PROMPTS)]


def _decode(at: int, temperature: float, drafter: Drafter | None) -> tuple[list[int], Tally]:
    model, prompt = text_model()[0], prompts(PROMPTS)[at]
    sampling = replace(DRAWN, temperature=temperature, seed=at)
    cache = kv.clone(_prefilled(at))
    return decode(model, cache, prompt, LENGTH, RowSampler(sampling, TINY_VOCABULARY), drafter)


@pytest.mark.parametrize(("make", "accepted"), [(LookupDrafter, 0.3), (model_drafter, 0.6)])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_fifty_prompts(make: Callable[[], Drafter], accepted: float, temperature: float) -> None:
    _check_output(make, accepted, temperature, PROMPTS)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_both_drafters_together(temperature: float) -> None:
    def both() -> Drafter:
        return FirstOf([LookupDrafter(), model_drafter()])

    _check_output(both, 0.4, temperature, 12)


def _check_output(
    make: Callable[[], Drafter], accepted: float, temperature: float, count: int
) -> None:
    """The output is the plain one, and at least this share of the guesses was right."""
    total = Tally()
    for at, plain in enumerate(_plain(temperature)[:count]):
        found, tally = _decode(at, temperature, make())
        assert found == plain
        total.proposed += tally.proposed
        total.accepted += tally.accepted
    assert total.accepted > count
    assert total.accepted > accepted * total.proposed
