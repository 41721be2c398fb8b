"""Which model types mlx-lm can build, found without importing it.

The check runs before a download, on a thread that must not touch MLX, and importing mlx-lm costs a
second. Its package lists one module for each type, and its table of aliases is a literal.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

_MODEL_CLASS = re.compile(r"^(class Model\b|from \.\S+ import .*\bModel\b)", re.MULTILINE)


@cache
def _package() -> Path | None:
    spec = importlib.util.find_spec("mlx_lm")
    return Path(spec.origin).parent if spec and spec.origin else None


@cache
def aliases() -> dict[str, str]:
    """Model types that mlx-lm builds with another type's module."""
    package = _package()
    if package is None:
        return {}
    for node in ast.parse((package / "utils.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "MODEL_REMAPPING":
            table: dict[str, str] = ast.literal_eval(node.value)
            return table
    return {}


@cache
def model_types() -> frozenset[str]:
    """All model types that mlx-lm can build, aliases included."""
    package = _package()
    if package is None:
        return frozenset()
    modules = {
        path.stem
        for path in (package / "models").glob("*.py")
        if _MODEL_CLASS.search(path.read_text(encoding="utf-8"))
    }
    return frozenset(modules | {alias for alias, type_ in aliases().items() if type_ in modules})


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
_MEDIA_MODULES = frozenset({
    "vision_tower", "vision_model", "vision_encoder", "vision_embedder", "vision_adapter",
    "vision_projection", "visual", "embed_vision", "vpm", "resampler",
    "multi_modal_projector", "mm_projector",
    "audio_tower", "audio_model", "audio_encoder", "embed_audio", "apm",
})  # fmt: skip


def is_multimodal(config: dict[str, Any]) -> bool:
    """Whether a model was made for images or sound too, whatever of it the weights still hold."""
    return any(config.get(key) for key in _MEDIA_KEYS)


def holds_media(tensors: frozenset[str]) -> bool:
    """Whether weights of a part that sees or hears are among the tensors."""
    return any(not _MEDIA_MODULES.isdisjoint(name.split(".")) for name in tensors)
