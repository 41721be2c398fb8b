"""Small random models, one for each form in which mlx-lm keeps KV, in float32."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map

from backend.engine.caching.cache_form import use_cache_kind
from backend.engine.caching.cache_kind import CacheKind
from backend.engine.errors import InvalidRequest
from tests.engine.random_models import CONFIGS, VOCABULARY

_GATED_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
}
_LATENT = {
    "n_routed_experts": None,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 2,
    "rope_scaling": None,
}
_SHARED = CONFIGS["full"]

MODELS: dict[str, dict[str, Any]] = {
    "attention": _SHARED | {"model_type": "llama"},
    "window": CONFIGS["window"],
    "short convolution": CONFIGS["hybrid"],
    "state space": CONFIGS["recurrent"],
    "gated delta": _SHARED
    | _GATED_DELTA
    | {
        "model_type": "qwen3_next",
        "num_experts": 0,
        "num_experts_per_tok": 1,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 16,
        "mlp_only_layers": [],
        "moe_intermediate_size": 16,
        "partial_rotary_factor": 0.5,
    },
    "latent": _SHARED | _LATENT | {"model_type": "deepseek_v3"},
    # two caches in each layer: the latent one, and the index of what to attend to
    "indexed latent": _SHARED
    | _LATENT
    | {"model_type": "deepseek_v32", "index_head_dim": 16, "index_n_heads": 2, "index_topk": 512},
    # a convolution over keys and values, whose state is a second cache in each layer
    "convolved attention": _SHARED
    | {
        "model_type": "baichuan_m1",
        "conv_window": 2,
        "sliding_window": 24,
        "sliding_window_layers": [0],
        "num_swa_attention_heads": 4,
        "num_swa_key_value_heads": 2,
        "tie_word_embeddings": False,
    },
    "quantised": _SHARED | {"head_dim": 32},
}
# a window, and beside it groups of tokens that are compressed when complete: one sequence only
COMPRESSED: dict[str, Any] = {
    "model_type": "deepseek_v41",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "o_groups": 2,
    "o_lora_rank": 32,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 32,
    "compress_ratios": (0, 4, 16),
    "kv_source_layer_ids": (0, 1, 2),
    "index_source_layer_ids": (0, 1, 2),
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_topk": 64,
    "candidate_topk_blocks": 64,
}


def use_kind(model: Any, kind: CacheKind) -> None:
    """`use_cache_kind`, or skips the test: MLX's CUDA build lacks some quantised products."""
    try:
        use_cache_kind(model, kind)
    except InvalidRequest:
        if not mx.cuda.is_available():
            raise
        pytest.skip("MLX's CUDA build cannot compute this quantised attention")


def kv_model(kind: str, **changes: Any) -> Any:
    """A new model of the kind with the same weights at every call.

    Not shared: each engine patches its model's layers, so a shared one would become slower.
    """
    config = MODELS.get(kind, COMPRESSED) | changes
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    keys = iter(mx.random.split(mx.random.key(7), 200))

    def fill(weight: mx.array) -> mx.array:
        if weight.ndim < 2:
            return 1 + 0.1 * mx.random.normal(weight.shape, key=next(keys))
        return 0.3 * mx.random.normal(weight.shape, key=next(keys))

    model.update(tree_map(fill, model.parameters()))
    mx.eval(model.parameters())
    if kind == "quantised":
        use_kind(model, CacheKind(8, 8, 32))
    return model


def words(count: int, start: int) -> list[int]:
    """A text of that many tokens, the same at every call."""
    return [(start * 11 + 7 * at * at + at) % (VOCABULARY - 1) + 1 for at in range(count)]
