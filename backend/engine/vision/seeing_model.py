"""A vision-language model of mlx-vlm as the engine wants to see one: tokens in, logits out.

The engine asks a model for `layers`, `make_cache` and a call on tokens and caches. Here the call
reaches the language part; what stands for images comes in as embeddings (`media_prefill`).
Positions are always given, per row, so nothing that mlx-vlm keeps on the model is ever read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as lm
from mlx_vlm.models import cache as vlm

from backend.engine.row_shift import RowShift
from backend.engine.vision.row_scale import scale_by_row

_ONE_AXIS = ("minimax_m3_vl",)  # whose tokens have one position each, [rows, tokens]


class SeeingModel(nn.Module):  # type: ignore[misc,name-defined]  # mlx.nn is untyped
    """The language part of `whole`, an mlx-vlm model; its parameters are those of the whole.

    shifts: whether positions differ from counts of tokens (multimodal RoPE); every row then has a
    `RowShift` as its last cache.
    """

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.whole = whole
        if hasattr(whole, "disable_talker"):
            whole.disable_talker()  # Qwen3-Omni's voice, which no call of ours asks for
        scale_by_row(whole.language_model)
        self.shifts = hasattr(whole.language_model, "get_rope_index")
        self._one_axis = getattr(whole.config, "model_type", "") in _ONE_AXIS

    @property
    def language_model(self) -> Any:
        return self.whole.language_model

    @property
    def layers(self) -> Sequence[Any]:
        layers: Sequence[Any] = self.whole.layers
        return layers

    @property
    def cast_predicate(self) -> Any:
        own = getattr(self.whole, "cast_predicate", None)
        return (lambda path: own(path.removeprefix("whole."))) if own else (lambda _: True)

    def make_cache(self) -> list[Any]:
        """Caches for one row: mlx-lm's where it has the like of them. Rows with others are served
        one at a time (`kv.can_batch`)."""
        language = self.language_model
        if hasattr(language, "make_cache"):
            row = [_of_mlx_lm(layer) for layer in language.make_cache()]
        else:
            row = [lm.KVCache() for _ in self.layers]
        return [*row, RowShift()] if self.shifts else row

    def __call__(
        self,
        inputs: mx.array,
        cache: list[Any],
        position_ids: mx.array | None = None,
        **features: Any,
    ) -> mx.array:
        """Logits of [rows, tokens] ids, or of the embeddings that `features` bring for them.

        position_ids: [3, rows, tokens], where they do not simply follow each row's last.
        Qwen3.5 and the families built on it may put other caches into the list that they are given
        (mlx-vlm 0.7.10, `qwen3_5/language.py`): those then stand in `cache`.
        """
        layers = list(cache)
        if self.shifts:
            shift = layers.pop()
            if position_ids is None:
                position_ids = _following(layers, shift.shifts, inputs.shape[1])
            features["position_ids"] = position_ids[0] if self._one_axis else position_ids
        output = self.language_model(inputs, cache=layers, **features)
        cache[: len(layers)] = layers
        logits: mx.array = getattr(output, "logits", output)
        return logits


def _following(layers: Sequence[Any], shifts: mx.array, tokens: int) -> mx.array:
    """[3, rows, tokens]: the positions after what the caches hold."""
    offset = next(layer.offset for layer in layers if hasattr(layer, "offset"))
    first = (shifts + offset)[:, None]
    positions = first + mx.arange(tokens)[None]
    return mx.broadcast_to(positions, (3, *positions.shape))


def _of_mlx_lm(layer: Any) -> Any:
    """mlx-lm's like of an empty cache of mlx-vlm, as the engine batches them."""
    made: Any
    match layer:
        case vlm.RotatingKVCache():
            made = lm.RotatingKVCache(max_size=layer.max_size, keep=layer.keep)
        case vlm.ChunkedKVCache():
            made = lm.ChunkedKVCache(layer.chunk_size)
        case vlm.CacheList():
            made = lm.CacheList(*map(_of_mlx_lm, layer.caches))
        case _ if type(layer) is vlm.KVCache:
            made = lm.KVCache()
        case _:
            made = layer
    return made


def accepted(call: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the arguments that a function takes by name."""
    import inspect

    parameters = inspect.signature(call).parameters.values()
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
        return dict(given)
    names = {one.name for one in parameters}
    return {name: value for name, value in given.items() if name in names}
