"""Attention and other functions of exponentials on a CPU, computed by `common/kernels`.

MLX's CPU build for Linux computes one exponential at a time, on one core. In a long prompt, softmax
takes four fifths of the time of attention, and exponentials take more than half of all time.

Gradients do not pass through the kernels, which replace numbers that MLX has computed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.nn.layers import activations

from backend.engine.small_attention import Attention, SmallAttention

# Functions besides softmax, and the modules from which models call them.
FUNCTIONS: Mapping[str, Sequence[Any]] = {
    **dict.fromkeys(("sigmoid", "tanh", "erf"), (mx,)),
    "gelu_approx": (nn, activations),
}
# Numbers of a call from which the kernels gain more than the wait for their input takes.
_LEAST = 1 << 11
# Number of selected experts from which mlx-lm's SwitchGLU sorts them along one axis first.
_SORTED = 64
# Numbers per thread. To start a thread takes as long as to compute about ten thousand.
_FOR_A_THREAD = 1 << 17


class CpuKernels:
    """The preloaded functions, called with numbers that MLX has computed.

    may_wait: whether the host may wait for a result before the rest of a pass is queued.
    """

    def __init__(self, library: ctypes.CDLL, may_wait: Callable[[], bool]) -> None:
        self._may_wait = may_wait
        self._softmax = library.mlx_kernels_softmax
        self._functions = {name: library[f"mlx_kernels_{name}"] for name in FUNCTIONS}
        for function in (self._softmax, *self._functions.values()):
            function.restype = None
        self._most_threads = library.openblas_get_num_threads

    def suit(self, count: int, *arrays: mx.array) -> bool:
        """Return whether the kernels may be used, and are faster, for `count` numbers."""
        return (
            count >= _LEAST
            and all(array.dtype == mx.float32 for array in arrays)
            and self._may_wait()
        )

    def softmax(
        self, scores: mx.array, mask: mx.array | None, *, tokens: int, causal: bool
    ) -> None:
        """Replace each row of scores by its softmax, in place. Both arrays must be computed.

        scores: [..., tokens, columns], contiguous.
        mask: booleans, [masks, tokens, columns], each of which equally many rows share.
        """
        columns = scores.shape[-1]
        rows = scores.size // columns
        sharing = rows if mask is None else rows // mask.shape[0]
        self._softmax(
            _address(scores),
            None if mask is None else _address(mask),
            *map(ctypes.c_long, (rows, columns, tokens, sharing)),
            causal,
            self._threads(scores.size),
        )

    def apply(self, name: str, numbers: mx.array) -> None:
        """Apply a function of FUNCTIONS to each number of a computed array, in place."""
        address = _address(numbers)
        threads = self._threads(numbers.size)
        self._functions[name](address, address, ctypes.c_long(numbers.size), threads)

    def _threads(self, count: int) -> int:
        most: int = self._most_threads()
        return max(min(most, count // _FOR_A_THREAD), 1)


def _address(array: mx.array) -> ctypes.c_void_p:
    return ctypes.c_void_p(np.array(array, copy=False).ctypes.data)


def find_kernels(may_wait: Callable[[], bool]) -> CpuKernels | None:
    """Return the preloaded kernels; None if there are none."""
    library = ctypes.CDLL(None)
    names = [f"mlx_kernels_{name}" for name in ("softmax", *FUNCTIONS)]
    if not all(hasattr(library, name) for name in (*names, "openblas_get_num_threads")):
        return None
    return CpuKernels(library, may_wait)


class CpuAttention:
    """`mx.fast.scaled_dot_product_attention`, with another softmax for many scores in float32."""

    def __init__(self, attend: Attention, kernels: CpuKernels) -> None:
        self.attend = attend
        self._kernels = kernels

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
            not self._kernels.suit(rows * heads * tokens * columns, q, k, v)
            or sinks is not None
            or rest
            or not _selects(mask)
        ):
            return self.attend(q, k, v, scale=scale, mask=mask, sinks=sinks, **rest)
        grouped = (q * scale).reshape(rows, kv_heads, heads // kv_heads * tokens, size)
        scores = grouped @ k.swapaxes(2, 3)
        selected = None
        if isinstance(mask, mx.array):
            mask = mask.reshape(-1, *mask.shape[-2:])
            selected = mx.contiguous(mx.broadcast_to(mask, (mask.shape[0], tokens, columns)))
        if not _computed(scores, v, *([] if selected is None else [selected])):
            return self.attend(q, k, v, scale=scale, mask=mask, sinks=sinks)
        self._kernels.softmax(scores, selected, tokens=tokens, causal=isinstance(mask, str))
        return (scores @ v).reshape(rows, heads, tokens, v.shape[3])


def _selects(mask: mx.array | str | None) -> bool:
    """Return whether a mask tells which columns each token attends to, the same for all heads."""
    if not isinstance(mask, mx.array):
        return mask in (None, "causal")
    return mask.dtype == mx.bool_ and (mask.ndim == 2 or (mask.ndim == 4 and mask.shape[1] == 1))


class CpuFunction:
    """One of FUNCTIONS, with another one for many numbers in float32."""

    def __init__(self, function: Callable[..., mx.array], name: str, kernels: CpuKernels) -> None:
        self.function = function
        self._name = name
        self._kernels = kernels

    def __call__(self, a: mx.array, /, **rest: Any) -> mx.array:
        """Return the function of each number.

        Numbers of routed experts are left to MLX: the result of an expert must not depend on how
        many are computed at once, and the kernels round differently.
        """
        if (
            not rest
            and isinstance(a, mx.array)
            and self._kernels.suit(a.size, a)
            and not _of_experts(a.shape)
        ):
            results = mx.contiguous(a * 1.0)
            if _computed(results):
                self._kernels.apply(self._name, results)
                return results
        return self.function(a, **rest)


class CpuSoftmax:
    """`mx.softmax`, with another function for long last axes in float32."""

    def __init__(self, function: Callable[..., mx.array], kernels: CpuKernels) -> None:
        self.function = function
        self._kernels = kernels

    def __call__(self, a: mx.array, /, axis: Any = None, **rest: Any) -> mx.array:
        """Return the softmax along the axis, or of all numbers."""
        if (
            axis in (-1, a.ndim - 1)
            and rest.keys() <= {"precise"}
            and a.ndim
            and self._kernels.suit(a.size, a)
        ):
            results = mx.contiguous(a * 1.0)
            if _computed(results):
                self._kernels.softmax(results, None, tokens=1, causal=False)
                return results
        return self.function(a, axis, **rest)


def use_kernels(kernels: CpuKernels) -> None:
    """Replace MLX's functions, unless that has been done."""
    attend = mx.fast.scaled_dot_product_attention
    if isinstance(attend, CpuAttention):
        return
    mx.fast.scaled_dot_product_attention = CpuAttention(attend, kernels)
    mx.softmax = CpuSoftmax(mx.softmax, kernels)
    for name, modules in FUNCTIONS.items():
        function = CpuFunction(getattr(modules[0], name), name, kernels)
        for module in modules:
            setattr(module, name, function)


def _of_experts(shape: tuple[int, ...]) -> bool:
    """Return whether an array may be one of mlx-lm's SwitchGLU.

    Its shape is [rows, tokens, experts, 1, width], or [selected experts, 1, width].
    """
    return len(shape) > 3 or (len(shape) == 3 and shape[1] == 1 and shape[0] >= _SORTED)


def _computed(*arrays: mx.array) -> bool:
    """Compute arrays. Returns False while MLX traces a function, when there are no numbers."""
    try:
        mx.eval(*arrays)
    except ValueError:
        return False
    return True


@contextmanager
def functions_of_mlx() -> Iterator[bool]:
    """Use MLX's own functions in the block; yields whether it replaces SmallAttention."""
    places = [(mx.fast, "scaled_dot_product_attention"), (mx, "softmax")]
    places += [(module, name) for name, modules in FUNCTIONS.items() for module in modules]
    used = [getattr(module, name) for module, name in places]
    for (module, name), function in zip(places, used, strict=True):
        of_mlx = getattr(function, "attend", getattr(function, "function", function))
        setattr(module, name, of_mlx)
    try:
        yield isinstance(used[0], SmallAttention)
    finally:
        for (module, name), function in zip(places, used, strict=True):
            setattr(module, name, function)
