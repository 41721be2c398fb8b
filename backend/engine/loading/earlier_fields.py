"""Translates fields of config.json to the names that mlx-lm and mlx-vlm read.

transformers 5 gives many fields new names. It writes the values of RoPE into `rope_parameters`, the
kinds of layers into `layer_types` in place of a period, and since 5.15 the values that differ
between layers into `per_layer_config`. Most families of mlx-lm and mlx-vlm do not read these
fields: they would use their default values, or fail to load.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

_FULL, _SLIDING = "full_attention", "sliding_attention"
# Names of the RoPE base of layers with sliding attention, whose positions no family scales.
_LOCAL_BASE = ("rope_local_base_freq", "swa_rope_theta", "local_rope_theta")
# Name in `rope_parameters` → the earlier names.
_EARLIER = {
    "rope_theta": ("rope_theta", "rotary_emb_base", "rope_global_base_freq", "global_rope_theta"),
    "partial_rotary_factor": ("partial_rotary_factor", "rotary_pct"),
    "original_max_position_embeddings": ("original_max_position_embeddings",),
}
# Other names for kinds of layers, by model type.
_KINDS = {
    "granitemoehybrid": {"linear_attention": "mamba", _FULL: "attention"},
    "glm5_next_text": {"indexed_attention": _FULL},
    "qwen4_exp_text": {"indexed_attention": _FULL},
}
_IF_NULL = {"output_gate_type": "hidden_act"}  # null means the value of the other field
# Earlier names of fields, beside those in transformers' own tables: of all models, and by type.
_SAME = {
    "block_dim": "hidden_size",
    "n_ctx": "n_positions",
}
_SAME_OF_TYPE = {
    "mimo_v2_flash": {
        "layernorm_epsilon": "rms_norm_eps",
        "sliding_window_size": "sliding_window",
        "swa_head_dim": "head_dim",
        "swa_num_attention_heads": "num_attention_heads",
        "swa_v_head_dim": "v_head_dim",
    },
}
# Factors of long RoPE that change nothing.
_NO_FACTORS = {"type": "longrope", "original_max_position_embeddings": 1 << 40}
_NO_GROUPS = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
# Fields that transformers does not save, because all models of the type have the same value.
_CONSTANT: Mapping[str, Mapping[str, Any]] = {
    "apertus": {"mlp_bias": False, "post_norm": False, "qk_norm": True},
    # Kimi Linear does not use RoPE, but mlx-lm wants a value.
    "kimi_linear": {"rope_theta": 10000.0},
    "glm4v_moe_text": {"use_qk_norm": False},
    "glm_moe_dsa": _NO_GROUPS | {"moe_layer_freq": 1},
    # MiniMax-M2 has no shared experts, but mlx-lm wants their size.
    "minimax_m2": {"shared_intermediate_size": 0},
    "longcat_flash": {
        "attention_method": "MLA",
        "mla_scale_kv_lora": True,
        "mla_scale_q_lora": True,
        "zero_expert_type": "identity",
    },
    "mimo_v2_flash": _NO_GROUPS
    | {
        "add_full_attention_sink_bias": False,
        "add_swa_attention_sink_bias": True,
        "n_shared_experts": None,
    },
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
    "solar_open": {
        "intermediate_size": 0,
        "first_k_dense_replace": 0,
        "partial_rotary_factor": 1.0,
    },
}
_PERIODS = ("full_attention_interval", "sliding_window_pattern")
_BEGUN_PERIOD = "global_attn_every_n_layers"  # a period begins with its layer of full attention
_EXPERTS = "moe_layers_enum"  # the layers with experts, as a list in a string
# (kind of layer, name in `per_layer_config`) → the earlier name.
_OF_KIND = {
    (_FULL, "head_dim"): "global_head_dim",
    (_FULL, "num_key_value_heads"): "num_global_key_value_heads",
}
# Step's object with the values of layers with sliding attention, and the names in it.
_STEP = "attention_other_setting"
_IN_STEP = {
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_attention_groups",
    "head_dim": "head_dim",
}


def earlier_fields(config: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return, under earlier names, the fields that a configuration has only under new names.

    known: the names that the model reads.

    Raises ValueError if the model's names cannot express a value.
    """
    known = frozenset(known)
    found = _renamed(config, known) | _unsaved(config, known) | _of_kinds(config, known)
    return found | _of_layers(config, known) | rope_fields(config, known)


