"""The samplers against their definitions in NumPy, and each row against itself in company."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.engine.penalties import Past
from backend.engine.request import WHOLE, Sampling
from backend.engine.sampling import BatchSampler, row_keys, row_luck

VOCABULARY = 40
DRAWS = 4000
LOGITS = np.random.default_rng(5).normal(0, 2, VOCABULARY).astype(np.float32)
NOTHING = Past((), 1, 100)


def _sample(rows: list[Sampling], steps: list[int], logits: np.ndarray | None = None) -> list[int]:
    batch = np.tile(LOGITS, (len(rows), 1)) if logits is None else logits
    sampler = BatchSampler(rows, [NOTHING] * len(rows), batch.shape[1])
    tokens = sampler(mx.array(batch), mx.zeros(len(rows), dtype=mx.uint32), steps)
    return [int(token) for token in np.array(tokens)]


def _shares(keep: np.ndarray) -> np.ndarray:
    weights = np.where(keep, np.exp(LOGITS.astype(np.float64) - LOGITS.max()), 0)
    shares: np.ndarray = weights / weights.sum()
    return shares


def _until(order: np.ndarray, shares: np.ndarray, most: float) -> np.ndarray:
    """The first tokens of the order, up to the one with which their shares reach `most`."""
    keep = np.zeros(VOCABULARY, dtype=bool)
    total = 0.0
    for token in order:
        if total >= most:
            break
        keep[token] = True
        total += shares[token]
    return keep


def _without_top_choices(keep: np.ndarray, threshold: float) -> np.ndarray:
    likely = np.flatnonzero(_shares(keep) >= threshold)
    if len(likely) < 2:
        return keep
    left = keep.copy()
    left[likely] = False
    left[likely[LOGITS[likely].argmin()]] = True
    return left


def _expected(sampling: Sampling) -> np.ndarray:
    """llama.cpp's chain: top_k, typical_p, top_p, min_p, XTC, temperature."""
    order = np.argsort(-LOGITS, kind="stable")
    keep = np.zeros(VOCABULARY, dtype=bool)
    keep[order[: sampling.top_k or VOCABULARY]] = True
    if sampling.typical_p < 1:
        shares = _shares(keep)
        known = np.where(shares > 0, shares, 1)
        entropy = -(shares * np.log(known)).sum()
        strange = np.where(keep, np.abs(-np.log(known) - entropy), np.inf)
        keep &= _until(np.argsort(strange, kind="stable"), shares, sampling.typical_p)
    if sampling.top_p < 1:
        keep &= _until([at for at in order if keep[at]], _shares(keep), sampling.top_p)  # type: ignore[arg-type]
    best = LOGITS[keep].max()
    keep &= np.exp(LOGITS - best) >= sampling.min_p
    excluded = _without_top_choices(keep, sampling.xtc_threshold)
    chance = sampling.xtc_probability
    return (1 - chance) * _drawn(keep, sampling) + chance * _drawn(excluded, sampling)


def _drawn(keep: np.ndarray, sampling: Sampling) -> np.ndarray:
    scaled = (LOGITS.astype(np.float64) - LOGITS.max()) / sampling.temperature
    weights = np.where(keep, np.exp(scaled), 0)
    drawn: np.ndarray = weights / weights.sum()
    return drawn


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
        Sampling(temperature=1.0, typical_p=0.5),
        Sampling(temperature=1.0, typical_p=0.1),
        Sampling(temperature=2.0, top_k=20, typical_p=0.8, top_p=0.9),
        Sampling(temperature=1.0, xtc_probability=1.0, xtc_threshold=0.1),
        Sampling(temperature=1.5, xtc_probability=0.5, xtc_threshold=0.05),
        Sampling(temperature=1.0, min_p=0.2, xtc_probability=0.3, xtc_threshold=0.01),
        Sampling(temperature=1.0, xtc_probability=1.0, xtc_threshold=0.9),
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


MIXED = st.builds(
    Sampling,
    logit_bias=st.sampled_from([(), ((3, 4.0), (7, -100.0))]),
    repetition=st.sampled_from([1.0, 1.3, 0.7]),
    window=st.sampled_from([1, 3, 64, WHOLE]),
    frequency=st.sampled_from([0.0, 0.8, -0.5]),
    presence=st.sampled_from([0.0, 1.1]),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 3, 30]),
    typical_p=st.sampled_from([1.0, 0.6]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.1]),
    xtc_probability=st.sampled_from([0.0, 0.5]),
    seed=st.integers(-3, 3),
)


