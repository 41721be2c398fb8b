"""Attention of passes with few tokens, on devices that prepare a kernel for each new shape.

On CUDA, cuDNN plans the attention of each pair of query and key lengths at its first use, which
takes 60 ms (docs/hardware.md). Almost every turn of a chat has a new pair, and so has a step that
checks draft tokens. For few tokens, attention by plain operations takes far less time than a plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import mlx.core as mx

# Maximum number of scores of a layer for plain operations. They move about ten bytes for each
# score, so on an H100 all layers of a model with 8 billion parameters take 3 ms longer than with a
# plan.
MOST_SCORES = 1 << 24
COPIES = 3  # arrays of scores that exist at the same time

Attention: TypeAlias = Callable[..., mx.array]  # mx.fast.scaled_dot_product_attention


class SmallAttention:
    """`mx.fast.scaled_dot_product_attention`, with plain operations for few tokens.

    A single token is left to MLX's function, whose kernels for decode steps depend only on the size
    of the KV's buffers.
    attend: MLX's function.
    most: maximum number of scores for plain operations.
    """

    def __init__(self, attend: Attention, most: int = MOST_SCORES) -> None:
        self.attend = attend
        self._most = most

    def __call__(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        *,
        scale: float,
        mask: mx.array | str | None = None,
        sinks: mx.array | None = None,
        **rest: Any,
    ) -> mx.array:
        """Return the attention, with the arguments of MLX's function.

        q: [rows, heads, tokens, size].
        k, v: [rows, KV heads, columns, size].
        """
        rows, heads, tokens, _ = q.shape
        if rest or tokens == 1 or rows * heads * tokens * k.shape[2] > self._most:
            return self.attend(q, k, v, scale=scale, mask=mask, sinks=sinks, **rest)
        return _plain(q, k, v, scale, mask, sinks)


def _plain(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> mx.array:
    rows, heads, tokens, size = q.shape
    kv_heads, columns = k.shape[1], k.shape[2]
    grouped = (q * scale).reshape(rows, kv_heads, heads // kv_heads, tokens, size)
    scores = grouped @ mx.expand_dims(k, 2).swapaxes(-1, -2)
    if isinstance(mask, str):  # "causal"
        mask = mx.arange(columns - tokens, columns)[:, None] >= mx.arange(columns)
    if mask is not None:
        scores = masked(scores, mask)
    if sinks is not None:
        shape = (rows, kv_heads, heads // kv_heads, tokens, 1)
        own_sinks = sinks.astype(scores.dtype).reshape(1, kv_heads, -1, 1, 1)
        scores = mx.concatenate([mx.broadcast_to(own_sinks, shape), scores], axis=-1)
    weights = mx.softmax(scores, axis=-1, precise=True)
    if sinks is not None:
        weights = weights[..., 1:]
    return (weights @ mx.expand_dims(v, 2)).reshape(rows, heads, tokens, v.shape[3])


def masked(scores: mx.array, mask: mx.array) -> mx.array:
    """Return the scores, with the least number where the mask hides a column.

    scores: [rows, KV heads, heads that share one, tokens, columns].
    mask: booleans or numbers to add, [tokens, columns], or [rows, heads or 1, tokens, columns].
    """
    if mask.ndim == 4:
        sharing = scores.shape[2] if mask.shape[1] > 1 else 1
        mask = mask.reshape(mask.shape[0], -1, sharing, *mask.shape[2:])
    if mask.dtype == mx.bool_:
        return mx.where(mask, scores, mx.finfo(scores.dtype).min)
    return scores + mask
