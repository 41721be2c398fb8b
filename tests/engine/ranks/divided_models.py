"""Checkpoints of small random models that mlx-lm can divide by two and by three ranks."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from mlx.utils import tree_flatten

from tests.engine.loading_models import write_tokenizer, write_weights
from tests.engine.random_models import drawn_weights

VOCABULARY = 288  # a multiple of 32, so that masks have no padding; larger than the tokenizer's
_SHARED: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _SHARED | {"model_type": "llama"},
    "qwen2": _SHARED | {"model_type": "qwen2"},
    "qwen3": _SHARED | {"model_type": "qwen3"},
    "qwen3_5": _SHARED
    | {
        "model_type": "qwen3_5",
        "num_experts": 0,
        "linear_num_value_heads": 6,
        "linear_num_key_heads": 6,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 2,
        "partial_rotary_factor": 0.5,
    },
    "deepseek_v3": _SHARED
    | {
        "model_type": "deepseek_v3",
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "n_group": 1,
        "topk_group": 1,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "rope_scaling": None,
    },
    "gpt_oss": _SHARED
    | {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 24,
        "tie_word_embeddings": False,
    },
}
WAYS: dict[str, tuple[str, ...]] = {
    "llama": ("tensor",),
    "qwen2": ("tensor", "pipeline"),
    "qwen3": ("tensor",),
    "qwen3_5": ("tensor", "pipeline"),
    "deepseek_v3": ("tensor", "pipeline"),
    "gpt_oss": ("tensor",),
}


def write_divided(directory: Path, name: str, shards: int = 1, **config: Any) -> Path:
    """A checkpoint in float32, with the same weights at every call."""
    directory.mkdir(parents=True, exist_ok=True)
    whole = CONFIGS[name] | config
    module = importlib.import_module(f"mlx_lm.models.{whole['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(whole))
    weights: Any = tree_flatten(drawn_weights(model))
    write_weights(directory, dict(weights), shards)
    (directory / "config.json").write_text(json.dumps(whole))
    write_tokenizer(directory)
    return directory
