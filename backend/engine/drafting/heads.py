"""The base of heads, which are a few layers that draft from a model's hidden states.

This module also loads the tensors of a checkpoint into heads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.quantized import QuantizedEmbedding, quantize
from mlx.utils import tree_flatten

from backend.engine.loading.shards import read_shards
from backend.engine.loading.untied_head import IS_EMBEDDING

Weights = dict[str, mx.array]


class HeadError(Exception):
    """There is no usable head. The error's text is a clause for the message to the user."""


class Head(Module, ABC):
    """The base of heads, whose KV is a cache for each layer of `inner`.

    embed: returns the vectors of tokens.
    size: length of the states that the head reads.
    longest: number of tokens for each sequence that one pass drafts.
    """

    inner: Any
    embed: Callable[[mx.array], mx.array]
    longest = 1

    def __init__(self, inner: Any, embedding: Callable[[mx.array], mx.array], size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inner = inner
        # A function, because a module would count as a part of the head.
        self.embed = lambda tokens: embedding(tokens)
        self.size = size

    @property
    def layers(self) -> list[Any]:
        return list(self.inner.layers)

    def __call__(
        self, tokens: mx.array, states: mx.array | None = None, *, cache: list[Any]
    ) -> mx.array:
        """Return the head's state after each token, [rows, tokens, hidden size].

        states: the states from which the tokens were chosen; None means zeros, to measure the
            memory of the KV.
        """
        embedded = self.embed(tokens)
        if states is None:
            states = mx.zeros((*embedded.shape[:-1], self.size), embedded.dtype)
        return self.read(embedded, states, cache)

    @abstractmethod
    def read(self, embedded: mx.array, states: mx.array, cache: Sequence[Any]) -> mx.array:
        """Append tokens, of which these are the vectors, to the KV; returns as `__call__` does."""


def read_weights(path: Path) -> Weights:
    """Return all tensors of a checkpoint, lazy."""
    found: Weights = {}
    for file in read_shards(path).files:
        loaded = mx.load(str(file))
        assert isinstance(loaded, dict)
        found.update(loaded)
    return found


def load_weights(head: Any, weights: Weights, form: str, *, exact: bool = False) -> None:
    """Quantise the layers of a head whose weights are quantised, and load its weights.

    Raises HeadError if a weight is missing or has another shape.

    form: the name of the kind of head, for errors.
    exact: whether to raise HeadError for weights that are no part of the head.
    """
    quantize(head, class_predicate=lambda path, layer: _quantisation(path, layer, weights))
    names = dict(tree_flatten(head.parameters()))
    wrong = [
        name
        for name, value in names.items()
        if name not in weights or weights[name].shape != value.shape
    ]
    if wrong:
        raise HeadError(f"its weights have no {wrong[0]} of the shape that {form} needs")
    unknown = sorted(weights.keys() - names.keys())
    if exact and unknown:
        raise HeadError(f"its weights have {unknown[0]}, which is not a part of {form}")
    head.load_weights([(name, weights[name]) for name in names])


def _quantisation(path: str, layer: Any, weights: Weights) -> dict[str, Any] | bool:
    """Return how a layer's weights are quantised, judging by their shapes; False if they are not.

    In many checkpoints, the bits in config.json apply only to the model's own layers.
    """
    scales = weights.get(f"{path}.scales")
    packed = weights.get(f"{path}.weight")
    if not hasattr(layer, "to_quantized") or scales is None or packed is None:
        return False
    inputs = layer.weight.shape[-1]
    bits, group_size = 32 * packed.shape[-1] // inputs, inputs // scales.shape[-1]
    if f"{path}.biases" in weights:
        mode = "affine"
    else:
        mode = "mxfp8" if bits == 8 else "nvfp4" if group_size == 16 else "mxfp4"
    return {"group_size": group_size, "bits": bits, "mode": mode}


def embedding_of(model: Any, vocabulary: int) -> Any:
    """Return a model's embedding of tokens. Raises HeadError."""
    for path, layer in model.named_modules():
        if (
            IS_EMBEDDING.fullmatch(path)
            and isinstance(layer, (Embedding, QuantizedEmbedding))
            and layer.weight.shape[0] >= vocabulary
        ):
            return layer
    raise HeadError("this backend does not find the token embedding of the model")


def hidden_size(model: Any, vocabulary: int) -> int:
    """Return the length of a model's states, which equals its embeddings'. Raises HeadError."""
    return int(embedding_of(model, vocabulary)(mx.array([0])).shape[-1])
