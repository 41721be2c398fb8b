"""Text architectures that only mlx-vlm has, in a size that computes in milliseconds."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from backend.engine.loading.row_masks import fit_row_masks
from backend.engine.vision.multimodal_model import MultimodalModel
from tests.architectures.shapes import drawn, filled

_MROPE = {
    "type": "default",
    "mrope_section": [2, 1, 1],
    "rope_theta": 10000,
    "partial_rotary_factor": 0.5,
}
# index_topk is larger than any prompt: with equal scores, which tokens are left out is arbitrary.
_OTHER: dict[str, dict[str, Any]] = {
    "deepseek_v4": {
        "compress_ratios": [0, 4, 128, 4],
        "hc_mult": 2,
        "num_hash_layers": 1,
        "sliding_window": 24,
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "head_dim": 32,
        "num_key_value_heads": 1,
    },
    "flint": {},
    "glm5_next": {
        "num_key_value_heads": 4,
        "qk_rope_head_dim": 0,
        "index_kpool": 4,
        "linear_head_dim": 16,
        "linear_num_heads": 2,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "hc_mult": 2,
    },
    "hrm_text": {
        "num_hidden_layers": 1,
        "num_key_value_heads": 4,
        "L_cycles": 1,
        "initializer_range": 0.5,
    },
    "hy_v4": {
        "num_key_value_heads": 1,
        "hc_mult": 2,
        "indexer_types": ["full", "shared"] * 2,
    },
    "inkling": {
        "layer_types": ["hybrid_sliding", "full"] * 2,
        "rel_extent": 32,
        "d_rel": 8,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "sliding_window_size": 24,
        "dense_mlp_idx": 1,
        "intermediate_size": 32,
        "route_scale": 1.0,
    },
    "k2_horizon": {},
    "kolibri1": {},
    "limite": {
        "attn_gate_channels": 16,
        "ve_dim": 16,
        "ve_layers": [1],
        "xsa_layers": [2],
        "global_layers": [3],
        "sliding_window": 24,
        "rope_n_pairs": 4,
        "softcap_logits": {"kind": "sigmoid", "a": 30.0, "b": 0.0, "c": 7.0},
    },
    "longcat_flash_sparse": {"index_n_heads": 2, "num_key_value_heads": 4},
    "mimo_v2": {
        "hybrid_layer_pattern": [1, 0, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "swa_v_head_dim": 16,
        "sliding_window_size": 24,
        "n_shared_experts": None,
    },
    "minimax_m3": {
        "moe_layer_freq": [0, 1, 1, 1],
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_index_dim": 16,
            "sparse_num_index_heads": 2,
            "sparse_topk_blocks": 3,
            "sparse_block_size": 8,
            "sparse_score_type": "max",
            "sparse_init_block": 0,
            "sparse_local_block": 1,
            "sparse_attention_freq": [0, 1, 1, 1],
        },
    },
    "nemotron_labs_diffusion": {},
    "qwen3_5_moe_text": {"rope_parameters": _MROPE},
    "qwen3_5_text": {"num_experts": 0, "rope_parameters": _MROPE},
    "step3p7": {
        "num_attention_groups": 2,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "share_expert_dim": 32,
        "moe_layers_enum": "1,2,3",
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "sliding_window": 24,
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "num_attention_heads": 4,
            "num_attention_groups": 2,
            "head_dim": 16,
        },
        "use_head_wise_attn_gate": True,
        "use_moe_router_bias": True,
        "moe_router_activation": "sigmoid",
        "vision_config": {"width": 32, "layers": 1, "heads": 2, "image_size": 56},
    },
    "xing4_0": {"hc_mult": 2, "num_key_value_heads": 4},
    "z1t": {"hidden_size": 64, "aft_heads": 4, "max_position_embeddings": 512},
}

VLM_ARCHITECTURES = sorted(_OTHER)


def text_arguments(model_type: str) -> dict[str, Any]:
    """The arguments of a family's text part, without a tower."""
    family = importlib.import_module(f"mlx_vlm.models.{model_type}")
    other = {name: value for name, value in _OTHER[model_type].items() if name != "vision_config"}
    return filled(family.TextConfig, other)


@cache
def tiny_vlm_model(model_type: str) -> Any:
    """The model as a load makes it, with random weights, in float32, the same at every call."""
    from mlx_vlm.utils import update_module_configs

    family = importlib.import_module(f"mlx_vlm.models.{model_type}")
    arguments = family.ModelConfig
    if model_type != "minimax_m3":
        arguments = getattr(family, "TextConfig", arguments)
    other = dict(_OTHER[model_type])
    tower = other.pop("vision_config", None)
    text = filled(arguments, other)
    config = text | {"model_type": model_type, "text_config": dict(text)}
    if tower is not None:
        config["text_config"]["model_type"] = model_type
        config["vision_config"] = tower
    if arguments is family.ModelConfig:
        config["text_config"] = {}
    settings = update_module_configs(
        family.ModelConfig.from_dict(config), family, config, ["text", "vision", "audio"]
    )
    mx.random.seed(7)
    model = family.Model(settings)
    found: Any = tree_flatten(model.language_model.parameters())
    keys = mx.random.split(mx.random.key(7), len(found))
    model.language_model.update(
        tree_unflatten([
            # Limite scales each layer by a number, which is 0 before training.
            (name, drawn(name, value, key) if value.ndim else mx.ones_like(value))
            for (name, value), key in zip(found, keys, strict=True)
        ])
    )  # fmt: skip
    model.eval()
    served = MultimodalModel(model)
    fit_row_masks(served)
    mx.eval(model.language_model.parameters())
    return served
