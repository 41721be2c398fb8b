"""Translates the names of encoders' weights to the names in this project's network.

transformers names and divides the matrices differently from the code with which a model was
published. A file may have either form, whatever its config.json states.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

import mlx.core as mx

from backend.engine.embedding.encoder_shape import Experts

Weights = dict[str, mx.array]

_PREFIX = re.compile(
    r"^((model|roberta|new|nomic_bert|gte|bert|mpnet|distilbert|electra|albert|ernie|deberta"
    r"|data2vec_text)\.)?"
)
_LAYER = re.compile(
    r"^(?:encoder\.|transformer\.)?(?:layers?|albert_layer_groups\.0\.albert_layers)\.(\d+)\.(.+)$"
)
_UNREAD = re.compile(
    r"^(lm_head|cls|decoder|vocab_\w+|\w*predictions|generator_lm_head|sop_classifier)\."
    r"|(position_ids|token_type_ids|inv_freq)$"
)
HEAD = frozenset({"pooler", "head_norm", "score"})
_LEAVES = {"gamma": "weight", "beta": "bias"}  # names of norms in early checkpoints


def _by_name(names: Mapping[str, str]) -> Mapping[str, str]:
    return {name: path for path, listed in names.items() for name in listed.split()}


# The network's layers → their names in checkpoints, without what `_PREFIX` and `_LAYER` match.
_OUTER = _by_name({
    "words": "embeddings.word_embeddings embeddings.tok_embeddings",
    "segments": "embeddings.token_type_embeddings",
    "positions": "embeddings.position_embeddings",
    "norm": "embeddings.LayerNorm embeddings.norm emb_ln",
    "widen": "embeddings_project encoder.embedding_hidden_mapping_in",
    "nearness": "encoder.relative_attention_bias",
    "distances": "encoder.rel_embeddings",
    "distances_norm": "encoder.LayerNorm",
    "pooler": "pooler.dense head.dense classifier.dense pre_classifier",
    "head_norm": "head.norm",
    "score": "classifier classifier.out_proj",
})  # fmt: skip
# Several layers on the left: a checkpoint stacks the rows of their matrices in one matrix.
_INNER = _by_name({
    "attention.queries attention.keys attention.values":
        "mixer.Wqkv attn.Wqkv attention.qkv_proj",
    "attention.queries":
        "attention.self.query attention.self.query_proj attention.query self_attn.q_proj"
        " attention.attn.q attention.q_lin",
    "attention.keys":
        "attention.self.key attention.self.key_proj attention.key self_attn.k_proj"
        " attention.attn.k attention.k_lin",
    "attention.values":
        "attention.self.value attention.self.value_proj attention.value self_attn.v_proj"
        " attention.attn.v attention.v_lin",
    "attention.out":
        "attention.output.dense attention.attn.o attention.dense attention.o_proj"
        " attention.out_lin attn.Wo attn.out_proj mixer.out_proj self_attn.o_proj",
    "attention_norm":
        "attention.output.LayerNorm attention.LayerNorm attn_ln attn_norm norm1 sa_layer_norm"
        " post_attention_layernorm",
    "mlp_norm":
        "full_layer_layer_norm mlp_ln norm2 output.LayerNorm output_layer_norm"
        " post_mlp_layernorm",
    "mlp.up": "ffn ffn.lin1 intermediate.dense mlp.fc1 mlp.fc11 mlp.up_proj",
    "mlp.gate": "mlp.fc12 mlp.gate_proj",
    "mlp.up mlp.gate": "mlp.up_gate_proj",
    "mlp.gate mlp.up": "mlp.Wi",
    "mlp.down": "ffn_output ffn.lin2 mlp.Wo mlp.down_proj mlp.fc2 output.dense",
    "mlp.router": "mlp.router.layer",
    "mlp": "mlp.experts",
})  # fmt: skip
# In names of Jina's weights: a matrix that is adapted, and its adapters (see `task_adapters`).
_ADAPTED, _ADAPTER = ".parametrizations.weight.original", ".parametrizations.weight.0."


def own_paths(layer: str) -> Sequence[str]:
    """Return the paths of the network's layers that a checkpoint stores as one layer.

    layer: the name of the layer in the checkpoint, without the name of a weight.
    """
    name = _PREFIX.sub("", layer)
    if not (inner := _LAYER.match(name)):
        return [_OUTER.get(name, name)]
    return [f"layers.{inner[1]}.{path}" for path in _INNER.get(inner[2], inner[2]).split()]


def in_own_names(weights: Weights, parts: Collection[str], experts: Experts | None) -> Weights:
    """Return a checkpoint's weights under the network's names, divided as in the network.

    parts: the names of the network's outermost modules.
    experts: the network's experts, if some layers have experts.
    """
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
        if paths[0] in HEAD and paths[0] not in parts:
            continue
        for path, part in zip(paths, mx.split(value, len(paths)), strict=True):
            found[f"{path}.{_LEAVES.get(leaf, leaf)}"] = part
    return found


def _expert(layer: str, name: str, value: mx.array, count: int) -> Weights:
    """Return the matrices of all experts, whose rows the published weights stack in one matrix."""
    matrices = value.reshape(count, -1, value.shape[-1])
    if name.endswith(".w1"):
        return {f"{layer}.mlp.experts.fc1.weight": matrices}
    return {f"{layer}.mlp.experts.fc2.weight": matrices.swapaxes(1, 2)}
