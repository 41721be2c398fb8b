"""Finds out which models mlx-lm and mlx-vlm can build, by their files and without importing them.

Both packages have one module for each model type. The check runs before a download, on a thread
that must not use MLX; importing either package takes a second.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from common.model_kind import SPEECH_TYPES

# A family may define its language part elsewhere, as internvl does, or have that of another family.
_LANGUAGE = re.compile(r"^from \.+\S* import .*\bLanguageModel\b", re.MULTILINE)
# A literal in mlx-lm and mlx-vlm. Parsing all of the file would take longer.
_REMAPPING = re.compile(r"^MODEL_REMAPPING = (\{.*?^\})", re.MULTILINE | re.DOTALL)
_MODEL_CLASS = re.compile(r"^(class Model\b|from \.\S+ import .*\bModel\b)", re.MULTILINE)


@cache
def model_types() -> frozenset[str]:
    """Return all model types that mlx-lm can build, aliases included."""
    modules = {
        path.stem
        for path in model_files("mlx_lm", "*.py")
        if _MODEL_CLASS.search(path.read_text(encoding="utf-8"))
    }
    return _with_aliases("mlx_lm", modules)


@cache
def vlm_model_types() -> frozenset[str]:
    """Return all model types whose language part mlx-vlm can build, aliases included."""
    modules = {path.parent.name for path in model_files("mlx_vlm", "*/language.py")}
    modules |= {
        path.parent.name
        for path in model_files("mlx_vlm", "*/__init__.py")
        if _LANGUAGE.search(path.read_text(encoding="utf-8"))
    }
    return _with_aliases("mlx_vlm", modules)


def is_built(model_type: str) -> bool:
    """Return whether mlx-lm or the language part of mlx-vlm can build models of this type."""
    # mlx-vlm's types take longer to find, and most models are of a type that mlx-lm knows.
    return model_type in model_types() or model_type.lower() in vlm_model_types()


def unserved_speech(model_type: str) -> bool:
    """Return whether only mlx-audio can build a model of this type, and it is not served."""
    folder = _folder("mlx_audio")
    found = (folder / "stt" / "models").glob("*/__init__.py") if folder else ()
    speech = {path.parent.name for path in found}
    return model_type in speech - SPEECH_TYPES.keys() and not is_built(model_type)


def _with_aliases(package: str, modules: set[str]) -> frozenset[str]:
    known = aliases(package).items()
    return frozenset(modules | {alias for alias, type_ in known if type_ in modules})


_MEDIA_KEYS = (
    "vision_config",
    "vision_tower",
    "mm_vision_tower",
    "visual",
    "image_token_id",
    "image_token_index",
    "audio_config",
    "audio_token_id",
    "audio_token_index",
)


def is_multimodal(config: dict[str, Any]) -> bool:
    """Return whether a model was designed for images or audio too, whichever weights are present.

    Qwen3-Omni describes its encoders inside `thinker_config`.
    """
    parts = (config, *(part for part in config.values() if isinstance(part, dict)))
    return any(part.get(key) for part in parts for key in _MEDIA_KEYS)


def model_files(package: str, pattern: str) -> Iterable[Path]:
    """Return the matching files in a package's `models` folder; none if it is not installed."""
    folder = _folder(package)
    return (folder / "models").glob(pattern) if folder else ()


@cache
def aliases(package: str) -> Mapping[str, str]:
    """Return, by model type, the other type whose module the package builds it with."""
    folder = _folder(package)
    if folder is None:
        return {}
    literal = _REMAPPING.search((folder / "utils.py").read_text(encoding="utf-8"))
    table: dict[str, str] = ast.literal_eval(literal[1]) if literal else {}
    return table


def _folder(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent if spec and spec.origin else None
