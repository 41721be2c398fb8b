"""config.json as mlx-vlm reads it.

transformers 5 writes the values of RoPE into `rope_parameters`, and those of the text part into
`text_config`. For many families mlx-vlm 0.7.10 looks for them in the earlier places only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import MISSING, Field, fields
from types import ModuleType
from typing import Any

from backend.engine.loading.earlier_fields import earlier_fields
from backend.engine.vision.opencv import opencv_replaced

# Families that take the text part from the top level.
_AT_TOP = ("qwen2_vl", "qwen2_5_vl", "paddleocr_vl", "ernie4_5_moe_vl")
# Families that know `rope_parameters` but not all of its values.
_READ_IN_PART = ("ernie4_5_moe_vl", "glm4v_moe", "paddleocr_vl")
# Parts that are not text, by the name of their class.
_OTHER_PARTS = {"vision_config": "VisionConfig", "audio_config": "AudioConfig"}


@contextmanager
def read_in_earlier_form() -> Iterator[None]:
    """Let mlx-vlm read config.json with the earlier fields added.

    Its `load_model` takes no configuration, so `load_config` is replaced.
    """
    from mlx_vlm import utils

    own: Any = utils.load_config

    def load_config(*arguments: Any, **named: Any) -> dict[str, Any]:
        return in_earlier_form(own(*arguments, **named))

    utils.load_config = load_config
    try:
        yield
    finally:
        utils.load_config = own


def in_earlier_form(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with the earlier fields added. Raises ValueError if that is impossible."""
    from mlx_vlm.utils import get_model_and_args

    with opencv_replaced():  # where the family's module is first imported
        module, family = get_model_and_args({"model_type": config["model_type"]})
    found = deepcopy(config)
    text = _fields_of(module, "TextConfig") or _fields_of(module, "ModelConfig")
    if family in _READ_IN_PART:
        text.pop("rope_parameters", None)
    if family in _AT_TOP:
        found = (found.pop("text_config", None) or {}) | found
    _complete(found, text, module)
    return found


def _complete(part: dict[str, Any], known: dict[str, Field[Any]], module: ModuleType) -> None:
    for name, value in part.items():
        if isinstance(value, dict) and name != "rope_parameters":
            other = _OTHER_PARTS.get(name)
            _complete(value, _fields_of(module, other) if other else known, module)
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
    return {one.name: one for one in fields(kind)} if kind is not None else {}


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default
