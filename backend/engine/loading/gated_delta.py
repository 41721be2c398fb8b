"""Passes of many tokens through gated delta layers (Qwen 3.5, Qwen 3 Next, OLMo Hybrid and others).

mlx-lm and mlx-vlm have a kernel for these layers on Metal only. On other devices they run ten
operations on the whole state for each token and layer, which in a long prompt takes longer than all
other work. Here a pass is cut into chunks of _CHUNK tokens, whose results are products of matrices,
and only the state at the end of each chunk depends on the chunk before (Yang et al. 2024, Gated
Delta Networks, https://arxiv.org/abs/2412.06464, section 3.3). Passes that check draft tokens are
short, and compute exactly what decode steps compute.

mlx-vlm's own chunks, for Qwen 3.5 alone, are replaced: they are slower, differ by up to 0.002, and
are used even for two tokens.

With the state S, [values, keys], of the tokens before the chunk, the product d of the decays from
the chunk's start to each token, and the strength b of each token's update, the recurrence

    S' = g S,  u = b (v - S' k),  S = S' + u k^T,  y = S q

is the linear system (I + L) U = b V - b d K S^T, with L[t, i] = b[t] d[t] / d[i] (k[t] k[i]) for
i < t, and Y = d Q S^T + A U, with A[t, i] = d[t] / d[i] (q[t] k[i]) for i <= t.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import mlx.core as mx

from backend.engine import device

_CHUNK = 32  # tokens
_LEAST = 9  # tokens of a pass that uses chunks
_TINY = 1e-38  # the smallest normal float: the logarithm of a decay of 0 would be infinite

# The function that each module calls for a pass.
_FUNCTIONS = {
    "mlx_lm.models.gated_delta": "gated_delta_ops",
    "mlx_vlm.models.gated_delta": "gated_delta_ops",
    "mlx_vlm.models.qwen3_5.gated_delta": "gated_delta_chunked",
}

# Called with q, k, v, decays, strengths, state and mask; returns the outputs and the state.
Rule = Callable[..., Any]


def use_chunks() -> None:
    """Let passes of many tokens use chunks in all models that have been built.

    On a CPU the step of a single token is replaced too. On CUDA products are rounded to TF32, which
    would add up in the state.
    """
    for name, function in _FUNCTIONS.items():
        module: Any = sys.modules.get(name)
        if module is not None and not isinstance(getattr(module, function), ChunkedRule):
            setattr(module, function, ChunkedRule(module.gated_delta_ops))
            if device.detect().kind == "cpu":
                module._gated_delta_step_ops = step


def step(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Return the output of one token, [rows, heads, values], and the state after it.

    The libraries' function passes seven times over the state, which many rows together do not
    share. This one reads it in a single product, and changes it afterwards.
    q, k: [rows, heads, keys].
    v: [rows, heads, values].
    g: decays, [rows, heads], or [rows, heads, keys].
    beta: strength of the update, [rows, heads].
    state: [rows, heads, values, keys].
    mask: [rows], whether the token changes the state; None if it does in all rows.
    """
    decay = g[..., None] if g.ndim == 2 else g
    from_k, from_q = mx.split(state @ mx.stack([decay * k, decay * q], axis=-1), 2, axis=-1)
    update = (v[..., None] - from_k) * beta[..., None, None]
    y = from_q + update * mx.sum(k * q, axis=-1)[..., None, None]
    new = state * decay[..., None, :] + update * k[..., None, :]
    if mask is not None:
        new = mx.where(mask[:, None, None, None], new, state)
    return y[..., 0].astype(q.dtype), new


class ChunkedRule:
    """The gated delta rule, in chunks for passes of many tokens with one decay per head.

    by_token: the library's function, which computes everything else.
    """

    def __init__(self, by_token: Rule) -> None:
        self._by_token = by_token

    def __call__(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        g: mx.array,
        beta: mx.array,
        state: mx.array | None = None,
        mask: mx.array | None = None,
        state_steps: int | None = None,
    ) -> Any:
        """Return the outputs, [rows, tokens, heads, values], and the state after the last token.

        q, k: [rows, tokens, key heads, keys].
        v: [rows, tokens, heads, values].
        g: decays, [rows, tokens, heads], or [rows, tokens, heads, keys].
        beta: strengths of the updates, [rows, tokens, heads].
        state: [rows, heads, values, keys]; None for zeros.
        mask: [rows, tokens], whether each token changes the state; None if all do.
        state_steps: an argument of mlx-vlm, which then returns earlier states too.
        """
        if state_steps is not None:
            return self._by_token(q, k, v, g, beta, state, mask, state_steps)
        if q.shape[1] < _LEAST or g.ndim != 3:
            return self._by_token(q, k, v, g, beta, state, mask)
        return _in_chunks(q, k, v, g, beta, state, mask)


