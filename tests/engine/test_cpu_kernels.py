"""Attention and functions of exponentials on a CPU, where `common/kernels` computes them."""

from __future__ import annotations

import ctypes
import math
import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.engine.cpu_kernels import (
    FUNCTIONS,
    CpuAttention,
    CpuFunction,
    CpuKernels,
    CpuSoftmax,
    find_kernels,
)
from backend.engine.device import Device, prepare
from common import openblas

KERNELS = find_kernels(lambda: True)
OF_MLX = {
    name: getattr(used := getattr(modules[0], name), "function", used)
    for name, modules in FUNCTIONS.items()
}
SIGMOID = OF_MLX["sigmoid"]
SOFTMAX = getattr(mx.softmax, "function", mx.softmax)
MLX = getattr(mx.fast.scaled_dot_product_attention, "attend", mx.fast.scaled_dot_product_attention)
pytestmark = pytest.mark.skipif(KERNELS is None, reason="only with a C compiler")


def _kernels(*, may_wait: bool = True) -> CpuKernels:
    kernels = find_kernels(lambda: may_wait)
    assert kernels is not None
    return kernels


def _attention(*, may_wait: bool = True) -> CpuAttention:
    return CpuAttention(MLX, _kernels(may_wait=may_wait))


def _sigmoid(*, may_wait: bool = True) -> CpuFunction:
    return CpuFunction(SIGMOID, "sigmoid", _kernels(may_wait=may_wait))


def _inputs(*shape: int, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array, mx.array]:
    """Queries, keys and values, as a layer passes them: heads are not in order in memory."""
    rows, heads, kv_heads, tokens, columns, size = shape
    keys = [mx.random.key(number) for number in range(3)]
    lengths = ((tokens, heads), (columns, kv_heads), (columns, kv_heads))
    q, k, v = (
        mx.random.normal((rows, *length, size), dtype, key=key).swapaxes(1, 2) * 3
        for length, key in zip(lengths, keys, strict=True)
    )
    return q, k, v


MASKS = ("none", "causal", "for all rows", "for each row", "for all tokens", "numbers")


def _mask(name: str, rows: int, tokens: int, columns: int) -> mx.array | str | None:
    key = mx.random.key(columns)
    if name in ("none", "causal"):
        return None if name == "none" else name
    if name == "numbers":
        return mx.random.normal((tokens, columns), key=key)
    shape, share = {
        "for all rows": ((tokens, columns), 0.5),
        "for each row": ((rows, 1, tokens, columns), 0.01),
        "for all tokens": ((rows, 1, 1, columns), 0.9),
    }[name]
    return mx.random.uniform(shape=shape, key=key) < share


