"""The samplers against their definitions in NumPy, and each row alone against itself in a batch."""

from __future__ import annotations

from dataclasses import replace
from shutil import which

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.engine import device
from backend.engine.request import WHOLE, Sampling
from backend.engine.sampling.penalties import Past
from backend.engine.sampling.sampler import BatchSampler, row_keys, row_uniforms
from tests.engine.compiling import compiled
from tests.engine.filter_definitions import kept

VOCABULARY = 40
DRAWS = 4000
LOGITS = np.random.default_rng(5).normal(0, 2, VOCABULARY).astype(np.float32)
NOTHING = Past((), 1, 100)


def _sample(rows: list[Sampling], steps: list[int], logits: np.ndarray | None = None) -> list[int]:
    batch = np.tile(LOGITS, (len(rows), 1)) if logits is None else logits
    sampler = BatchSampler(rows, [NOTHING] * len(rows), batch.shape[1])
    tokens = sampler(mx.array(batch), mx.zeros(len(rows), dtype=mx.uint32), steps)
    return [int(token) for token in np.array(tokens)]


def _expected(sampling: Sampling) -> np.ndarray:
    rest = _drawn(kept(LOGITS, replace(sampling, xtc_probability=0.0)), sampling)
    chance = sampling.xtc_probability
    return (1 - chance) * rest + chance * _drawn(kept(LOGITS, sampling), sampling)


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
    expected = _expected(sampling)
    assert counts[expected == 0].sum() == 0
    assert _chi(counts, expected) < 5


def _chi(counts: np.ndarray, shares: np.ndarray) -> float:
    """Deviations of the counts from the shares, in standard deviations of chi-square.

    Categories with fewer than 5 expected draws are merged.
    """
    expected = shares * counts.sum()
    likely = expected >= 5
    seen, meant = counts[likely], expected[likely]
    if expected[~likely].sum() >= 1:
        seen, meant = (
            np.append(seen, counts[~likely].sum()),
            np.append(meant, expected[~likely].sum()),
        )
    freedom = max(len(seen) - 1, 1)
    return float((((seen - meant) ** 2 / meant).sum() - freedom) / np.sqrt(2 * freedom))


def _draws(sampling: Sampling, logits: np.ndarray, count: int, first: int = 0) -> np.ndarray:
    """`count` draws from the same logits, at successive steps from `first` on."""
    rows = [sampling] * 500
    drawn = [
        _sample(rows, list(range(at, at + 500)), np.tile(logits, (500, 1)))
        for at in range(first, first + count, 500)
    ]
    return np.array(drawn).reshape(-1)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, seed=1),
        Sampling(temperature=0.5, seed=2),
        Sampling(temperature=1.0, top_k=100, seed=3),
        Sampling(temperature=1.0, top_p=0.5, seed=4),
        Sampling(temperature=1.0, top_p=0.9, seed=5),
    ],
    ids=str,
)
def test_draws_from_a_large_vocabulary_follow_the_distribution(sampling: Sampling) -> None:
    """The 2,500 tokens are in several blocks; top_p 0.9 keeps more of them than it first sorts."""
    logits = np.random.default_rng(6).normal(0, 1, 2500).astype(np.float32)
    keep = kept(logits, sampling)
    assert (keep.sum() > 1024) == (sampling.top_p in (0.9, 1.0) and not sampling.top_k)
    weights = np.where(keep, np.exp(logits.astype(np.float64) / sampling.temperature), 0)
    counts = np.bincount(_draws(sampling, logits, 5000), minlength=2500)
    assert counts[weights == 0].sum() == 0
    assert abs(_chi(counts, weights / weights.sum())) < 5


