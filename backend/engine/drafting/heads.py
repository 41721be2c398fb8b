"""Heads, which are a few layers that draft from a model's hidden states.

The heads below, which were trained to draft for one model, have layers of mlx-vlm. These layers are
private parts of mlx-vlm's drafters, which any release may change.

EAGLE-3 (https://arxiv.org/abs/2503.01840, `speculative.drafters.eagle3`) predicts the next token
from a token's embedding and the inputs of three of the model's layers. Further tokens are predicted
from the head's own states. mlx-vlm's drafter stores one KV for all sequences and samples draft
tokens itself, so only its `fc`, `layers`, `norm` and `lm_head` are used.

DFlash (https://arxiv.org/abs/2602.06036, `speculative.drafters.qwen3_dflash`) attends to states of
the model. Its input is the last known token and masks after it; one pass fills in all masks.
mlx-vlm's layers read one sequence, or several of equal lengths, so only the parts of their
attention (`q_proj` to `o_proj`) are called here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.quantized import QuantizedEmbedding, quantize
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.rope_utils import initialize_rope
from mlx_lm.utils import infer_quant_config

from backend.engine.caching.layer_kv import visible
from backend.engine.loading.shards import read_shards
from backend.engine.loading.untied_head import IS_EMBEDDING
from backend.engine.planning.draft_width import WIDTHS
from backend.engine.sampling.logits_head import LogitsHead

Weights = dict[str, mx.array]
_STATES = 3  # layers of the model whose inputs an EAGLE-3 head reads
_KEY = "eagle_aux_hidden_state_layer_ids"


class HeadError(Exception):
    """There is no usable head. The error's text is a clause for the message to the user."""


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """How the states of a draft model or head become tokens."""

    project: Callable[[mx.array], mx.array]  # returns logits [..., n] for states [..., size]
    vocabulary: int  # number of tokens; later logits are padding
    # The main model's id of each token, [vocabulary]; None if the ids are equal.
    tokens: mx.array | None = None

    def best(self, states: mx.array) -> tuple[Any, Any]:
        """Return the best token after each state [...], and its probability, as nested lists."""
        logits = self.project(states)[..., : self.vocabulary].astype(mx.float32)
        drafts = mx.argmax(logits, axis=-1)
        shares = mx.exp(mx.max(logits, axis=-1) - mx.logsumexp(logits, axis=-1))
        if self.tokens is not None:
            drafts = self.tokens[drafts]
        mx.eval(drafts, shares)
        return drafts.tolist(), shares.tolist()


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
    loaded: list[Any] = [mx.load(str(file)) for file in read_shards(path).files]
    return {name: value for each in loaded for name, value in each.items()}


