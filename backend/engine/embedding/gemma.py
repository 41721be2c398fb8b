"""EmbeddingGemma's layers, with the window that its local layers have.

mlx-vlm 0.7.10 gives every layer the mask of the global ones, so that texts longer than the window
come out differently from the reference (transformers' Gemma3TextModel with
`use_bidirectional_attention`, where a token of a local layer sees those less than half a window
plus one away).
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from backend.engine.embedding.vectors import PaddedRows


def bidirectional_states(model: Any, rows: PaddedRows) -> mx.array:
    """Vectors of the tokens, (rows, longest, hidden), from mlx-vlm's gemma3_embedding."""
    config, inner = model.config, model.model
    states = inner.embed_tokens(rows.ids) * config.hidden_size**0.5
    everywhere = rows.mask.astype(mx.bool_)[:, None, None, :]
    place = mx.arange(rows.ids.shape[1])
    reach = config.sliding_window // 2 + 1
    nearby = everywhere & (mx.abs(place[:, None] - place[None, :]) < reach)[None, None]
    # Rows of padding see nothing in a local layer: their softmax is void, and is never read.
    nearby = nearby | (rows.mask == 0)[:, None, :, None]
    for index, layer in enumerate(inner.layers):
        is_global = (index + 1) % config.sliding_window_pattern == 0
        states = layer(states, everywhere if is_global else nearby, None)
    normed: mx.array = inner.norm(states)
    return normed
