"""Queries that Mistral's text models scale by their position, in batches.

mlx-vlm 0.7.10 computes the scale once for all rows, from the position of the first
(`mistral3/language.py`, `mistral4/language.py`), which is wrong as soon as rows stand on different
sides of the length that the model was first trained at. Here each layer scales every row by its
own position.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx


def scale_by_row(language: Any) -> None:
    """Give the layers of a language part their rows' own scales, where it scales queries at all."""
    rope = getattr(getattr(language, "config", None), "rope_parameters", None) or {}
    beta = rope.get("llama_4_scaling_beta")
    if beta is None:
        return
    length = rope["original_max_position_embeddings"]
    for layer in language.model.layers:
        kind = type(layer)
        layer.__class__ = type(kind.__name__, (kind,), {"__call__": _scaled(kind, beta, length)})


def _scaled(kind: Any, beta: float, length: int) -> Any:
    def call(layer: Any, x: mx.array, scale: mx.array, mask: Any = None, cache: Any = None) -> Any:
        offset = getattr(cache, "offset", 0)
        if isinstance(offset, mx.array) and offset.ndim:
            positions = offset[:, None] + mx.arange(x.shape[1])
            scale = 1 + beta * mx.log(1 + mx.floor(positions / length))
            scale = scale[:, None, :, None].astype(x.dtype)
        return kind.__call__(layer, x, scale, mask, cache=cache)

    return call
