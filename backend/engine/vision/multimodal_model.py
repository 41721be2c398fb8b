"""Adapts an mlx-vlm model to the interface that the engine expects: tokens in, logits out.

The engine needs `layers`, `make_cache` and a call with tokens and caches. The call runs the
language part; images and audio are passed as embeddings (`media_prefill`). Positions are passed for
every row, so the state that mlx-vlm stores on the model is never used.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import cache as lm
from mlx_vlm.models import cache as vlm
from mlx_vlm.models.base import create_attention_mask

from backend.engine.caching.layer_kv import RowShift
from backend.engine.loading.recurrent_layers import use_chunks
from backend.engine.vision import patches
from backend.engine.vision.families import family_of


class MultimodalModel(nn.Module):  # type: ignore[misc,name-defined]  # mlx.nn is untyped
    """An mlx-vlm model (`whole`) that is called as its language part.

    shifts: whether positions differ from token counts (multimodal RoPE). If so, every row has a
        `RowShift` as its last cache.
    axes: number of positions of a token, with multimodal RoPE.
    passes_positions: whether mlx-vlm cannot compute these positions from tokens.
    sees_ahead: whether the tokens of an image attend to each other in both directions, so that a
        pass must contain all of them.
    reads_whole: whether all tokens of a prompt attend to each other in both directions, so that a
        pass must contain the rest of the prompt and nothing else.
    forgets: whether an answer attends to the prompt, but only to the answer's latest tokens.
    stores: whether stored KV of a prompt and its answer can start a later prompt.
    """

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.whole = whole
        if hasattr(whole, "disable_talker"):
            whole.disable_talker()  # Qwen3-Omni's speech output, which is never requested
        self.model_type = str(getattr(whole.config, "model_type", ""))
        self.family = family_of(self.model_type)
        language = whole.language_model
        patches.scale_by_row(language)
        use_chunks()
        patches.use_mlx_lm(language)
        patches.join_windows(language)
        patches.choose_by_group(language)
        self.sees_ahead = patches.mask_blocks_of_pass(language)
        text = getattr(language, "config", None)
        self.reads_whole = getattr(text, "use_bidirectional_attention", None) is True
        self.forgets = self.family.forgets
        self.stores = not (self.reads_whole or self.forgets)
        self.axes = patches.place_rows(language) or 3
        self.passes_positions = self.axes > 3
        self.shifts = self.passes_positions or hasattr(language, "get_rope_index")
        rotary: Any = getattr(getattr(language, "model", None), "rotary_emb", None)
        unselected = self.model_type == "cohere_compass" and rotary.position_selector is None
        self._one_axis = unselected or self.family.one_axis
        # The name of the argument in which layers receive the kind of each token.
        self._kinds = "mm_token_type_ids" if self.sees_ahead else self.family.kinds

    @property
    def language_model(self) -> Any:
        return self.whole.language_model

    @property
    def layers(self) -> Sequence[Any]:
        # Idefics 2 and Molmo look for their layers under a wrong name.
        layers: Sequence[Any] | None = getattr(self.whole, "layers", None)
        return self.language_model.layers if layers is None else layers

    @property
    def cast_predicate(self) -> Any:
        may_cast = getattr(self.whole, "cast_predicate", None)
        if may_cast is None:
            return lambda _: True
        return lambda path: may_cast(path.removeprefix("whole."))

    def make_cache(self) -> list[Any]:
        """Return the caches of one row, of mlx-lm's classes wherever they have an equivalent.

        Rows with caches of other classes are served one at a time (`kv.can_batch`).
        """
        language = self.language_model
        if hasattr(language, "make_cache"):
            row = [_of_mlx_lm(layer) for layer in language.make_cache()]
        else:
            row = [lm.KVCache() for _ in self.layers]
        return [*row, RowShift()] if self.shifts else row

    def embeddings(self, ids: mx.array, pixels: Any, rest: Mapping[str, Any]) -> dict[str, Any]:
        """Return mlx-vlm's inputs of the language part for ids, [rows, tokens], by name."""
        embed = self.whole.get_input_embeddings
        found: dict[str, Any] = embed(ids, pixels, **_accepted(embed, rest)).to_dict()
        return found

    def __call__(
        self,
        inputs: mx.array,
        cache: list[Any],
        position_ids: mx.array | None = None,
        **features: Any,
    ) -> mx.array:
        """Return the logits for ids, [rows, tokens], or for the embeddings in `features`.

        cache: the caches of all layers. Qwen3.5 and related families may replace caches in the list
            (mlx-vlm's `qwen3_5/language.py`).
        position_ids: [axes, rows, tokens]; None if they continue each row's positions.
        """
        layers = list(cache)
        if self.shifts:
            shift = layers.pop()
            if position_ids is None:
                position_ids = _following(layers, shift.shifts, inputs.shape[1], self.axes)
            features["position_ids"] = self._laid_out(position_ids)
        if self.family.deep_by_token and "visual_pos_masks" in features:
            mask = features["visual_pos_masks"]
            features["visual_pos_masks"] = _OfChunk(mask)
            rows = mx.maximum(mx.cumsum(mask[0].astype(mx.int32)) - 1, 0)  # arbitrary for text
            features["deepstack_visual_embeds"] = [
                _OfChunk(layer[rows]) for layer in features["deepstack_visual_embeds"]
            ]
        if self.reads_whole:
            features["mask"] = _mask_of_answer(inputs, layers[0])
        if "inputs_embeds" in features:
            features |= self.given_by_token(inputs)
        output = self.language_model(inputs, cache=layers, **features)
        cache[: len(layers)] = layers
        logits: mx.array = getattr(output, "logits", output)
        return logits

    def _laid_out(self, positions: mx.array) -> mx.array:
        """Return positions, [axes, rows, tokens], in the order of axes that the family expects."""
        if self._one_axis:
            return positions[0]
        return mx.moveaxis(positions, 0, -1) if self.family.axes_last else positions

    def axes_first(self, positions: mx.array) -> mx.array:
        """Return the family's positions as [axes, rows, tokens]."""
        return mx.moveaxis(positions, -1, 0) if self.family.axes_last else positions

    def given_by_token(self, tokens: mx.array) -> dict[str, mx.array]:
        """Return the kind of each token under the language part's name; empty if it needs none."""
        if not self._kinds:
            return {}
        config = self.whole.config
        visual = mx.array([config.image_token_id, config.video_token_id or -1])
        return {self._kinds: mx.any(tokens[..., None] == visual, -1).astype(mx.int32)}


