"""Small mixtures of experts, in the forms in which families publish their checkpoints.

The weights are drawn for the model as mlx-lm holds it. `stored` turns them into what the family's
own checkpoints hold, from which mlx-lm's `sanitize` makes the same weights again.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP
from mlx_lm.utils import load_model

from backend.engine.experts.offload import CachedExperts, offload, slots_of
from backend.engine.loading.weights import bytes_of, cast
from tests.architectures.shapes import configuration, drawn
from tests.engine.loading_models import write_tokenizer, write_weights
from tests.engine.loads import at_once

EXPERTS, SELECTED = 8, 3
_VOCABULARY = 259  # of the tokenizer that `write_tokenizer` writes
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_CHOSEN = ("num_experts_per_tok", "experts_per_token", "top_k_experts")

Weights = dict[str, mx.array]


def _one_by_one(weights: Weights) -> Weights:
    """Each expert on its own: Qwen3, GLM, DeepSeek and most others."""
    found: Weights = {}
    for name, value in weights.items():
        if "switch_mlp" in name:
            for expert in range(value.shape[0]):
                found[name.replace("switch_mlp", f"experts.{expert}")] = value[expert]
        else:
            found[name] = value
    return found


def _mixtral(weights: Weights) -> Weights:
    """As `_one_by_one`, with numbered names of projections: Mixtral and MiniMax."""
    names = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    return {
        re.sub("gate_proj|down_proj|up_proj", lambda found: names[found[0]], name): value
        for name, value in _one_by_one(weights).items()
    }


def _in_fp8(stored: Callable[[Weights], Weights]) -> Callable[[Weights], Weights]:
    """Experts as bytes with a scale for each block of 128 x 128 values: DeepSeek and MiniMax."""

    def made(weights: Weights) -> Weights:
        found: Weights = {}
        for name, value in stored(weights).items():
            found[name] = value
            if re.search(r"experts\.\d+\.", name):
                blocks = [-(-size // 128) for size in value.shape]
                scales = mx.random.uniform(0.5, 2.0, blocks, key=mx.random.key(len(found)))
                found[name] = mx.to_fp8(value)
                found[f"{name}_scale_inv"] = scales
        return found

    return made


def _fused(weights: Weights) -> Weights:
    """Gate and up projections one after the other: Qwen3.5 and Gemma 4."""
    found = dict(weights)
    for name in [name for name in weights if name.endswith("gate_proj.weight")]:
        if (switch := re.search(r"experts\.switch_glu|switch_mlp", name)) is None:
            continue
        before = name[: switch.start()]
        parts = [found.pop(f"{before}{switch[0]}.{part}_proj.weight") for part in ("gate", "up")]
        found[f"{before}experts.gate_up_proj"] = mx.concatenate(parts, axis=1)
        down = found.pop(f"{before}{switch[0]}.down_proj.weight")
        found[f"{before}experts.down_proj"] = down
    return found


def _turned(weights: Weights) -> Weights:
    """As `_fused`, but transposed: Qwen3-VL and Llama 4."""
    found = _fused(weights)
    return {
        name: value.swapaxes(1, 2) if ".experts." in name and value.ndim == 3 else value
        for name, value in found.items()
    }


def _alternating(weights: Weights) -> Weights:
    """Rows of gate and up projections in turn, in bytes: gpt-oss."""
    found = dict(weights)
    for name in [name for name in weights if ".experts.gate_proj." in name]:
        gate, up = found.pop(name), found.pop(name.replace("gate_proj", "up_proj"))
        both = mx.stack([gate, up], axis=2).flatten(1, 2)
        found[name.replace("gate_proj", "gate_up_proj")] = both
    endings = {".weight": "_blocks", ".scales": "_scales", ".bias": "_bias"}
    renamed: Weights = {}
    for name, value in found.items():
        _, switch, rest = name.partition(".experts.")
        if switch:
            part, dot, kind = rest.partition(".")
            name = name.removesuffix(rest) + part + endings[dot + kind]
            if kind == "weight":
                value = value.view(mx.uint8).reshape(*value.shape[:2], -1, 16)
        renamed[name] = value
    return renamed


@dataclass(frozen=True)
class Form:
    """A model type, how its checkpoint is stored, and how its experts are quantised.

    config: what turns experts on.
    """

    model_type: str
    stored: Callable[[Weights], Weights] = dict
    quantised: dict[str, Any] = field(default_factory=dict)
    dtype: mx.Dtype = mx.bfloat16
    config: dict[str, Any] = field(default_factory=dict)


_FOUR = {"group_size": 32, "bits": 4, "mode": "affine"}
FORMS = {
    "Qwen3, one by one": Form("qwen3_moe", _one_by_one),
    "Qwen3, of mlx-lm": Form("qwen3_moe", quantised=_FOUR),
    "Qwen3, nvfp4": Form("qwen3_moe", quantised={"group_size": 16, "bits": 4, "mode": "nvfp4"}),
    "Qwen3.5, fused": Form("qwen3_5_moe", _fused),
    "Gemma 4, fused": Form(
        "gemma4_text",
        _fused,
        config={
            "enable_moe_block": True,
            "num_experts": EXPERTS,
            "top_k_experts": SELECTED,
            "moe_intermediate_size": 32,
        },
    ),
    "gpt-oss, alternating mxfp4": Form(
        "gpt_oss", _alternating, {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    ),
    "gpt-oss, of mlx-lm": Form("gpt_oss", quantised=_FOUR),
    "GLM, quantised one by one": Form("glm4_moe", _one_by_one, _FOUR),
    "MiniMax, one by one": Form("minimax", _mixtral),
    "MiniMax, FP8": Form("minimax", _in_fp8(_mixtral)),
    "DeepSeek, one by one": Form("deepseek_v3", _one_by_one),
    "DeepSeek, FP8": Form(
        "deepseek_v3", _in_fp8(_one_by_one), config={"moe_intermediate_size": 160}
    ),
    "Qwen3-VL, transposed": Form("qwen3_vl_moe", _turned, dtype=mx.float16),
    "Nemotron, of mlx-lm": Form(
        "nemotron_h", dtype=mx.float32, config={"hybrid_override_pattern": "ME*E"}
    ),
}


def write_experts(folder: Path, form: Form, *, shards: int = 3, **changes: Any) -> Path:
    """A checkpoint of a small mixture of experts with random weights. changes: to its config."""
    folder.mkdir(parents=True, exist_ok=True)
    config = configuration(form.model_type) | form.config
    for part in (config, config.get("text_config", {})):
        part |= {name: EXPERTS for name in _COUNTS if part.get(name)}
        part |= {name: SELECTED for name in _CHOSEN if part.get(name)}
        part |= {name: _VOCABULARY for name in part if name.startswith("vocab_size")}
        part |= {"n_group": 1, "topk_group": 1} if "n_group" in part else {}
    config |= {"eos_token_id": 0} | changes
    module = importlib.import_module(f"mlx_lm.models.{form.model_type}")
    mx.random.seed(5)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.update(tree_map(lambda value: value.astype(form.dtype), model.parameters()))
    named: Any = tree_flatten(model.parameters())
    keys = mx.random.split(mx.random.key(11), len(named))
    pairs = zip(named, keys, strict=True)
    weights = [(name, _random(name, value, key)) for (name, value), key in pairs]
    model.update(tree_unflatten(weights))
    if form.quantised:
        switch = re.compile("experts|switch_mlp|switch_glu")
        quantize(
            model,
            class_predicate=lambda path, part: (
                hasattr(part, "to_quantized") and bool(switch.search(path))
            ),
            **form.quantised,
        )
        config["quantization"] = form.quantised
    write_weights(folder, form.stored(dict(tree_flatten(model.parameters()))), shards)
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return folder


def _random(name: str, value: mx.array, key: mx.array) -> mx.array:
    """As `drawn`, with biases, which are zero in a new model, and with uneven routers."""
    if name.endswith(".bias") and value.ndim == 2:
        return (0.3 * mx.random.normal(value.shape, key=key)).astype(value.dtype)
    return drawn(name, value, key)


def opened(folder: Path) -> Any:
    """A model with its experts in memory, in float32 as on a CPU; its weights are lazy."""
    model = load_model(folder, lazy=True)[0]
    cast(model, "float32")
    return model


def with_slots(folder: Path, slots: int, model: Any = None) -> tuple[Any, CachedExperts]:
    """A model whose experts stay in its files; each layer has so many slots."""
    model = opened(folder) if model is None else model
    cached = at_once(offload(model, folder.name, folder, budget_for(model, slots)))
    assert cached.counts.slots == slots
    return model, cached


def budget_for(model: Any, slots: int) -> int:
    """The least bytes of a cache with so many slots."""
    every = [layer for _, layer in model.named_modules() if type(layer) in (SwitchGLU, SwitchMLP)]
    sizes = [bytes_of(layer) // EXPERTS for layer in every]
    return next(n for n in count(sum(sizes), 1024) if slots_of(n, sizes)[0] == slots)


@cache
def prompt(length: int, seed: int = 0) -> list[int]:
    dice = np.random.default_rng(seed)
    return [int(token) for token in dice.integers(1, _VOCABULARY, length)]


def same(ours: mx.array, theirs: mx.array) -> bool:
    """Whether two results are equal, except for rounding with OpenBLAS's kernels for AVX-512.

    A cache computes experts in other groups than the resident model does. With the other kernels,
    that changes no bit.
    """
    core = getattr(ctypes.CDLL(None), "openblas_get_corename", None)
    if core is not None:
        core.restype = ctypes.c_char_p
    if core is None or core() not in (b"SkylakeX", b"Cooperlake", b"SapphireRapids"):
        return bool(mx.array_equal(ours, theirs))
    return ours.shape == theirs.shape and bool(mx.allclose(ours, theirs, rtol=1e-5, atol=1e-4))
