"""Runs Gemma 3n's language part by mlx-lm's code, with the weights that mlx-vlm has loaded.

mlx-vlm 0.7.10 does not scale the embeddings of a prompt's text, and rotates the queries of layers
without KV of their own by positions that depend on how a prompt is cut into passes
(`gemma3n/language.py`). mlx-lm's classes read the same attributes, and two numbers besides.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from backend.engine.patching import patch


def use_mlx_lm(language: Any, model_type: str) -> None:
    """Patch a language part; does nothing for other families."""
    if model_type != "gemma3n":
        return
    from mlx_lm.models import gemma3n

    text = language.model
    text.__class__ = gemma3n.LanguageModel
    for name in ("sliding_window", "final_logit_softcapping"):
        setattr(text, name, getattr(text.config, name))
    for layer in text.layers:
        layer.__class__ = gemma3n.Gemma3nDecoderLayer
        layer.self_attn.__class__ = gemma3n.Gemma3nAttention
    scale = text.hidden_size**0.5
    patch(text.embed_tokens, lambda own, embedding, tokens: own(embedding, tokens) * scale)
    patch(language, _logits)


def _logits(
    _own: Any,
    language: Any,
    inputs: mx.array,
    inputs_embeds: mx.array | None = None,
    cache: Any = None,
    **_: Any,
) -> mx.array:
    text = language.model
    if inputs_embeds is None:  # mlx-lm would scale them again
        inputs_embeds = text.embed_tokens(inputs)
    logits: mx.array = text(inputs, cache, inputs_embeds)
    return logits
