"""Every configuration that transformers saves means what it meant before.

A configuration in the form of mlx-lm, as published checkpoints have it, goes through transformers'
class for it, and what this class does not declare is left out. Models of both forms with the same
weights must compute the same logits.
"""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from backend.engine.loading.weights import mlx_lm_classes
from tests.architectures.shapes import UNBUILT, architectures, configuration, drawn

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_LLAMA3 = {
    "type": "llama3",
    "rope_type": "llama3",
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_QWEN = {"rope_parameters": _ROPE | {"type": "default", "mrope_section": [2, 1, 1]}}
_NO_WINDOW = {"layer_types": None, "sliding_window": None}
_GEMMA4 = {
    "final_logit_softcapping": 30.0,
    "use_double_wide_mlp": True,
    "global_head_dim": 32,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "rope_parameters": {
        "full_attention": _ROPE | {"rope_type": "proportional"},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
    },
}
# Values that a published configuration states, for which transformers has another default.
_STATED: dict[str, dict[str, Any]] = {
    "afmoe": {"route_scale": 2.826, "mup_enabled": True},
    "apertus": {"rope_theta": 12000000.0, "rope_scaling": _LLAMA3},
    "bailing_hybrid": {"head_dim": 8},
    "ernie4_5_moe": {
        "moe_layer_start_index": 0,
        "moe_layer_end_index": 3,
        "moe_num_shared_experts": 1,
    },
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
    "glm4_moe": {"rope_scaling": {}},
    "gpt_oss": {"rope_scaling": _YARN},
    "granitemoehybrid": {"mamba_conv_bias": True, "position_embedding_type": "rope"},
    "gpt_bigcode": {"attention_bias": True, "mlp_bias": True},
    "llama4_text": {"moe_layers": []},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama": _NO_WINDOW,
    "longcat_flash": {"norm_topk_prob": False},
    "mamba": {"expand": 2, "intermediate_size": 128},
    "ministral3": _NO_WINDOW,
    "mistral3": _NO_WINDOW,
    "solar_open": {"use_qk_norm": False, "first_k_dense_replace": 0},
    "laguna": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "mimo_v2_flash": {"attention_value_scale": 0.707},
    "minimax_m3_vl": {"layer_types": ["full_attention", *["minimax_m3_sparse"] * 3]},
    "nemotron_h": {"hybrid_override_pattern": "M*M-", "layer_types": None},
    "olmo3": {"rope_theta": 500000.0},
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "step3p5": {
        "moe_layers_enum": "1,2,3",
        "moe_router_scaling_factor": 1.0,
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "num_attention_heads": 6,
            "num_attention_groups": 2,
            "head_dim": 16,
        },
    },
}
# transformers refuses a pattern in letters; its Muse Glimmer has a text part, its Pixtral is an
# encoder, and its MiniMax and Ling are other networks. Of Kimi Linear and MiMo it computes fields.
_OTHER = (
    *("exaone4", "muse_glimmer", "phi3small", "pixtral"),
    *("bailing_hybrid", "kimi_linear", "mimo_v2_flash", "minimax"),
)
_SAVED = [
    one
    for one in architectures()
    if one in CONFIG_MAPPING and one not in UNBUILT and one not in _OTHER
]


@pytest.mark.parametrize("architecture", _SAVED)
def test_a_saved_configuration_means_the_same(architecture: str) -> None:
    earlier = configuration(architecture)
    earlier.get("text_config", earlier).update(_STATED.get(architecture, {}))
    earlier = {name: value for name, value in earlier.items() if value is not None}
    family = CONFIG_MAPPING[architecture]
    saved = _declared(family, json.loads(family.from_dict(deepcopy(earlier)).to_json_string()))
    first = _built(earlier)
    held: Any = tree_flatten(first.parameters())
    keys = mx.random.split(mx.random.key(7), len(held))
    drawn_weights = [
        (name, drawn(name, one, key)) for (name, one), key in zip(held, keys, strict=True)
    ]
    first.load_weights(drawn_weights)
    second = _built(saved)
    second.load_weights(drawn_weights)
    assert mx.allclose(_logits(second), _logits(first), atol=1e-4)


def _declared(family: Any, saved: dict[str, Any]) -> dict[str, Any]:
    """What transformers saves of a configuration that never had a field of another form."""
    names = {"model_type", "per_layer_config", *family.attribute_map.values()}.union(
        *(vars(base).get("__annotations__", ()) for base in family.__mro__)
    )
    found = {name: value for name, value in saved.items() if name in names}
    part = found.get("text_config")
    if isinstance(part, dict) and part.get("model_type") in CONFIG_MAPPING:
        found["text_config"] = _declared(CONFIG_MAPPING[part["model_type"]], part)
    return found


def _built(config: dict[str, Any]) -> Any:
    config = deepcopy(config)
    model, arguments = mlx_lm_classes(config)
    built = model(arguments.from_dict(config))
    built.eval()
    return built


def _logits(model: Any) -> mx.array:
    logits: mx.array = model(mx.array([[*range(5, 45)]]), cache=make_prompt_cache(model))
    return logits