@given(st.lists(MIXED, min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_a_row_chooses_the_same_alone_and_in_company(rows: list[Sampling], seed: int) -> None:
    """Also where its memory was built anew half-way, as it is when others come and go."""
    rng = np.random.default_rng(seed)
    histories = [rng.integers(0, VOCABULARY, 4).tolist() for _ in rows]
    together: BatchSampler | None = None
    single: list[BatchSampler | None] = [None] * len(rows)
    for step in range(6):
        if together is None or step == 3:
            together = BatchSampler(
                rows, [Past(tokens[:-1], 4, 50) for tokens in histories], VOCABULARY
            )
        logits = rng.normal(0, 2, (len(rows), VOCABULARY)).astype(np.float32)
        fed = mx.array([tokens[-1] for tokens in histories], dtype=mx.uint32)
        chosen = together(mx.array(logits), fed, [step] * len(rows)).tolist()
        for at, row in enumerate(rows):
            alone = single[at] or BatchSampler([row], [Past(histories[at][:-1], 4, 50)], VOCABULARY)
            single[at] = alone
            own = alone(mx.array(logits[at : at + 1]), fed[at : at + 1], [step]).tolist()
            assert own == [chosen[at]]  # type: ignore[index]
        for tokens, token in zip(histories, chosen, strict=True):  # type: ignore[arg-type]
            tokens.append(token)


def test_seed_zero_is_a_seed_and_steps_and_seeds_differ() -> None:
    keys = row_keys([0, 0, 1, -1, 2**63], [0, 1, 0, 0, 0])
    assert len({tuple(key) for key in keys.tolist()}) == 5
    assert row_keys([0], [0]).tolist() == row_keys([0], [0]).tolist()


def test_luck_is_spread_evenly() -> None:
    luck = row_luck(row_keys([7] * 10_000, list(range(10_000))))
    assert luck.shape == (10_000, 1)
    assert 0 <= luck.min() < luck.max() < 1
    counts, _ = np.histogram(luck, bins=20, range=(0, 1))
    assert ((counts - 500) ** 2 / 500).sum() < 19 + 5 * np.sqrt(2 * 19)


def test_greedy_takes_the_best_token_whatever_the_filters() -> None:
    best = int(LOGITS.argmax())
    filters = {"top_k": 1, "top_p": 0.1, "min_p": 1.0, "xtc_probability": 1.0, "typical_p": 0.1}
    for sampling in (Sampling(), Sampling(seed=9, **filters)):  # type: ignore[arg-type]
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
    wide = [
        Sampling(temperature=1e30),
        Sampling(temperature=1.0, top_k=2**31 - 1),
        Sampling(temperature=1.0, typical_p=1e-30),
        Sampling(temperature=1.0, xtc_probability=1.0, xtc_threshold=0.0),
        Sampling(temperature=1.0, xtc_probability=1.0, xtc_threshold=1.0),
        Sampling(temperature=1e-30, top_k=1, xtc_probability=1.0, xtc_threshold=1e-9),
    ]
    assert all(0 <= token < VOCABULARY for token in _sample(wide, list(range(len(wide)))))


def test_the_end_of_sequence_is_closed_until_it_opens() -> None:
    best = int(LOGITS.argmax())
    rows = [Sampling(), Sampling(temperature=1.0, seed=4), Sampling(), Sampling()]
    sampler = BatchSampler(
        rows, [NOTHING] * 4, VOCABULARY, end_ids=[best], closed=[1 << 62, 1 << 62, 0, 20]
    )
    for step in range(30):
        logits = mx.array(np.tile(LOGITS, (4, 1)))
        tokens = np.array(sampler(logits, mx.zeros(4, dtype=mx.uint32), [step] * 4))
        assert tokens[0] != best
        assert tokens[1] != best
        assert tokens[2] == best
        assert (tokens[3] == best) == (step >= 20)


def test_ties_at_the_cut_keep_exactly_top_k() -> None:
    flat = np.zeros((1, VOCABULARY), dtype=np.float32)
    drawn = {_sample([Sampling(temperature=1.0, top_k=4)], [step], flat)[0] for step in range(300)}
    assert len(drawn) == 4


def test_a_mask_binds_its_rows_and_no_other() -> None:
    rows = [Sampling(), Sampling(), Sampling(temperature=1.0, seed=1)]
    sampler = BatchSampler(rows, [NOTHING] * 3, VOCABULARY, constrained=[1, 2])
    worst = int(LOGITS.argmin())
    mask = np.zeros((2, 2), dtype=np.uint32)
    mask[0, worst // 32] = 1 << (worst % 32)
    mask[1, 39 // 32] = 1 << (39 % 32)
    logits = mx.array(np.tile(LOGITS, (3, 1)))
    tokens = sampler(logits, mx.zeros(3, dtype=mx.uint32), [0, 0, 0], mask)
    assert tokens.tolist() == [int(LOGITS.argmax()), worst, 39]
