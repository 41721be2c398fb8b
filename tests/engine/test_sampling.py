"""The samplers against their definitions in NumPy, and each row against itself in company."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from backend.engine.request import Sampling
from backend.engine.sampling import BatchSampler, row_keys

VOCABULARY = 40
DRAWS = 4000
LOGITS = np.random.default_rng(5).normal(0, 2, VOCABULARY).astype(np.float32)


def _sample(rows: list[Sampling], steps: list[int], logits: np.ndarray | None = None) -> list[int]:
    batch = np.tile(LOGITS, (len(rows), 1)) if logits is None else logits
    tokens = BatchSampler(rows, [None] * len(rows))(mx.array(batch), steps)
    return [int(token) for token in np.array(tokens)]


def _expected(sampling: Sampling) -> np.ndarray:
    """llama.cpp's chain: top_k, top_p of what is left, min_p relative to the best, temperature."""
    order = np.argsort(-LOGITS, kind="stable")
    keep = np.zeros(VOCABULARY, dtype=bool)
    keep[order[: sampling.top_k or VOCABULARY]] = True
    share = np.where(keep, np.exp(LOGITS - LOGITS.max()), 0)
    share /= share.sum()
    before = np.cumsum(share[order]) - share[order]
    keep[order[before >= sampling.top_p]] = False
    keep &= np.exp(LOGITS - LOGITS.max()) >= sampling.min_p
    weights = np.where(keep, np.exp((LOGITS - LOGITS.max()) / sampling.temperature), 0)
    probabilities: np.ndarray = weights / weights.sum()
    return probabilities


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.5),
        Sampling(temperature=3.0),
        Sampling(temperature=1.0, top_k=5),
        Sampling(temperature=1.0, top_p=0.7),
        Sampling(temperature=1.5, min_p=0.1),
        Sampling(temperature=1.2, top_k=12, top_p=0.9, min_p=0.02),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(sampling: Sampling) -> None:
    rows = [sampling] * DRAWS
    counts = np.bincount(_sample(rows, list(range(DRAWS))), minlength=VOCABULARY)
    expected = _expected(sampling) * DRAWS
    assert counts[expected == 0].sum() == 0
    likely = expected >= 5
    rest_seen, rest = counts[~likely].sum(), expected[~likely].sum()
    chi = ((counts[likely] - expected[likely]) ** 2 / expected[likely]).sum()
    chi += (rest_seen - rest) ** 2 / rest if rest > 1 else 0
    freedom = int(likely.sum())
    # Mean `freedom`, variance 2 * freedom: five deviations would be an accident in a million.
    assert chi < freedom + 5 * np.sqrt(2 * freedom)


def test_a_row_draws_the_same_alone_and_in_company() -> None:
    rng = np.random.default_rng(1)
    rows = [
        Sampling(),
        Sampling(temperature=1.0, seed=0),
        Sampling(temperature=0.7, top_k=3, seed=1),
        Sampling(temperature=1.3, top_p=0.8, seed=2**31 - 1),
        Sampling(temperature=2.0, min_p=0.2, seed=-5),
    ]
    for step in range(50):
        logits = rng.normal(0, 2, (len(rows), VOCABULARY)).astype(np.float32)
        together = _sample(rows, [step] * len(rows), logits)
        single = [_sample([row], [step], logits[at : at + 1])[0] for at, row in enumerate(rows)]
        assert together == single


def test_seed_zero_is_a_seed_and_steps_and_seeds_differ() -> None:
    keys = row_keys([0, 0, 1, -1, 2**63], [0, 1, 0, 0, 0])
    assert len({tuple(key) for key in keys.tolist()}) == 5
    assert row_keys([0], [0]).tolist() == row_keys([0], [0]).tolist()


def test_greedy_takes_the_best_token_whatever_the_filters() -> None:
    best = int(LOGITS.argmax())
    for sampling in (Sampling(), Sampling(top_k=1, top_p=0.1, min_p=1.0, seed=9)):
        assert _sample([sampling], [0]) == [best]


def test_the_ends_of_every_range_are_harmless() -> None:
    """Peers' defect 1: one such value made every later evaluation in the process fail."""
    best = int(LOGITS.argmax())
    narrow = [
        Sampling(temperature=1.0, top_k=1),
        Sampling(temperature=1.0, top_p=1e-30),
        Sampling(temperature=1.0, min_p=1.0),
        Sampling(temperature=1e-30),
        Sampling(temperature=1e-38, top_p=0.5),
    ]
    assert _sample(narrow, [0] * len(narrow)) == [best] * len(narrow)
    wide = [Sampling(temperature=1e30), Sampling(temperature=1.0, top_k=2**31 - 1)]
    assert all(0 <= token < VOCABULARY for token in _sample(wide, [0, 0]))


def test_banned_tokens_are_never_drawn() -> None:
    best = int(LOGITS.argmax())
    rows = [Sampling(), Sampling(temperature=1.0, seed=4), Sampling()]
    sampler = BatchSampler(rows, [mx.array([best]), mx.array([best]), None])
    for step in range(30):
        tokens = np.array(sampler(mx.array(np.tile(LOGITS, (3, 1))), [step] * 3))
        assert tokens[0] != best
        assert tokens[1] != best
        assert tokens[2] == best


def test_ties_at_the_cut_keep_exactly_top_k() -> None:
    flat = np.zeros((1, VOCABULARY), dtype=np.float32)
    drawn = {_sample([Sampling(temperature=1.0, top_k=4)], [step], flat)[0] for step in range(300)}
    assert len(drawn) == 4
