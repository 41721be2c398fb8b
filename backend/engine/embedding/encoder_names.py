"""Weights of encoders under the names of our network.

The code that these models were published with, and transformers, name and divide the matrices
differently; a file may have any of these forms, whatever its config.json looks like.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

import mlx.core as mx

from backend.engine.embedding.encoder_shape import Experts

Weights = dict[str, mx.array]

_PREFIX = re.compile(r"^((model|roberta|new|nomic_bert|gte|bert|mpnet|distilbert)\.)?")
_LAYER = re.compile(r"^(?:encoder\.|transformer\.)?layers?\.(\d+)\.(.+)$")
_UNREAD = re.compile(r"^(lm_head|cls|decoder|vocab_\w+)\.|(position_ids|token_type_ids|inv_freq)$")
_HEAD = frozenset({"pooler", "head_norm", "score"})
_LEAVES = {"gamma": "weight", "beta": "bias"}  # of norms, in files of earlier versions
_JOINED = "attention.queries attention.keys attention.values"
_OUTER = {
    "embeddings.word_embeddings": "words",
    "embeddings.tok_embeddings": "words",
    "embeddings.token_type_embeddings": "segments",
    "embeddings.position_embeddings": "places",
    "embeddings.LayerNorm": "norm",
    "embeddings.norm": "norm",
    "emb_ln": "norm",
    "encoder.relative_attention_bias": "nearness",
    "pooler.dense": "pooler",
    "head.dense": "pooler",
    "head.norm": "head_norm",
    "classifier.dense": "pooler",
    "classifier.out_proj": "score",
    "classifier": "score",
}
# Several names mean the rows of one matrix, divided equally.
_INNER = {
    "mixer.Wqkv": _JOINED,
    "attn.Wqkv": _JOINED,
    "attention.qkv_proj": _JOINED,
    "attention.self.query": "attention.queries",
    "attention.self.key": "attention.keys",
    "attention.self.value": "attention.values",
    "self_attn.q_proj": "attention.queries",
    "self_attn.k_proj": "attention.keys",
    "self_attn.v_proj": "attention.values",
    "attention.attn.q": "attention.queries",
    "attention.attn.k": "attention.keys",
    "attention.attn.v": "attention.values",
    "attention.q_lin": "attention.queries",
    "attention.k_lin": "attention.keys",
    "attention.v_lin": "attention.values",
    "attention.output.dense": "attention.out",
    "attention.attn.o": "attention.out",
    "attention.o_proj": "attention.out",
    "attention.out_lin": "attention.out",
    "attn.Wo": "attention.out",
    "attn.out_proj": "attention.out",
    "mixer.out_proj": "attention.out",
    "self_attn.o_proj": "attention.out",
    "attention.output.LayerNorm": "attention_norm",
    "attention.LayerNorm": "attention_norm",
    "attn_ln": "attention_norm",
    "attn_norm": "attention_norm",
    "norm1": "attention_norm",
    "post_attention_layernorm": "attention_norm",
    "sa_layer_norm": "attention_norm",
    "mlp_ln": "mlp_norm",
    "norm2": "mlp_norm",
    "output.LayerNorm": "mlp_norm",
    "output_layer_norm": "mlp_norm",
    "post_mlp_layernorm": "mlp_norm",
    "ffn.lin1": "mlp.up",
    "intermediate.dense": "mlp.up",
    "mlp.fc1": "mlp.up",
    "mlp.fc11": "mlp.up",
    "mlp.up_proj": "mlp.up",
    "mlp.fc12": "mlp.gate",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_gate_proj": "mlp.up mlp.gate",
    "mlp.Wi": "mlp.gate mlp.up",
    "ffn.lin2": "mlp.down",
    "mlp.Wo": "mlp.down",
    "mlp.down_proj": "mlp.down",
    "mlp.fc2": "mlp.down",
    "output.dense": "mlp.down",
    "mlp.router.layer": "mlp.router",
    "mlp.experts": "mlp",
}
# A matrix to which Jina's code adds adapters, and these, which `task_adapters` reads.
_ADAPTED, _ADAPTER = ".parametrizations.weight.original", ".parametrizations.weight.0."


def own_paths(layer: str) -> Sequence[str]:
    """The network's layers for a checkpoint's layer. layer: without the names of weights in it."""
    name = _PREFIX.sub("", layer)
    if not (inner := _LAYER.match(name)):
        return [_OUTER.get(name, name)]
    return [f"layers.{inner[1]}.{path}" for path in _INNER.get(inner[2], inner[2]).split()]


def in_own_names(weights: Weights, parts: Collection[str], experts: Experts | None) -> Weights:
    """A checkpoint's weights as the network has them. parts: the network's outermost ones."""
    found: Weights = {}
    for full, value in weights.items():
        name = _PREFIX.sub("", full.replace(_ADAPTED, ".weight"))
        if _UNREAD.search(name) or _ADAPTER in name:
            continue
        layer = _LAYER.match(name)
        if layer and experts and layer[2].startswith("mlp.experts.mlp."):
            found |= _expert(f"layers.{layer[1]}", layer[2], value, experts.count)
            continue
        module, _, leaf = name.rpartition(".")
        paths = own_paths(module)
        if paths[0] in _HEAD and paths[0] not in parts:
            continue
        for path, part in zip(paths, mx.split(value, len(paths)), strict=True):
            found[f"{path}.{_LEAVES.get(leaf, leaf)}"] = part
    return found


def _expert(layer: str, name: str, value: mx.array, count: int) -> Weights:
    """The matrices of all experts, which the published weights have below one another."""
    matrices = value.reshape(count, -1, value.shape[-1])
    if name.endswith(".w1"):
        return {f"{layer}.mlp.experts.fc1.weight": matrices}
    return {f"{layer}.mlp.experts.fc2.weight": matrices.swapaxes(1, 2)}
