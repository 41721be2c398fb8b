"""Trains an EAGLE-3 and a DFlash drafter for the tiny text model, in about a minute.

That is too short for good guesses, but enough to measure what guesses cost and gain.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

_SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
}
_EAGLE = _SIZES | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "draft_vocab_size": 511,
}
_DFLASH = _SIZES | {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 1,
    "block_size": 6,
    "num_target_layers": 4,
    "dflash_config": {"mask_token_id": 0, "target_layer_ids": [0, 1, 2]},
}
FORMS = {"EAGLE-3": _EAGLE, "DFlash": _DFLASH}

_STEPS, _TEXTS, _LENGTH, _RATE = 250, 8, 48, 3e-3


def train(model: Path, form: str, folder: Path) -> None:
    """Train a drafter of the kind `form` for the model, and write it to `folder`."""
    import mlx.core as mx
    import mlx_lm

    from tests.engine.drafting.drafter_training import write_drafter
    from tests.models import tiny_dialogues
    from tests.models.tiny_batches import encode

    network, tokenizer = mlx_lm.load(str(model))[:2]
    network.set_dtype(mx.float32)
    network.freeze()

    def text(dice: random.Random) -> list[int]:
        """A part of a dialogue; at most half of it comes before the answer."""
        while True:
            example = encode(tokenizer, tiny_dialogues.draw(dice, tiny_dialogues.Mix()), dice)
            tokens = example.tokens
            if len(tokens) > _LENGTH:
                last = len(tokens) - _LENGTH
                start = dice.randint(min(max(example.answer_from - _LENGTH // 2, 0), last), last)
                return tokens[start : start + _LENGTH]

    write_drafter(
        folder,
        network,
        FORMS[form],
        lambda dice: [text(dice) for _ in range(_TEXTS)],
        _STEPS,
        _RATE,
    )
