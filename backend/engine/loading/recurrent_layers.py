"""Passes of many tokens through recurrent layers, where the libraries are slow.

A pass is cut into chunks, whose results are products of matrices, and only the state at the end of
each chunk depends on the chunk before.

- Gated delta layers (Qwen 3.5, Qwen 3 Next, OLMo Hybrid): mlx-lm and mlx-vlm have a kernel on Metal
  only. On other devices they run ten operations on the whole state for each token and layer, which
  in a long prompt takes longer than all other work. mlx-vlm has chunks for Qwen 3.5 alone; they are
  slower, differ by up to 0.002, and are used even for two tokens.
- State-space layers (Mamba 2), on a CPU: mlx-lm cuts a pass into chunks of 256 tokens. It computes
  an exponential for each pair of tokens of a chunk and each head, and multiplies the state at the
  start of the chunk by each token separately.

Passes that check draft tokens are short, and compute exactly what decode steps compute.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import mlx.core as mx

from backend.engine import device

_DELTA_CHUNK, _SPACE_CHUNK = 32, 64  # tokens
_DELTA_LEAST, _SPACE_LEAST = 9, 32  # tokens of a pass that uses chunks
_TINY = 1e-38  # the smallest normal float: the logarithm of a decay of 0 would be infinite
_LOG2_E = 1.4426950408889634

# The function that each module calls for a pass.
_DELTA = {
    "mlx_lm.models.gated_delta": "gated_delta_ops",
    "mlx_vlm.models.gated_delta": "gated_delta_ops",
    "mlx_vlm.models.qwen3_5.gated_delta": "gated_delta_chunked",
}
_SPACE = ("mlx_lm.models.ssm", "mlx_vlm.models.ssm")

Pass = Callable[..., Any]


def use_chunks() -> None:
    """Let passes of many tokens use chunks in all models that have been built.

    The scan of state-space layers is replaced on every device, for the lengths of rows. On a CPU
    the step of a single token is replaced too. On CUDA products are rounded to TF32, which
    would add up in the state.
    """
    on_cpu = device.detect().kind == "cpu"
    for name, function in _DELTA.items():
        module: Any = sys.modules.get(name)
        if module is not None and not isinstance(getattr(module, function), GatedDelta):
            setattr(module, function, GatedDelta(module.gated_delta_ops))
            if on_cpu:
                module._gated_delta_step_ops = delta_step
    for name in _SPACE:
        module = sys.modules.get(name)
        if module is not None and not isinstance(module.ssm_attn, StateSpace):
            module.ssm_attn = StateSpace(module.ssm_attn, chunked=on_cpu)


def _chunks(array: mx.array, groups: int, size: int, neutral: float = 0.0) -> mx.array:
    """Return [rows, groups, heads of each, chunks, tokens of a chunk, ...] in float32.

    array: [rows, tokens, heads, ...].
    size: tokens of a chunk; the last chunk is filled with `neutral`.
    """
    sides = [(0, 0), (0, -array.shape[1] % size), *[(0, 0)] * (array.ndim - 2)]
    array = mx.pad(array.astype(mx.float32), sides, constant_values=neutral)
    split = mx.unflatten(mx.unflatten(array, 2, (groups, -1)), 1, (-1, size))
    return split.transpose(0, 3, 4, 1, 2, *range(5, split.ndim))


def _joined(chunks: mx.array, tokens: int) -> mx.array:
    heads = mx.moveaxis(mx.flatten(chunks, 3, 4)[:, :, :, :tokens], 3, 1)
    return mx.flatten(heads, 2, 3)


def _decays(decayed: mx.array) -> mx.array:
    """Return the decay from each token of a chunk to each later one, [..., later, earlier].

    decayed: binary logarithms of the decays from the start of the chunk.
    """
    since = decayed[..., :, None] - decayed[..., None, :]
    return mx.power(2.0, mx.where(mx.tri(since.shape[-1]) > 0, since, -mx.inf))


class GatedDelta:
    """The gated delta rule, in chunks for passes of many tokens with one decay per head.

    With the state S, [values, keys], of the tokens before the chunk, the product d of the decays
    from the chunk's start to each token, and the strength b of each token's update, the recurrence

        S' = g S,  u = b (v - S' k),  S = S' + u k^T,  y = S q

    is the linear system (I + L) U = b V - b d K S^T, with L[t, i] = b[t] d[t] / d[i] (k[t] k[i])
    for i < t, and Y = d Q S^T + A U, with A[t, i] = d[t] / d[i] (q[t] k[i]) for i <= t (Yang et al.
    2024, Gated Delta Networks, https://arxiv.org/abs/2412.06464, section 3.3).

    by_token: the library's function, which computes everything else.
    """

    def __init__(self, by_token: Pass) -> None:
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
        if q.shape[1] < _DELTA_LEAST or g.ndim != 3:
            return self._by_token(q, k, v, g, beta, state, mask)
        return _delta_pass(q, k, v, g, beta, state, mask)


def _delta_pass(
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
    q, k, v = (_chunks(array, key_heads, _DELTA_CHUNK) for array in (q, k, v))
    beta = _chunks(beta, key_heads, _DELTA_CHUNK)
    g = _chunks(g, key_heads, _DELTA_CHUNK, neutral=1.0)
    decayed = mx.cumsum(mx.log2(mx.maximum(g, _TINY)), axis=-1)
    between = _decays(decayed)
    strong = beta[..., None]
    decay = mx.power(2.0, decayed)[..., None]
    solved = _inverse(strong * between * (k @ k.swapaxes(-1, -2)) * mx.tri(_DELTA_CHUNK, k=-1))
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
        found.append(outputs[:, :, :, at] + seen[..., :_DELTA_CHUNK, :])
        updates = remaining[:, :, :, at] * (own[:, :, :, at] - seen[..., _DELTA_CHUNK:, :])
        state = decay[:, :, :, at, -1:] * state + updates.swapaxes(-1, -2) @ k[:, :, :, at]
    y = _joined(mx.stack(found, axis=3), tokens).astype(kind)
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


def delta_step(
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
    share. This one reads it in a single product, and changes it afterwards. The arguments are those
    of `GatedDelta`, without the axis of tokens.
    """
    decay = g[..., None] if g.ndim == 2 else g
    from_k, from_q = mx.split(state @ mx.stack([decay * k, decay * q], axis=-1), 2, axis=-1)
    update = (v[..., None] - from_k) * beta[..., None, None]
    y = from_q + update * mx.sum(k * q, axis=-1)[..., None, None]
    new = state * decay[..., None, :] + update * k[..., None, :]
    if mask is not None:
        new = mx.where(mask[:, None, None, None], new, state)
    return y[..., 0].astype(q.dtype), new


class StateSpace:
    """The scan of a state-space layer, in chunks for passes of many tokens.

    The chunks are those of Dao and Gu 2024, Transformers are SSMs,
    https://arxiv.org/abs/2405.21060, section 6.

    scan: the library's function, which computes everything else.
    chunked: whether to use chunks.
    """

    def __init__(self, scan: Pass, *, chunked: bool = True) -> None:
        self._scan, self._chunked = scan, chunked

    def __call__(
        self,
        x: mx.array,
        A_log: mx.array,  # noqa: N803, the names of mlx-lm
        B: mx.array,  # noqa: N803
        C: mx.array,  # noqa: N803
        D: mx.array,  # noqa: N803
        dt: mx.array,
        dt_bias: mx.array,
        state: mx.array | None = None,
        time_step_limit: tuple[float, float] = (0.001, 100.0),
        mask: mx.array | None = None,
        **rest: Any,
    ) -> Any:
        """Return the outputs, of the shape of `x`, and the state after the last token.

        x: [rows, tokens, heads, values].
        A_log, D, dt_bias: [heads].
        B, C: [rows, tokens, groups of heads, keys].
        dt: [rows, tokens, heads].
        state: [rows, heads, values, keys]; None for zeros.
        mask: [rows, tokens], whether each token changes the state; None if all do.
        rest: other arguments of the library's function. Of these, `lengths` is the number of tokens
            of each row that the mask lets through.
        """
        counted = rest.pop("lengths", None)
        short = x.shape[1] < _SPACE_LEAST
        if not self._chunked or short or rest or (counted is not None and mask is None):
            if counted is None and mask is not None:
                # Nemotron-H omits it, and the states of rows with padding would lack tokens.
                counted = mx.sum(mask, axis=1)
            rest["lengths"] = counted
            return self._scan(
                x, A_log, B, C, D, dt, dt_bias, state, time_step_limit, mask=mask, **rest
            )
        # the logarithm of 1 + e to a power, which keeps the steps positive
        steps = mx.clip(mx.logaddexp(dt.astype(mx.float32) + dt_bias, 0.0), *time_step_limit)
        if mask is not None:
            steps = mx.where(mask[..., None], steps, 0.0)
        decays = steps * (-_LOG2_E * mx.exp(A_log.astype(mx.float32)))
        y, state = _space_pass(steps[..., None] * x, decays, B, C, state)
        return (y + x * D[:, None]).astype(x.dtype), state


def _space_pass(
    inputs: mx.array,
    decays: mx.array,
    keys: mx.array,
    queries: mx.array,
    state: mx.array | None,
) -> tuple[mx.array, mx.array]:
    """Return the outputs, [rows, tokens, heads, values], and the state after the last token.

    Each token changes the state to 2^decay state + input key^T, and its output is state query. The
    shapes are those of the arguments of `StateSpace`.
    """
    rows, tokens, heads, values = inputs.shape
    groups, size = keys.shape[2:]
    inputs, keys, queries = (
        _chunks(array, groups, _SPACE_CHUNK) for array in (inputs, keys, queries)
    )
    decayed = mx.cumsum(_chunks(decays, groups, _SPACE_CHUNK), axis=-1)
    between = _decays(decayed)
    y = (queries @ keys.swapaxes(-1, -2) * between) @ inputs
    added = (inputs * between[..., -1:, :].swapaxes(-1, -2)).swapaxes(-1, -2) @ keys
    decay = mx.power(2.0, decayed)[..., None]
    shape = (rows, groups, heads // groups, values, size)
    at_start = [mx.zeros(shape) if state is None else state.astype(mx.float32).reshape(shape)]
    for at in range(added.shape[3]):
        at_start.append(decay[:, :, :, at, -1:] * at_start[-1] + added[:, :, :, at])
    *earlier, last = at_start
    y = y + decay * (queries @ mx.stack(earlier, axis=3).swapaxes(-1, -2))
    return _joined(y, tokens), last.reshape(rows, heads, values, size)
