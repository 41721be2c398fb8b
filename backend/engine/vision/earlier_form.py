"""Translates config.json to the form that mlx-vlm reads.

transformers 5 writes the values of RoPE into `rope_parameters` and those of the text part into
`text_config`, and uses other types and fields for encoders ("towers"). For many families, mlx-vlm
reads only the earlier fields, or refuses an encoder of an unknown type.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import MISSING, Field, fields
from types import ModuleType
from typing import Any

from backend.engine.loading.earlier_fields import earlier_fields
from backend.engine.vision.patches import opencv_replaced, replaced

# Families that read the fields of the text part at the top level.
_AT_TOP = ("qwen2_vl", "qwen2_5_vl", "paddleocr_vl", "ernie4_5_moe_vl")
# Families that read `rope_parameters`, but not all values in it.
_READ_IN_PART = ("ernie4_5_moe_vl", "glm4v_moe", "paddleocr_vl")
# By family: names of an encoder's fields → the names that transformers 5 writes.
_TOWERS = {
    "kimi_k25": {
        "depth": "num_hidden_layers",
        "embed_dim": "hidden_size",
        "num_heads": "num_attention_heads",
        "init_pos_emb_height": "pos_emb_height",
        "init_pos_emb_width": "pos_emb_width",
    },
    "step3p7": {
        "width": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "ls_init_value": "layer_scale_init_value",
    },
    "molmo2": {
        "image_default_input_size": "image_size",
        "image_patch_size": "patch_size",
        "image_num_pos": "num_position_embeddings",
    },
}
IMAGE_TOKEN = "image_token_id", "image_token_index"  # one token under two names
_UNREAD = {"rope_parameters", "dtype"}  # some families fail on these fields of an encoder
# Parts other than text → the names of their classes.
_OTHER_PARTS = {"vision_config": "VisionConfig", "audio_config": "AudioConfig"}


def read_in_earlier_form() -> AbstractContextManager[None]:
    """Let mlx-vlm read config.json with the earlier fields added.

    mlx-vlm's `load_model` accepts no configuration, so `load_config` is replaced.
    """
    from mlx_vlm import utils

    original: Any = utils.load_config

    def load_config(*arguments: Any, **named: Any) -> dict[str, Any]:
        return in_earlier_form(original(*arguments, **named))

    return replaced(utils, "load_config", load_config)


def in_earlier_form(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with the earlier fields added.

    Raises ValueError if the earlier fields cannot express a value.
    """
    from mlx_vlm.utils import get_model_and_args

    with opencv_replaced():  # the call imports the family's module
        module, family = get_model_and_args({"model_type": config["model_type"]})
    found = deepcopy(config)
    text = _fields_of(module, "TextConfig") or _fields_of(module, "ModelConfig")
    part = found.get("text_config") or {}
    if family in _READ_IN_PART or part.get("model_type") == "mistral":
        text.pop("rope_parameters", None)
    if family in _AT_TOP:
        found = (found.pop("text_config", None) or {}) | found
    if isinstance(tower := found.get("vision_config"), dict):
        _name_tower(tower, family, _fields_of(module, "VisionConfig"))
        if "vit_config" not in tower and "vision_feature_layer" in found.get("adapter_config", {}):
            adapter = found["adapter_config"]
            adapter["vit_layers"] = adapter["vision_feature_layer"]
            found["vision_config"] = {"vit_config": tower, "adapter_config": adapter}
    _complete(found, text, module)
    for name, other in (IMAGE_TOKEN, IMAGE_TOKEN[::-1]):
        if found.get(other) is not None and found.get(name) is None:
            found[name] = found[other]
    if family == "gemma3" and "mm_tokens_per_image" in found:
        part.setdefault("mm_tokens_per_image", found["mm_tokens_per_image"])
    elif family == "aya_vision":
        found.setdefault("alignment_intermediate_size", part.get("hidden_size"))
    elif family == "glm_ocr":  # it fails on fields that it does not know
        found["text_config"] = {name: part[name] for name in text if name in part}
    return found


def _name_tower(tower: dict[str, Any], family: str, known: dict[str, Field[Any]]) -> None:
    """Give an encoder the type and the names of fields that mlx-vlm reads."""
    usual = _default(known["model_type"]) if "model_type" in known else MISSING
    if tower.get("model_type") == f"{family}_vision" and isinstance(usual, str):
        tower["model_type"] = usual
    for earlier, name in _TOWERS.get(family, {}).items():
        if name in tower:
            tower.setdefault(earlier, tower[name])


def _complete(part: dict[str, Any], known: dict[str, Field[Any]], module: ModuleType) -> None:
    for name, value in part.items():
        if isinstance(value, dict) and name != "rope_parameters":
            other = _OTHER_PARTS.get(name)
            fields_ = _fields_of(module, other) if other else known
            _complete(value, fields_, module)
            for unread in _UNREAD.difference(fields_) if other else ():
                value.pop(unread, None)
    added = earlier_fields(part, known)
    if "rope_scaling" in added:
        usual = _default(known["rope_scaling"]) or {}
        sections = {name: value for name, value in usual.items() if name.endswith("_section")}
        if added["rope_scaling"] is None and sections:
            del added["rope_scaling"]
        elif "xdrope_section" in sections and "mrope_section" in added["rope_scaling"]:
            scaling = added["rope_scaling"]
            scaling["xdrope_section"] = scaling["mrope_section"]
    part |= added


def _fields_of(module: ModuleType, name: str) -> dict[str, Field[Any]]:
    kind = getattr(module, name, None)
    return {field.name: field for field in fields(kind)} if kind is not None else {}


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default
