"""Every text architecture of mlx-lm in a size that computes in milliseconds.

A configuration is made from the fields of the architecture's own argument class: a field has its
small value wherever it appears. Architectures that need other values are listed separately.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import mlx.core as mx
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten, tree_unflatten

from backend.engine.loading.architectures import aliases, model_types
from backend.engine.loading.early_layers import start_layers_early
from backend.engine.loading.row_masks import fit_row_masks

VOCABULARY = 128
_GROUP = 32  # values that share a scale in a quantised weight
_HIDDEN, _INNER, _LAYERS, _HEADS, _HEAD = 64, 96, 4, 4, 16

_WIDTHS = dict.fromkeys(("hidden_size", "n_embd", "d_model", "model_dim", "hidden_dim"), _HIDDEN)
_INNER_WIDTHS = dict.fromkeys(
    (
        "intermediate_size",
        "intermediate_size_mlp",
        "ff_intermediate_size",
        "ffn_hidden_size",
        "mlp_hidden_size",
        "n_inner",
        "dense_intermediate_size",
        "block_ff_dim",
    ),
    _INNER,
)
_EXPERT_WIDTHS = dict.fromkeys(
    (
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "expert_ffn_hidden_size",
        "shared_intermediate_size",
        "moe_hidden_size",
        "share_expert_dim",
    ),
    32,
)
_DEPTHS = dict.fromkeys(
    ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_transformer_layers"), _LAYERS
)
_HEAD_COUNTS = dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), _HEADS)
_KV_HEAD_COUNTS = dict.fromkeys(
    ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_attention_groups"), 2
)
_EXPERTS = dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 4)
_EXPERTS |= dict.fromkeys(("moe_num_experts", "zero_expert_num"), 4)
_CHOSEN = dict.fromkeys(("num_experts_per_tok", "num_experts_per_token"), 2)
_CHOSEN |= dict.fromkeys(("moe_topk", "moe_top_k", "moe_k"), 2)
_LENGTHS = dict.fromkeys(
    ("max_position_embeddings", "n_positions", "n_ctx", "block_size", "model_max_length"), 4096
)
_LENGTHS |= dict.fromkeys(("original_max_position_embeddings",), 4096)
_WINDOWS = dict.fromkeys(
    ("sliding_window", "sliding_window_size", "attention_window_size", "window_size"), 24
)
_GROUPS = dict.fromkeys(("n_group", "topk_group", "n_groups", "mamba_n_groups"), 1)
_LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
}
_LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "qk_head_dim": 24,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 512,
}
_STATE = {
    "state_size": 16,
    "ssm_state_size": 16,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_ssm": 128,
    "time_step_rank": 4,
    "time_step_limit": (0.0, 100.0),
    "conv_kernel": 4,
    "conv1d_width": 4,
    "conv_L_cache": 3,
    "use_bias": False,
    "use_conv_bias": True,
    "mamba_proj_bias": False,
}
_FLAGS = dict.fromkeys(
    ("attention_bias", "mlp_bias", "qk_norm", "post_norm", "use_qkv_bias", "conv_bias"), False
)
_FLAGS |= {"norm_topk_prob": True, "use_qk_norm": True, "use_expert_bias": True}
_NUMBERS = dict.fromkeys(
    ("embedding_multiplier", "residual_multiplier", "logits_scaling", "routed_scaling_factor"), 1.0
)
_NUMBERS |= dict.fromkeys(("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps"), 1e-5)
_NUMBERS |= dict.fromkeys(("norm_eps", "layernorm_epsilon"), 1e-5)
_NUMBERS |= dict.fromkeys(("rope_theta", "swa_rope_theta", "rope_local_base_freq"), 10000.0)

_SMALL: dict[str, Any] = {
    **_WIDTHS,
    **_INNER_WIDTHS,
    **_EXPERT_WIDTHS,
    **_DEPTHS,
    **_HEAD_COUNTS,
    **_KV_HEAD_COUNTS,
    **_EXPERTS,
    **_CHOSEN,
    **_LENGTHS,
    **_WINDOWS,
    **_GROUPS,
    **_LINEAR,
    **_LATENT,
    **_STATE,
    **_FLAGS,
    **_NUMBERS,
    "vocab_size": VOCABULARY,
    "num_vocab": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
    "head_dim": _HEAD,
    "global_head_dim": _HEAD,
    "hidden_size_per_head": _HEAD,
    "kv_channels": _HEAD,
    "rotary_dim": 8,
    "rotary_pct": 0.5,
    "partial_rotary_factor": 0.5,
    "rotary_emb_base": 10000,
    "query_pre_attn_scalar": 16,
    "attention_multiplier": 0.25,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "num_shared_expert": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "layer_group_size": 2,
    "group_norm_size": 2,
    "sliding_window_pattern": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "dim_model_base": _HIDDEN,
    "scale_depth": 1.4,
    "scale_emb": 1.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
_HYBRID = ["linear_attention", "full_attention"] * 2
_YARN = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048}
_SCALED = {
    "type": "default",
    "rope_theta": 10000.0,
    "llama_4_scaling_beta": 0.5,
    "original_max_position_embeddings": 16,
}
_KDA = {
    "kda_layers": [1, 3],
    "full_attn_layers": [2, 4],
    "num_heads": 2,
    "head_dim": 16,
    "short_conv_kernel_size": 4,
}
_OTHER: dict[str, dict[str, Any]] = {
    "afm7": {"num_kv_reuse_layers": 2},
    "baichuan_m1": {
        "sliding_window_layers": [0],
        "conv_window": 2,
        "num_swa_attention_heads": 4,
        "num_swa_key_value_heads": 2,
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": _INNER, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v41": {
        "num_hidden_layers": 3,
        "o_groups": 2,
        "o_lora_rank": 32,
        "head_dim": 32,
        "qk_rope_head_dim": 16,
        "compress_ratios": (0, 4, 16),
        "kv_source_layer_ids": (0, 1, 2),
        "index_source_layer_ids": (0, 1, 2),
        "index_head_dim": 32,
        "index_topk": 64,
        "candidate_topk_blocks": 64,
        "hc_sinkhorn_iters": 4,
    },
    "exaone4": {"sliding_window_pattern": "LG", "rope_scaling": None},
    "exaone_moe": {"is_moe_layer": [False, True, True, True]},
    "gemma3n": {
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "altup_num_inputs": 2,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "laurel_rank": 8,
        "num_kv_shared_layers": 2,
        "final_logit_softcapping": 30.0,
    },
    "gemma4_text": {"num_kv_shared_layers": 0},
    "glm4_moe": {"rope_scaling": None},
    "glm_moe_dsa": {"rope_parameters": {"rope_theta": 10000.0}},
    "gear": {"rope_parameters": {"rope_theta": 10000.0}},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "deepseek_v2": {"rope_scaling": _YARN},
    "hunyuan": {"rope_scaling": {"alpha": 2.0, "factor": 1.0, "type": "dynamic"},
                "use_mixed_mlp_moe": True, "use_cla": True, "cla_share_factor": 2},
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "kimi_k3": {"linear_attn_config": _KDA, "hidden_act": "situ"},
    "kimi_linear": {"linear_attn_config": _KDA},
    "lfm2": {"block_dim": _HIDDEN, "block_multiple_of": 16, "block_ffn_dim_multiplier": 1.0,
             "block_auto_adjust_ff_dim": False, "full_attn_idxs": [1, 3]},
    "lfm2_moe": {"full_attn_idxs": [1, 3], "layer_types": None},
    "llama4": {"attention_chunk_size": 24, "interleave_moe_layer_step": 2, "rope_scaling": None,
               "num_experts_per_tok": 1},
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0]},
    "longcat_flash": {"attention_method": "MLA", "zero_expert_type": "identity",
                      "mla_scale_q_lora": True, "mla_scale_kv_lora": True},
    "longcat_flash_ngram": {"mla_scale_q_lora": True, "mla_scale_kv_lora": True},
    "mellum": {
        "rope_parameters": {
            "sliding_attention": {"rope_theta": 10000.0},
            "full_attention": {"rope_theta": 20000.0},
        }
    },
    "minicpm3": {"rope_scaling": {"type": "su"}},
    "minimax_m3_vl": {
        "moe_layer_freq": [0, 1, 1, 1],
        "layer_types": ["full_attention", *["sparse_attention"] * 3],
        "index_block_size": 4,
        "index_topk_blocks": 3,
        "index_head_dim": _HEAD,
    },
    "ministral3": {"rope_parameters": _SCALED},
    "mistral4": {"rope_parameters": _SCALED},
    "muse_spark": {
        "post_norm_eps": 1e-8,
        "rope_parameters": {"rope_theta": 10000.0},
        "layer_rope_theta": [10000.0, 0.0] * 2,
        "final_logit_softcapping": 30.0,
        "output_multiplier": 0.5,
        "num_shared_experts": 0,
    },
    "nemotron-nas": {
        "block_configs": [{"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}}]
        * _LAYERS
    },
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [1, 0, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": _HEAD,
        "swa_v_head_dim": _HEAD,
    },
    "nemotron_h": {"hybrid_override_pattern": ["M", "*", "M", "-"]},
    "olmo": {"embedding_size": VOCABULARY},
    "olmo_hybrid": {"layer_types": _HYBRID, "linear_allow_neg_eigval": True},
    "openelm": {
        "ffn_dim_divisor": 16,
        "num_query_heads": [4] * _LAYERS,
        "num_kv_heads": [2] * _LAYERS,
        "ffn_multipliers": [1.0] * _LAYERS,
    },
    "phi3small": {"dense_attention_every_n_layers": 2, "gegelu_limit": 20.0,
                  "blocksparse_block_size": 32, "blocksparse_num_local_blocks": 2,
                  "blocksparse_vert_stride": 2,
                  "vocab_size": 100_352},  # the model masks fixed ids of unused tokens
    "plamo": {"n_shared_head": 2},
    "qwen3_5": {"num_experts": 0},
    "recurrent_gemma": {"logits_soft_cap": 30.0, "block_types": ["recurrent", "attention"]},
    "rwkv7": {"a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8,
              "decay_low_rank_dim": 8},
    "spark2_5": {
        "hidden_act": "gelu",
        "rope_parameters": {
            "full_attention": {"rope_theta": 10000.0},
            "sliding_attention": {"rope_theta": 10000.0},
        }
    },
}  # fmt: skip
_TEXT_PARTS = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "kimi_k25": "deepseek_v3",
    "kimi_vl": "deepseek_v3",
    "lfm2-vl": "lfm2",
    "mistral3": "ministral3",
    "pixtral": "llama",
    "qwen2_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}


# Why an architecture is not built here.
UNBUILT = {
    "olmo": "it needs a Python package of its own",
    "prism_hadamard_qwen35": "its weights are packed by a tool of its own",
}
if not mx.metal.is_available():
    UNBUILT |= dict.fromkeys(("bitnet", "muse_spark"), "its kernels are written for Metal")

# In mlx-lm itself, the way a prompt is cut into passes changes the answer.
DISAGREES = {
    "plamo3": "a prefill pass of mlx-lm's lets a token see one more than its window's cache keeps"
}


def architectures() -> list[str]:
    """One model type for each module of mlx-lm that holds a model."""
    return sorted(model_types() - aliases("mlx_lm").keys())


def configuration(model_type: str) -> dict[str, Any]:
    """The contents of `config.json`."""
    module = importlib.import_module(f"mlx_lm.models.{model_type}")
    config = filled(module.ModelArgs, _OTHER.get(model_type, {}))
    if "text_config" in _names(module.ModelArgs):
        config["text_config"] = _text_part(module, model_type)
    return config | {"model_type": model_type}


def _text_part(module: Any, model_type: str) -> dict[str, Any]:
    if model_type in _TEXT_PARTS:
        return configuration(_TEXT_PARTS[model_type])
    if model_type == "qwen3_5_moe":
        dense: dict[str, Any] = configuration("qwen3_5")["text_config"]
        return dense | {"num_experts": 4}
    own = [
        value
        for name, value in vars(module).items()
        if name in ("TextConfig", "TextArgs", "TextModelArgs") and is_dataclass(value)
    ]
    return filled(own[0], _OTHER.get(model_type, {})) | {"model_type": model_type}


def filled(arguments: Any, other: Mapping[str, Any]) -> dict[str, Any]:
    names = _names(arguments)
    return {name: value for name, value in _SMALL.items() if name in names} | dict(other)


def _names(arguments: Any) -> frozenset[str]:
    return frozenset(one.name for one in fields(arguments))


def quantised_model(model_type: str) -> Any:
    """`tiny_model` with weights of 8 bits, where their rows can be cut into groups."""
    model = tiny_model.__wrapped__(model_type)

    def fits(_: str, module: Any) -> bool:
        make = getattr(module, "to_quantized", None)
        if make is None or "mode" not in inspect.signature(make).parameters:  # afm7's fused layers
            return False
        return bool(module.weight.ndim > 1 and module.weight.shape[-1] % _GROUP == 0)

    quantize(model, group_size=_GROUP, bits=8, class_predicate=fits)
    mx.eval(model.parameters())
    return model


@cache
def tiny_model(model_type: str) -> Any:
    """The model as a load makes it, with random weights, in float32, the same at every call."""
    module = importlib.import_module(f"mlx_lm.models.{model_type}")
    mx.random.seed(7)
    model = module.Model(module.ModelArgs.from_dict(configuration(model_type)))
    found: Any = tree_flatten(model.parameters())
    keys = mx.random.split(mx.random.key(7), len(found))
    weights = [
        (name, drawn(name, value, key)) for (name, value), key in zip(found, keys, strict=True)
    ]
    model.update(tree_unflatten(weights))
    model.eval()
    fit_row_masks(model)
    mx.eval(model.parameters())
    start_layers_early(model)
    return model


def drawn(name: str, value: mx.array, key: mx.array) -> mx.array:
    """Scaled so that the layers outweigh the embeddings.

    Otherwise the last token alone would decide, and not what was read before it.
    """
    if value.ndim < 2 or not mx.issubdtype(value.dtype, mx.floating):
        return value
    width = 0.3 if "embed" in name else 1.5 / math.sqrt(value.shape[-1])
    return (mx.random.normal(value.shape, key=key) * width).astype(value.dtype)
