"""Gemma 3's forward pass for embeddings, with the sliding window of its local layers.

mlx-vlm 0.7.10 uses the mask of EmbeddingGemma's global layers in all layers of all models. Its
vectors differ from those of the reference, transformers' Gemma3TextModel, for texts longer than the
window and for models without `use_bidirectional_attention`. In the reference, a token in a local
layer attends to the tokens less than half a window plus one away on both sides; without that field,
to the earlier tokens in its window.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from backend.engine.embedding.vectors import PaddedRows


def gemma_states(model: Any, rows: PaddedRows, *, causal: bool) -> mx.array:
    """Hidden states of the tokens, (rows, longest, hidden), from mlx-vlm's gemma3_embedding."""
    config, inner = model.config, model.model
    states = inner.embed_tokens(rows.ids) * config.hidden_size**0.5
    everywhere = rows.mask.astype(mx.bool_)[:, None, None, :]
    place = mx.arange(rows.ids.shape[1])
    distance = place[:, None] - place[None, :]
    reach = config.sliding_window if causal else config.sliding_window // 2 + 1
    if causal:
        everywhere = everywhere & (distance >= 0)
    nearby = everywhere & (mx.abs(distance) < reach)
    # In a local layer, padding may attend to nothing: its softmax is NaN, but it is never used.
    nearby = nearby | (rows.mask == 0)[:, None, :, None]
    for index, layer in enumerate(inner.layers):
        is_global = (index + 1) % config.sliding_window_pattern == 0
        states = layer(states, everywhere if is_global else nearby, None)
    normed: mx.array = inner.norm(states)
    return normed
