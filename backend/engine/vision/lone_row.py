"""A batch of one row, lent to the model as the caches of one sequence.

mlx-vlm's Qwen3.5 and the families built on it take a batch of one row apart: they copy each row
out, run the copies, and put merged ones into the list of caches. That costs three copies of the KV
for each token. Such a batch has no padding, so its arrays are those of one sequence as they stand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache


@contextmanager
def as_sequence(batch: Sequence[Any]) -> Iterator[list[Any]]:
    """Caches with the arrays of `batch`, which holds one row; it takes them back at the end.

    Layers of other kinds are lent as they are. After an exception nothing is taken back.
    """
    lent = [_sequence(layer) for layer in batch]
    yield lent
    for layer, sequence in zip(batch, lent, strict=True):
        if sequence is not layer:
            length = sequence.offset
            offset, padding = mx.array([length]), layer.left_padding
            layer.state = sequence.keys, sequence.values, offset, padding, length


def _sequence(layer: Any) -> Any:
    if type(layer) is not BatchKVCache:
        return layer
    sequence = KVCache()
    sequence.keys, sequence.values, *_, sequence.offset = layer.state
    return sequence
