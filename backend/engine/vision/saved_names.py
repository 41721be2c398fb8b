"""Changes weights that transformers saves to the names and layouts that mlx-vlm reads.

mlx-vlm reads the weights as they were first published. transformers 5 saves some families under the
names of its own code: always, for models that were not loaded from published weights, or with
`save_original_format=False`. The names are changed before mlx-vlm reads them, because mlx-vlm also
decides by names which weights it changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from backend.engine.loading.saved_weights import (
    KIMI,
    PARTS_FIRST,
    Rules,
    single_experts,
    transpose_experts,
)
from backend.engine.vision.patches import replaced

_TEXT_FIRST: Rules = [(r"^model\.language_model\.", "model."), (r"^model\.visual\.", "visual.")]
_TOWER: Rules = [
    (
        r"^((?:model\.)?vision_tower\.)(?=embeddings\.|encoder\.|head\.|(?:pre|post)_lay)",
        r"\1vision_model.",
    )
]
# Model type → patterns of transformers' names, and the published names, in the order in which they
# are applied.
_RENAMED: Mapping[str, Rules] = {
    "aya_vision": [*PARTS_FIRST, *_TOWER],
    "gemma3": [*PARTS_FIRST, *_TOWER],
    "gemma4_unified": [
        (r"^model\.embed_vision\.multimodal_embedder\.", "model.embed_vision."),
        (r"^model\.embed_vision\.(?=patch_|pos_)", "model.vision_embedder."),
    ],
    "granite4_vision": _TOWER,
    "hunyuan_vl": [
        *_TEXT_FIRST,
        (r"^model\.vision_tower\.", "vit."),
        (r"^(vit\..*)\.layer_norm1\.", r"\1.input_layernorm."),
        (r"^(vit\..*)\.layer_norm2\.", r"\1.post_attention_layernorm."),
        (r"^(vit\..*)\.fc1\.", r"\1.dense_h_to_4h."),
        (r"^(vit\..*)\.fc2\.", r"\1.dense_4h_to_h."),
        (r"^vit\.patch_merger\.proj_conv\.", "vit.perceive.proj.0."),
        (r"^vit\.patch_merger\.proj_out\.", "vit.perceive.proj.2."),
        (r"^vit\.patch_merger\.", "vit.perceive."),
    ],
    "internvl": PARTS_FIRST,
    "kimi_k25": KIMI,
    "llava": [*PARTS_FIRST, *_TOWER],
    "paddleocr_vl": [*_TEXT_FIRST, (r"^model\.projector\.", "mlp_AR.")],
    "paligemma": [*PARTS_FIRST, *_TOWER],
    "qwen2_5_vl": _TEXT_FIRST,
    "qwen2_vl": _TEXT_FIRST,
}
_COMPUTED = (".rotary_emb.inv_freq", ".position_ids")  # tables in checkpoints of earlier versions
_EMBEDDING, _HEAD = "language_model.model.embed_tokens.", "language_model.lm_head."


@contextmanager
def read_as_saved() -> Iterator[None]:
    """Let mlx-vlm read the names and layouts of transformers too."""
    from mlx_vlm import utils

    package: Any = utils
    sanitize, load = package.sanitize_weights, package.load_model_weights

    def sanitized(model: Any, weights: dict[str, mx.array], *rest: Any) -> dict[str, mx.array]:
        if isinstance(model, Module):  # the call for the whole model is the first of several
            weights = published(model, weights)
        changed: dict[str, mx.array] = sanitize(model, weights, *rest)
        return changed

    def loaded(model: Any, config: Any, weights: dict[str, mx.array], *rest: Any, **kw: Any) -> Any:
        return load(model, config, _complete(model, config, weights), *rest, **kw)

    with (
        replaced(utils, "sanitize_weights", sanitized),
        replaced(utils, "load_model_weights", loaded),
    ):
        yield


def published(model: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return weights under their published names and in the published layouts."""
    model_type = str(getattr(getattr(model, "config", None), "model_type", ""))
    found = dict(weights)
    for pattern, replacement in _RENAMED.get(model_type, ()):
        found = {re.sub(pattern, replacement, name): each for name, each in found.items()}
    own: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    if not any(".vision_model.head." in name for name in own):  # of SigLIP, which nothing reads
        found = {name: each for name, each in found.items() if ".vision_model.head." not in name}
    if model_type == "qwen3_vl_moe":
        transpose_experts(found, own)
    elif model_type == "glm4v_moe":
        found = single_experts(found)
    elif model_type == "molmo2":
        # transformers joins both parts, and divides the whole into halves.
        names = {name.rpartition("wte.")[2]: name for name in found if ".wte." in name}
        first, second = names.get("embedding"), names.get("new_embedding")
        if first and second:
            rows = own["language_model.model.wte.embedding"].shape[0]
            whole = mx.concatenate([found[first], found[second]])
            found[first], found[second] = whole[:rows], whole[rows:]
    return found


def _complete(
    model: Any, config: Mapping[str, Any], weights: dict[str, mx.array]
) -> dict[str, mx.array]:
    """Return the weights without tables that are computed, and with the head of a tied model.

    Some families always have a head.
    """
    text = config.get("text_config")
    parts = (config, text if isinstance(text, dict) else {})
    own = dict(tree_flatten(model.parameters()))
    weights = {
        name: each for name, each in weights.items() if name in own or not name.endswith(_COMPUTED)
    }
    if f"{_HEAD}weight" not in own or any(name.startswith(_HEAD) for name in weights):
        return weights
    if not any(part.get("tie_word_embeddings") for part in parts):
        return weights
    return weights | {
        _HEAD + name.removeprefix(_EMBEDDING): each
        for name, each in weights.items()
        if name.startswith(_EMBEDDING)
    }
