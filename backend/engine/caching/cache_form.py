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
from mlx_lm.models.cache import CacheList

from backend.engine.caching.cache_kind import CacheKind, group_size_for
from backend.engine.caching.gather import keeps_state
from backend.engine.caching.kv import BatchCache, can_batch, leaves, new_row
from backend.engine.caching.layer_kv import LayerKV, RowShift, WindowKV
from backend.engine.caching.quantized_kv import (
    Bits,
    Packing,
    QuantizedKV,
    QuantizedWindowKV,
    install_attention,
)
from backend.engine.errors import InvalidRequest
from common.field_names import named

_log = logging.getLogger(__name__)

# Largest distance of the logits with 8-bit KV from those without quantisation, as a share of these.
_MOST_DISTANCE = 0.5
_WRONG = "on this device MLX computes its attention wrongly"
_REMEDY = f"leave {named('CacheTypeKey')}, {named('CacheTypeValue')} and kv_bits out"


def use_cache_kind(model: Any, kind: CacheKind) -> CacheKind:
    """Make the model create this kind of cache; returns the kind with its group size filled in.

    Only keys and values are quantised: the recurrent states of a hybrid model keep their type.
    Raises InvalidRequest, with the reason, if the model or the device does not support the kind. To
    find out, the model is run on a few tokens with 8-bit KV and with KV that is not quantised, and
    the logits are compared. The 8-bit KV is tried first with products of packed values, which not
    every model uses and not every device computes (on an H100, MLX refuses some), and then with
    dequantised keys and values.
    """
    if kind == CacheKind():
        return kind
    empty, row = new_row(model), new_row(model)
    mx.eval(model(mx.array([[0]]), cache=row))
    if kind.dtype or not kind.quantised:
        _require_type(row, kind.dtype)
    if not kind.quantised:
        return kind
    cache = _keys_and_values(row)
    heads = frozenset(part.shape[-1] for layer in cache for part in (layer.keys, layer.values))
    kind = dataclasses.replace(kind, group_size=group_size_for(kind, heads))
    bits = Bits(kind.key_bits, kind.value_bits)
    eight = Bits(*(8 if own else 0 for own in bits))
    install_attention()
    for dense in (False, True):
        tried = Packing(eight, kind.group_size, dense)
        why = _fault(model, new_row(model), [_quantized(layer, tried) for layer in empty])
        if not why:
            break
        _log.info("%s KV: %s", "dequantised" if dense else "quantised", why)
    if why:
        raise _refused(why)
    packing = Packing(bits, kind.group_size, dense)
    model.make_cache = lambda: [_quantized(layer, packing) for layer in empty]
    return kind


def _quantized(layer: Any, packing: Packing) -> Any:
    """Return an empty cache like this one, with quantised keys and values."""
    if type(layer) is LayerKV:
        return QuantizedKV(packing)
    if type(layer) is WindowKV:
        return QuantizedWindowKV(packing, layer.max_size)
    layer = copy.deepcopy(layer)
    if isinstance(layer, CacheList):
        layer.caches = tuple(_quantized(inner, packing) for inner in layer.caches)
    return layer


def _require_type(cache: list[Any], dtype: str) -> None:
    """Raise InvalidRequest unless the model computes keys and values in this type."""
    for layer in leaves(cache):
        keys = getattr(layer, "keys", None)
        if keys is not None and keys.dtype != getattr(mx, dtype):
            own = str(keys.dtype).removeprefix("mlx.core.")
            raise InvalidRequest(
                f"the KV cache cannot be {dtype}: it has the type in which this model computes,"
                f" {own}; set dtype to {dtype}, or leave {named('CacheTypeKey')} and"
                f" {named('CacheTypeValue')} out"
            )


def _keys_and_values(row: list[Any]) -> list[LayerKV]:
    """Return the layers that can be quantised. Raises InvalidRequest for unsuitable layers."""
    layers = list(leaves(row))
    for layer in layers:
        kinds = type(layer) in (LayerKV, WindowKV) or isinstance(layer, RowShift)
        if not (kinds or keeps_state(layer)):
            raise _refused(f"its layers have caches of an unknown kind ({type(layer).__name__})")
    cache = [layer for layer in layers if type(layer) in (LayerKV, WindowKV)]
    if not cache:
        raise _refused("its layers store a recurrent state, not keys and values")
    return cache


def _fault(model: Any, plain: list[Any], quantized: list[Any]) -> str:
    """Return why a model cannot be run with a quantised cache; '' if it can."""
    try:
        return "" if _close(model, plain, quantized) else _WRONG
    except Exception as fault:
        _log.debug("a pass with quantised KV failed", exc_info=True)
        line = str(fault).partition("\n")[0]
        # MLX's ValueErrors begin with the name of its function in brackets.
        if isinstance(fault, RuntimeError) or line.startswith("["):
            return f"MLX cannot compute its attention on this device ({line})"
        return "its attention does not accept quantised keys and values"


def _close(model: Any, plain: list[Any], quantized: list[Any]) -> bool:
    """Compare the logits with both caches: for three tokens, then for one more in each of two rows.

    Raises what the model raises.
    """
    for tokens in ([[0, 1, 2]], [[1], [0]]):
        expected, found = (
            model(mx.array(tokens), cache=row).astype(mx.float32) for row in (plain, quantized)
        )
        distance = mx.linalg.norm(found - expected) / mx.linalg.norm(expected)
        if not (distance < _MOST_DISTANCE).item():
            return False
        if can_batch(plain):
            plain, quantized = (BatchCache([row, row]).layers for row in (plain, quantized))
        else:
            break
    return True


def _refused(reason: str) -> InvalidRequest:
    return InvalidRequest(f"the KV cache of this model cannot be quantised: {reason}; {_REMEDY}")
