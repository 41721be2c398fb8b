"""The best tokens of each row, found without sorting the vocabulary.

Higher logits come first, and equal logits are ordered by id. So the result does not depend on how a
partition orders equal logits, of which a model in half precision has many.
"""

from __future__ import annotations

from math import isqrt

import mlx.core as mx

_NEVER = float("-inf")
_ID_BITS = 32
_ID = (1 << _ID_BITS) - 1
_SMALLEST_BLOCK = 4


def best(logits: mx.array, count: int) -> mx.array:
    """Return the ids of the `count` best tokens of each row, best first: [rows, count] int32.

    logits: [rows, vocabulary] float32, without NaN.
    count: from 1 to the vocabulary size.

    The ids are cut into blocks, and only the `count` blocks with the best maxima are sorted: tokens
    of other blocks are worse than all these maxima, and so worse than `count` tokens.
    """
    vocabulary = logits.shape[-1]
    size = _block_size(vocabulary, count)
    if size < _SMALLEST_BLOCK:
        return _first(logits, mx.arange(vocabulary)[None], count)
    blocks = in_blocks(logits, size, _NEVER)
    heads = mx.max(blocks, axis=-1)
    chosen = _first(heads, mx.arange(heads.shape[-1])[None], count)[:, :, None]
    inside = mx.take_along_axis(blocks, chosen, axis=1)
    return _first(mx.flatten(inside, 1), mx.flatten(chosen * size + mx.arange(size), 1), count)


def in_blocks(values: mx.array, size: int, padding: float) -> mx.array:
    """Return rows as blocks of neighbouring columns, [rows, blocks, size]; the last is padded."""
    rows, length = values.shape
    if over := -length % size:
        values = mx.pad(values, [(0, 0), (0, over)], constant_values=padding)
    return values.reshape(rows, -1, size)


def _block_size(vocabulary: int, count: int) -> int:
    """Return the number of tokens in a block.

    The work is smallest if there are as many blocks as tokens in the chosen blocks. The size is a
    power of two, because most vocabulary sizes are multiples of a power of two.
    """
    return 1 << (isqrt(vocabulary // count).bit_length() - 1)


def _first(logits: mx.array, ids: mx.array, count: int) -> mx.array:
    """Return the ids of the `count` highest logits, in order."""
    # Each integer key combines a logit and its id, and sorts like the pair. The bits of a float
    # sort like its value if all but the sign are inverted in negative numbers. Adding 0 turns -0
    # into 0.
    bits = mx.view(logits + 0.0, mx.int32)
    ascending = mx.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = mx.left_shift((~ascending).astype(mx.int64), _ID_BITS) | ids.astype(mx.int64)
    if count < keys.shape[-1]:
        keys = mx.partition(keys, count - 1, axis=-1)[:, :count]
    return (mx.sort(keys, axis=-1) & _ID).astype(mx.int32)
