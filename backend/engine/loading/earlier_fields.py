"""The fields of RoPE in config.json, under the names that mlx-lm and mlx-vlm read.

transformers 5 writes them into `rope_parameters`, where most families of mlx-lm 0.32.2 and mlx-vlm
0.7.10 do not look. They would use a base of their own without any scaling, and answer wrongly.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

_FULL, _SLIDING = "full_attention", "sliding_attention"
# The base in layers with sliding attention, whose positions no family scales.
_LOCAL_BASE = ("rope_local_base_freq", "swa_rope_theta")
# Name in `rope_parameters` → the earlier names.
_EARLIER = {
    "rope_theta": ("rope_theta", "rotary_emb_base", "rope_global_base_freq"),
    "partial_rotary_factor": ("partial_rotary_factor", "rotary_pct"),
    "original_max_position_embeddings": ("original_max_position_embeddings",),
}


def earlier_fields(config: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The fields that a configuration states in `rope_parameters` only.

    known: the names that the model reads. Raises ValueError if these cannot express it.
    """
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
        found["rope_scaling"] = None if plain else {**rope, "type": kind}
    return found


def _type_of(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")