def test_draws_are_independent() -> None:
    """Successive steps and neighbouring seeds are independent too: all pairs are equally likely.

    The four tokens are two neighbours in one block, and two from other blocks.
    """
    logits = np.full(1000, -np.inf, dtype=np.float32)
    tokens = [300, 301, 700, 10]
    logits[tokens] = 0
    place = {token: at for at, token in enumerate(tokens)}
    steps = [place[token] for token in _draws(Sampling(temperature=1.0, seed=8), logits, 8000)]
    others = [place[token] for token in _draws(Sampling(temperature=1.0, seed=9), logits, 8000)]
    even = np.full(16, 1 / 16)
    for left, right in ((steps[::2], steps[1::2]), (steps, others)):
        pairs = np.array(left) * 4 + np.array(right)
        assert abs(_chi(np.bincount(pairs, minlength=16), even)) < 5


def test_waiting_for_the_device_does_not_change_the_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = np.random.default_rng(7).normal(0, 2, (64, 3000)).astype(np.float32)
    logits[::2] *= 0.1
    rows = [Sampling(temperature=1.0, top_p=0.9, seed=at) for at in range(64)]
    waited = _sample(rows, [0] * 64, logits)
    monkeypatch.setattr(device, "may_wait_within_a_step", lambda: False)
    assert _sample(rows, [0] * 64, logits) == waited


@pytest.mark.skipif(which("c++") is None, reason="on a CPU, MLX compiles with a C++ compiler")
def test_compiled_functions_draw_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "may_wait_within_a_step", lambda: False)
    logits = np.random.default_rng(8).normal(0, 2, (8, 3000)).astype(np.float32)
    settings = {"top_p": 0.9, "min_p": 0.01, "xtc_probability": 0.5}
    rows = [Sampling(temperature=1.0, seed=at, **settings) for at in range(8)]  # type: ignore[arg-type]
    steps = range(20)
    plain = [_sample(rows, [step] * 8, logits) for step in steps]
    with compiled():
        assert [_sample(rows, [step] * 8, logits) for step in steps] == plain