def load_weights(head: Any, weights: Weights, form: str, *, exact: bool = False) -> None:
    """Quantise the layers of a head whose weights are quantised, and load its weights.

    Raises HeadError if a weight is missing or has another shape.

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
    stored = {f"{path}.weight", f"{path}.scales"}
    if not (hasattr(layer, "to_quantized") and stored <= weights.keys()):
        return False
    found: dict[str, Any] = infer_quant_config(path, layer, weights)
    return found


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


class EagleHead(Head):
    """The layers of an EAGLE-3 checkpoint.

    drafter: mlx-vlm's module.
    embedding: the token embedding to use instead of the drafter's; None for the drafter's.
    """

    def __init__(self, drafter: Any, embedding: Any = None) -> None:
        if embedding is not None:
            drafter.pop("embed_tokens")
        super().__init__(
            drafter,
            lambda tokens: (embedding or drafter.embed_tokens)(tokens),
            _STATES * drafter.target_hidden_size,
        )

    def read(self, embedded: mx.array, states: mx.array, cache: Sequence[Any]) -> mx.array:
        """Read the model's states, [rows, tokens, `size`], or the head's, [.., .., hidden size]."""
        if states.shape[-1] == self.size:
            if self.inner.input_norm is not None:
                states = self.inner.input_norm(states)
            states = self.inner.fc(states)
        mask = create_attention_mask(states, cache[0])
        first, *others = self.inner.layers
        states = first(embedded, states, mask, cache[0], None)
        for layer, layer_cache in zip(others, cache[1:], strict=True):
            states = layer(states, mask, layer_cache, None)
        return states


def eagle_layers(config: Mapping[str, Any], layers: int) -> list[int]:
    """Return the indices of the three layers whose inputs an EAGLE-3 checkpoint reads.

    In vLLM's convention, the configuration names these layers; in SGLang's (`eagle_config`), it
    names the layers before them. By default, the layers are near the start, in the middle and near
    the end. Raises HeadError.
    """
    nested = config.get("eagle_config")
    if own := config.get(_KEY):
        positions = [int(position) for position in own]
    elif isinstance(nested, Mapping) and (own := nested.get(_KEY)):
        positions = [int(layer) + 1 for layer in own]
    else:
        positions = [2, layers // 2, layers - 3]
    if len(positions) != _STATES:
        raise HeadError(
            f"it reads states before layers {positions}, but EAGLE-3 reads three of them"
        )
    return positions


def open_eagle(
    config: Mapping[str, Any],
    weights: Weights,
    model: Any,
    size: int,
    vocabulary: int,
    projection: LogitsHead,
) -> tuple[EagleHead, Choices]:
    """Return the head for a model, with lazy weights, and how its states become tokens.

    Raises HeadError.
    """
    from mlx_vlm.speculative.drafters.eagle3 import Eagle3DraftModel, ModelConfig

    own = ModelConfig.from_dict(_nested(config))
    text = own.transformer_layer_config
    _require_size(own.target_hidden_size, size)
    drafter = Eagle3DraftModel(own)
    inner = config.get("transformer_layer_config", config)
    scaling = inner.get("rope_scaling") or inner.get("rope_parameters")
    for layer in drafter.layers:
        layer.self_attn.rope = initialize_rope(
            text.head_dim,
            text.rope_theta,
            text.rope_traditional,
            dict(scaling) if isinstance(scaling, Mapping) else None,
            text.max_position_embeddings,
        )
    weights = drafter.sanitize(
        {name.replace("midlayer.", "layers.0."): value for name, value in weights.items()}
    )
    if own.draft_vocab_size == text.vocab_size:
        weights.pop("d2t", None)
    if "lm_head.weight" not in weights:
        drafter.lm_head = None
    if drafter.lm_head is None and (own.draft_vocab_size != vocabulary or not projection.found):
        raise HeadError("its weights lack lm_head.weight")
    embedding = None
    trained = own.embed_requires_grad and "embed_tokens.weight" in weights
    if size == text.hidden_size and not trained:
        embedding = embedding_of(model, vocabulary)
        weights = {at: value for at, value in weights.items() if "embed_tokens." not in at}
    if embedding is None and text.vocab_size < vocabulary:
        raise HeadError(
            f"its vocabulary has {text.vocab_size} tokens, but that of this model has {vocabulary}"
        )
    head = EagleHead(drafter, embedding)
    own_weights = {f"inner.{at}": value for at, value in weights.items()}
    load_weights(head, own_weights, "EAGLE-3", exact=True)
    drafted, tokens = min(own.draft_vocab_size, vocabulary), None
    if drafter.d2t is not None:
        drafted, tokens = own.draft_vocab_size, mx.arange(own.draft_vocab_size) + drafter.d2t
        mx.eval(tokens)
        if not ((tokens >= 0) & (tokens < vocabulary)).all():
            raise HeadError(f"its d2t has token ids beyond the {vocabulary} of this model")
    project = projection.project if drafter.lm_head is None else drafter.lm_head
    return head, Choices(lambda states: project(drafter.norm(states)), drafted, tokens)


def _nested(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration in the form of Speculators, which nests the layers' configuration.

    Other programs write a flat configuration, like that of a Llama model.
    """
    if "transformer_layer_config" in config:
        return dict(config)
    return {
        "draft_vocab_size": config.get("draft_vocab_size") or config.get("vocab_size"),
        **config,
        "transformer_layer_config": dict(config),
    }


