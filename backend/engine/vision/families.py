"""Which model types are served with image or audio input, decided without importing mlx-vlm.

Most families are tested when a model is loaded (`vision_builder`). Listed here are the families for
which that test would pass although their answers would be wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from backend.engine.loading.architectures import aliases, model_files
from common.wording import shown

_BIDIRECTIONAL = "its attention over the prompt is bidirectional, which batches do not support"
_SEES_AHEAD = (
    "the tokens of an image attend to each other in both directions, but here a prompt is read in"
    " parts that may cut an image"
)
_CROSSES = "its layers use cross-attention to the image, which batches do not support"
_CANVAS = (
    "it places all images of a prompt on one canvas, but here each image is prepared on its own"
)
_OWN_POSITIONS = "its images need a kind of position ids that this backend does not compute"
_LOSES_A_TOKEN = (
    "mlx-vlm drops the last token of a prompt with an image; serve dots.ocr or PaddleOCR-VL instead"
)
_FORGETS = (
    "which of its own tokens an answer attends to depends on where its prompt ended, which stored"
    " KV does not record; serve dots.ocr or PaddleOCR-VL instead"
)
_OPENS = (
    "its processor opens a prompt with a token of its own, but here it prepares each image alone;"
    " serve a Qwen-VL model instead"
)
_IN_FRONT = (
    "mlx-vlm puts one image before the whole prompt, wherever it is in the conversation; serve a"
    " Qwen-VL model instead"
)
_CHANGES = (
    "texts, images and sounds each need other weights (LoRA), which requests in one batch cannot"
    " have, and mlx-vlm answers texts with the weights for images; serve Phi-4-mini-instruct for"
    " text, or Gemma 3 for images"
)
_SCALED = "mlx-vlm does not scale the embeddings of a prompt as it scales those of an answer"
_DIFFUSION = (
    "it fills in blocks of tokens in many passes (diffusion), and here one token follows the other;"
    " serve a model that writes in that way, such as Gemma 3 or Ling"
)
_BY_NEIGHBOURS = (
    "what its processor writes around an image depends on the text and the images beside it, but"
    " here each image is prepared on its own; serve Idefics 3 or SmolVLM instead"
)
_OTHER = "it does not generate text from a conversation"
_NOT_SERVED: Mapping[str, str] = {
    "paligemma": _BIDIRECTIONAL,
    "moondream2": _BIDIRECTIONAL,
    "moondream3": _BIDIRECTIONAL,
    "falcon_ocr": _BIDIRECTIONAL,
    "falcon_perception": _BIDIRECTIONAL,
    "mllama": _CROSSES,
    "minicpmv4_7": _CANVAS,
    "hunyuan_vl": _OWN_POSITIONS,
    "ernie4_5_moe_vl": _OWN_POSITIONS,
    "deepseek_vl_v2": _OPENS,
    "deepseekocr": _LOSES_A_TOKEN,
    "deepseekocr_2": _LOSES_A_TOKEN,
    "unlimited_ocr": _FORGETS,
    "molmo": _IN_FRONT,
    "phi4mm": _CHANGES,
    "gemma3n": _SCALED,
    "gemma4_unified": _SEES_AHEAD,
    "idefics2": _BY_NEIGHBOURS,
    "florence2": _OTHER,
    "nemotron_parse": _OTHER,
    "diffusion_gemma": _DIFFUSION,
    "sam3": _OTHER,
    "sam3_1": _OTHER,
    "colidefics3": _OTHER,
    "colqwen2_5": _OTHER,
    "qwen3_vl_embedding": _OTHER,
}
# Families whose language part alone answers wrongly too.
_NOT_READ: Mapping[str, str] = {
    "unlimited_ocr": _FORGETS,
    "phi4mm": _CHANGES,
    "diffusion_gemma": _DIFFUSION,
    "llada2_moe": _DIFFUSION,
}


def why_not_seen(config: Mapping[str, Any]) -> str:
    """Why a model's vision part is not served, as the end of a sentence; '' if it is served."""
    model_type = str(config["model_type"]).lower()
    module = _module(model_type)
    if module not in _modules():
        return f"mlx-vlm has no vision-language model of type {shown(model_type)}"
    if why := _NOT_SERVED.get(module):
        return f"vision-language models of type {shown(model_type)} are not served: {why}"
    text = config.get("text_config")
    if isinstance(text, Mapping) and text.get("use_bidirectional_attention") == "vision":
        return (
            f"this vision-language model of type {shown(model_type)} is not served: {_SEES_AHEAD}"
        )
    return ""


def why_not_read(model_type: str) -> str:
    """Why the language part of a family is not served alone, as a sentence; '' if it is."""
    why = _NOT_READ.get(_module(model_type.lower()))
    return f"models of type {shown(model_type)} are not served: {why}" if why else ""


def _module(model_type: str) -> str:
    return aliases("mlx_vlm").get(model_type, model_type)


@cache
def _modules() -> frozenset[str]:
    """The packages of mlx-vlm whose model has a vision part, its own or one of another package."""
    return frozenset(
        path.parent.name
        for path in model_files("mlx_vlm", "*/*.py")
        if path.stem in (path.parent.name, "__init__")
        and "vision" in path.read_text(encoding="utf-8").lower()
    )
