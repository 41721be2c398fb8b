"""EmbeddingGemma's forward pass, with the sliding window of its local layers.

mlx-vlm 0.7.10 uses the mask of the global layers in all layers, so for texts longer than the window
its vectors differ from those of the reference, transformers' Gemma3TextModel with
`use_bidirectional_attention`. There, a token in a local layer attends to tokens less than half a
window plus one away.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from backend.engine.embedding.vectors import PaddedRows


def bidirectional_states(model: Any, rows: PaddedRows) -> mx.array:
    """Hidden states of the tokens, (rows, longest, hidden), from mlx-vlm's gemma3_embedding."""
    config, inner = model.config, model.model
    states = inner.embed_tokens(rows.ids) * config.hidden_size**0.5
    everywhere = rows.mask.astype(mx.bool_)[:, None, None, :]
    place = mx.arange(rows.ids.shape[1])
    reach = config.sliding_window // 2 + 1
    nearby = everywhere & (mx.abs(place[:, None] - place[None, :]) < reach)[None, None]
    # In a local layer, padding may attend to nothing: its softmax is NaN, but it is never used.
    nearby = nearby | (rows.mask == 0)[:, None, :, None]
    for index, layer in enumerate(inner.layers):
        is_global = (index + 1) % config.sliding_window_pattern == 0
        states = layer(states, everywhere if is_global else nearby, None)
    normed: mx.array = inner.norm(states)
    return normed