def test_a_sole_candidate_is_drawn_whatever_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A uniform number of 0 is noise of minus infinity."""
    monkeypatch.setattr(
        mx.random, "gumbel", lambda shape, key: mx.full(shape, float("-inf"), dtype=mx.float32)
    )
    logits = np.random.default_rng(9).normal(0, 2, (1, 900)).astype(np.float32)
    sampling = Sampling(temperature=1.0, top_k=1)
    assert _sample([sampling], [0], logits) == [int(logits.argmax())]


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


@given(
    st.lists(MIXED, min_size=1, max_size=6),
    st.sampled_from([VOCABULARY, 3000]),
    st.sampled_from([0.1, 2.0, 6.0]),
    st.integers(0, 2**32 - 1),
)
def test_a_row_chooses_the_same_tokens_alone_and_in_a_batch(
    rows: list[Sampling], vocabulary: int, spread: float, seed: int
) -> None:
    """The penalties' counts are rebuilt half-way, as they are when other rows join and leave.

    With a small spread of logits, top_p keeps more of the large vocabulary than it first sorts.
    """
    rng = np.random.default_rng(seed)
    histories = [rng.integers(0, vocabulary, 4).tolist() for _ in rows]
    together: BatchSampler | None = None
    single: list[BatchSampler | None] = [None] * len(rows)
    for step in range(6):
        if together is None or step == 3:
            together = BatchSampler(
                rows, [Past(tokens[:-1], 4, 50) for tokens in histories], vocabulary
            )
        logits = rng.normal(0, spread, (len(rows), vocabulary)).astype(np.float32)
        fed = mx.array([tokens[-1] for tokens in histories], dtype=mx.uint32)
        chosen = together(mx.array(logits), fed, [step] * len(rows)).tolist()
        for at, row in enumerate(rows):
            alone = single[at] or BatchSampler([row], [Past(histories[at][:-1], 4, 50)], vocabulary)
            single[at] = alone
            own = alone(mx.array(logits[at : at + 1]), fed[at : at + 1], [step]).tolist()
            assert own == [chosen[at]]  # type: ignore[index]
        for tokens, token in zip(histories, chosen, strict=True):  # type: ignore[arg-type]
            tokens.append(token)


def test_later_steps_of_a_sampler_draw_the_same_tokens_as_new_samplers() -> None:
    rows = [
        Sampling(temperature=1.0, seed=3),
        Sampling(temperature=2.0, xtc_probability=0.5, xtc_threshold=0.05, seed=4),
    ]
    flat = np.zeros((2, VOCABULARY), dtype=np.float32)
    fed = mx.array([0, 0], dtype=mx.uint32)
    sampler = BatchSampler(rows, [NOTHING] * 2, VOCABULARY)
    # more than are made together, and then a return to an earlier step
    steps = [[at, 7 + at] for at in [*range(40), 5]]
    found = [np.array(sampler(mx.array(flat), fed, step)).tolist() for step in steps]
    assert found == [_sample(rows, step, flat) for step in steps]
    assert len(set(map(tuple, found))) > 20


def test_seed_zero_is_a_seed_and_steps_and_seeds_differ() -> None:
    keys = row_keys([0, 0, 1, -1, 2**63], [0, 1, 0, 0, 0])
    assert len({tuple(key) for key in keys.tolist()}) == 5
    assert row_keys([0], [0]).tolist() == row_keys([0], [0]).tolist()


def test_row_uniforms_are_evenly_distributed() -> None:
    uniforms = row_uniforms(row_keys([7] * 10_000, list(range(10_000))))
    assert uniforms.shape == (10_000, 1)
    assert 0 <= uniforms.min() < uniforms.max() < 1
    counts, _ = np.histogram(uniforms, bins=20, range=(0, 1))
    assert ((counts - 500) ** 2 / 500).sum() < 19 + 5 * np.sqrt(2 * 19)


def test_greedy_takes_the_best_token_whatever_the_filters() -> None:
    best = int(LOGITS.argmax())
    narrow = {"top_k": 1, "top_p": 0.1, "min_p": 1.0, "xtc_probability": 1.0, "typical_p": 0.1}
    for sampling in (Sampling(), Sampling(seed=9, **narrow)):  # type: ignore[arg-type]
        assert _sample([sampling], [0]) == [best]


def test_extreme_values_are_harmless() -> None:
    """In another server, one such value made every later evaluation in the process fail."""
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


def test_excluded_tokens_do_not_count_as_likely() -> None:
    """With a threshold of 0 every token is likely; XTC must leave the last one of top_k's."""
    third = int(np.argsort(-LOGITS)[2])
    sampling = Sampling(temperature=1.0, top_k=3, xtc_probability=1.0, xtc_threshold=0.0)
    assert _sample([sampling] * 20, list(range(20))) == [third] * 20


def test_the_end_of_sequence_is_excluded_until_it_is_allowed() -> None:
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


def test_ties_at_the_threshold_keep_exactly_top_k() -> None:
    flat = np.zeros((1, VOCABULARY), dtype=np.float32)
    drawn = {_sample([Sampling(temperature=1.0, top_k=4)], [step], flat)[0] for step in range(300)}
    assert len(drawn) == 4


def test_a_mask_applies_only_to_its_rows() -> None:
    rows = [Sampling(), Sampling(), Sampling(temperature=1.0, seed=1)]
    sampler = BatchSampler(rows, [NOTHING] * 3, VOCABULARY, constrained=[1, 2])
    worst = int(LOGITS.argmin())
    mask = np.zeros((2, 2), dtype=np.uint32)
    mask[0, worst // 32] = 1 << (worst % 32)
    mask[1, 39 // 32] = 1 << (39 % 32)
    logits = mx.array(np.tile(LOGITS, (3, 1)))
    tokens = sampler(logits, mx.zeros(3, dtype=mx.uint32), [0, 0, 0], mask)
    assert tokens.tolist() == [int(LOGITS.argmax()), worst, 39]
