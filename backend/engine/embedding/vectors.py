"""Pads rows to arrays on the device, and pools the vectors of their tokens.

Rows are padded at their end, so a row's tokens are in the first `lengths[row]` columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from backend.engine.embedding.encoding import Piece
from backend.engine.embedding.pooling_rule import Mode

_TINY = 1e-12  # the smallest divisor, as in torch.nn.functional.normalize


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """Rows as arrays, int32, (rows, longest)."""

    ids: mx.array
    mask: mx.array  # 1 for tokens and 0 for padding
    # 1 for tokens that are pooled; 0 for padding and for prompts that are not pooled.
    pooled: mx.array
    segments: mx.array  # the segment ids of the tokens
    lengths: tuple[int, ...]  # number of tokens in each row


def padded(pieces: Sequence[Piece], pad_token: int) -> PaddedRows:
    """Return rows that are padded to the longest row."""
    longest = max(len(piece.ids) for piece in pieces)

    def rectangle(rows: Sequence[list[int]], filler: int) -> mx.array:
        return mx.array([row + [filler] * (longest - len(row)) for row in rows], dtype=mx.int32)

    mask = rectangle([[1] * len(piece.ids) for piece in pieces], 0)
    unpooled = mx.array([[piece.unpooled] for piece in pieces])
    return PaddedRows(
        ids=rectangle([piece.ids for piece in pieces], pad_token),
        mask=mask,
        pooled=mask * (mx.arange(longest) >= unpooled),
        segments=rectangle([piece.segments for piece in pieces], 0),
        lengths=tuple(len(piece.ids) for piece in pieces),
    )


def attention_masks(
    tokens: mx.array, reach: int, *, causal: bool = False
) -> tuple[mx.array, mx.array]:
    """Return the boolean masks of global and local layers, (rows, 1, 1 or longest, longest).

    tokens: (rows, longest), 1 for tokens and 0 for padding.
    reach: a token of a local layer attends to the tokens that are less than this far away.
    causal: whether tokens attend only to earlier tokens.
    """
    position = mx.arange(tokens.shape[1])
    distance = position[:, None] - position[None, :]
    everywhere = tokens.astype(mx.bool_)[:, None, None, :]
    if causal:
        everywhere = everywhere & (distance >= 0)
    nearby = everywhere & (mx.abs(distance) < reach)
    # Padding attends to everything: the softmax of no scores is NaN, and NaN in a column of padding
    # would reach the tokens of its row.
    return everywhere, nearby | (tokens == 0)[:, None, :, None]


def last_tokens(hidden: mx.array, rows: PaddedRows) -> mx.array:
    """Return the vector of each row's last token, (rows, dim)."""
    last = mx.array([length - 1 for length in rows.lengths])
    return hidden[mx.arange(len(rows.lengths)), last]


def pool(hidden: mx.array, rows: PaddedRows, mode: Mode) -> mx.array:
    """Pool token vectors, (rows, longest, dim), to one float32 vector per row, (rows, dim)."""
    hidden = hidden.astype(mx.float32)
    if mode == "cls":
        return hidden[mx.arange(len(rows.lengths)), mx.argmax(rows.pooled, axis=1)]
    if mode == "last":
        return last_tokens(hidden, rows)
    mask = rows.pooled[..., None].astype(mx.float32)
    if mode == "max":
        return mx.max(mx.where(mask > 0, hidden, -mx.inf), axis=1)
    if mode == "weighted_mean":
        mask = mask * mx.arange(1, hidden.shape[1] + 1, dtype=mx.float32)[None, :, None]
    # The vectors of padding may be NaN, which multiplication by 0 would not remove.
    total = mx.sum(mx.where(mask > 0, hidden, 0.0) * mask, axis=1)
    weight = mx.maximum(mx.sum(mask, axis=1), _TINY)
    return total / (mx.sqrt(weight) if mode == "mean_sqrt_len" else weight)


def normalized(vectors: mx.array) -> mx.array:
    """Scale vectors along the last axis to length 1."""
    return vectors / mx.maximum(mx.linalg.norm(vectors, axis=-1, keepdims=True), _TINY)
