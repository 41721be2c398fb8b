"""Makes a loaded model create the kind of KV cache that its load request asks for.

mlx-lm creates caches by calling `make_cache` of the model, so that method is replaced: all code
that creates a cache gets the right kind. For the engine thread.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from backend.engine.caching.cache_kind import CacheKind, group_size_for
from backend.engine.caching.kv import BatchCache, new_row
from backend.engine.caching.layer_kv import LayerKV
from backend.engine.caching.quantized_kv import QuantizedKV
from backend.engine.caching.row_shift import RowShift
from backend.engine.caching.window_kv import WindowKV
from backend.engine.errors import InvalidRequest
from common.field_names import named

_log = logging.getLogger(__name__)

# Largest distance of the logits with 8-bit KV from those with plain KV, relative to the latter.
_MOST_DISTANCE = 0.5
_REMEDY = f"leave {named('CacheTypeKey')}, {named('CacheTypeValue')} and kv_bits out"


def use_cache_kind(model: Any, kind: CacheKind) -> CacheKind:
    """Use this kind of cache; returns it with its group size filled in.

    Only keys and values are quantised: the recurrent states of a hybrid model keep their type.
    Raises InvalidRequest, with the reason, if the model or the device does not support it. To find
    out, the model is run on a few tokens with 8-bit KV and with plain KV, and the logits are
    compared: not every device computes all quantised products (on an H100, MLX refuses
    some).
    """
    if kind == CacheKind():
        return kind
    empty, row = new_row(model), new_row(model)
    mx.eval(model(mx.array([[0]]), cache=row))
    if not kind.bits:
        _require_type(row, kind.dtype)
        return kind
    cache = _keys_and_values(row)
    heads = frozenset(part.shape[-1] for layer in cache for part in (layer.keys, layer.values))
    kind = dataclasses.replace(kind, group_size=group_size_for(kind, heads))

    def quantized(bits: int) -> list[Any]:
        return [
            QuantizedKV(kind.group_size, bits) if type(cache) is LayerKV else copy.deepcopy(cache)
            for cache in empty
        ]

    try:
        _try(model, new_row(model), quantized(8))
    except InvalidRequest:
        raise
    except Exception as fault:
        _log.warning("the model does not support a quantised KV cache", exc_info=True)
        if "attention sinks" in str(fault):
            raise _refused("its attention has attention sinks") from None
        line = str(fault).partition("\n")[0]
        # MLX's ValueErrors begin with the name of its function in brackets.
        if isinstance(fault, RuntimeError) or line.startswith("["):
            raise _refused(f"MLX cannot compute its attention on this device ({line})") from None
        raise _refused("it does not use mlx-lm's function for quantised attention") from None
    model.make_cache = lambda: quantized(kind.bits)
    return kind


def _require_type(cache: list[Any], dtype: str) -> None:
    """Raise InvalidRequest unless the model computes keys and values in this type."""
    for layer in cache:
        keys = getattr(layer, "keys", None)
        if keys is not None and keys.dtype != getattr(mx, dtype):
            own = str(keys.dtype).removeprefix("mlx.core.")
            raise InvalidRequest(
                f"the KV cache cannot be {dtype}: it has the type in which this model computes,"
                f" {own}; set dtype to {dtype}, or leave {named('CacheTypeKey')} and"
                f" {named('CacheTypeValue')} out"
            )


def _keys_and_values(row: list[Any]) -> list[LayerKV]:
    """The layers that can be quantised. Raises InvalidRequest for layers of unsuitable kinds."""
    for layer in row:
        if isinstance(layer, WindowKV):
            raise _refused("some of its layers keep a sliding window")
        if not (type(layer) is LayerKV or isinstance(layer, ArraysCache | RowShift)):
            raise _refused(f"its layers have caches of their own kind ({type(layer).__name__})")
    cache = [layer for layer in row if type(layer) is LayerKV]
    if not cache:
        raise _refused("its layers keep a recurrent state, not keys and values")
    return cache


def _try(model: Any, plain: list[Any], quantized: list[Any]) -> None:
    """Compare the logits with both caches: for three tokens, then for one more in each of two rows.

    Raises what the model raises, and InvalidRequest if the logits differ much.
    """
    for tokens in ([[0, 1, 2]], [[1], [0]]):
        expected, found = (
            model(mx.array(tokens), cache=row).astype(mx.float32) for row in (plain, quantized)
        )
        distance = mx.linalg.norm(found - expected) / mx.linalg.norm(expected)
        if not (distance < _MOST_DISTANCE).item():
            raise _refused("on this device MLX computes its attention wrongly")
        plain, quantized = (BatchCache([row, row]).layers for row in (plain, quantized))


def _refused(reason: str) -> InvalidRequest:
    return InvalidRequest(f"the KV cache of this model cannot be quantised: {reason}; {_REMEDY}")
