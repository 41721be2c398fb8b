"""Small checkpoints of the embedding families that only mlx-vlm computes, with random weights."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from tests.engine.embedding.tiny_checkpoints import HEADS, HIDDEN, LAYERS, QWEN, WIDE
from tests.engine.embedding.tiny_checkpoints import write_tokenizer as write_words

_SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 2,
    "head_dim": HIDDEN // HEADS,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
# Family → its module in mlx-vlm, and config.json.
MLX_VLM_EMBEDDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_bidirec": ("llama_bidirec", _SIZES | {"rope_theta": 10000.0}),
    "ministral3": (
        "ministral3_embedding",
        _SIZES
        | {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "lfm2": (
        "lfm2_embedding",
        _SIZES
        | {
            "norm_eps": 1e-5,
            "conv_bias": False,
            "conv_L_cache": 3,
            "block_dim": HIDDEN,
            "block_ff_dim": WIDE,
            "block_multiple_of": 8,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
            "full_attn_idxs": [1],
        },
    ),
    "embedding_gemma2": (
        "embedding_gemma2",
        {
            "vision_config": None,
            "audio_config": None,
            "text_config": _SIZES
            | {
                "model_type": "embedding_gemma2_text",
                "num_hidden_layers": 3,
                "hidden_size_per_layer_input": 8,
                "embedding_dim": HIDDEN,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
                "per_layer_config": {"02": {"head_dim": 16, "num_key_value_heads": 1}},
            },
        },
    ),
}


def write_mlx_vlm(family: str, folder: Path) -> Path:
    """Write the checkpoint of a family of MLX_VLM_EMBEDDERS."""
    module, config = MLX_VLM_EMBEDDERS[family]
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = write_words(folder, QWEN, appends=True)
    part = config.get("text_config", config)
    whole = config | {"model_type": family, "architectures": ["EmbeddingModel"]}
    if part is config:
        whole["vocab_size"] = vocabulary
    else:
        whole["text_config"] = part | {"vocab_size": vocabulary}
    (folder / "config.json").write_text(json.dumps(whole))
    network = importlib.import_module(f"mlx_vlm.models.{module}")
    model = network.Model(network.ModelConfig.from_dict(whole))
    mx.random.seed(7)
    shapes: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    drawn = {
        name: 0.3 * mx.random.normal(value.shape) + (value.ndim == 1)
        for name, value in shapes.items()
    }
    mx.save_safetensors(str(folder / "model.safetensors"), drawn, {"format": "mlx"})
    return folder
