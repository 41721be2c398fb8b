"""Attention to the tokens of sequences in a window, each compared with the sequence alone."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm.models.base import create_causal_mask

from backend.engine.caching.layer_kv import WindowKV
from tests.long import examples

_ROWS, _HEADS, _SIZE = 2, 2, 4


class _Texts:
    """Sequences with random keys, values and queries, which share a layer's KV."""

    def __init__(self, max_size: int, window: int) -> None:
        self.window = window
        self.kv = WindowKV(max_size, [0] * _ROWS)
        self.known = [mx.zeros((2, _HEADS, 0, _SIZE)) for _ in range(_ROWS)]

    def feed(self, counts: list[int], removed: list[int]) -> None:
        """Run a pass of `counts` tokens, of which the last `removed` are then taken back."""
        width = max(counts)
        fresh = mx.random.normal((3, len(counts), _HEADS, width, _SIZE))
        queries, keys, values = fresh
        mask = self.kv.make_mask(width, window_size=self.window)
        found = _attend(queries, *self.kv.update_and_fetch(keys, values), mask)
        for row, count in enumerate(counts):
            known = mx.concatenate([self.known[row], fresh[1:, row, :, :count]], axis=2)
            own = slice(row, row + 1)
            before = known.shape[2] - count
            alone = create_causal_mask(count, before, window_size=self.window)
            expected = _attend(queries[own, :, :count], known[:1], known[1:], alone)
            np.testing.assert_allclose(found[own, :, :count], expected, atol=1e-4)
            self.known[row] = known[:, :, : known.shape[2] - removed[row]]
        if width > 1:
            pairs = zip(counts, removed, strict=True)
            self.kv.drop([width - count + gone for count, gone in pairs])


def _attend(
    queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | str | None
) -> mx.array:
    attend = mx.fast.scaled_dot_product_attention
    return attend(queries, keys, values, scale=1.0, mask=mask)


# For each sequence, the tokens of a pass, and how many of the last are taken back at most.
_PASS = st.tuples(*[st.tuples(st.integers(1, 30) | st.integers(1, 3), st.integers(0, 30))] * _ROWS)


@settings(max_examples=examples(120))
@example(size=16, window=4, passes=[((5, 0), (2, 0)), ((3, 0), (3, 0))])
@given(st.integers(2, 20), st.integers(1, 20), st.lists(_PASS, min_size=1, max_size=6))
def test_each_sequence_sees_its_own_latest_tokens(
    size: int, window: int, passes: list[tuple[tuple[int, int], ...]]
) -> None:
    """In passes of any lengths, some of whose tokens are taken back, before and after the wrap.

    size: tokens that are kept. window: that of the mask, which may be smaller.
    """
    texts = _Texts(size, min(window, size))
    for one in passes:
        counts = [count for count, _ in one]
        texts.feed(counts, [min(gone, count - 1) for count, gone in one])
        texts.feed([1] * _ROWS, [0] * _ROWS)
