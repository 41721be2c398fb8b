"""The BERTs that mlx-vlm 0.7.10 lacks: Jina embeddings v3, Nomic Embed, GTE, MPNet, DistilBERT.

One network for all of them: learned or rotary positions, a plain or gated MLP or experts, and the
head of a reranker, as `Shape` says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.activations import gelu, silu
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm

from backend.engine.embedding.rotary_shape import Positions, Shape
from backend.engine.embedding.rotary_weights import in_own_names
from backend.engine.embedding.task_adapters import TaskAdapter

_ACTIVATIONS = {"gelu": gelu, "silu": silu}


class Outputs(NamedTuple):
    """The results under mlx-vlm's names. logits: None without a reranker's head."""

    last_hidden_state: mx.array
    logits: mx.array | None


@dataclass(frozen=True, slots=True)
class Plan:
    """What `Model` is built from.

    ranks: whether it has the head of a reranker. adapters: those that are added to its weights.
    dtype: of the sums; None means that of the weights.
    """

    shape: Shape
    ranks: bool = False
    adapters: tuple[TaskAdapter, ...] = ()
    dtype: mx.Dtype | None = None


class Model(Module):
    """The network. Its weights have the names of `rotary_weights`."""

    model_type = "rotary_bert"

    def __init__(self, plan: Plan) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        shape = plan.shape
        self._plan = plan
        self.words = Embedding(shape.vocabulary, shape.hidden)
        if shape.segments:
            self.segments = Embedding(shape.segments, shape.hidden)
        if shape.positions.learned:
            self.places = Embedding(shape.positions.learned, shape.hidden)
        if shape.positions.distances:
            self.nearness = Embedding(shape.positions.distances, shape.heads)
        self.norm = LayerNorm(shape.hidden, shape.epsilon)
        head = shape.hidden // shape.heads
        self._periods = _periods(shape.positions, head) if shape.positions.theta else None
        self.layers = [_Layer(shape, at) for at in range(shape.layers)]
        if plan.ranks:
            self.pooler = Linear(shape.hidden, shape.hidden)
            self.score = Linear(shape.hidden, 1)

    def __call__(
        self, ids: mx.array, attention_mask: mx.array, token_type_ids: mx.array
    ) -> Outputs:
        """ids, attention_mask, token_type_ids: (rows, longest); rows are padded at their end."""
        states = self.words(ids)
        if "segments" in self:
            # Tokenizers of models with one segment may number two.
            one = self._plan.shape.segments == 1
            states = states + self.segments(mx.zeros_like(ids) if one else token_type_ids)
        if "places" in self:
            pad = self._plan.shape.positions.pad
            filled = (ids != pad).astype(mx.int32)
            states = states + self.places(mx.cumsum(filled, axis=1) * filled + pad)
        states = self.norm(states)
        mask = attention_mask.astype(mx.bool_)[:, None, None, :]
        if "nearness" in self:
            classes = _distance_classes(ids.shape[1], self._plan.shape.positions.distances)
            bias = self.nearness(classes).transpose(2, 0, 1)
            mask = mx.where(mask, bias, mx.finfo(bias.dtype).min)
        for layer in self.layers:
            states = layer(states, mask, self._periods)
        if "score" not in self:
            return Outputs(states, None)
        return Outputs(states, self.score(mx.tanh(self.pooler(states[:, 0]))))

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """A checkpoint's weights under the names of the network."""
        plan = self._plan
        return in_own_names(
            weights, plan.shape, ranks=plan.ranks, adapters=plan.adapters, dtype=plan.dtype
        )


class _Layer(Module):
    def __init__(self, shape: Shape, at: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.attention = _Attention(shape)
        self.attention_norm = LayerNorm(shape.hidden, shape.epsilon)
        expert = shape.experts is not None and shape.experts.serve(at)
        self.mlp = _Experts(shape) if expert else _MLP(shape)
        self.mlp_norm = LayerNorm(shape.hidden, shape.epsilon)

    def __call__(self, states: mx.array, mask: mx.array, periods: mx.array | None) -> mx.array:
        states = self.attention_norm(states + self.attention(states, mask, periods))
        result: mx.array = self.mlp_norm(states + self.mlp(states))
        return result


class _Attention(Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.joined = Linear(shape.hidden, 3 * shape.hidden, bias=shape.attention_bias)
        self.out = Linear(shape.hidden, shape.hidden, bias=shape.attention_bias)
        self._heads, self._size = shape.heads, shape.hidden // shape.heads

    def __call__(self, states: mx.array, mask: mx.array, periods: mx.array | None) -> mx.array:
        rows, length, _ = states.shape
        parts = self.joined(states).reshape(rows, length, 3, self._heads, self._size)
        queries, keys, values = (parts[:, :, at].swapaxes(1, 2) for at in range(3))
        if periods is not None:
            queries, keys = _turned(queries, periods), _turned(keys, periods)
        mixed = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=self._size**-0.5, mask=mask
        )
        result: mx.array = self.out(mixed.swapaxes(1, 2).reshape(rows, length, -1))
        return result


def _turned(states: mx.array, periods: mx.array) -> mx.array:
    return mx.fast.rope(
        states,
        states.shape[-1],
        traditional=False,
        base=None,
        scale=1.0,
        offset=0,
        freqs=periods,
    )


def _distance_classes(length: int, count: int) -> mx.array:
    """The class of the distance from each token to each other, (length, length), as in MPNet.

    The first half is for earlier tokens, the second for later ones. Half of either is for a single
    distance each, the rest for ranges that grow up to a distance of 128.
    """
    place = mx.arange(length)
    distance = place[:, None] - place[None, :]
    half = count // 2
    exact = half // 2
    ahead = mx.where(distance < 0, half, 0)
    distance = mx.abs(distance)
    growth = mx.log(mx.maximum(distance, 1).astype(mx.float32) / exact) / math.log(128 / exact)
    ranged = mx.minimum(exact + (growth * (half - exact)).astype(mx.int32), half - 1)
    return ahead + mx.where(distance < exact, distance, ranged)


def _periods(positions: Positions, size: int) -> mx.array:
    """The inverse of each pair's frequency."""
    powers = mx.arange(0, size, 2, dtype=mx.float32) / size
    return positions.stretch * positions.theta**powers


class _MLP(Module):
    """joined: the inner values, and after them those of the gate, if there is one."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        width = shape.inner * (2 if shape.gated else 1)
        self.joined = Linear(shape.hidden, width, bias=shape.up_bias)
        self.down = Linear(shape.inner, shape.hidden, bias=shape.down_bias)
        self._gated, self._activate = shape.gated, _ACTIVATIONS[shape.activation]

    def __call__(self, states: mx.array) -> mx.array:
        inner = self.joined(states)
        if self._gated:
            inner, gate = mx.split(inner, 2, axis=-1)
            inner = inner * self._activate(gate)
        else:
            inner = self._activate(inner)
        result: mx.array = self.down(inner)
        return result


class _Experts(Module):
    """Experts without biases; one bias is added to their weighted sum.

    The weights of the chosen experts need not add up to 1.
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