@given(
    heads=st.sampled_from([(1, 3, 3), (1, 4, 1), (3, 2, 2), (8, 4, 1)]),
    columns=st.integers(1, 700),
    share=st.floats(0, 0.3),
    mask=st.sampled_from(MASKS),
)
@settings(max_examples=100, deadline=None)
def test_it_equals_mlx_for_every_shape_and_mask(
    heads: tuple[int, int, int], columns: int, share: float, mask: str
) -> None:
    rows, kv_heads, group = heads
    tokens = max(round(columns * share), 1)
    # More scores than the limit, so that most calls use the other softmax.
    rows *= -(-40_000 // (rows * group * kv_heads * tokens * columns))
    inputs = _inputs(rows, group * kv_heads, kv_heads, tokens, columns, 16)
    masked = _mask(mask, rows, tokens, columns)
    found = _attention()(*inputs, scale=0.25, mask=masked)
    expected = MLX(*inputs, scale=0.25, mask=masked)
    if isinstance(masked, mx.array) and masked.dtype == mx.bool_:
        # A token that attends to nothing is padding: it only must not become NaN.
        attends = mx.any(masked, -1, keepdims=True)
        expected = mx.where(attends, expected, 0)
    assert mx.abs(found - expected).max() < 1e-4


EXACT = {
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "tanh": math.tanh,
    "erf": math.erf,
    "gelu_approx": lambda x: x * (1 + math.tanh(0.7978845608028654 * (x + 0.044715 * x**3))) / 2,
}


class _Compiled(ctypes.CDLL):
    """Functions for one kind of processor; those of this process where it has none."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(ctypes.CDLL(None), name)


ARM_COMPILER = "aarch64-linux-gnu-gcc"
EMULATOR = ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")
# Calls a function of a library with numbers of its input, and writes the results.
CALLER = """
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
int main(int count, char **words) {
    void *function = dlsym(dlopen(words[1], RTLD_NOW), words[2]);
    long sizes[6], bytes;
    for (int at = 3; at < count; at++)
        sizes[at - 3] = atol(words[at]);
    bytes = 4 * sizes[0] * (count == 5 ? 1 : sizes[1]);
    float *numbers = malloc(bytes);
    fread(numbers, 1, bytes, stdin);
    if (count == 5)
        ((void (*)(float *, float *, long, int))function)(numbers, numbers, sizes[0], sizes[1]);
    else
        ((void (*)(float *, void *, long, long, long, long, int, int))function)(
            numbers, NULL, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]);
    fwrite(numbers, 1, bytes, stdout);
}
"""


class _Emulated(ctypes.CDLL):
    """Functions for ARM, each call of which is a process in an emulator."""

    def __init__(self, folder: Path) -> None:
        super().__init__(None)
        self._library, self._program = folder / "lib.so", folder / "caller"
        openblas.compile_kernels(self._library, compiler=ARM_COMPILER)
        source = self._program.with_suffix(".c")
        source.write_text(CALLER)
        subprocess.run([ARM_COMPILER, "-o", str(self._program), str(source)], check=True)

    def __getitem__(self, name: str) -> Any:
        def function(numbers: ctypes.c_void_p, _: object, *sizes: Any) -> None:
            values = [int(getattr(size, "value", size)) for size in sizes]
            count = values[0] if len(values) == 2 else values[0] * values[1]
            command = [*EMULATOR, str(self._program), str(self._library), name, *map(str, values)]
            given = ctypes.string_at(numbers, 4 * count)
            found = subprocess.run(command, input=given, stdout=subprocess.PIPE, check=True).stdout
            assert len(found) == len(given)
            ctypes.memmove(numbers, found, len(given))

        return function

    def __getattr__(self, name: str) -> Any:
        return self[name] if name.startswith("mlx_") else getattr(ctypes.CDLL(None), name)


# How the functions are compiled for a kind of x86 processor alone.
TARGETS = {"AVX2": '__attribute__((target("avx2")))', "any": ""}


@pytest.fixture(scope="module", params=["this", *TARGETS, "ARM"])
def kernels(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CpuKernels]:
    """The functions as one kind of processor computes them."""
    kind = request.param
    if kind != "this" and platform.machine() != "x86_64":
        pytest.skip("compares with x86")
    folder = tmp_path_factory.mktemp("kernels")
    if kind == "this":
        yield _kernels()
    elif kind in TARGETS:
        openblas.compile_kernels(folder / "lib.so", f"-DVECTORISED={TARGETS[kind]}")
        yield CpuKernels(_Compiled(str(folder / "lib.so")), lambda: True)
    else:
        for program in (ARM_COMPILER, EMULATOR[0]):
            if not shutil.which(program):
                pytest.skip(f"{program} is not on PATH")
        yield CpuKernels(_Emulated(folder), lambda: True)


@pytest.mark.parametrize("name", FUNCTIONS)
@given(
    count=st.sampled_from([1 << 11, 4_001, 30_007]), size=st.sampled_from([1e-9, 0.01, 0.3, 3, 90])
)
@settings(max_examples=20, deadline=None)
def test_functions_are_as_exact_as_those_of_mlx(
    name: str, kernels: CpuKernels, count: int, size: float
) -> None:
    numbers = mx.random.normal((count,), key=mx.random.key(count)) * size
    for array in (numbers, mx.stack([numbers, -numbers]).T):
        before = array * 1
        found = np.array(CpuFunction(OF_MLX[name], name, kernels)(array))
        assert found.shape == array.shape
        assert mx.array_equal(array, before)
        exact = np.vectorize(EXACT[name])(np.array(array, dtype=np.float64))
        assert (np.abs(found - exact) / np.maximum(np.abs(exact), 1)).max() < 3e-7
        near = np.abs(np.array(array)) < 0.2
        assert np.allclose(found[near], exact[near], rtol=1e-6, atol=0)


def test_every_processor_computes_the_same_numbers(kernels: CpuKernels) -> None:
    """Also those behind the last whole vector, and those that are no numbers."""
    for count in (4_000, 4_001, 4_015):
        numbers = mx.random.normal((count,), key=mx.random.key(count)) * 20
        numbers[5], numbers[-2], numbers[-1] = mx.inf, mx.nan, -mx.inf
        for name in FUNCTIONS:
            found, expected = numbers * 1, numbers * 1
            mx.eval(found, expected)
            kernels.apply(name, found)
            _kernels().apply(name, expected)
            assert mx.array_equal(found, expected, equal_nan=True), name
    found = mx.random.normal((60, 333), key=mx.random.key(1)) * 9
    found[1, 2], found[2, 3], found[3] = mx.inf, mx.nan, -mx.inf
    expected = found * 1
    mx.eval(found, expected)
    for each, scores in ((kernels, found), (_kernels(), expected)):
        each.softmax(scores, None, tokens=20, causal=True)
    assert mx.array_equal(found, expected, equal_nan=True)


@pytest.mark.parametrize("shape", [(4, 700), (3000,), (2, 3, 5, 129), (1, 40_000)])
def test_softmax_equals_that_of_mlx(shape: tuple[int, ...]) -> None:
    softmax = CpuSoftmax(SOFTMAX, _kernels())
    numbers = mx.random.normal(shape, key=mx.random.key(1)) * 9
    for array in (numbers, numbers.T, numbers > 0, numbers.astype(mx.float16)):
        for axis in (-1, array.ndim - 1, 0, None, [-1]):
            for precise in (False, True):
                found = softmax(array, axis, precise=precise)
                assert mx.allclose(found, SOFTMAX(array, axis, precise=precise), atol=1e-6)
    # Padding that attends to nothing is NaN in MLX, and would make other numbers NaN.
    assert mx.all(softmax(numbers - mx.inf, axis=-1) == 0)


def test_the_number_of_threads_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, kernels = _inputs(1, 8, 2, 200, 500, 32), _kernels()
    answers = []
    for threads in (1, 2, 7, 100):
        monkeypatch.setattr(kernels, "_threads", lambda _, threads=threads: threads)
        attended = CpuAttention(MLX, kernels)(*inputs, scale=0.2, mask="causal")
        answers.append((attended, CpuFunction(SIGMOID, "sigmoid", kernels)(inputs[0])))
    for answer in answers[1:]:
        assert all(mx.array_equal(a, b) for a, b in zip(answer, answers[0], strict=True))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scores_that_are_no_numbers_are_not_hidden(value: float) -> None:
    q, k, v = _inputs(1, 4, 4, 64, 256, 8)
    q[0, 1, 5] = value
    found = _attention()(q, k, v, scale=1.0, mask="causal")
    assert mx.isnan(found).sum().item() == 8
    numbers = mx.zeros(1 << 15)
    numbers[77] = value
    for name, function in OF_MLX.items():
        found = CpuFunction(function, name, _kernels())(numbers)
        assert mx.array_equal(found, function(numbers), equal_nan=True), name


def test_other_types_sinks_experts_and_traced_functions_are_left_to_mlx() -> None:
    q, k, v = _inputs(1, 4, 2, 64, 256, 8)
    attention = _attention()

    def attend(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return attention(q, k, v, scale=0.3, mask="causal")

    expected = MLX(q, k, v, scale=0.3, mask="causal")
    for trace in (mx.compile(attend), mx.checkpoint(attend)):
        assert mx.allclose(trace(q, k, v), expected, atol=1e-5)
    for shape in ((2, 64, 2, 1, 16), (64, 1, 512)):
        experts = mx.random.normal(shape)
        assert mx.array_equal(_sigmoid()(experts), SIGMOID(experts))
    found = mx.compile(_sigmoid())(mx.zeros(1 << 16))
    assert mx.all(found == 0.5)
    half = [array.astype(mx.bfloat16) for array in (q, k, v)]
    assert attention(*half, scale=0.3, mask="causal").dtype == mx.bfloat16
    sinks = mx.ones(4)
    found = attention(q, k, v, scale=0.3, mask="causal", sinks=sinks)
    assert mx.array_equal(found, MLX(q, k, v, scale=0.3, mask="causal", sinks=sinks))
    with pytest.raises(ValueError, match="mask"):
        attention(q, k, v, scale=0.3, mask="diagonal")


def test_nothing_waits_within_a_step_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "eval", None)
    _attention(may_wait=False)(*_inputs(1, 4, 2, 64, 256, 8), scale=0.3, mask="causal")
    _sigmoid(may_wait=False)(mx.zeros(1 << 16))


def test_only_a_cpu_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", MLX)
    monkeypatch.setattr(mx, "softmax", SOFTMAX)
    for name, modules in FUNCTIONS.items():
        for module in modules:
            monkeypatch.setattr(module, name, OF_MLX[name])
    prepare(Device("metal", "test", 1 << 34, 1 << 34), {})
    assert (mx.fast.scaled_dot_product_attention, mx.erf) == (MLX, OF_MLX["erf"])
    for _ in range(2):
        prepare(Device("cpu", "test", 1 << 34, 1 << 34), {})
        assert getattr(mx.fast.scaled_dot_product_attention, "attend", None) is MLX
        for name, modules in FUNCTIONS.items():
            assert all(getattr(module, name).function is OF_MLX[name] for module in modules)
