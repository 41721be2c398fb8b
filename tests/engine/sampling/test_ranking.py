"""The best tokens, compared with a stable sort of the whole vocabulary."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.engine.sampling.filters import best


@given(
    st.integers(1, 3000),
    st.floats(0, 1),
    st.sampled_from([None, 0.5, 4.0]),
    st.floats(0, 0.9),
    st.integers(0, 2**32 - 1),
)
def test_they_equal_those_of_a_stable_sort(
    vocabulary: int, part: float, step: float | None, masked: float, seed: int
) -> None:
    """step: logits are multiples of it, so that many are equal, and zeros have either sign."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (3, vocabulary)).astype(np.float32)
    if step is not None:
        logits = np.round(logits / step) * np.float32(step)
    logits[rng.random(logits.shape) < masked] = -np.inf
    count = max(1, round(part * vocabulary))
    expected = np.argsort(-logits, axis=-1, kind="stable")[:, :count]
    assert np.array_equal(np.array(best(mx.array(logits), count)), expected)


@pytest.mark.parametrize("count", [1, 40, 64, 1024, 20_000])
def test_a_large_vocabulary_that_is_no_multiple_of_a_block(count: int) -> None:
    logits = np.random.default_rng(count).normal(0, 3, (2, 49_157)).astype(np.float32)
    logits = logits.astype(np.float16).astype(np.float32)
    expected = np.argsort(-logits, axis=-1, kind="stable")[:, :count]
    assert np.array_equal(np.array(best(mx.array(logits), count)), expected)


def test_all_best_tokens_may_be_in_one_block() -> None:
    logits = np.zeros((1, 4096), dtype=np.float32)
    logits[0, 4000:4032] = np.arange(32, 0, -1)
    assert best(mx.array(logits), 40).tolist() == [[*range(4000, 4032), *range(8)]]
