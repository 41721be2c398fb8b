"""config.json as mlx-vlm's embedding models read it.

transformers 5 writes the values of RoPE into `rope_parameters`, separately for each kind of layer,
and the kinds into `layer_types`. mlx-vlm 0.7.10 ignores these and needs the earlier fields, or uses
its own values in their place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backend.engine.errors import ModelRejected

_FULL, _SLIDING = "full_attention", "sliding_attention"
# Family → the earlier names of RoPE's base in layers of each kind.
_BASES: Mapping[str, Mapping[str, str]] = {
    "gemma3_text": {_FULL: "rope_theta", _SLIDING: "rope_local_base_freq"},
    "modernbert": {_FULL: "global_rope_theta", _SLIDING: "local_rope_theta"},
}
# Families whose positions may be scaled in one kind of layers → the earlier field for that.
_SCALED = {"gemma3_text": "rope_scaling"}


def in_earlier_form(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the earlier fields added. name: the model's.

    Raises ModelRejected for what these cannot express.
    """
    family = str(config["model_type"])
    found = dict(config)
    rope, kinds = config.get("rope_parameters"), config.get("layer_types")
    if isinstance(rope, dict):
        if family in _BASES:
            _add_bases(name, family, rope, found)
        elif "rope_theta" in rope:
            found.setdefault("rope_theta", rope["rope_theta"])
            if rope.get("rope_type", "default") != "default":
                found.setdefault("rope_scaling", dict(rope))
    if family in _BASES and isinstance(kinds, list) and kinds:
        found |= _interval(name, family, kinds)
    return found


def _add_bases(name: str, family: str, rope: Mapping[str, Any], found: dict[str, Any]) -> None:
    for kind, earlier in _BASES[family].items():
        values = rope.get(kind)
        if not isinstance(values, dict):
            continue
        if "rope_theta" in values:
            found[earlier] = values["rope_theta"]
        if values.get("rope_type", "default") == "default":
            continue
        if kind != _FULL or family not in _SCALED:
            raise ModelRejected.because(
                name,
                f"its rope_parameters scale positions in layers with {kind}, which is not"
                " supported; load a model without that",
            )
        found[_SCALED[family]] = dict(values)


def _interval(name: str, family: str, kinds: list[Any]) -> dict[str, int]:
    """The number of layers from one with full attention to the next, under its earlier name.

    Gemma's groups of layers end with such a layer, and ModernBERT's begin with it.
    """
    ends = family == "gemma3_text"
    full = [at for at, kind in enumerate(kinds) if kind == _FULL]
    if ends:
        interval = full[0] + 1 if full else len(kinds) + 1
        regular = [(at + 1) % interval == 0 for at in range(len(kinds))]
    else:
        interval = full[1] if len(full) > 1 else len(kinds)
        regular = [at % interval == 0 for at in range(len(kinds))]
    if [kind == _FULL for kind in kinds] != regular:
        raise ModelRejected.because(
            name,
            "its layer_types must have full attention in every n-th layer, and they do not; load a"
            " model such as EmbeddingGemma",
        )
    return {"sliding_window_pattern" if ends else "global_attn_every_n_layers": interval}
