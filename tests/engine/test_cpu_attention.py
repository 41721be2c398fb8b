"""Attention on a CPU equals MLX's, also where another softmax computes it."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.engine.cpu_attention import CpuAttention, softmax_library
from backend.engine.device import Device, prepare

LIBRARY = softmax_library()
MLX = getattr(mx.fast.scaled_dot_product_attention, "attend", mx.fast.scaled_dot_product_attention)
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="only x86 with a C compiler")


def _attention(*, may_wait: bool = True) -> CpuAttention:
    assert LIBRARY is not None
    return CpuAttention(MLX, LIBRARY, lambda: may_wait)


def _inputs(*shape: int, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array, mx.array]:
    """Queries, keys and values, as a layer passes them: heads are not in order in memory."""
    rows, heads, kv_heads, tokens, columns, size = shape
    keys = [mx.random.key(number) for number in range(3)]
    lengths = ((tokens, heads), (columns, kv_heads), (columns, kv_heads))
    q, k, v = (
        mx.random.normal((rows, *length, size), dtype, key=key).swapaxes(1, 2) * 3
        for length, key in zip(lengths, keys, strict=True)
    )
    return q, k, v


MASKS = ("none", "causal", "for all rows", "for each row", "for all tokens", "numbers")


def _mask(name: str, rows: int, tokens: int, columns: int) -> mx.array | str | None:
    key = mx.random.key(columns)
    if name in ("none", "causal"):
        return None if name == "none" else name
    if name == "numbers":
        return mx.random.normal((tokens, columns), key=key)
    shape, share = {
        "for all rows": ((tokens, columns), 0.5),
        "for each row": ((rows, 1, tokens, columns), 0.01),
        "for all tokens": ((rows, 1, 1, columns), 0.9),
    }[name]
    return mx.random.uniform(shape=shape, key=key) < share


@given(
    heads=st.sampled_from([(1, 3, 3), (1, 4, 1), (3, 2, 2), (8, 4, 1)]),
    columns=st.integers(1, 700),
    share=st.floats(0, 0.3),
    mask=st.sampled_from(MASKS),
)
@settings(max_examples=100, deadline=None)
def test_it_equals_mlx_for_every_shape_and_mask(
    heads: tuple[int, int, int], columns: int, share: float, mask: str
) -> None:
    rows, kv_heads, group = heads
    tokens = max(round(columns * share), 1)
    # More scores than the limit, so that most calls use the other softmax.
    rows *= -(-40_000 // (rows * group * kv_heads * tokens * columns))
    inputs = _inputs(rows, group * kv_heads, kv_heads, tokens, columns, 16)
    masked = _mask(mask, rows, tokens, columns)
    found = _attention()(*inputs, scale=0.25, mask=masked)
    expected = MLX(*inputs, scale=0.25, mask=masked)
    if isinstance(masked, mx.array) and masked.dtype == mx.bool_:
        # A token that attends to nothing is padding: it only must not become NaN.
        attends = mx.any(masked, -1, keepdims=True)
        expected = mx.where(attends, expected, 0)
    assert mx.abs(found - expected).max() < 1e-4


def test_the_number_of_threads_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, attention = _inputs(1, 8, 2, 200, 500, 32), _attention()
    answers = []
    for threads in (1, 2, 7, 100):
        monkeypatch.setattr(attention, "_threads", lambda threads=threads: threads)
        answers.append(attention(*inputs, scale=0.2, mask="causal"))
    assert all(mx.array_equal(answer, answers[0]) for answer in answers[1:])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scores_that_are_no_numbers_are_not_hidden(value: float) -> None:
    q, k, v = _inputs(1, 4, 4, 64, 256, 8)
    q[0, 1, 5] = value
    found = _attention()(q, k, v, scale=1.0, mask="causal")
    assert mx.isnan(found).sum().item() == 8


def test_other_types_sinks_and_traced_functions_are_left_to_mlx() -> None:
    q, k, v = _inputs(1, 4, 2, 64, 256, 8)
    attention = _attention()

    def attend(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return attention(q, k, v, scale=0.3, mask="causal")

    expected = MLX(q, k, v, scale=0.3, mask="causal")
    for trace in (mx.compile(attend), mx.checkpoint(attend)):
        assert mx.allclose(trace(q, k, v), expected, atol=1e-5)
    gradient = mx.grad(lambda q: attend(q, k, v).sum())(q)
    assert gradient.shape == q.shape
    half = [array.astype(mx.bfloat16) for array in (q, k, v)]
    assert attention(*half, scale=0.3, mask="causal").dtype == mx.bfloat16
    sinks = mx.ones(4)
    found = attention(q, k, v, scale=0.3, mask="causal", sinks=sinks)
    assert mx.array_equal(found, MLX(q, k, v, scale=0.3, mask="causal", sinks=sinks))
    with pytest.raises(ValueError, match="mask"):
        attention(q, k, v, scale=0.3, mask="diagonal")


def test_nothing_waits_within_a_step_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "eval", None)
    _attention(may_wait=False)(*_inputs(1, 4, 2, 64, 256, 8), scale=0.3, mask="causal")


def test_only_a_cpu_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", MLX)
    prepare(Device("metal", "test", 1 << 34, 1 << 34), {})
    assert mx.fast.scaled_dot_product_attention is MLX
    for _ in range(2):
        prepare(Device("cpu", "test", 1 << 34, 1 << 34), {})
        assert getattr(mx.fast.scaled_dot_product_attention, "attend", None) is MLX