def _in_chunks(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array | None,
    mask: mx.array | None,
) -> tuple[mx.array, mx.array]:
    rows, tokens, key_heads, keys = k.shape
    heads, values = v.shape[2:]
    group = heads // key_heads
    if mask is not None:
        g, beta = mx.where(mask[..., None], g, 1.0), mx.where(mask[..., None], beta, 0.0)
    if state is None:
        state = mx.zeros((rows, heads, values, keys))
    kind = q.dtype

    def chunks(array: mx.array, heads: int, neutral: float = 0.0) -> mx.array:
        """Return [rows, key heads, heads of each, chunks, tokens of a chunk, ...] in float32."""
        rest = array.shape[3:]
        sides = [(0, 0), (0, -tokens % _CHUNK), *[(0, 0)] * (array.ndim - 2)]
        array = mx.pad(array, sides, constant_values=neutral)
        array = array.astype(mx.float32)
        split = mx.unflatten(array, 1, (-1, _CHUNK)).reshape(
            rows, -1, _CHUNK, key_heads, heads // key_heads, *rest
        )
        return split.transpose(0, 3, 4, 1, 2, *range(5, split.ndim))

    q, k = chunks(q, key_heads), chunks(k, key_heads)
    v, beta, g = chunks(v, heads), chunks(beta, heads), chunks(g, heads, 1.0)
    decayed = mx.cumsum(mx.log2(mx.maximum(g, _TINY)), axis=-1)
    since = decayed[..., :, None] - decayed[..., None, :]
    earlier = mx.tri(_CHUNK)
    between = mx.power(2.0, mx.where(earlier > 0, since, -mx.inf))
    strong = beta[..., None]
    decay = mx.power(2.0, decayed)[..., None]
    solved = _inverse(strong * between * (k @ k.swapaxes(-1, -2)) * mx.tri(_CHUNK, k=-1))
    own = solved @ (strong * v)
    from_state = solved @ (strong * decay * k)
    attended = between * (q @ k.swapaxes(-1, -2))
    outputs = attended @ own
    read = decay * q - attended @ from_state
    remaining = between[..., -1:, :].swapaxes(-1, -2)
    both = mx.concatenate([read, from_state], axis=-2)
    state = state.reshape(rows, key_heads, group, values, keys)
    found = []
    for at in range(k.shape[3]):
        seen = both[:, :, :, at] @ state.swapaxes(-1, -2)
        found.append(outputs[:, :, :, at] + seen[..., :_CHUNK, :])
        updates = remaining[:, :, :, at] * (own[:, :, :, at] - seen[..., _CHUNK:, :])
        state = decay[:, :, :, at, -1:] * state + updates.swapaxes(-1, -2) @ k[:, :, :, at]
    y = mx.concatenate(found, axis=3)[:, :, :, :tokens]
    y = mx.moveaxis(y, 3, 1).reshape(rows, tokens, heads, values).astype(kind)
    state = state.reshape(rows, heads, values, keys)
    if not device.may_wait_within_a_step():
        # mlx-vlm, which computes some models in this way, found that CUDA fails to capture graphs
        # of whole passes.
        with suppress(ValueError):  # while MLX traces a function
            mx.async_eval(y, state)
    return y, state


def _inverse(lower: mx.array) -> mx.array:
    """Return the inverse of I + L for strictly lower triangular matrices L, [..., n, n].

    The inverses of blocks on the diagonal are joined to those of twice the size. Unlike a power
    series of L, this is exact also for tokens whose keys are alike.
    """
    size = lower.shape[-1]
    block = mx.arange(size)
    inverse = mx.eye(size)
    width = 1
    while width < size:
        beside = (block[:, None] // width == block // width + 1) & (
            block[:, None] // (2 * width) == block // (2 * width)
        )
        joint = mx.where(beside, lower, 0.0)
        inverse = inverse - (joint if width == 1 else inverse @ joint @ inverse)
        width *= 2
    return inverse
