"""Measures the temporary memory of a forward pass, on the device that will run it.

Whether attention scores are materialised depends on the device, the head size and the kind of KV;
what else a layer needs depends on its architecture. Two short passes measure it: one after a single
token, and one after a long KV filled with zeros.
"""

from __future__ import annotations

import logging
from typing import Any

import mlx.core as mx

from backend.engine.caching import kv
from backend.engine.caching.quantized_kv import QuantizedRow
from backend.engine.planning.plan import PassCost

_log = logging.getLogger(__name__)

_TOKENS = 8
_SEEN = 2048
# Longer passes use other kernels and keep more arrays at once: at most this factor more memory.
_MARGIN = 1.5
# Copies of a row of float32 logits during sampling: from the model, biased, masked, filtered,
# sorted, their ids, as weights, with noise.
_CHOICE_COPIES = 8


def pass_cost(model: Any, vocabulary: int, *, all_logits: bool = False) -> PassCost:
    """The memory cost of the model's passes. Raises what the model raises on its first tokens.

    all_logits: whether the last pass of a prompt computes the logits of all its tokens, not of one.
    """
    row = kv.new_row(model)
    kv.feed(model, row, 1)
    short = _temporary_bytes(model, row)
    try:
        _lengthen(row, _SEEN - 2 * _TOKENS - 1)
        long = _temporary_bytes(model, row)
    except Exception:
        # A cache that cannot be filled with zeros: assume as much again for every 256 tokens.
        _log.debug("the memory of a pass after a long text could not be measured", exc_info=True)
        long = short * _SEEN // 256
    finally:
        mx.clear_cache()
    return PassCost(
        per_token=round(_MARGIN * short / _TOKENS) + all_logits * 2 * 4 * vocabulary,
        per_pair=_MARGIN * max(long - short, 0) / (_TOKENS * _SEEN),
        per_choice=_CHOICE_COPIES * 4 * vocabulary,
    )


def _temporary_bytes(model: Any, row: kv.RowCache) -> int:
    """Peak bytes of a pass of `_TOKENS` more tokens, without the KV that it adds."""
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    model(mx.zeros((1, _TOKENS), mx.int32), cache=row)  # its logits are not evaluated
    kv.evaluate(row)
    mx.synchronize()
    grown = max(mx.get_active_memory() - before, 0)
    return max(mx.get_peak_memory() - before - grown, 0)


def _lengthen(row: kv.RowCache, tokens: int) -> None:
    """Append zeros to the layers that keep keys and values, with room for the next pass."""
    for layer in kv.leaves(row):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is not None and values is not None:
            layer.update_and_fetch(*(_zeros(layer, part, tokens) for part in (keys, values)))
    kv.evaluate(row)


def _zeros(layer: Any, like: Any, tokens: int) -> mx.array:
    """Zeros, [1, heads, tokens, size], in the form in which a model appends to the layer."""
    if isinstance(layer, QuantizedRow):
        packed, scales, _ = like
        size = scales.shape[3] * layer.group_size
        return mx.zeros((1, packed.shape[1], tokens, size), scales.dtype)
    return mx.zeros((*like.shape[:2], tokens, like.shape[3]), like.dtype)
