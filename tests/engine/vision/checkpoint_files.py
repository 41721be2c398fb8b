"""The files of a small checkpoint, and parts that the configurations of many families share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PIXELS = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "rescale_factor": 1 / 255,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "resample": 1,
}
SIGLIP = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "patch_size": 14,
    "image_size": 56,
}
TEXT = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
}
"""Attention of DeepSeek's kind, which stores latent vectors."""
EXPERTS = {
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
MOONVIT = {
    "model_type": "moonvit",
    "depth": 2,
    "embed_dim": 32,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 64,
    "init_pos_emb_height": 8,
    "init_pos_emb_width": 8,
}
QWEN_MARKER = "<|vision_start|><|image_pad|><|vision_end|>"


def add_tokens(path: Path, texts: list[str], marker: str) -> dict[str, int]:
    """Add control tokens to the tokenizer, and one of them to the template; returns their ids."""
    tokenizer = read(path, "tokenizer.json")
    known = [token["id"] for token in tokenizer["added_tokens"]]
    first = max([*known, *tokenizer["model"]["vocab"].values()]) + 1
    ids = {text: first + at for at, text in enumerate(texts)}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"] += [
        {"id": token, "content": text, "special": True, **flags} for text, token in ids.items()
    ]
    write(path, "tokenizer.json", tokenizer)
    template = path / "chat_template.jinja"
    written = template.read_text()
    assert QWEN_MARKER in written
    template.write_text(written.replace(QWEN_MARKER, marker))
    (path / "video_preprocessor_config.json").unlink()
    return ids


def begin_with(path: Path, text: str) -> None:
    """Let the tokenizer write a token of its own, the BOS token, before each text."""
    tokenizer = read(path, "tokenizer.json")
    (token,) = (one["id"] for one in tokenizer["added_tokens"] if one["content"] == text)
    texts = [{"Sequence": {"id": part, "type_id": 0}} for part in "AB"]
    first = {"SpecialToken": {"id": text, "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, texts[0]],
        "pair": [first, *texts],
        "special_tokens": {text: {"id": text, "ids": [token], "tokens": [text]}},
    }
    write(path, "tokenizer.json", tokenizer)
    config = read(path, "tokenizer_config.json")
    write(path, "tokenizer_config.json", config | {"bos_token": text})


def read(path: Path, name: str) -> dict[str, Any]:
    held: dict[str, Any] = json.loads((path / name).read_text())
    return held


def write(path: Path, name: str, value: dict[str, Any]) -> None:
    (path / name).write_text(json.dumps(value))


def write_config(path: Path, ids: dict[str, int], config: dict[str, Any]) -> None:
    """Write config.json with the size of a vocabulary whose last tokens are these."""
    size = {"vocab_size": max(ids.values()) + 1}
    found = {**size, "eos_token_id": 2, **config}
    if "text_config" in found:
        found["text_config"] = size | found["text_config"]
    write(path, "config.json", found)
