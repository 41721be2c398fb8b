"""How the families of mlx-vlm differ, and which of them are refused.

Most families are not named here: the load of a model finds out what its template, processor and
network do (`vision_builder`). This module names the exceptions, and refuses families that would
load but answer wrongly. It does not import mlx-vlm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from backend.engine.loading.architectures import aliases, model_files
from common.wording import shown

_CROSSES = (
    "mlx-vlm computes its cross-attention differently in prompts and in answers, and lets the"
    " tokens of a prompt without images attend to later tokens; serve Gemma 3 or a Qwen-VL model"
    " instead"
)
_ONE_QUESTION = (
    "its processor writes a complete prompt around an image, so it cannot answer in a conversation;"
    " serve a Qwen-VL model instead"
)
_DROPS_A_TOKEN = "mlx-vlm drops the token after each image; serve a Qwen-VL model instead"
_FORGETS = (
    "an answer's attention depends on where its prompt ended, and stored KV does not record that;"
    " serve dots.ocr or PaddleOCR-VL instead"
)
_CHANGES = (
    "text, images and audio each need different weights (LoRA), but all requests in a batch use the"
    " same weights, and mlx-vlm answers text with the weights for images; serve Phi-4-mini-instruct"
    " for text, or Gemma 3 for images"
)
_DIFFUSION = (
    "it generates blocks of tokens in many passes (diffusion), but this backend generates one token"
    " after another; serve a model of that kind, such as Gemma 3 or Ling"
)
_POINTS = (
    "each image adds its parts to the vocabulary, and mlx-vlm stores them in the model for one"
    " request at a time; serve Molmo 2 instead"
)
_ONE_CACHE = (
    "mlx-vlm stores the KV of all its layers in one cache, which this backend can neither measure"
    " nor divide"
)
_NEEDS_PYTORCH = (
    "its image processor cannot be built here, because it needs PyTorch, which this backend does"
    " not use; serve Gemma 3 or a Qwen-VL model instead"
)
_DECIDES = "it chooses among given options and generates no text"
_OTHER = "it does not generate text from a conversation"
_NO_CHAT = """
    colidefics3 colqwen2_5 dinov2 falcon_perception florence2 moge3 nemotron_parse pp_doclayout_v3
    qwen3_vl_embedding rfdetr rt_detr_v2 sam3 sam3_1 sam3d_body sam3d_objects sapiens2 siglip
    video_depth_anything
"""
_NOT_SERVED: Mapping[str, str] = {
    **dict.fromkeys(_NO_CHAT.split(), _OTHER),
    **dict.fromkeys(("moondream2", "moondream3", "falcon_ocr", "plamo2vl"), _ONE_QUESTION),
    **dict.fromkeys(("clef", "d1", "d1_omni"), _DECIDES),
    "deepseek_v41": _ONE_CACHE,
    "diffusion_gemma": _DIFFUSION,
    "mllama": _CROSSES,
    "molmo_point": _POINTS,
    "phi3_v": _DROPS_A_TOKEN,
    "phi4_siglip": _NEEDS_PYTORCH,
    "phi4mm": _CHANGES,
}
# Families whose language part alone answers wrongly.
_NOT_READ: Mapping[str, str] = {
    "unlimited_ocr": _FORGETS,
    "phi4mm": _CHANGES,
    "diffusion_gemma": _DIFFUSION,
    "llada2_moe": _DIFFUSION,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How the processor, features and layers of a family differ from most families."""

    image_ends: tuple[str, ...] = ()  # the item's first and last token in the processor's prompt
    boundary: str = ""  # a token around each image; written only once between two images
    drops_last: bool = False  # the processor removes the last token of a prompt
    # The image precedes the whole prompt: its first token, and the marker for the processor.
    in_front: tuple[str, str] | None = None
    bos_after_image: bool = False  # BOS follows the image, and a line break follows the text
    idle: str = ""  # a feature that mlx-vlm's generation ignores
    deep_by_token: bool = False  # deep features have a row for each token, not only visual tokens
    one_axis: bool = False  # positions are [rows, tokens], not [axes, rows, tokens]
    axes_last: bool = False  # positions are [rows, tokens, axes]
    kinds: str = ""  # the argument that selects the experts of visual tokens
    forgets: bool = False  # answers attend to the prompt and only the answer's latest tokens


_FAMILIES: Mapping[str, Family] = {
    "deepseekocr": Family(drops_last=True),
    "deepseekocr_2": Family(drops_last=True),
    "ernie4_5_moe_vl": Family(axes_last=True, kinds="token_type_ids"),
    "gemma3": Family(idle="attention_mask_4d"),
    "got": Family(image_ends=("<img>", "</img>")),
    "granite4_vision": Family(deep_by_token=True),
    "idefics2": Family(boundary="<fake_token_around_image>"),
    "minimax_m3": Family(one_axis=True),
    "minimax_m3_vl": Family(one_axis=True),
    "molmo": Family(in_front=("<im_start>", "")),
    "paligemma": Family(
        in_front=("<image>", "<image>"), bos_after_image=True, idle="attention_mask_4d"
    ),
    "unlimited_ocr": Family(forgets=True),
}
_USUAL = Family()


def family_of(model_type: str) -> Family:
    """Return how the family of a model type differs from most families."""
    return _FAMILIES.get(_module(model_type.lower()), _USUAL)


def why_not_seen(config: Mapping[str, Any]) -> str:
    """Return a clause that says why a model's vision part is not served; '' if it is served."""
    model_type = str(config["model_type"]).lower()
    module = _module(model_type)
    if module not in _modules():
        return f"mlx-vlm has no vision-language model of type {shown(model_type)}"
    if why := _NOT_SERVED.get(module):
        return f"vision-language models of type {shown(model_type)} are not served: {why}"
    return ""


def why_not_read(model_type: str) -> str:
    """Return a message that says why a family's language part is not served alone; '' if it is."""
    why = _NOT_READ.get(_module(model_type.lower()))
    return f"models of type {shown(model_type)} are not served: {why}" if why else ""


def _module(model_type: str) -> str:
    return aliases("mlx_vlm").get(model_type, model_type)


@cache
def _modules() -> frozenset[str]:
    """Return the packages of mlx-vlm whose model has or imports a vision part."""
    return frozenset(
        path.parent.name
        for path in model_files("mlx_vlm", "*/*.py")
        if path.stem in (path.parent.name, "__init__")
        and "vision" in path.read_text(encoding="utf-8").lower()
    )
