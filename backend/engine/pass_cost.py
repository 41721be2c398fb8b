"""Measures what a forward pass computes with, on the device that is to run it.

Whether attention scores are ever in memory depends on the device, the size of the heads and the
form of the KV, and what else a layer needs depends on its architecture. Two short passes show it:
one that sees nothing before it, and one behind a long text of zeros that nobody computed.
"""

from __future__ import annotations

import logging
from typing import Any

import mlx.core as mx

from backend.engine import kv
from backend.engine.plan import PassCost
from backend.engine.quantized_kv import QuantizedRow

_log = logging.getLogger(__name__)

_TOKENS = 8
_SEEN = 2048
# Longer passes have more in flight than the short ones show, and other kernels: up to so much more.
_MARGIN = 1.5
# Of a row of logits in float32: as the model gave them, biased, masked, filtered, in the order of
# their size with their ids, as weights, and with noise.
_CHOICE_COPIES = 8


def pass_cost(model: Any, vocabulary: int, *, whole: bool = False) -> PassCost:
    """What passes of the model compute with. Raises what the model raises on its first tokens.

    whole: the last pass of a prompt computes the logits of all its tokens for the sake of one.
    """
    short = _computes_with(model, 0)
    try:
        long = _computes_with(model, _SEEN)
    except Exception:
        # Layers of a kind that takes no zeros: as much again for every few hundred tokens seen.
        _log.debug("a pass behind a long text could not be tried", exc_info=True)
        long = short * _SEEN // 256
    finally:
        mx.clear_cache()
    return PassCost(
        per_token=round(_MARGIN * short / _TOKENS) + whole * 2 * 4 * vocabulary,
        per_pair=_MARGIN * max(long - short, 0) / (_TOKENS * _SEEN),
        per_choice=_CHOICE_COPIES * 4 * vocabulary,
    )


def _computes_with(model: Any, seen: int) -> int:
    """Bytes of a pass of `_TOKENS` at its peak, beside the KV that it leaves behind."""
    row = kv.new_row(model)
    kv.feed(model, row, 1)
    if seen:
        _lengthen(row, seen - _TOKENS - 1)
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    model(mx.zeros((1, _TOKENS), mx.int32), cache=row)  # as in prefill, its logits stay undone
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
    """[1, heads, tokens, size] as a model gives it to the layer."""
    if isinstance(layer, QuantizedRow):
        packed, scales, _ = like
        size = scales.shape[3] * layer.group_size
        return mx.zeros((1, packed.shape[1], tokens, size), scales.dtype)
    return mx.zeros((*like.shape[:2], tokens, like.shape[3]), like.dtype)
