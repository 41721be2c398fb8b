"""A greedy decode step that `mx.compile` turns into one function, against the plain step.

The compiled function needs shapes that never change, so it attends to a whole buffer of keys and
values under a mask. The engine has no such step: on a CPU MLX compiles only with a C++ compiler at
run time, and nobody has measured on a GPU yet what it saves there. These figures are for that
decision.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, make_prompt_cache

_COLUMNS: int = KVCache.step  # of the buffers of the compiled step
_PROMPT = 20  # tokens

# Next tokens, [rows, 1], and the state for the next step.
Step = Callable[[mx.array, Sequence[Any]], tuple[mx.array, Sequence[Any]]]


class _FixedKV:
    """Keys and values of one layer, in buffers that never grow.

    offset: number of tokens, an array without dimensions.
    """

    def __init__(self, keys: mx.array, values: mx.array, offset: mx.array) -> None:
        self.keys, self.values, self.offset = keys, values, offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        start = self.offset.reshape(1)
        self.keys = mx.slice_update(self.keys, keys, start, axes=(2,))
        self.values = mx.slice_update(self.values, values, start, axes=(2,))
        return self.keys, self.values

    def make_mask(self, *_: object, **__: object) -> mx.array:
        mask: mx.array = mx.arange(self.keys.shape[2]) <= self.offset
        return mask


def speeds(model: Any, rows: int, tokens: int) -> tuple[list[list[int]], float, float]:
    """Generate the tokens of `rows` equally long sequences, with both steps.

    tokens: number of tokens of each sequence, at most 200.
    Returns the tokens of the plain steps, and the tokens per second of plain and compiled steps.
    Raises RuntimeError if the compiled steps computed other tokens, and what MLX raises if the
    model cannot be compiled.
    """
    _run(_plain(model), *_prefilled(model, rows), 2)  # builds kernels
    plain, plain_speed = _run(_plain(model), *_prefilled(model, rows), tokens)
    first, caches = _prefilled(model, rows)
    buffers = [_whole(part) for layer in caches for part in (layer.keys, layer.values)]
    step, state = _compiled(model), [mx.array(_PROMPT), *buffers]
    _run(step, first, [part * 1 for part in state], 2)  # traces and builds kernels
    compiled, compiled_speed = _run(step, first, state, tokens)
    if compiled != plain:
        raise RuntimeError("the compiled step computes other tokens than the plain step")
    return plain, plain_speed, compiled_speed


def _prefilled(model: Any, rows: int) -> tuple[mx.array, list[Any]]:
    """Return the first tokens, [rows, 1], and the caches of a prompt."""
    caches = make_prompt_cache(model)
    prompts = mx.arange(_PROMPT)[None] + mx.arange(rows)[:, None]
    first = _greedy(model(prompts, cache=caches))
    mx.eval(first, [layer.state for layer in caches])
    return first, caches


def _plain(model: Any) -> Step:
    def step(last: mx.array, caches: Sequence[Any]) -> tuple[mx.array, Sequence[Any]]:
        return _greedy(model(last, cache=caches)), caches

    return step


def _compiled(model: Any) -> Step:
    def traced(last: mx.array, offset: mx.array, *buffers: mx.array) -> Sequence[mx.array]:
        pairs = zip(buffers[::2], buffers[1::2], strict=True)
        caches = [_FixedKV(keys, values, offset) for keys, values in pairs]
        chosen = _greedy(model(last, cache=caches))
        return [chosen, offset + 1, *(p for each in caches for p in (each.keys, each.values))]

    whole = mx.compile(traced)

    def step(last: mx.array, state: Sequence[Any]) -> tuple[mx.array, Sequence[Any]]:
        chosen, *state = whole(last, *state)
        return chosen, state

    return step


def _run(
    step: Step, last: mx.array, state: Sequence[Any], tokens: int
) -> tuple[list[list[int]], float]:
    """Return the tokens of each step, and tokens per second."""
    found: list[Any] = []
    began = time.perf_counter()
    for _ in range(tokens):
        chosen, state = step(last, state)
        mx.async_eval(chosen, state if isinstance(state[0], mx.array) else [])
        found.append(last[:, 0].tolist())
        last = chosen
    mx.eval(last)
    return found, tokens * last.shape[0] / (time.perf_counter() - began)


def _greedy(logits: mx.array) -> mx.array:
    return mx.argmax(logits[:, -1:], axis=-1)


def _whole(part: mx.array) -> mx.array:
    """Return the keys or values of a prompt in a buffer of all columns."""
    rows, heads, _, size = part.shape
    buffer = mx.zeros((rows, heads, _COLUMNS, size), part.dtype)
    buffer[:, :, :_PROMPT] = part[:, :, :_PROMPT]
    mx.eval(buffer)
    return buffer
