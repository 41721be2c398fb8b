"""Rotary position embeddings on a CPU, with angles that all layers of a pass share.

`mx.fast.rope` is one kernel on a GPU. On a CPU, MLX replaces it by about 40 operations, of which 30
compute the cosines and sines of the angles. The angles are the same for the queries and the keys of
every layer. In a decode step of a small model, computing them takes as long as all other work.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeAlias

import mlx.core as mx

from backend.engine.caching.shared_numbers import shared_numbers

# passes whose angles are cached, because the layers of a model may have several kinds of rotation
_PASSES = 4
_MOST_BYTES = 1 << 16  # the largest cosines and sines; longer prompts use `mx.fast.rope`

Rope: TypeAlias = Callable[..., mx.array]


class SharedAngles:
    """Computes exactly what `mx.fast.rope` computes on a CPU, to the last bit.

    Angles are shared if the positions are known without a read from the device: if the offset is a
    Python integer or an array of `shared_numbers`. All other calls are left to `rope`.
    """

    def __init__(self, rope: Rope) -> None:
        self._rope = rope
        self._kept: OrderedDict[Any, tuple[Any, mx.array, mx.array]] = OrderedDict()

    def __call__(
        self,
        a: mx.array,
        dims: int,
        *,
        traditional: bool,
        base: float | None,
        scale: float,
        offset: int | mx.array,
        freqs: mx.array | None = None,
        stream: Any = None,
    ) -> mx.array:
        """Rotate the first `dims` elements of each vector, with the arguments of `mx.fast.rope`.

        a: [rows, heads, tokens, size].
        offset: position of the first token, or of the first token of each row.
        """
        starts = shared_numbers.numbers_of(offset) if isinstance(offset, mx.array) else (offset,)
        rows = 1 if starts is None else len(starts)
        fits = a.ndim == 4 and rows in (1, a.shape[0]) and dims % 2 == 0
        if starts is None or stream is not None or not fits or self._large(a, rows, dims):
            return self._rope(
                a,
                dims,
                traditional=traditional,
                base=base,
                scale=scale,
                offset=offset,
                freqs=freqs,
                stream=stream,
            )
        rule = (a.shape[2], a.dtype, dims, traditional, base, scale, id(freqs))
        cosines, sines = self._angles(starts, rule, freqs)
        rotated = a if dims == a.shape[3] else a[..., :dims]
        result = rotated * cosines + _swapped(rotated, traditional) * sines
        if rotated is a:
            return result
        return mx.concatenate([result, a[..., dims:]], axis=-1)

    def clear(self) -> None:
        """Drop the cached angles."""
        self._kept.clear()

    def _large(self, a: mx.array, rows: int, dims: int) -> bool:
        return 2 * rows * a.shape[2] * dims * a.dtype.size > _MOST_BYTES

    def _angles(
        self, starts: tuple[int, ...], rule: tuple[Any, ...], freqs: mx.array | None
    ) -> tuple[mx.array, mx.array]:
        """Return the factors of each element and of its partner, [rows or 1, 1, tokens, dims].

        The rotation changes a pair (x, y) into (x cos − y sin, x sin + y cos).
        """
        key = (starts, rule)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key][1:]
        tokens, dtype, dims, traditional, base, scale, _ = rule
        firsts = shared_numbers.array(shared_numbers(starts))
        positions = mx.arange(tokens, dtype=mx.float32) + firsts[:, None]
        if freqs is None:
            step = mx.array(math.log(base) / (dims // 2), dtype=mx.float32)
            frequencies = mx.exp(mx.arange(0, -(dims // 2), -1, dtype=mx.float32) * step)
        else:
            frequencies = 1 / freqs
        angles = (positions * mx.array(scale, dtype=mx.float32))[:, None, :, None] * frequencies
        cosines, sines = mx.cos(angles).astype(dtype), mx.sin(angles).astype(dtype)
        pairs = [cosines, cosines], [-sines, sines]
        if traditional:
            both = [mx.flatten(mx.stack(pair, axis=-1), -2) for pair in pairs]
        else:
            both = [mx.concatenate(pair, axis=-1) for pair in pairs]
        if len(self._kept) >= _PASSES:
            self._kept.popitem(last=False)
        # The reference to the frequencies keeps them alive, so that no other array gets their id.
        self._kept[key] = (freqs, both[0], both[1])
        return both[0], both[1]


def _swapped(a: mx.array, traditional: bool) -> mx.array:
    """Return each element's partner: adjacent (`traditional`), or half of the vector away."""
    half = a.shape[-1] // 2
    if traditional:
        return mx.flatten(mx.unflatten(a, -1, (half, 2))[..., ::-1], -2)
    return mx.concatenate([a[..., half:], a[..., :half]], axis=-1)
