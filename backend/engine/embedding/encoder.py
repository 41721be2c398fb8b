"""The networks of this project: encoders such as BERT, ModernBERT and DeBERTa, and model2vec.

`Shape` describes the positions, norms and MLP of an encoder. transformers names and divides the
matrices differently from the code with which a model was published. A file may have either form,
whatever its config.json states.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers import activations
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm
from mlx.nn.layers.positional_encoding import RoPE

from backend.engine.embedding.encoder_shape import Disentangled, Experts, Shape

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
# In names of Jina's weights: a matrix that is adapted, and its adapters (see `kind`).
_ADAPTED, _ADAPTER = ".parametrizations.weight.original", ".parametrizations.weight.0."


def own_paths(layer: str) -> Sequence[str]:
    """Return the paths of the network's layers that a checkpoint stores as one layer."""
    name = _PREFIX.sub("", layer)
    if not (inner := _LAYER.match(name)):
        return [_OUTER.get(name, name)]
    return [f"layers.{inner[1]}.{path}" for path in _INNER.get(inner[2], inner[2]).split()]


def in_own_names(weights: Weights, parts: Collection[str], experts: Experts | None) -> Weights:
    """Return a checkpoint's weights under the network's names, divided as in the network."""
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


_ATTENDING = ("queries", "keys", "values")
# DeBERTa's vectors of classes of distances, (classes, hidden), and the class of the distance
# between each two tokens, (length, length).
Distances = tuple[mx.array, mx.array]


class Outputs(NamedTuple):
    """The results of a forward pass, under mlx-vlm's names."""

    last_hidden_state: mx.array  # (rows, longest, hidden)
    # (rows, outputs), or (rows, longest, outputs) for each token; None without a head.
    logits: mx.array | None


