"""Scales queries by position (Mistral's text models) for each row of a batch.

mlx-vlm 0.7.10 computes the scale once for all rows, from the position of the first
(`mistral3/language.py`, `mistral4/language.py`). That is wrong when some rows are shorter and some
longer than the model's original context. Here each layer scales every row by its own position.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from backend.engine.patching import patch


def scale_by_row(language: Any) -> None:
    """Patch the layers of a language part to scale each row; does nothing if it has no scale."""
    rope = getattr(getattr(language, "config", None), "rope_parameters", None) or {}
    beta = rope.get("llama_4_scaling_beta")
    if beta is None:
        return
    length = rope["original_max_position_embeddings"]

    def call(
        own: Any, layer: Any, x: mx.array, scale: mx.array, mask: Any = None, cache: Any = None
    ) -> Any:
        offset = getattr(cache, "offset", 0)
        if isinstance(offset, mx.array) and offset.ndim:
            positions = offset[:, None] + mx.arange(x.shape[1])
            scale = 1 + beta * mx.log(1 + mx.floor(positions / length))
            scale = scale[:, None, :, None].astype(x.dtype)
        return own(layer, x, scale, mask, cache=cache)

    for layer in language.model.layers:
        patch(layer, call)