class BlockHead(Head):
    """The layers of a DFlash checkpoint. The KV contains states of the model.

    longest: number of tokens that one pass fills in.
    """

    def __init__(self, drafter: Any, embedding: Any) -> None:
        super().__init__(drafter, embedding, drafter.fc.weight.shape[-1])
        self.longest = min(int(drafter.config.block_size) - 1, WIDTHS[-1])
        self._mask = int(drafter.config.mask_token_id)

    def read(self, embedded: mx.array, states: mx.array, cache: Sequence[Any]) -> mx.array:
        """Append the model's states to the KV, and return the states of the longest block."""
        self.append(states, cache)
        return self.fill([0] * len(embedded), self.longest, cache)

    def append(self, states: mx.array, cache: Sequence[Any]) -> None:
        """Append the model's states, [rows, tokens, size], to the KV."""
        states = self.inner.hidden_norm(self.inner.fc(states))
        for layer, cached in zip(self.inner.layers, cache, strict=True):
            cached.update_and_fetch(*self._keys_and_values(layer.self_attn, states, cached.offset))

    def fill(self, last: Sequence[int], size: int, cache: Sequence[Any]) -> mx.array:
        """Return the states of `size` tokens after each row's last, [rows, size, hidden size].

        last: the last known token of each row.
        """
        tokens = mx.array([[token, *[self._mask] * size] for token in last])
        states = self.embed(tokens)
        masks: dict[tuple[bool, int | None], mx.array] = {}
        for layer, cached in zip(self.inner.layers, cache, strict=True):
            own = layer.self_attn
            kind = bool(own.is_causal), own.sliding_window
            if kind not in masks:
                masks[kind] = _mask(cached, size + 1, *kind)
            states = states + self._attend(own, layer.input_layernorm(states), cached, masks[kind])
            states = states + layer.mlp(layer.post_attention_layernorm(states))
        found: mx.array = self.inner.norm(states[:, 1:])
        return found

    def _keys_and_values(
        self, own: Any, states: mx.array, offset: Any
    ) -> tuple[mx.array, mx.array]:
        keys = own.k_norm(_by_head(own.k_proj(states), own.n_kv_heads))
        values = _by_head(own.v_proj(states), own.n_kv_heads)
        return self.inner.rope(keys.swapaxes(1, 2), offset=offset), values.swapaxes(1, 2)

    def _attend(self, own: Any, states: mx.array, cached: Any, mask: mx.array) -> mx.array:
        queries = own.q_norm(_by_head(own.q_proj(states), own.n_heads)).swapaxes(1, 2)
        new = self._keys_and_values(own, states, cached.offset)
        parts = zip(cached.keys_and_values(), new, strict=True)
        keys, values = (mx.concatenate(list(pair), axis=2) for pair in parts)
        found = mx.fast.scaled_dot_product_attention(
            self.inner.rope(queries, offset=cached.offset),
            keys,
            values,
            scale=own.scale,
            mask=mask,
            sinks=own.attention_sink_bias,
        )
        projected: mx.array = own.o_proj(found.swapaxes(1, 2).flatten(2))
        return projected


def open_block_head(
    config: Mapping[str, Any], weights: Weights, model: Any, size: int, vocabulary: int
) -> BlockHead:
    """Return the head for a model, with lazy weights. Raises HeadError."""
    from mlx_vlm.speculative.drafters.qwen3_dflash import DFlashDraftModel, ModelConfig

    own = ModelConfig.from_dict(dict(config))
    _require_size(own.hidden_size, size)
    if own.block_size < 2:
        raise HeadError(f"its block_size is {own.block_size}, which leaves no token to draft")
    embedding = embedding_of(model, vocabulary)
    if not 0 <= own.mask_token_id < embedding.weight.shape[0]:
        raise HeadError(f"its mask_token_id {own.mask_token_id} is not a token of this model")
    head = BlockHead(DFlashDraftModel(own), embedding)
    weights = {
        f"inner.{name.removeprefix('model.')}": value
        for name, value in weights.items()
        if not name.endswith(("embed_tokens.weight", "lm_head.weight"))  # copies of the model's
    }
    load_weights(head, weights, "DFlash", exact=True)
    return head


def block_layers(config: Mapping[str, Any]) -> list[int]:
    """Return the indices of the layers whose inputs DFlash reads.

    The checkpoint names the layers before them.
    """
    return [int(layer) + 1 for layer in config["dflash_config"].get("target_layer_ids", ())]


def _by_head(states: mx.array, heads: int) -> mx.array:
    return states.reshape(*states.shape[:2], heads, -1)


def _mask(cache: Any, size: int, causal: bool, window: int | None) -> mx.array:
    """Return the attention mask of a block of `size` tokens.

    Every token attends to the whole block, and to as much of the KV as the first token. In a causal
    layer, tokens do not attend to later tokens.
    """
    starts = mx.array(cache.offset).reshape(-1, 1)
    columns = mx.arange(cache.size())
    # The block's columns follow the columns of the longest sequence. Columns after a shorter
    # sequence get positions after the block, to which no token attends.
    stored = mx.where(columns < starts, columns, starts + size)
    now = starts + mx.arange(size)
    mask = visible(mx.concatenate([stored, now], axis=1), now, window)
    if causal:
        return mask
    before = mx.broadcast_to(mask[..., :1, : columns.size], [*mask.shape[:3], columns.size])
    return mx.concatenate([before, mx.ones([*mask.shape[:3], size], mx.bool_)], axis=-1)


def _require_size(trained: int, size: int) -> None:
    if trained != size:
        raise HeadError(
            f"it was trained for a model whose states have {trained} numbers, but those of this"
            f" model have {size}"
        )
