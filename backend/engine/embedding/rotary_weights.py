"""Weights of BERT models with rotary positions, under the names of our network.

The code that these models were published with, and transformers 5, name and divide the matrices
differently; a file may have either form, whatever its config.json looks like.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from backend.engine.embedding.rotary_shape import Shape
from backend.engine.embedding.task_adapters import TaskAdapter
from backend.engine.loading.peft import changes_of

Weights = dict[str, mx.array]

_PREFIX = re.compile(
    r"^(base_model\.model\.)?((model|roberta|new|nomic_bert|gte|bert|mpnet|distilbert)\.)?"
)
_LAYER = re.compile(r"^(?:encoder\.|transformer\.)?layers?\.(\d+)\.(.+)$")
_UNREAD = re.compile(r"^(lm_head|cls|vocab_\w+)\.|(position_ids|token_type_ids|inv_freq)$")
_HEAD = ("pooler", "score")
_OUTER = {
    "embeddings.word_embeddings": "words",
    "embeddings.token_type_embeddings": "segments",
    "embeddings.position_embeddings": "places",
    "embeddings.LayerNorm": "norm",
    "emb_ln": "norm",
    "encoder.relative_attention_bias": "nearness",
    "pooler.dense": "pooler",
    "classifier.dense": "pooler",
    "classifier.out_proj": "score",
    "classifier": "score",
}
# `joined#1` is the second part of `joined`.
_INNER = {
    "mixer.Wqkv": "attention.joined",
    "attn.Wqkv": "attention.joined",
    "attention.qkv_proj": "attention.joined",
    "self_attn.q_proj": "attention.joined#0",
    "self_attn.k_proj": "attention.joined#1",
    "self_attn.v_proj": "attention.joined#2",
    "attention.attn.q": "attention.joined#0",
    "attention.attn.k": "attention.joined#1",
    "attention.attn.v": "attention.joined#2",
    "attention.q_lin": "attention.joined#0",
    "attention.k_lin": "attention.joined#1",
    "attention.v_lin": "attention.joined#2",
    "mixer.out_proj": "attention.out",
    "attn.out_proj": "attention.out",
    "attention.o_proj": "attention.out",
    "self_attn.o_proj": "attention.out",
    "attention.attn.o": "attention.out",
    "attention.out_lin": "attention.out",
    "norm1": "attention_norm",
    "attention.LayerNorm": "attention_norm",
    "sa_layer_norm": "attention_norm",
    "attn_ln": "attention_norm",
    "post_attention_layernorm": "attention_norm",
    "norm2": "mlp_norm",
    "output.LayerNorm": "mlp_norm",
    "output_layer_norm": "mlp_norm",
    "mlp_ln": "mlp_norm",
    "post_mlp_layernorm": "mlp_norm",
    "mlp.fc1": "mlp.joined",
    "intermediate.dense": "mlp.joined",
    "ffn.lin1": "mlp.joined",
    "mlp.up_gate_proj": "mlp.joined",
    "mlp.fc11": "mlp.joined#0",
    "mlp.up_proj": "mlp.joined#0",
    "mlp.fc12": "mlp.joined#1",
    "mlp.gate_proj": "mlp.joined#1",
    "mlp.fc2": "mlp.down",
    "output.dense": "mlp.down",
    "ffn.lin2": "mlp.down",
    "mlp.down_proj": "mlp.down",
    "mlp.router.layer": "mlp.router",
    "mlp.experts": "mlp",
}
_ORIGINAL, _FIRST, _SECOND = (
    f".parametrizations.weight.{part}" for part in ("original", "0.lora_A", "0.lora_B")
)


def in_own_names(
    weights: Weights,
    shape: Shape,
    *,
    ranks: bool,
    adapters: Sequence[TaskAdapter] = (),
    dtype: mx.Dtype | None = None,
) -> Weights:
    """A checkpoint's weights as the network has them.

    ranks: whether it has the head of a reranker. adapters: those to add. dtype: of the sums; None
    means that of the weights.
    """
    plain = {
        name.replace(_ORIGINAL, ".weight"): value
        for name, value in weights.items()
        if not name.endswith((_FIRST, _SECOND))
    }
    own = _joined(_renamed(plain, shape, ranks=ranks), sparse=False)
    for adapter in adapters:
        changes = _renamed(_changes(weights, adapter), shape, ranks=ranks)
        add_changes(own, _joined(changes, sparse=True), dtype)
    return own


def _renamed(weights: Weights, shape: Shape, *, ranks: bool) -> Weights:
    found: Weights = {}
    for full, value in weights.items():
        name = _PREFIX.sub("", full)
        if _UNREAD.search(name):
            continue
        layer = _LAYER.match(name)
        if layer and shape.experts and layer[2].startswith("mlp.experts.mlp."):
            found |= _expert(f"layers.{layer[1]}", layer[2], value, shape.experts.count)
            continue
        module, _, leaf = (layer[2] if layer else name).rpartition(".")
        renamed = (_INNER if layer else _OUTER).get(module, module)
        if renamed in _HEAD and not layer and not ranks:
            continue
        found[f"{f'layers.{layer[1]}.' if layer else ''}{renamed}.{leaf}"] = value
    return found


def _expert(layer: str, name: str, value: mx.array, count: int) -> Weights:
    """The matrices of all experts, which the published weights have below one another."""
    matrices = value.reshape(count, -1, value.shape[-1])
    if name.endswith(".w1"):
        return {f"{layer}.mlp.experts.fc1.weight": matrices}
    return {f"{layer}.mlp.experts.fc2.weight": matrices.swapaxes(1, 2)}


def _joined(weights: Weights, *, sparse: bool) -> Weights:
    """Parts of a matrix or bias as one. sparse: missing parts are zeros."""
    whole: Weights = {}
    parts: dict[str, dict[int, mx.array]] = {}
    for name, value in weights.items():
        module, mark, rest = name.partition("#")
        if mark:
            place, _, leaf = rest.partition(".")
            parts.setdefault(f"{module}.{leaf}", {})[int(place)] = value
        else:
            whole[name] = value
    counts = {name: 3 if ".attention." in name else 2 for name in parts}
    for name, held in parts.items():
        if len(held) < counts[name] and not sparse:
            raise ValueError(f"a part of {name} is missing")
    for name, held in parts.items():
        some = next(iter(held.values()))
        every = [held.get(at, mx.zeros_like(some)) for at in range(counts[name])]
        whole[name] = mx.concatenate(every)
    return whole


def _changes(weights: Weights, adapter: TaskAdapter) -> Weights:
    """What an adapter adds to each weight of a checkpoint, by the weight's name."""
    if adapter.file is not None and adapter.peft is not None:
        read: Any = mx.load(str(adapter.file))
        changes = changes_of(read, adapter.peft)
        return {name: change * adapter.scale for name, change in changes.items()}
    found = {}
    for name in [name for name in weights if name.endswith(_FIRST)]:
        module = name.removesuffix(_FIRST)
        first, second = (
            weights[f"{module}{part}"][adapter.place].astype(mx.float32)
            for part in (_FIRST, _SECOND)
        )
        product = first @ second if module.endswith("_embeddings") else second @ first
        found[f"{module}.weight"] = product * adapter.scale
    if not found:
        raise ValueError("its weights have no adapters for tasks")
    return found


def add_changes(weights: Weights, changes: Weights, dtype: mx.Dtype | None) -> None:
    """Add an adapter's changes in single precision. dtype: of the sums; None means the weights'."""
    for name, change in changes.items():
        if name not in weights:
            raise ValueError(f"its adapter changes {name}, which the model does not have")
        if f"{name.removesuffix('weight')}scales" in weights:
            raise ValueError(
                "its weights are quantised, and an adapter cannot be added to them: use a version"
                " that is not quantised"
            )
        value = weights[name]
        weights[name] = (value.astype(mx.float32) + change).astype(dtype or value.dtype)
