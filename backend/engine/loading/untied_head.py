"""Gives a model whose head is its embedding a head of its own.

Adapters of PEFT may change one of the two alone. Many families cannot have both, so the embedding
is replaced by a layer that has both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx.utils import tree_unflatten

_EMBEDDING = r"embed_tokens|wte|word_embeddings|embed_in|embeddings?|tok_embeddings"
_HEAD = r"lm_head|embed_out"
IS_EMBEDDING = re.compile(rf"(?:.+\.)?(?:{_EMBEDDING})")
# A weight of an embedding or a head in an adapter, unless it is one of single tokens.
_OF_EMBEDDING = re.compile(rf"(?:^|\.)(?:{_EMBEDDING})\.(?!token_adapter\.)")
_OF_HEAD = re.compile(rf"(?:^|\.)(?:{_HEAD})\.")
_IS_HEAD = re.compile(rf"(?:.+\.)?(?:{_HEAD})")


class UntiedEmbedding(Module):
    """An embedding, and a head with the weights that the embedding had before an adapter."""

    def __init__(self, embedding: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        rows = embedding.weight.shape[0]
        head: Any = Linear(embedding.weight.shape[1], rows, bias=False)
        if "scales" in embedding:
            form = {name: getattr(embedding, name) for name in ("group_size", "bits", "mode")}
            columns = embedding.scales.shape[-1] * embedding.group_size
            head = QuantizedLinear(columns, rows, bias=False, **form)
        self.embedding = embedding
        self.head = head.update(embedding.parameters())

    def __call__(self, tokens: mx.array) -> mx.array:
        found: mx.array = self.embedding(tokens)
        return found

    def as_linear(self, states: mx.array) -> mx.array:
        logits: mx.array = self.head(states)
        return logits


def changes_one(tensor: str, copied: tuple[str, ...]) -> bool:
    """Return whether a tensor of an adapter changes the head or the embedding of a model alone.

    copied: the layers of which the adapter has copies. Another whole embedding is also the head.
    """
    adapted = ".lora_" in tensor or any(tensor.rpartition(".")[0].endswith(end) for end in copied)
    return bool(_OF_HEAD.search(tensor) or (adapted and _OF_EMBEDDING.search(tensor)))


def untie(model: Any) -> None:
    """Give a model a head of its own, unless it has one."""
    modules: dict[str, Any] = dict(model.named_modules())
    paths = [
        path
        for path, layer in modules.items()
        if type(layer) in (Embedding, QuantizedEmbedding) and IS_EMBEDDING.fullmatch(path)
    ]
    if len(paths) == 1 and not any(map(_IS_HEAD.fullmatch, modules)):
        changed = UntiedEmbedding(modules[paths[0]])
        model.update_modules(tree_unflatten([(paths[0], changed)]))


def own_path(path: str, modules: Mapping[str, Any]) -> str:
    """Return the path of an embedding or a head in a model that may have been given a head."""
    at, layer = next(
        ((at, layer) for at, layer in modules.items() if isinstance(layer, UntiedEmbedding)),
        ("", None),
    )
    if layer is None:
        return path
    if path == at:
        return f"{at}.embedding"
    return f"{at}.head" if path not in modules and _IS_HEAD.fullmatch(path) else path
