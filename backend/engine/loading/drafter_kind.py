"""Recognises drafters: checkpoints that guess tokens for one model and are no complete model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

# The names of drafters, which models do not have; the last two patterns are mlx-vlm's.
_NAMES = re.compile(r".*(eagle-?3|dflash|dspark|speculator).*|.+_mtp|.+_assistant", re.IGNORECASE)
_EAGLE = re.compile(r".*eagle-?3.*", re.IGNORECASE)

# Checkpoints of a prediction head alone, as mlx-vlm splits it from a model: the families of these.
SPLIT_HEADS = {
    "qwen3_5_mtp": ("qwen3_5", "qwen3_5_moe", "qwen3_next"),
    "glm4_moe_lite_mtp": ("glm4_moe_lite",),
    "glm_moe_dsa_mtp": ("glm_moe_dsa",),
    "nemotron_h_mtp": ("nemotron_h",),
}


class DrafterKind(Enum):
    """The kinds of drafters that this version drafts with."""

    HEAD = "prediction head"
    EAGLE3 = "EAGLE-3"
    DFLASH = "DFlash"


def drafter_name(config: Mapping[str, Any]) -> str:
    """What a checkpoint's configuration calls itself if it is a drafter's; '' if it is not."""
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else [architectures]
    for name in (config.get("speculators_model_type"), config.get("model_type"), *names):
        if isinstance(name, str) and _NAMES.fullmatch(name):
            return name
    return ""


def drafter_kind(config: Mapping[str, Any]) -> DrafterKind | None:
    """The kind of a drafter that is supported; None for other drafters and for models.

    DFlash2, DSpark, and DFlash for families other than Qwen3's are not supported, because their
    layers are different.
    """
    name = drafter_name(config)
    if _EAGLE.fullmatch(name):
        return DrafterKind.EAGLE3
    if config.get("model_type") in SPLIT_HEADS:
        return DrafterKind.HEAD
    own = config.get("dflash_config")
    if (
        name == "DFlashDraftModel"
        and config.get("model_type") == "qwen3"
        and isinstance(own, Mapping)
        and own.get("projector_type") != "dspark"
        and not (config.get("markov_rank") or own.get("markov_rank"))
    ):
        return DrafterKind.DFLASH
    return None
