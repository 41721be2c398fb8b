"""Changes the files that transformers 5 saves to the form that mlx-vlm reads.

transformers 5 writes the values of RoPE into `rope_parameters` and those of the text part into
`text_config`, and uses other types and fields for encoders ("towers"). For many families, mlx-vlm
reads only the earlier fields, or refuses an encoder of an unknown type.

mlx-vlm reads the weights as they were first published. transformers 5 saves some families under the
names of its own code: always, for models that were not loaded from published weights, or with
`save_original_format=False`. The names are changed before mlx-vlm reads them, because mlx-vlm also
decides by names which weights it changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import MISSING, Field, fields
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from backend.engine.loading.earlier_fields import earlier_fields
from backend.engine.loading.saved_weights import (
    KIMI,
    MINIMAX,
    PARTS_FIRST,
    Rules,
    separate,
    transpose_experts,
)
from backend.engine.vision.patches import opencv_replaced, replaced

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
    "deepseek_v4": [(r"\.hc_head\.hc_", ".hc_head."), (r"\.attn\.norm\.", ".attn.kv_norm.")],
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
    "kimi_k25": [
        *KIMI,
        (r"^mm_projector\.in_proj\.", "mm_projector.proj.0."),
        (r"^mm_projector\.out_proj\.", "mm_projector.proj.2."),
        (r"^(vision_tower\.layers\..*\.(?:mlp\.fc|norm))1\.", r"\g<1>0."),
        (r"^(vision_tower\.layers\..*\.(?:mlp\.fc|norm))2\.", r"\g<1>1."),
        (r"^(vision_tower\.layers\..*\.attn)\.proj\.", r"\1.wo."),
        (r"^vision_tower\.layers\.", "vision_tower.blocks."),
        (r"\.pos_emb\.position_embeddings$", ".pos_emb.weight"),
    ],
    "llava": [*PARTS_FIRST, *_TOWER],
    "minimax_m3_vl": MINIMAX,
    "molmo2": [
        (r"^model\.vision_tower\.layers\.", "model.vision_tower.transformer.resblocks."),
        (r"^model\.vision_tower\.", "model.vision_backbone.image_vit."),
        (r"^model\.multi_modal_projector\.", "model.vision_backbone."),
        (r"(image_vit\..*)\.self_attn\.([qkvo])_proj\.", r"\1.attention.w\2."),
        (r"(image_vit\..*)\.mlp\.fc", r"\1.feed_forward.w"),
        (r"(image_vit\..*)\.layer_norm1\.", r"\1.attention_norm."),
        (r"(image_vit\..*)\.layer_norm2\.", r"\1.ffn_norm."),
        (r"(image_pooling_2d\.)([qkvo])_proj\.", r"\1w\2."),
        (r"(image_projector\.)gate_proj\.", r"\1w1."),
        (r"(image_projector\.)down_proj\.", r"\1w2."),
        (r"(image_projector\.)up_proj\.", r"\1w3."),
        (r"^model\.language_model\.layers\.", "model.transformer.blocks."),
        (r"^model\.language_model\.norm\.", "model.transformer.ln_f."),
        (r"^model\.language_model\.embed_tokens\.weight$", "model.transformer.wte.embedding"),
        (r"\.input_layernorm\.", ".attn_norm."),
        (r"\.post_attention_layernorm\.", ".ff_norm."),
        (r"\.self_attn\.o_proj\.", ".self_attn.attn_out."),
        (r"\.mlp\.down_proj\.", ".mlp.ff_out."),
    ],
    "paddleocr_vl": [*_TEXT_FIRST, (r"^model\.projector\.", "mlp_AR.")],
    "paligemma": [*PARTS_FIRST, *_TOWER],
    "qwen2_5_vl": _TEXT_FIRST,
    "qwen2_vl": _TEXT_FIRST,
}
_QKV = tuple(f".{part}_proj." for part in "qkv")
# Model type → matrices that are published as one: the parts of their names that differ, and the
# published part.
_JOINED: Mapping[str, Sequence[tuple[tuple[str, ...], str]]] = {
    "kimi_k25": [(tuple(f".attn{part}" for part in _QKV), ".attn.wqkv.")],
    "molmo2": [
        (tuple(f".self_attn{part}" for part in _QKV), ".self_attn.att_proj."),
        ((".mlp.up_proj.", ".mlp.gate_proj."), ".mlp.ff_proj."),
    ],
}
_COMPUTED = (".rotary_emb.inv_freq", ".position_ids")  # tables in checkpoints of earlier versions
_EMBEDDING, _HEAD = "language_model.model.embed_tokens.", "language_model.lm_head."
# Families that read the fields of the text part at the top level.
_AT_TOP = ("qwen2_vl", "qwen2_5_vl", "paddleocr_vl", "ernie4_5_moe_vl")
# Families that read `rope_parameters`, but not all values in it.
_READ_IN_PART = ("ernie4_5_moe_vl", "glm4v_moe", "paddleocr_vl")
# By family: names of an encoder's fields → the names that transformers 5 writes.
_TOWERS = {
    "kimi_k25": {
        "depth": "num_hidden_layers",
        "embed_dim": "hidden_size",
        "num_heads": "num_attention_heads",
        "init_pos_emb_height": "pos_emb_height",
        "init_pos_emb_width": "pos_emb_width",
    },
    "step3p7": {
        "width": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "ls_init_value": "layer_scale_init_value",
    },
    "molmo2": {
        "image_default_input_size": "image_size",
        "image_patch_size": "patch_size",
        "image_num_pos": "num_position_embeddings",
    },
}
# DeepSeek-V4's types of layers → how many tokens one compressed token replaces.
_RATIOS = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}
IMAGE_TOKEN = "image_token_id", "image_token_index"  # one token under two names
_UNREAD = {"rope_parameters", "dtype"}  # some families fail on these fields of an encoder
# Parts other than text → the names of their classes.
_OTHER_PARTS = {"vision_config": "VisionConfig", "audio_config": "AudioConfig"}


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
    found = separate(weights, model_type)
    for pattern, replacement in _RENAMED.get(model_type, ()):
        found = {re.sub(pattern, replacement, name): each for name, each in found.items()}
    for marks, mark in _JOINED.get(model_type, ()):
        for name in [name for name in found if marks[0] in name]:
            parts = [found.pop(name.replace(marks[0], other)) for other in marks]
            if model_type == "kimi_k25":
                heads = model.config.vision_config.num_heads
                parts[:2] = [_in_pairs(part, heads) for part in parts[:2]]
            found[name.replace(marks[0], mark)] = mx.concatenate(parts)
    own: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    for head in (".vision_model.head.", "vision_tower.head."):  # of SigLIP, which nothing reads
        if not any(head in name for name in own):
            found = {name: each for name, each in found.items() if head not in name}
    if model_type == "qwen3_vl_moe":
        transpose_experts(found, own)
    elif model_type == "molmo2":
        # transformers joins both parts, and divides the whole into halves.
        first, second = "model.transformer.wte.embedding", "model.transformer.wte.new_embedding"
        parts = [found[name] for name in (first, second) if name in found]
        if parts:
            rows = own["language_model.model.wte.embedding"].shape[0]
            whole = mx.concatenate(parts)
            found[first], found[second] = whole[:rows], whole[rows:]
    return found


def _in_pairs(rows: mx.array, heads: int) -> mx.array:
    """Return a projection whose rows that rotate together are neighbours, not in halves."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


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


