"""Positions with more axes than three (HunyuanOCR's xdrope), for each token of each row.

mlx-vlm 0.7.10 uses them only in a pass that begins a prompt, and otherwise numbers the tokens of
all rows from the end of one row's KV (`hunyuan_vl/language.py`). Here every pass has them.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from backend.engine.patching import patch


def place_rows(language: Any) -> int:
    """Patch a language part to take `position_ids`, [axes, rows, tokens], in every pass.

    Returns the number of axes, or 0 for other families.
    """
    scaling = getattr(getattr(language, "args", None), "rope_scaling", None) or {}
    sections = scaling.get("xdrope_section")
    if sections is None or not hasattr(language, "get_xdrope_input_positions"):
        return 0
    patch(language, _call_language)
    for layer in language.model.layers:
        attention = layer.self_attn
        patch(attention, _attend)
        attention.sections = [size for _ in range(2) for size in sections]
    return len(sections)


def _call_language(
    _own: Any,
    language: Any,
    inputs: mx.array,
    inputs_embeds: mx.array | None = None,
    mask: Any = None,
    cache: Any = None,
    position_ids: mx.array | None = None,
    **_: Any,
) -> mx.array:
    out = language.model(inputs, inputs_embeds, mask, cache, position_ids)
    tied = language.args.tie_word_embeddings
    head = language.model.embed_tokens.as_linear if tied else language.lm_head
    logits: mx.array = head(out)
    return logits


def _attend(
    _own: Any, attention: Any, x: mx.array, mask: Any, cache: Any, positions: mx.array
) -> mx.array:
    from mlx_vlm.models.base import scaled_dot_product_attention
    from mlx_vlm.models.rope_utils import rotate_half

    rows, tokens, _ = x.shape

    def heads(projected: mx.array) -> mx.array:
        return projected.reshape(rows, tokens, -1, attention.head_dim).transpose(0, 2, 1, 3)

    def turned(array: mx.array) -> mx.array:
        whole = array.astype(mx.float32)
        result: mx.array = (whole * cosine + rotate_half(whole) * sine).astype(array.dtype)
        return result

    angles = positions[..., None].astype(mx.float32) * attention.rotary_emb._inv_freq
    angles = mx.concatenate([angles, angles], axis=-1)
    ends = [sum(attention.sections[: at + 1]) for at in range(len(attention.sections) - 1)]
    parts = mx.split(angles, ends, axis=-1)
    angles = mx.concatenate([part[at % len(positions)] for at, part in enumerate(parts)], axis=-1)
    # mlx-vlm rounds both to the type of the weights.
    cosine, sine = (turn(angles)[:, None].astype(x.dtype) for turn in (mx.cos, mx.sin))
    queries, keys, values = (
        heads(project(x)) for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    queries, keys = turned(queries), turned(keys)
    if attention.config.use_qk_norm:
        queries, keys = attention.query_layernorm(queries), attention.key_layernorm(keys)
    keys, values = cache.update_and_fetch(keys, values)
    attended = scaled_dot_product_attention(
        queries, keys, values, cache=cache, scale=attention.scale, mask=mask
    )
    joined = attended.transpose(0, 2, 1, 3).reshape(rows, tokens, -1)
    projected: mx.array = attention.o_proj(joined)
    return projected