class Model(Module):
    """An encoder. `in_own_names` returns the weights under its names."""

    model_type = "encoder"

    def __init__(self, shape: Shape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shape = shape
        width = shape.embedded or shape.hidden
        self.words = Embedding(shape.vocabulary, width)
        if shape.segments:
            self.segments = Embedding(shape.segments, width)
        if shape.learned:
            self.positions = Embedding(shape.learned, width)
        if shape.distances:
            self.nearness = Embedding(shape.distances, shape.heads)
        self.norm = LayerNorm(width, shape.epsilon, bias=shape.norm_bias)
        if shape.embedded:
            self.widen = Linear(width, shape.hidden)
        if shape.disentangled:
            self.distances = Embedding(2 * shape.disentangled.span, shape.hidden)
            self.distances_norm = _norm(shape)
        self.layers = [_Layer(shape, at) for at in range(1 if shape.shared else shape.layers)]
        if shape.norms_first:
            self.final_norm = _norm(shape)
        if shape.outputs and (shape.head_norm or not shape.labels):
            self.pooler = Linear(shape.hidden, shape.hidden, bias=shape.pooler_bias)
        if shape.outputs and shape.head_norm:
            self.head_norm = _norm(shape)
        if shape.outputs:
            self.score = Linear(shape.hidden, shape.outputs)

    def __call__(
        self, ids: mx.array, attention_mask: mx.array, token_type_ids: mx.array
    ) -> Outputs:
        """Run the network.

        ids, attention_mask, token_type_ids: (rows, longest); rows are padded at their end.
        """
        shape, states = self._shape, self.words(ids)
        if "segments" in self:
            # The tokenizer of a model with one segment embedding may number two segments.
            states += self.segments(mx.zeros_like(ids) if shape.segments == 1 else token_type_ids)
        if "positions" in self:
            filled = (ids != shape.pad).astype(mx.int32)
            states += self.positions(mx.cumsum(filled, axis=1) * filled + shape.pad)
        states = self.norm(states)
        if "widen" in self:
            states = self.widen(states)
        reach = shape.local.reach if shape.local else 0
        everywhere, nearby = attention_masks(attention_mask, reach)
        if "nearness" in self:
            bias = self.nearness(_distance_classes(ids.shape[1], shape.distances))
            bias = bias.transpose(2, 0, 1)
            everywhere = mx.where(everywhere, bias, mx.finfo(bias.dtype).min)
        distances = None
        if shape.disentangled:
            vectors = self.distances_norm(self.distances(mx.arange(2 * shape.disentangled.span)))
            distances = vectors, _deberta_classes(ids.shape[1], shape.disentangled)
        for layer in self.layers * (shape.layers if shape.shared else 1):
            states = layer(states, nearby if layer.local else everywhere, distances)
        if "final_norm" in self:
            states = self.final_norm(states)
        return Outputs(states, self._scores(states, attention_mask) if "score" in self else None)

    def _scores(self, states: mx.array, mask: mx.array) -> mx.array:
        shape = self._shape
        if not shape.labels and shape.pooled == "mean":
            filled = mask[..., None].astype(mx.float32)  # a sum of many may overflow float16
            states = ((states * filled).sum(axis=1) / filled.sum(axis=1)).astype(states.dtype)
        elif not shape.labels:
            states = states[:, 0]
        if "head_norm" in self:
            states = self.head_norm(getattr(activations, shape.activation)(self.pooler(states)))
        elif "pooler" in self:
            states = getattr(activations, shape.head_activation)(self.pooler(states))
        scores: mx.array = self.score(states)
        return scores

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return a checkpoint's weights under the names of the network."""
        return in_own_names(weights, self, self._shape.experts)

    def own_paths(self, layer: str) -> Sequence[str]:
        """Return the paths of the layers that a checkpoint stores as one layer.

        Returns none for a layer of a head that is not served, such as BERT's pooler.
        """
        return [path for path in own_paths(layer) if path in self or path not in HEAD]


def _norm(shape: Shape) -> LayerNorm:
    return LayerNorm(shape.hidden, shape.epsilon, bias=shape.norm_bias)


class _Layer(Module):
    """A layer of attention and MLP.

    local: whether its tokens attend only nearby.
    """

    def __init__(self, shape: Shape, at: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        local: Any = shape.local
        self.local = local is not None and local.layers[at]
        self.attention = _Attention(shape, local.theta if self.local else shape.theta)
        if not shape.norms_first or at:  # the first layer follows the norm of the embeddings
            self.attention_norm = _norm(shape)
        expert = shape.experts is not None and shape.experts.serve(at)
        self.mlp = _Experts(shape) if expert else _MLP(shape)
        self.mlp_norm = _norm(shape)
        self._first = shape.norms_first

    def __call__(
        self, states: mx.array, mask: mx.array, distances: Distances | None = None
    ) -> mx.array:
        if self._first:
            normed = self.attention_norm(states) if "attention_norm" in self else states
            states = states + self.attention(normed, mask)
            return states + self.mlp(self.mlp_norm(states))
        states = self.attention_norm(states + self.attention(states, mask, distances))
        result: mx.array = self.mlp_norm(states + self.mlp(states))
        return result


class _Attention(Module):
    def __init__(self, shape: Shape, theta: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        for part in (*_ATTENDING, "out"):
            self[part] = Linear(shape.hidden, shape.hidden, bias=shape.attention_bias)
        self._heads, self._size = shape.heads, shape.hidden // shape.heads
        if theta:
            self.rope = RoPE(self._size, base=theta, scale=1 / shape.stretch)
        # DeBERTa adds up three scores.
        self._scale = (self._size * (3 if shape.disentangled else 1)) ** -0.5

    def _divided(self, part: str, states: mx.array) -> mx.array:
        rows, length, _ = states.shape
        divided: mx.array = self[part](states).reshape(rows, length, self._heads, self._size)
        return divided.swapaxes(1, 2)

    def __call__(
        self, states: mx.array, mask: mx.array, distances: Distances | None = None
    ) -> mx.array:
        """Run the layer.

        mask: which tokens each token attends to, or what is added to the scores.
        distances: what DeBERTa compares tokens with.
        """
        rows, length, _ = states.shape
        queries, keys, values = (self._divided(part, states) for part in _ATTENDING)
        if distances is not None:
            vectors, classes = distances
            of_keys, of_queries = (
                self._divided(part, vectors[None]).swapaxes(2, 3) for part in ("keys", "queries")
            )
            index, turned = classes[None, None], classes.T[None, None]
            near = mx.take_along_axis(queries @ of_keys, index, axis=-1)
            near += mx.take_along_axis(keys @ of_queries, turned, axis=-1).swapaxes(2, 3)
            mask = mx.where(mask, near * self._scale, mx.finfo(near.dtype).min)
        if "rope" in self:
            queries, keys = self.rope(queries), self.rope(keys)
        mixed = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=self._scale, mask=mask
        )
        result: mx.array = self.out(mixed.swapaxes(1, 2).reshape(rows, length, -1))
        return result


def _distance_classes(length: int, count: int) -> mx.array:
    """Return MPNet's class of the distance between each two tokens, (length, length).

    The first half of the classes is for earlier tokens, the second half for later tokens. In each
    half, the first classes are for a single distance each, and as many others for ranges that grow
    up to a distance of 128.
    """
    position = mx.arange(length)
    distance = position[:, None] - position[None, :]
    half = count // 2
    exact = half // 2
    ahead = mx.where(distance < 0, half, 0)
    distance = mx.abs(distance)
    growth = mx.log(mx.maximum(distance, 1).astype(mx.float32) / exact) / math.log(128 / exact)
    ranged = mx.minimum(exact + (growth * (half - exact)).astype(mx.int32), half - 1)
    return ahead + mx.where(distance < exact, distance, ranged)


def _deberta_classes(length: int, shape: Disentangled) -> mx.array:
    """Return DeBERTa's class of the distance between each two tokens, (length, length).

    Distances up to half the span have a class each, and longer ones share ever wider classes.
    """
    position = mx.arange(length)
    distance = position[:, None] - position[None, :]
    half = shape.span // 2
    if shape.span < shape.longest:
        far = mx.maximum(mx.abs(distance), half).astype(mx.float32)
        growth = mx.log(far / half) / math.log((shape.longest - 1) / half)
        ranged = mx.ceil(growth * (half - 1)).astype(mx.int32) + half
        ranged = ranged * mx.sign(distance)
        distance = mx.where(mx.abs(distance) <= half, distance, ranged)
    return mx.clip(distance + shape.span, 0, 2 * shape.span - 1)


class _MLP(Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.up = Linear(shape.hidden, shape.inner, bias=shape.up_bias)
        if shape.gated:
            self.gate = Linear(shape.hidden, shape.inner, bias=shape.up_bias)
        self.down = Linear(shape.inner, shape.hidden, bias=shape.down_bias)
        self._activate = getattr(activations, shape.activation)

    def __call__(self, states: mx.array) -> mx.array:
        inner = self.up(states)
        gated = "gate" in self
        inner = inner * self._activate(self.gate(states)) if gated else self._activate(inner)
        result: mx.array = self.down(inner)
        return result


class _Experts(Module):
    """Experts without biases. One bias is added to the weighted sum of the chosen experts.

    The weights of the chosen experts are not normalised to a sum of 1.
    """

    def __init__(self, shape: Shape) -> None:
        from mlx_lm.models.switch_layers import SwitchMLP

        super().__init__()  # type: ignore[no-untyped-call]
        experts: Any = shape.experts
        self.router = Linear(shape.hidden, experts.count, bias=False)
        activate = getattr(activations, shape.activation)
        self.experts = SwitchMLP(shape.hidden, shape.inner, experts.count, activation=activate)
        self.bias = mx.zeros(shape.hidden)
        self._chosen = experts.chosen

    def __call__(self, states: mx.array) -> mx.array:
        shares = mx.softmax(self.router(states).astype(mx.float32), axis=-1)
        best = mx.argpartition(-shares, kth=self._chosen - 1, axis=-1)[..., : self._chosen]
        weights = mx.take_along_axis(shares, best, axis=-1).astype(states.dtype)
        mixed = (self.experts(states, best) * weights[..., None]).sum(axis=-2)
        result: mx.array = mixed + self.bias
        return result


def attention_masks(tokens: mx.array, reach: int) -> tuple[mx.array, mx.array]:
    """Return the boolean masks of global and local layers, (rows, 1, 1 or longest, longest).

    tokens: (rows, longest), 1 for tokens and 0 for padding.
    reach: a token of a local layer attends to the tokens that are less than this far away.
    """
    position = mx.arange(tokens.shape[1])
    distance = position[:, None] - position[None, :]
    everywhere = tokens.astype(mx.bool_)[:, None, None, :]
    nearby = everywhere & (mx.abs(distance) < reach)
    # Padding attends to everything: the softmax of no scores is NaN, and NaN in a column of padding
    # would reach the tokens of its row.
    return everywhere, nearby | (tokens == 0)[:, None, :, None]


_MOST_TOKENS = 1 << 17  # of a text; nothing in the model limits its length


class StaticModel(Module):
    """Static embeddings (model2vec): each token has a fixed vector, and a text the mean of these.

    shape: the number of token ids, and the length of a vector.
    """

    model_type = "model2vec"

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.vectors = Embedding(*shape)

    def __call__(self, ids: mx.array, **_: mx.array) -> Outputs:
        """Return the vectors of tokens, (rows, longest, dim)."""
        return Outputs(self.vectors(ids), None)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return one vector for each token id.

        A model2vec whose vocabulary was quantised stores fewer vectors, with the index of the
        vector of each token, and may store a factor for each token.
        """
        vectors = _stored(weights)
        if (index := weights.get("mapping")) is not None:
            vectors = vectors[index.astype(mx.int32)]
        if (factors := weights.get("weights")) is not None:
            vectors = vectors * factors.astype(mx.float32)[:, None]
        return {"vectors.weight": vectors}


def fields_of_static(path: Path) -> dict[str, Any]:
    """Return the fields of config.json that other modules read."""
    weights: Any = mx.load(str(path / "model.safetensors"))
    vectors = _stored(weights)
    return {
        "vocab_size": weights.get("mapping", vectors).shape[0],
        "hidden_size": vectors.shape[1],
        "max_position_embeddings": _MOST_TOKENS,
        "num_attention_heads": 0,
    }


def _stored(weights: dict[str, mx.array]) -> mx.array:
    return weights["embedding.weight" if "embedding.weight" in weights else "embeddings"]
