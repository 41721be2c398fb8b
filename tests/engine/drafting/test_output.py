"""Guessing changes the speed and nothing else, at every temperature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import mlx.core as mx
import pytest

from backend.engine import kv
from backend.engine.drafting.drafter import Drafter
from backend.engine.drafting.first_of import FirstOf
from backend.engine.drafting.lookup import LookupDrafter
from backend.engine.request import Sampling
from tests.engine.drafting.rows import RowSampler, Tally, decode, prefilled
from tests.engine.drafting.tiny import VOCABULARY, model_drafter, prompts, text_model

PROMPTS = 50
LENGTH = 12
DRAWN = Sampling(top_p=0.95, top_k=40)


@pytest.fixture(autouse=True)
def _no_compiler() -> None:
    mx.disable_compile()


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
    return decode(model, cache, prompt, LENGTH, RowSampler(sampling, VOCABULARY), drafter)


@pytest.mark.parametrize(("make", "held"), [(LookupDrafter, 0.3), (model_drafter, 0.6)])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_fifty_prompts(make: Callable[[], Drafter], held: float, temperature: float) -> None:
    _check(make(), held, temperature, PROMPTS)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_both_drafters_together(temperature: float) -> None:
    _check(FirstOf([LookupDrafter(), model_drafter()]), 0.4, temperature, 12)


def _check(drafter: Drafter, held: float, temperature: float, count: int) -> None:
    """The output is the plain one, and at least this share of the guesses held."""
    total = Tally()
    for at, plain in enumerate(_plain(temperature)[:count]):
        found, tally = _decode(at, temperature, drafter)
        assert found == plain
        drafter.forget()
        total.proposed += tally.proposed
        total.accepted += tally.accepted
    assert total.accepted > count
    assert total.accepted > held * total.proposed
