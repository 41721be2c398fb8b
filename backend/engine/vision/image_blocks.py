"""Attention in both directions among the tokens of an image (Gemma 4's larger models).

mlx-vlm 0.7.10 adds it to the causal mask only if a pass has the whole prompt
(`gemma4/language.py`). Here a pass has whole images, and may continue stored KV.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from backend.engine.patching import patch


def mask_blocks_of_pass(language: Any) -> bool:
    """Patch the masks of a language part. Returns whether it has such attention."""
    wanted = getattr(getattr(language, "config", None), "use_bidirectional_attention", None)
    if wanted != "vision":
        return False
    patch(language.model, _open, "_apply_blockwise_bidirectional_overlay")
    return True


def _open(_: Any, text: Any, causal: mx.array, token_types: mx.array) -> mx.array:
    """`causal`, [tokens, keys] or [rows, 1, tokens, keys], with each image's tokens unmasked.

    The last keys are those of the pass.
    """
    blocks = text._block_sequence_ids_for_mask(token_types)
    same = (blocks[:, :, None] == blocks[:, None, :]) & (blocks[:, :, None] >= 0)
    before = causal.shape[-1] - same.shape[-1]
    return causal | mx.pad(same[:, None], [(0, 0), (0, 0), (0, 0), (before, 0)])
