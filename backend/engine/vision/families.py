"""Which model types are served with what sees and hears, decided without importing mlx-vlm.

What can be found out by trying is found out when the model is loaded (`vision_builder`).
Listed here is what no trial shows: families that would answer, and wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from backend.engine.loading.architectures import aliases, model_files
from common.wording import shown

_ALL_SEEN = "its prompt is read in both directions, which a batch of text rows is not"
_CROSSES = "its layers look at the image beside the text, which a batch of text rows has not"
_CANVAS = (
    "its images take positions on a canvas of the whole prompt, and are prepared one by one here"
)
_OWN_PLACES = "its images have positions of another kind than those that are passed on here"
_LOSES_A_TOKEN = (
    "mlx-vlm takes the last token of a prompt with an image away; serve dots.ocr or PaddleOCR-VL"
    " instead"
)
_FORGETS = (
    "which of its own tokens an answer sees depends on where its prompt ended, and stored KV does"
    " not keep that; serve dots.ocr or PaddleOCR-VL instead"
)
_IN_FRONT = (
    "mlx-vlm puts one image in front of the whole prompt, wherever it stands in the conversation;"
    " serve a Qwen-VL model instead"
)
_CHANGES = (
    "texts, images and sounds each need other weights (LoRA), which requests in one batch cannot"
    " have, and mlx-vlm answers texts with the weights for images; serve Phi-4-mini-instruct for"
    " text, or Gemma 3 for images"
)
_SCALED = "mlx-vlm does not scale the embeddings of a prompt as it scales those of an answer"
_OTHER = "it does not generate text from a conversation"
_NOT_SERVED: Mapping[str, str] = {
    "paligemma": _ALL_SEEN,
    "moondream2": _ALL_SEEN,
    "moondream3": _ALL_SEEN,
    "falcon_ocr": _ALL_SEEN,
    "falcon_perception": _ALL_SEEN,
    "mllama": _CROSSES,
    "minicpmv4_7": _CANVAS,
    "hunyuan_vl": _OWN_PLACES,
    "ernie4_5_moe_vl": _OWN_PLACES,
    "deepseekocr": _LOSES_A_TOKEN,
    "deepseekocr_2": _LOSES_A_TOKEN,
    "unlimited_ocr": _FORGETS,
    "molmo": _IN_FRONT,
    "phi4mm": _CHANGES,
    "gemma3n": _SCALED,
    "florence2": _OTHER,
    "nemotron_parse": _OTHER,
    "diffusion_gemma": _OTHER,
    "sam3": _OTHER,
    "sam3_1": _OTHER,
    "colidefics3": _OTHER,
    "colqwen2_5": _OTHER,
    "qwen3_vl_embedding": _OTHER,
}
# Whose language part alone is wrong as well.
_NOT_READ = {"unlimited_ocr": _FORGETS, "phi4mm": _CHANGES}


def why_not_seen(config: Mapping[str, Any]) -> str:
    """The end of a sentence about why a model's vision part is not served; '' where it is."""
    model_type = str(config["model_type"]).lower()
    module = _module(model_type)
    if module not in _modules():
        return f"mlx-vlm has no vision-language model of type {shown(model_type)}"
    if why := _NOT_SERVED.get(module):
        return f"vision-language models of type {shown(model_type)} are not served: {why}"
    return ""


def why_not_read(model_type: str) -> str:
    """The end of a sentence about why mlx-vlm's language part of a family is not served alone; ''
    where it may be."""
    why = _NOT_READ.get(_module(model_type.lower()))
    return f"models of type {shown(model_type)} are not served: {why}" if why else ""


def _module(model_type: str) -> str:
    return aliases("mlx_vlm").get(model_type, model_type)


@cache
def _modules() -> frozenset[str]:
    """Those of mlx-vlm's packages that hold a model with a part that sees, be it another's."""
    return frozenset(
        path.parent.name
        for path in model_files("mlx_vlm", "*/*.py")
        if path.stem in (path.parent.name, "__init__")
        and "vision" in path.read_text(encoding="utf-8").lower()
    )