def read_in_earlier_form() -> AbstractContextManager[None]:
    """Let mlx-vlm read config.json with the earlier fields added.

    mlx-vlm's `load_model` accepts no configuration, so `load_config` is replaced.
    """
    from mlx_vlm import utils

    original: Any = utils.load_config

    def load_config(*arguments: Any, **named: Any) -> dict[str, Any]:
        return in_earlier_form(original(*arguments, **named))

    return replaced(utils, "load_config", load_config)


def in_earlier_form(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with the earlier fields added.

    Raises ValueError if the earlier fields cannot express a value.
    """
    from mlx_vlm.utils import get_model_and_args

    with opencv_replaced():  # the call imports the family's module
        module, family = get_model_and_args({"model_type": config["model_type"]})
    found = deepcopy(config)
    text = _fields_of(module, "TextConfig") or _fields_of(module, "ModelConfig")
    part = found.get("text_config") or {}
    if family in _READ_IN_PART or part.get("model_type") == "mistral":
        text.pop("rope_parameters", None)
    if family in _AT_TOP:
        found = (found.pop("text_config", None) or {}) | found
    if isinstance(tower := found.get("vision_config"), dict):
        _name_tower(tower, family, _fields_of(module, "VisionConfig"))
        if "vit_config" not in tower and "vision_feature_layer" in found.get("adapter_config", {}):
            adapter = found["adapter_config"]
            adapter["vit_layers"] = adapter["vision_feature_layer"]
            found["vision_config"] = {"vit_config": tower, "adapter_config": adapter}
    _complete_part(found, text, module)
    for name, other in (IMAGE_TOKEN, IMAGE_TOKEN[::-1]):
        if found.get(other) is not None and found.get(name) is None:
            found[name] = found[other]
    if family == "gemma3" and "mm_tokens_per_image" in found:
        part.setdefault("mm_tokens_per_image", found["mm_tokens_per_image"])
    elif family == "aya_vision":
        found.setdefault("alignment_intermediate_size", part.get("hidden_size"))
    elif family == "deepseek_v4" and _RATIOS.keys() >= {*(found.get("layer_types") or "?")}:
        found.setdefault("compress_ratios", [_RATIOS[kind] for kind in found["layer_types"]])
        found.setdefault("num_hash_layers", (found.get("mlp_layer_types") or []).count("hash_moe"))
    elif family == "glm_ocr":  # it fails on fields that it does not know
        found["text_config"] = {name: part[name] for name in text if name in part}
    return found


def _name_tower(tower: dict[str, Any], family: str, known: dict[str, Field[Any]]) -> None:
    """Give an encoder the type and the names of fields that mlx-vlm reads."""
    usual = _default(known["model_type"]) if "model_type" in known else MISSING
    if tower.get("model_type") == f"{family}_vision" and isinstance(usual, str):
        tower["model_type"] = usual
    for earlier, name in _TOWERS.get(family, {}).items():
        if name in tower:
            tower.setdefault(earlier, tower[name])


def _complete_part(part: dict[str, Any], known: dict[str, Field[Any]], module: ModuleType) -> None:
    for name, value in part.items():
        if isinstance(value, dict) and name != "rope_parameters":
            other = _OTHER_PARTS.get(name)
            fields_ = _fields_of(module, other) if other else known
            _complete_part(value, fields_, module)
            for unread in _UNREAD.difference(fields_) if other else ():
                value.pop(unread, None)
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
    return {field.name: field for field in fields(kind)} if kind is not None else {}


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default