def in_mlx_lm(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration under the name that mlx-lm has for the network in transformers."""
    if config.get("architectures") == ["BailingHybridForCausalLM"]:
        return {
            **config,
            "architectures": ["BailingMoeV3ForCausalLM"],
            "moe_shared_expert_intermediate_size": config.get("moe_intermediate_size"),
        }
    if config.get("model_type") == "llama4_text" and config.get("moe_layers"):
        # mlx-lm's family of this name has no experts.
        return {**config, "model_type": "llama4", "text_config": dict(config)}
    return dict(config)


def _unsaved(config: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return the fields that transformers 5 computes from others, or does not have."""
    found = dict(_CONSTANT.get(str(config.get("model_type")), {}))
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    rope = config.get("rope_parameters") or {}
    if "rope_parameters" in config and "kv_lora_rank" not in config and heads and hidden:
        found["head_dim"] = int(hidden) // int(heads)
    if config.get("model_type") == "mimo_v2_flash" and config.get("num_key_value_heads"):
        found["swa_num_key_value_heads"] = 2 * config["num_key_value_heads"]
    if "rotary_dim" in known and config.get("head_dim") and "partial_rotary_factor" in rope:
        found["rotary_dim"] = int(config["head_dim"] * rope["partial_rotary_factor"])
    if config.get("expand") and hidden:
        found["intermediate_size"] = int(config["expand"] * hidden)
    return {
        name: value for name, value in found.items() if name in known and config.get(name) is None
    }


def _renamed(config: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return the fields that transformers saves under a new name."""
    model_type = str(config.get("model_type"))
    names = _SAME | _SAME_OF_TYPE.get(model_type, {}) | dict(_new_names(model_type))
    names |= {name: other for name, other in _IF_NULL.items() if name in config}
    return {
        earlier: config[name]
        for earlier, name in names.items()
        if earlier in known and config.get(earlier) is None and config.get(name) is not None
    }


@cache
def _new_names(model_type: str) -> Mapping[str, str]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type].attribute_map if model_type in CONFIG_MAPPING else {}


def _of_kinds(config: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return the fields that follow from the lists of layers' kinds."""
    found: dict[str, Any] = {}
    kinds, experts = config.get("layer_types"), config.get("mlp_layer_types")
    if config.get("model_type") == "minimax" and isinstance(kinds, list) and {_FULL} != {*kinds}:
        raise ValueError(
            "layer_types in config.json has layers without full attention (MiniMax-Text-01), which"
            " MLX's family for MiniMax-M2 does not have"
        )
    if isinstance(kinds, list) and "layer_types" in known:
        names = _KINDS.get(str(config.get("model_type")), {})
        found["layer_types"] = [names.get(kind, kind) for kind in kinds]
    elif isinstance(kinds, list) and config.get("model_type") == "exaone4":
        letters = "".join("G" if kind == _FULL else "L" for kind in kinds)
        found["sliding_window_pattern"] = letters if "L" in letters else None
    elif isinstance(kinds, list):
        for name in _PERIODS:
            if name in known and config.get(name) is None:
                found[name] = _period(kinds)
        if _BEGUN_PERIOD in known:
            found[_BEGUN_PERIOD] = _period(kinds[1:] if kinds[:1] == [_FULL] else [_FULL, *kinds])
    lists: dict[str, Any] = {}
    if isinstance(kinds, list):
        lists["hybrid_layer_pattern"] = [int(kind == _SLIDING) for kind in kinds]
    if isinstance(kinds, list) and "linear_num_heads" in config:
        linear = [at for at, kind in enumerate(kinds, 1) if kind == "linear_attention"]
        lists["linear_attn_config"] = {
            "kda_layers": linear,
            "full_attn_layers": [at for at in range(1, len(kinds) + 1) if at not in linear],
            "num_heads": config["linear_num_heads"],
            "head_dim": config.get("linear_head_dim"),
            "short_conv_kernel_size": config.get("linear_conv_kernel_dim"),
        }
    if isinstance(experts, list):
        sparse = [kind == "sparse" for kind in experts]
        lists[_EXPERTS] = ",".join(str(at) for at, has in enumerate(sparse) if has)
        lists["is_moe_layer"] = sparse
        if "hybrid_layer_pattern" in known:  # in other families it is a period
            lists["moe_layer_freq"] = [int(each) for each in sparse]
        lists["first_k_dense_replace"] = sparse.index(True) if True in sparse else len(sparse)
    return found | {
        name: value for name, value in lists.items() if name in known and config.get(name) is None
    }


def _period(kinds: list[Any]) -> int:
    """Return the distance between two layers of full attention. Raises ValueError."""
    period = kinds.index(_FULL) + 1 if _FULL in kinds else len(kinds) + 1
    if any((kind == _FULL) != (at % period == 0) for at, kind in enumerate(kinds, 1)):
        raise ValueError(
            "layer_types in config.json has no regular order, and this family cannot have another"
        )
    return period


def _of_layers(config: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return the fields for layers of one kind, from `per_layer_config`."""
    layers, kinds = config.get("per_layer_config"), config.get("layer_types")
    if not (isinstance(layers, dict) and isinstance(kinds, list)) or "per_layer_config" in known:
        return {}
    found: dict[str, Any] = {}
    for kind in sorted(set(kinds)):
        of_kind = [layers.get(str(at)) or {} for at, other in enumerate(kinds) if other == kind]
        # A field that these layers do not have has the value of the whole configuration.
        usual_too = {name for named, name in _OF_KIND if named == kind and name in config}
        for name in sorted({name for fields in of_kind for name in fields} | usual_too):
            usual = config.get(name)
            first, *others = (fields.get(name, usual) for fields in of_kind)
            same, earlier = all(other == first for other in others), _OF_KIND.get((kind, name), "")
            if same and earlier in known:
                found[earlier] = first
            elif same and kind == _SLIDING and _STEP in known and name in _IN_STEP:
                usual_values = {step: config.get(new) for new, step in _IN_STEP.items()}
                found.setdefault(_STEP, usual_values)[_IN_STEP[name]] = first
            elif not same or first != usual:
                raise ValueError(
                    f"per_layer_config in config.json gives layers with {kind} values of their own"
                    f" for {name}, which this family cannot have"
                )
    return {name: value for name, value in found.items() if config.get(name) is None}


def rope_fields(config: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return the fields from `rope_parameters`. Arguments and errors as for `earlier_fields`."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_parameters" in known:
        return {}
    if isinstance(compressed := rope.get("compress"), dict):  # DeepSeek-V4 scales only these
        scaling = {"rope_scaling"}.intersection(known)
        return _missing(config, scaling, compressed) | _missing(
            config, set(known) - scaling, rope["main"]
        )
    if not isinstance(rope.get(_FULL), dict):
        return _missing(config, known, rope)
    found = _missing(config, known, rope[_FULL])
    local = rope.get(_SLIDING)
    if not isinstance(local, dict):
        return found
    base = local.get("rope_theta")
    names = [name for name in _LOCAL_BASE if name in known]
    if _type_of(local) != "default" or (not names and base != rope[_FULL].get("rope_theta")):
        raise ValueError(
            "rope_parameters in config.json gives layers with sliding_attention values of their"
            " own, which this family cannot have"
        )
    return found | {name: base for name in names if base and config.get(name) is None}


def _missing(
    config: Mapping[str, Any], known: Collection[str], rope: Mapping[str, Any]
) -> dict[str, Any]:
    found = {
        earlier: rope[name]
        for name, names in _EARLIER.items()
        for earlier in names
        if name in rope and earlier in known and config.get(earlier) is None
    }
    if "rope_scaling" in known and config.get("rope_scaling") is None:
        kind = _type_of(rope)
        plain = kind == "default" and "mrope_section" not in rope
        # mlx-lm's MiniCPM3 has no RoPE without factors.
        unscaled = _NO_FACTORS if config.get("model_type") == "minicpm3" else None
        found["rope_scaling"] = unscaled if plain else {**rope, "type": kind}
    return found


def _type_of(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")
