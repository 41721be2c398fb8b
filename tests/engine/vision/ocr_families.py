"""Small checkpoints of DeepSeek-OCR and related families, in their own file format.

mlx-vlm fixes the size of their first tower in its code; `small_tower` makes it small enough to
compute in a second.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.engine.vision.checkpoint_files import (
    EXPERTS,
    LATENT,
    TEXT,
    add_tokens,
    begin_with,
    write,
    write_config,
)

_WIDTH = 1024  # between the towers, in mlx-vlm's code


def write_deepseekocr(path: Path) -> None:
    """Two towers, one after the other; its processor removes the last token of a prompt."""
    _write(path, "deepseekocr", {})
    begin_with(path, "<|endoftext|>")  # the token 0, as in mlx-vlm's code


def write_unlimited_ocr(path: Path) -> None:
    """Like deepseekocr, but each token of an answer sees the prompt and only the latest tokens."""
    _write(path, "unlimited-ocr", {"sliding_window_size": 24})
    begin_with(path, "<|endoftext|>")  # the token 0, as in mlx-vlm's code


def write_deepseek_vl_v2(path: Path) -> None:
    """Tiles of an image beside the whole, and a processor that begins prompts with BOS."""
    begin = "<｜begin▁of▁sentence｜>"
    marks = ["<image>", begin, "<｜▁pad▁｜>", "<|ref|>", "<|/ref|>", "<|det|>", "<|/det|>"]
    ids = add_tokens(path, [*marks, "<|grounding|>", "<|User|>", "<|Assistant|>"], "<image>\n")
    begin_with(path, begin)
    (path / "preprocessor_config.json").unlink()
    size = max(ids.values()) + 1
    write_config(path, ids, {
        "model_type": "deepseek_vl_v2",
        "image_token_index": ids["<image>"],
        "pad_id": 0,
        "language_config": TEXT | LATENT | EXPERTS | {
            "model_type": "deepseek_v2",
            "vocab_size": size,
            "q_lora_rank": None,
        },
        "vision_config": {
            "model_type": "vision",
            "layers": 2,
            "width": 32,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "image_size": 56,
            "patch_size": 14,
        },
        "projector_config": {"input_dim": 32, "n_embed": TEXT["hidden_size"]},
    })  # fmt: skip
    write(path, "processor_config.json", {
        "processor_class": "DeepseekVLV2Processor",
        "candidate_resolutions": [[56, 56], [112, 56], [56, 112]],
        "patch_size": 14,
        "downsample_ratio": 2,
        "image_token": "<image>",
    })  # fmt: skip


def small_tower(patch: pytest.MonkeyPatch) -> None:
    from mlx_vlm.models.deepseekocr import deepseekocr

    small = partial(deepseekocr.SAMViTConfig, width=32, layers=2, heads=2, global_attn_indexes=(1,))
    patch.setattr(deepseekocr, "SAMViTConfig", small)


def _write(path: Path, family: str, other: dict[str, int]) -> None:
    marks = ["<image>", "<｜▁pad▁｜>", "<|ref|>", "<|/ref|>", "<|det|>", "<|/det|>"]
    ids = add_tokens(path, [*marks, "<|grounding|>", "<|User|>", "<|Assistant|>"], "<image>\n")
    (path / "preprocessor_config.json").unlink()
    size = max(ids.values()) + 1
    text = (
        TEXT
        | EXPERTS
        | {
            "model_type": "deepseek_v2",
            "vocab_size": size,
            "num_key_value_heads": 4,
            "kv_lora_rank": None,
            "q_lora_rank": None,
            "qk_rope_head_dim": 0,
            "qk_nope_head_dim": 0,
            "v_head_dim": 0,
        }
    )
    write_config(path, ids, {
        "model_type": family,
        "image_token_index": ids["<image>"],
        "pad_id": 0,
        "language_config": text | other,
        "vision_config": {
            "model_type": "vision",
            "layers": 2,
            "hidden_size": _WIDTH,
            "intermediate_size": 64,
            "num_attention_heads": 2,
        },
        "projector_config": {
            "projector_type": "linear",
            "input_dim": 2 * _WIDTH,
            "n_embed": TEXT["hidden_size"],
        },
    })  # fmt: skip
    write(path, "processor_config.json", {
        "processor_class": "DeepseekVLV2Processor",
        "candidate_resolutions": [[1024, 1024]],
        "patch_size": 16,
        "downsample_ratio": 4,
        "image_token": "<image>",
        "pad_token": "<｜▁pad▁｜>",
        "mask_prompt": False,
    })  # fmt: skip
