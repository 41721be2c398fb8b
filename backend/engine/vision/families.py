"""Which model types are served with what sees and hears, decided without importing mlx-vlm.

What can be found out by trying is found out when the model is loaded (`engine.vision.loading`).
Listed here is what no trial shows: families that would answer, and wrongly.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from common.options import shown

_ALL_SEEN = "its prompt is read in both directions, which a batch of text rows is not"
_CROSSES = "its layers look at the image beside the text, which a batch of text rows has not"
_OTHER = "it does not generate text from a conversation"
_NOT_SERVED: Mapping[str, str] = {
    "paligemma": _ALL_SEEN,
    "moondream2": _ALL_SEEN,
    "moondream3": _ALL_SEEN,
    "falcon_ocr": _ALL_SEEN,
    "falcon_perception": _ALL_SEEN,
    "mllama": _CROSSES,
    "florence2": _OTHER,
    "nemotron_parse": _OTHER,
    "diffusion_gemma": _OTHER,
    "sam3": _OTHER,
    "sam3_1": _OTHER,
    "colidefics3": _OTHER,
    "colqwen2_5": _OTHER,
    "qwen3_vl_embedding": _OTHER,
}


def why_not_seen(config: Mapping[str, Any]) -> str:
    """The end of a sentence about why a model's vision part is not served; '' where it is."""
    model_type = str(config["model_type"]).lower()
    module = _aliases().get(model_type, model_type)
    if module not in _modules():
        return f"mlx-vlm has no vision-language model of type {shown(model_type)}"
    if why := _NOT_SERVED.get(module):
        return f"vision-language models of type {shown(model_type)} are not served: {why}"
    return ""


@cache
def _package() -> Path | None:
    spec = importlib.util.find_spec("mlx_vlm")
    return Path(spec.origin).parent if spec and spec.origin else None


@cache
def _aliases() -> Mapping[str, str]:
    """Model types that mlx-vlm builds with another type's module."""
    package = _package()
    if package is None:
        return {}
    for node in ast.parse((package / "utils.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "MODEL_REMAPPING":
            table: dict[str, str] = ast.literal_eval(node.value)
            return table
    return {}


@cache
def _modules() -> frozenset[str]:
    """Those of mlx-vlm's packages that hold a model with a part that sees."""
    package = _package()
    if package is None:
        return frozenset()
    return frozenset(
        path.parent.name
        for path in (package / "models").glob("*/*.py")
        if path.stem == path.parent.name and "vision" in path.read_text(encoding="utf-8").lower()
    )
