"""The network of all encoders, such as BERT, RoBERTa, ModernBERT, Nomic, GTE, MPNet and DeBERTa.

`Shape` describes the positions, norms and MLP of an encoder, and `encoder_names` the names of
weights in checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.activations import gelu, gelu_approx, relu, silu
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm

from backend.engine.embedding.encoder_names import HEAD, in_own_names, own_paths
from backend.engine.embedding.encoder_shape import Disentangled, Shape

_ACTIVATIONS: Mapping[str, Callable[[mx.array], mx.array]] = {
    "gelu": gelu,
    "gelu_new": gelu_approx,
    "relu": relu,
    "silu": silu,
    "tanh": mx.tanh,
}


_ATTENDING = ("queries", "keys", "values")
# DeBERTa's vectors of classes of distances, (classes, hidden), and the class of the distance
# between each two tokens, (length, length).
Distances = tuple[mx.array, mx.array]


class Outputs(NamedTuple):
    """The results of a forward pass, under mlx-vlm's names."""

    last_hidden_state: mx.array  # (rows, longest, hidden)
    # (rows, outputs), or (rows, longest, outputs) for each token; None without a head.
    logits: mx.array | None


@dataclass(frozen=True, slots=True)
class Plan:
    """The description from which `Model` is built."""

    shape: Shape
    outputs: int = 0  # number of scores or labels; 0 for no head
    of_tokens: bool = False  # whether each token has scores, rather than each row


class Model(Module):
    """An encoder. Its weights have the names in `encoder_names`."""

    model_type = "encoder"

    def __init__(self, plan: Plan) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        shape = plan.shape
        self._plan = plan
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
        if plan.outputs and (shape.head_norm or not plan.of_tokens):
            self.pooler = Linear(shape.hidden, shape.hidden, bias=shape.pooler_bias)
        if plan.outputs and shape.head_norm:
            self.head_norm = _norm(shape)
        if plan.outputs:
            self.score = Linear(shape.hidden, plan.outputs)

    def __call__(
        self, ids: mx.array, attention_mask: mx.array, token_type_ids: mx.array
    ) -> Outputs:
        """Run the network.

        ids, attention_mask, token_type_ids: (rows, longest); rows are padded at their end.
        """
        shape, states = self._plan.shape, self.words(ids)
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
        shape = self._plan.shape
        if not self._plan.of_tokens and shape.pooled == "mean":
            filled = mask[..., None].astype(mx.float32)  # a sum of many may overflow float16
            states = ((states * filled).sum(axis=1) / filled.sum(axis=1)).astype(states.dtype)
        elif not self._plan.of_tokens:
            states = states[:, 0]
        if "head_norm" in self:
            states = self.head_norm(_ACTIVATIONS[shape.activation](self.pooler(states)))
        elif "pooler" in self:
            states = _ACTIVATIONS[shape.head_activation](self.pooler(states))
        scores: mx.array = self.score(states)
        return scores

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return a checkpoint's weights under the names of the network."""
        return in_own_names(weights, self, self._plan.shape.experts)

    def own_paths(self, layer: str) -> Sequence[str]:
        """Return the paths of the layers that a checkpoint stores as one layer.

        Returns none for a layer of a head that is not served, such as BERT's pooler.

        layer: the name of the layer in the checkpoint.
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
        powers = mx.arange(0, self._size, 2, dtype=mx.float32) / self._size
        # The inverse of the rotary frequency of each pair of values.
        self._periods = shape.stretch * theta**powers if theta else None
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
        if self._periods is not None:
            queries, keys = _turned(queries, self._periods), _turned(keys, self._periods)
        mixed = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=self._scale, mask=mask
        )
        result: mx.array = self.out(mixed.swapaxes(1, 2).reshape(rows, length, -1))
        return result


def _turned(states: mx.array, periods: mx.array) -> mx.array:
    return mx.fast.rope(
        states, states.shape[-1], traditional=False, base=None, scale=1.0, offset=0, freqs=periods
    )


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
        self._activate = _ACTIVATIONS[shape.activation]

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
        activate = _ACTIVATIONS[shape.activation]
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


def attention_masks(
    tokens: mx.array, reach: int, *, causal: bool = False
) -> tuple[mx.array, mx.array]:
    """Return the boolean masks of global and local layers, (rows, 1, 1 or longest, longest).

    tokens: (rows, longest), 1 for tokens and 0 for padding.
    reach: a token of a local layer attends to the tokens that are less than this far away.
    causal: whether tokens attend only to earlier tokens.
    """
    position = mx.arange(tokens.shape[1])
    distance = position[:, None] - position[None, :]
    everywhere = tokens.astype(mx.bool_)[:, None, None, :]
    if causal:
        everywhere = everywhere & (distance >= 0)
    nearby = everywhere & (mx.abs(distance) < reach)
    # Padding attends to everything: the softmax of no scores is NaN, and NaN in a column of padding
    # would reach the tokens of its row.
    return everywhere, nearby | (tokens == 0)[:, None, :, None]
