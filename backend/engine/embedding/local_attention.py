"""Families whose local layers attend within a window: ModernBERT and Gemma 3.

mlx-vlm 0.7.10 computes them otherwise than the reference, transformers:

- In float16 its mask of ModernBERT is -inf, so that padding beyond the window attends to nothing.
  The softmax of nothing is NaN, and NaN in a padded column reaches the tokens of its row.
- It uses the mask of EmbeddingGemma's global layers in all layers of all Gemma 3 models, and
  ignores that those without `use_bidirectional_attention` are causal.
- It approximates ModernBERT's GELU.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from backend.engine.embedding.vectors import PaddedRows


def attention_masks(
    tokens: mx.array, reach: int, *, causal: bool = False
) -> tuple[mx.array, mx.array]:
    """Return the boolean masks of global and local layers, (rows, 1, 1 or longest, longest).

    tokens: (rows, longest), 1 for tokens and 0 for padding. reach: a token of a local layer attends
    to the tokens that are less than this far away. causal: whether it attends to earlier ones only.
    In local layers padding attends to everything, so that it stays finite.
    """
    place = mx.arange(tokens.shape[1])
    distance = place[:, None] - place[None, :]
    everywhere = tokens.astype(mx.bool_)[:, None, None, :]
    if causal:
        everywhere = everywhere & (distance >= 0)
    nearby = everywhere & (mx.abs(distance) < reach)
    return everywhere, nearby | (tokens == 0)[:, None, :, None]


def gemma_states(model: Any, rows: PaddedRows, *, causal: bool) -> mx.array:
    """Compute the tokens' states, (rows, longest, hidden), with mlx-vlm's gemma3_embedding."""
    config, inner = model.config, model.model
    states = inner.embed_tokens(rows.ids) * config.hidden_size**0.5
    reach = config.sliding_window if causal else config.sliding_window // 2 + 1
    everywhere, nearby = attention_masks(rows.mask, reach, causal=causal)
    for index, layer in enumerate(inner.layers):
        is_global = (index + 1) % config.sliding_window_pattern == 0
        states = layer(states, everywhere if is_global else nearby, None)
    normed: mx.array = inner.norm(states)
    return normed


def mend_modernbert(model: Any) -> None:
    """Give mlx-vlm's ModernBERT masks under which padding stays finite, and its exact GELU."""
    from mlx.nn.layers.activations import GELU

    model._masks = lambda tokens, _: attention_masks(tokens, model.local_attention // 2 + 1)
    for layer in model.layers:
        layer.mlp.act = GELU()
    if hasattr(model, "head"):
        model.head.act = GELU()
