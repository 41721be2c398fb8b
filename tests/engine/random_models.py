"""Small models with random weights, one for each way in which a layer keeps state.

Their text means nothing, but their arithmetic is that of the real architectures, so they show
whether a row's results depend on who shares its batch.
"""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

VOCABULARY = 96

_SHARED: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}

CONFIGS: dict[str, dict[str, Any]] = {
    # every layer keeps all tokens
    "full": {"model_type": "qwen3", **_SHARED},
    # a window of 24 tokens beside a full layer
    "window": {
        "model_type": "gemma3_text",
        **_SHARED,
        "query_pre_attn_scalar": 8,
        "sliding_window": 24,
        "sliding_window_pattern": 2,
        "rope_local_base_freq": 10000.0,
    },
    # a recurrent (short convolution) layer beside a full one
    "hybrid": {
        "model_type": "lfm2",
        **_SHARED,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 32,
        "block_ff_dim": 64,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1],
        "rope_parameters": {"rope_theta": 10000.0},
    },
    # state-space layers only
    "recurrent": {
        "model_type": "mamba2",
        **_SHARED,
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 8,
        "conv_kernel": 4,
        "n_groups": 1,
        "expand": 2,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": (0.0, 100.0),
        "layer_norm_epsilon": 1e-5,
        "time_step_rank": 4,
        "residual_in_fp32": False,
        "ssm_state_size": 8,
    },
}


def random_model(kind: str) -> Any:
    """A new model of the kind, float32, with the same weights at every call.

    Not shared: each engine patches its model's layers, so a shared one would become slower.
    """
    config = CONFIGS[kind]
    architecture = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = architecture.Model(architecture.ModelArgs.from_dict(config))
    model.update(drawn_weights(model))
    mx.eval(model.parameters())
    return model


def drawn_weights(model: Any) -> Any:
    """Random weights for every parameter of a model, as a tree, the same at every call."""
    key = mx.random.key(7)

    def fill(weight: mx.array) -> mx.array:
        nonlocal key
        key, own = mx.random.split(key)
        if weight.ndim < 2:
            return 1 + 0.1 * mx.random.normal(weight.shape, key=own)
        return 0.3 * mx.random.normal(weight.shape, key=own)

    return tree_map(fill, model.parameters())
