"""Recognises drafters: checkpoints that only propose draft tokens for one other model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any

# The names of drafters, which no complete model has; the last two patterns are mlx-vlm's.
_NAMES = re.compile(r".*(eagle-?3|dflash|dspark|speculator).*|.+_mtp|.+_assistant", re.IGNORECASE)
_EAGLE = re.compile(r".*eagle-?3.*", re.IGNORECASE)

# Model types of prediction heads that mlx-vlm splits from models, and the families of these models.
SPLIT_HEADS = {
    "qwen3_5_mtp": ("qwen3_5", "qwen3_5_moe", "qwen3_next"),
    "glm4_moe_lite_mtp": ("glm4_moe_lite",),
    "glm_moe_dsa_mtp": ("glm_moe_dsa",),
    "nemotron_h_mtp": ("nemotron_h",),
}


class DrafterKind(Enum):
    """The supported kinds of drafters."""

    HEAD = "prediction head"
    EAGLE3 = "EAGLE-3"
    DFLASH = "DFlash"


def drafter_name(config: Mapping[str, Any]) -> str:
    """Return the value in a drafter's configuration that identifies a drafter; '' for a model."""
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else [architectures]
    for name in (config.get("speculators_model_type"), config.get("model_type"), *names):
        if isinstance(name, str) and _NAMES.fullmatch(name):
            return name
    return ""


def is_drafter(folder: Path) -> bool:
    """Return whether the checkpoint in a folder is a drafter."""
    with suppress(OSError, ValueError, RecursionError):
        config = json.loads((folder / "config.json").read_bytes())
        return isinstance(config, dict) and bool(drafter_name(config))
    return False


def drafter_kind(config: Mapping[str, Any]) -> DrafterKind | None:
    """Return the kind of a supported drafter; None for other drafters and for models.

    DFlash2, DSpark, and DFlash for families other than Qwen3's are not supported, because their
    layers are different.
    """
    name = drafter_name(config)
    if _EAGLE.fullmatch(name):
        return DrafterKind.EAGLE3
    if config.get("model_type") in SPLIT_HEADS:
        return DrafterKind.HEAD
    dflash = config.get("dflash_config")
    if (
        name == "DFlashDraftModel"
        and config.get("model_type") == "qwen3"
        and isinstance(dflash, Mapping)
        and dflash.get("projector_type") != "dspark"
        and not (config.get("markov_rank") or dflash.get("markov_rank"))
    ):
        return DrafterKind.DFLASH
    return None
