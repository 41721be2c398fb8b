"""A training forward pass for the tiny model that is fast on a CPU.

MLX's CPU build takes 12 ns for one `exp`, which is most of a training step at this size.
Here `exp` is a polynomial squared six times: only products and sums, which a compiled
kernel does for a whole vector at once. Softmax and SiLU get gradients from their own
values, so that nothing differentiates through the polynomial.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

_LEAST = -40.0


@mx.compile
def exp_of_negative(x: mx.array) -> mx.array:
    """exp(x) for x <= 0; anything under -40 counts as -40."""
    y = mx.maximum(x, _LEAST) * (1 / 64)
    power = 1 + y * (1 + y * (1 / 2 + y * (1 / 6 + y * (1 / 24 + y * (1 / 120)))))
    for _ in range(6):
        power = power * power
    return power


def _softmax(scores: mx.array) -> mx.array:
    power = exp_of_negative(scores - mx.max(scores, axis=-1, keepdims=True))
    return power * (1 / mx.sum(power, axis=-1, keepdims=True))


def _softmax_vjp(_scores: mx.array, cotangent: mx.array, shares: mx.array) -> mx.array:
    weighted = shares * cotangent
    return weighted - shares * mx.sum(weighted, axis=-1, keepdims=True)


softmax: Any = mx.custom_function(_softmax)
softmax.vjp(_softmax_vjp)


@mx.compile
def _sigmoid(x: mx.array) -> mx.array:
    power = exp_of_negative(-mx.abs(x))
    share = 1 / (1 + power)
    negative = (x < 0).astype(x.dtype)
    return negative + (1 - 2 * negative) * share


def _silu(x: mx.array) -> mx.array:
    return x * _sigmoid(x)


def _silu_vjp(x: mx.array, cotangent: mx.array, value: mx.array) -> mx.array:
    share = _sigmoid(x)
    return cotangent * (share + value * (1 - share))


silu: Any = mx.custom_function(_silu)
silu.vjp(_silu_vjp)


def _cross_entropy(logits: mx.array, targets: mx.array, weights: mx.array) -> mx.array:
    """Sum over all rows of weight x (-log probability of the target)."""
    shifted = logits - mx.max(logits, axis=-1, keepdims=True)
    total = mx.sum(exp_of_negative(shifted), axis=-1)
    chosen = mx.take_along_axis(shifted, targets[:, None], axis=-1)[:, 0]
    return mx.sum(weights * (mx.log(total) - chosen))


def _cross_entropy_vjp(
    primals: tuple[mx.array, mx.array, mx.array], cotangent: mx.array, _value: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    logits, targets, weights = primals
    scaled = softmax(logits) * weights[:, None]
    rows = mx.arange(targets.size)
    gradient = scaled.at[rows, targets].add(-weights) * cotangent
    return (gradient, mx.zeros_like(targets), mx.zeros_like(weights))


cross_entropy: Any = mx.custom_function(_cross_entropy)
cross_entropy.vjp(_cross_entropy_vjp)


def rotation_table(positions: mx.array, dims: int, base: float) -> tuple[mx.array, mx.array]:
    """Cosines and sines of rotary embedding, [rows, 1, length, dims]."""
    frequencies = base ** (-mx.arange(0, dims, 2, dtype=mx.float32) / dims)
    return rotation_of(positions[:, None, :, None].astype(mx.float32) * frequencies)


def rotation_of(angles: mx.array) -> tuple[mx.array, mx.array]:
    """Cosines and signed sines for both halves of a head, from the angles of one half."""
    cosine, sine = mx.cos(angles), mx.sin(angles)
    return mx.concatenate([cosine, cosine], -1), mx.concatenate([-sine, sine], -1)


def _rotate(x: mx.array, table: tuple[mx.array, mx.array]) -> mx.array:
    half = x.shape[-1] // 2
    swapped = mx.concatenate([x[..., half:], x[..., :half]], -1)
    return x * table[0] + swapped * table[1]


def _attend(attention: Any, x: mx.array, table: tuple[mx.array, mx.array]) -> mx.array:
    rows, length, _ = x.shape
    heads, shared = attention.n_heads, attention.n_kv_heads

    def split(projected: mx.array, count: int) -> mx.array:
        return projected.reshape(rows, length, count, -1)

    queries = attention.q_norm(split(attention.q_proj(x), heads)).transpose(0, 2, 1, 3)
    keys = attention.k_norm(split(attention.k_proj(x), shared)).transpose(0, 2, 1, 3)
    values = split(attention.v_proj(x), shared).transpose(0, 2, 1, 3)
    queries, keys = _rotate(queries * attention.scale, table), _rotate(keys, table)
    keys = mx.repeat(keys, heads // shared, axis=1)
    values = mx.repeat(values, heads // shared, axis=1)
    steps = mx.arange(length)
    future = (steps[None, :] > steps[:, None]).astype(mx.float32) * -1e9
    mixed = softmax(queries @ keys.swapaxes(-1, -2) + future) @ values
    output: mx.array = attention.o_proj(mixed.transpose(0, 2, 1, 3).reshape(rows, length, -1))
    return output


def logits_from(
    model: Any,
    x: mx.array,
    table: tuple[mx.array, mx.array],
    after_first: mx.array | None = None,
) -> mx.array:
    """The logits of mlx-lm's qwen3 model, from its own parameters, for given embeddings.

    `after_first` is added after the first layer, where a Qwen3-VL adds its deepstack features.
    """
    for number, layer in enumerate(model.model.layers):
        x = x + _attend(layer.self_attn, layer.input_layernorm(x), table)
        y, mlp = layer.post_attention_layernorm(x), layer.mlp
        x = x + mlp.down_proj(silu(mlp.gate_proj(y)) * mlp.up_proj(y))
        if number == 0 and after_first is not None:
            x = x + after_first
    logits: mx.array = model.model.embed_tokens.as_linear(model.model.norm(x))
    return logits


def logits_of(model: Any, tokens: mx.array, positions: mx.array) -> mx.array:
    """The logits of mlx-lm's qwen3 model, from its own parameters, at given positions."""
    table = rotation_table(positions, model.args.head_dim, model.args.rope_theta)
    return logits_from(model, model.model.embed_tokens(tokens), table)


def loss(
    model: Any, tokens: mx.array, positions: mx.array, targets: mx.array, weights: mx.array
) -> mx.array:
    """Weighted mean of the cross entropy over a batch."""
    return mean_loss(logits_of(model, tokens, positions), targets, weights)


def mean_loss(logits: mx.array, targets: mx.array, weights: mx.array) -> mx.array:
    """Weighted mean of the cross entropy, from logits of shape (rows, length, vocabulary)."""
    summed: mx.array = cross_entropy(
        logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), weights.reshape(-1)
    )
    return summed / mx.sum(weights)
