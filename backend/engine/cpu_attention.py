"""Attention on a CPU, with the softmax of `common/kernels`.

MLX's CPU build for x86 computes one exponential at a time, on one core. In a long prompt, this
takes four fifths of the time of attention, and more than half of all time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from backend.engine.small_attention import Attention

# Scores of a call from which the softmax gains more than the wait for its input takes.
_LEAST_SCORES = 1 << 15
# Scores for each thread: a thread starts in the time of some ten thousand.
_SCORES_A_THREAD = 1 << 17


class CpuAttention:
    """`mx.fast.scaled_dot_product_attention`, with another softmax for many scores in float32.

    attend: MLX's function, which computes everything else.
    library: the result of `softmax_library`.
    may_wait: whether the host may wait for a result before the rest of a pass is queued.
    """

    def __init__(
        self, attend: Attention, library: ctypes.CDLL, may_wait: Callable[[], bool]
    ) -> None:
        self.attend = attend
        self._may_wait = may_wait
        self._softmax = library.attention_softmax
        self._softmax.restype = None
        self._threads = library.openblas_get_num_threads

    def __call__(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        *,
        scale: float,
        mask: mx.array | str | None = None,
        sinks: mx.array | None = None,
        **rest: Any,
    ) -> mx.array:
        """Return the attention, with the arguments of MLX's function.

        q: [rows, heads, tokens, size].
        k, v: [rows, KV heads, columns, size].
        """
        rows, heads, tokens, size = q.shape
        kv_heads, columns = k.shape[1:3]
        if (
            rows * heads * tokens * columns < _LEAST_SCORES
            or {q.dtype, k.dtype, v.dtype} != {mx.float32}
            or sinks is not None
            or rest
            or not _selects(mask)
            or not self._may_wait()
        ):
            return self.attend(q, k, v, scale=scale, mask=mask, sinks=sinks, **rest)
        grouped = (q * scale).reshape(rows, kv_heads, heads // kv_heads * tokens, size)
        scores = grouped @ k.swapaxes(2, 3)
        selected = None
        if isinstance(mask, mx.array):
            mask = mask.reshape(-1, *mask.shape[-2:])
            selected = mx.contiguous(mx.broadcast_to(mask, (mask.shape[0], tokens, columns)))
        try:
            mx.eval(scores, v, *([] if selected is None else [selected]))
        except ValueError:  # MLX traces the function, so there are no numbers yet
            return self.attend(q, k, v, scale=scale, mask=mask, sinks=sinks)
        count = rows * heads * tokens
        self._softmax(
            ctypes.c_void_p(_address(scores)),
            None if selected is None else ctypes.c_void_p(_address(selected)),
            *map(ctypes.c_long, (count, columns, tokens)),
            ctypes.c_long(count // (1 if selected is None else selected.shape[0])),
            isinstance(mask, str),
            max(min(self._threads(), count * columns // _SCORES_A_THREAD), 1),
        )
        return (scores @ v).reshape(rows, heads, tokens, v.shape[3])


def _selects(mask: mx.array | str | None) -> bool:
    """Return whether a mask tells which columns each token attends to, the same for all heads."""
    if not isinstance(mask, mx.array):
        return mask in (None, "causal")
    return mask.dtype == mx.bool_ and (mask.ndim == 2 or (mask.ndim == 4 and mask.shape[1] == 1))


def _address(array: mx.array) -> int:
    return int(np.array(array, copy=False).ctypes.data)


def softmax_library() -> ctypes.CDLL | None:
    """Return the preloaded library with the functions that CpuAttention calls; None without one."""
    library = ctypes.CDLL(None)
    names = ("attention_softmax", "openblas_get_num_threads")
    return library if all(hasattr(library, name) for name in names) else None