def _mask_of_answer(inputs: mx.array, layer: Any) -> mx.array | None:
    """Return the mask for an answer's tokens; None for a prompt, where no token is masked."""
    if layer.empty():
        return None
    mask: mx.array | None = create_attention_mask(inputs, layer, return_array=True)
    # mlx-vlm may mistake the first axis of [tokens, keys] for rows, so add the missing axes.
    return mask[None, None] if mask is not None and mask.ndim == 2 else mask


class _CacheList(lm.CacheList, vlm.CacheList):  # type: ignore[misc]  # both are untyped
    """Several caches of one layer, as an instance of both mlx-lm's class and mlx-vlm's."""


class _OfChunk:
    """An array for a chunk's tokens, for code that slices an array for the whole prompt."""

    def __init__(self, array: mx.array) -> None:
        self._array = array

    def __getitem__(self, _: Any) -> mx.array:
        return self._array


def _following(layers: Sequence[Any], shifts: mx.array, tokens: int, axes: int) -> mx.array:
    """Return the positions after the tokens in the caches, [axes, rows, tokens]."""
    offset = next(layer.offset for layer in layers if hasattr(layer, "offset"))
    first = (shifts + offset)[:, None]
    positions = first + mx.arange(tokens)[None]
    return mx.broadcast_to(positions, (axes, *positions.shape))


def _of_mlx_lm(layer: Any) -> Any:
    """Return mlx-lm's equivalent of an empty cache, because the engine batches only such caches."""
    match layer:
        case vlm.RotatingKVCache():
            return lm.RotatingKVCache(max_size=layer.max_size, keep=layer.keep)
        case vlm.ChunkedKVCache():
            return lm.ChunkedKVCache(layer.chunk_size)
        case vlm.CacheList():
            return _CacheList(*map(_of_mlx_lm, layer.caches))
    if type(layer) is vlm.KVCache:
        return lm.KVCache()
    if not hasattr(layer, "nbytes"):  # such as the states of Z1T
        kind: Any = type(layer)
        layer.__class__ = _measured(kind)
    return layer


@cache
def _measured(kind: type) -> type:
    """Return a class of recurrent states with the members that mlx-lm's caches have."""

    def size(layer: Any) -> int:
        arrays: Any = tree_flatten(layer.state)
        return sum(array.nbytes for _, array in arrays if array is not None)

    return type(kind.__name__, (kind, lm._BaseCache), {"nbytes": property(size)})


def _accepted(call: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the arguments that a function accepts."""
    parameters = inspect.signature(call).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name in parameters}
