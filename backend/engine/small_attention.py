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
        from backend.engine.caching.quantized_kv import attend

        return attend(q, k, v, scale, mask, bits=0, sinks=sinks)
