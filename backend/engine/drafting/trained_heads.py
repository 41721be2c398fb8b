"""Heads that were trained to draft for one model, with layers of mlx-vlm.

These layers are private parts of mlx-vlm's drafters, which any release may change.

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

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.rope_utils import initialize_rope

from backend.engine.caching.layer_kv import visible
from backend.engine.drafting.batch_drafter import Choices
from backend.engine.drafting.heads import Head, HeadError, Weights, embedding_of, load_weights
from backend.engine.planning.draft_width import WIDTHS
from backend.engine.sampling.logits_head import LogitsHead

_STATES = 3  # layers of the model whose inputs an EAGLE-3 head reads
_KEY = "eagle_aux_hidden_state_layer_ids"


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

    size: length of the model's states.
    vocabulary: number of the model's logits.

    Raises HeadError.
    """
    from mlx_vlm.speculative.drafters.eagle3 import Eagle3DraftModel, ModelConfig

    own = ModelConfig.from_dict(_nested(config))
    text = own.transformer_layer_config
    _require_size(own.target_hidden_size, size)
    drafter = Eagle3DraftModel(own)
    for layer in drafter.layers:
        layer.self_attn.rope = initialize_rope(
            text.head_dim,
            text.rope_theta,
            text.rope_traditional,
            _rope_scaling(config),
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
    if not own.embed_requires_grad or "embed_tokens.weight" not in weights:
        embedding = embedding_of(model, vocabulary)
        if embedding(mx.array([0])).shape[-1] != text.hidden_size:
            embedding = None
        else:
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


def _rope_scaling(config: Mapping[str, Any]) -> dict[str, Any] | None:
    inner = config.get("transformer_layer_config", config)
    scaling = inner.get("rope_scaling") or inner.get("rope_parameters")
    return dict(scaling) if isinstance(scaling, Mapping) else None


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
    """Return the head for a model, with lazy weights; arguments as for `open_eagle`.

    Raises HeadError.
    """
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
    """Raise HeadError if a head was trained for states of another length than the model's."""
    if trained != size:
        raise HeadError(
            f"it was trained for a model whose states have {trained} numbers, but those of this"
            f" model have {size}"
        )
