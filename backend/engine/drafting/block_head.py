"""DFlash (https://arxiv.org/abs/2602.06036): layers trained to fill in a model's next tokens.

They attend to states of the model, and fill in a block of tokens in one pass: the last known one,
and masks after it. The layers are mlx-vlm's (`speculative.drafters.qwen3_dflash`). Their own
call reads one sequence, or several of equal lengths, so the attention is called in parts here
(`q_proj` to `o_proj`), which no release promises to keep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from backend.engine.caching.layer_kv import visible
from backend.engine.drafting.head_weights import HeadError, Weights, embedding_of, load_weights
from backend.engine.planning.draft_width import WIDTHS


class BlockHead(Module):
    """The layers of a DFlash checkpoint. Its KV, a cache for each layer, holds states of the model.

    drafter: mlx-vlm's module.
    longest: tokens that one pass fills in.
    """

    inner: Any
    _embed: Any

    def __init__(self, drafter: Any, embedding: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inner = drafter
        self.longest = min(int(drafter.config.block_size) - 1, WIDTHS[-1])
        self._embed = lambda tokens: embedding(tokens)
        self._mask = int(drafter.config.mask_token_id)
        self._size = drafter.fc.weight.shape[-1]

    @property
    def layers(self) -> list[Any]:
        return list(self.inner.layers)

    def __call__(self, tokens: mx.array, *, cache: list[Any]) -> mx.array:
        """Read zeros in place of states for these tokens, to measure what the KV costs."""
        like: mx.array = self._embed(tokens)
        self.read(mx.zeros((*tokens.shape, self._size), like.dtype), cache)
        return like

    def read(self, states: mx.array, cache: Sequence[Any]) -> None:
        """Append the model's states, [rows, tokens, size], to the KV."""
        states = self.inner.hidden_norm(self.inner.fc(states))
        for layer, cached in zip(self.inner.layers, cache, strict=True):
            cached.update_and_fetch(*self._keys_and_values(layer.self_attn, states, cached.offset))

    def fill(self, last: Sequence[int], size: int, cache: Sequence[Any]) -> mx.array:
        """Return the states of `size` tokens after each row's `last`, [rows, size, hidden size]."""
        tokens = mx.array([[token, *[self._mask] * size] for token in last])
        states = self._embed(tokens)
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
    """Return the head for a model with states of this size, with lazy weights. Raises HeadError."""
    from mlx_vlm.speculative.drafters.qwen3_dflash import DFlashDraftModel, ModelConfig

    own = ModelConfig.from_dict(dict(config))
    if own.hidden_size != size:
        raise HeadError(
            f"it was trained for a model whose states have {own.hidden_size} numbers, but"
            f" those of this model have {size}"
        )
    if own.block_size < 2:
        raise HeadError(f"its block_size is {own.block_size}, which leaves no token to guess")
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


def block_places(config: Mapping[str, Any]) -> list[int]:
    """Return the layers of the model before which DFlash reads the states.

    The checkpoint names the layers that produce the states instead.
    """
    return [int(layer) + 1 for layer in config["dflash_config"].get("target_layer_ids", ())]


def _by_head(states: mx.array, heads: int) -> mx.array:
    return states.reshape(*states.shape[:2], heads, -1)


def _mask(cache: Any, size: int, causal: bool, window: int | None) -> mx.array:
    """Return the attention mask of a block of `size` tokens.

    Every token sees all of the block, and as much of the KV as the first one. In a causal layer
    each sees only what precedes it.
    """
    starts = mx.array(cache.offset).reshape(-1, 1)
    columns = mx.arange(cache.size())
    # The block's columns follow those of the longest sequence. Columns after a shorter one are
    # placed after the block, where no token sees them.
    stored = mx.where(columns < starts, columns, starts + size)
    now = starts + mx.arange(size)
    mask = visible(mx.concatenate([stored, now], axis=1), now, window)
    if causal:
        return mask
    before = mx.broadcast_to(mask[..., :1, : columns.size], [*mask.shape[:3], columns.size])
    return mx.concatenate([before, mx.ones([*mask.shape[:3], size], mx.bool_)], axis=-1)
