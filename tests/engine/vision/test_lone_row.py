"""A model fills the caches of a batch, of one row or several, as it fills those of each row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, BatchKVCache, KVCache

from backend.engine import kv
from backend.engine.vision.lone_row import as_sequence
from backend.engine.vision.model import SeeingModel
from tests.engine.vision.families import write_family
from tests.models.tiny_media_eval import load

_HEADS, _SIZE = 2, 4


def _written(tokens: int, first: int) -> mx.array:
    values = mx.arange(first, first + tokens, dtype=mx.float32)
    return mx.broadcast_to(values[None, None, :, None], (1, _HEADS, tokens, _SIZE))


@given(
    st.integers(0, 600),
    st.lists(st.tuples(st.integers(1, 300), st.booleans(), st.integers(0, 3)), max_size=6),
)
def test_what_is_written_while_lent_is_in_the_batch(
    held: int, writes: list[tuple[int, bool, int]]
) -> None:
    row = KVCache()
    if held:
        row.update_and_fetch(_written(held, 0), _written(held, 0))
    batch = BatchKVCache.merge([row])
    for tokens, lent, back in writes:
        new = _written(tokens, held)
        if lent:
            with as_sequence([batch]) as (sequence,):
                assert sequence.offset == held
                keys, values = sequence.update_and_fetch(new, new)
        else:
            keys, values = batch.update_and_fetch(new, new)
        held += tokens
        assert keys[0, 0, :, 0].tolist() == values[0, 0, :, 0].tolist() == list(range(held))
        held -= batch.trim(back)
        assert batch.size() == held
        assert batch.offset.tolist() == [held]
        assert batch.left_padding.tolist() == [0]
    if held:
        assert batch.extract(0).keys[0, 1, :, 0].tolist() == list(range(held))


def test_a_call_that_fails_leaves_the_batch_as_it_was() -> None:
    batch = BatchKVCache.merge([KVCache()])
    batch.update_and_fetch(_written(3, 0), _written(3, 0))

    def fail() -> None:
        with as_sequence([batch]) as (sequence,):
            sequence.update_and_fetch(_written(2, 3), _written(2, 3))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert batch.size() == 3
    assert batch.extract(0).keys[0, 0, :, 0].tolist() == [0, 1, 2]


def test_other_caches_are_lent_as_they_are() -> None:
    layers: list[Any] = [ArraysCache(2), KVCache()]
    with as_sequence(layers) as lent:
        assert all(one is layer for one, layer in zip(lent, layers, strict=True))


@pytest.mark.parametrize("family", ["qwen3_5", "qwen2_5_vl"])
@pytest.mark.parametrize("lengths", [(7,), (7, 7), (3, 9, 5)])
def test_rows_of_any_length_take_several_tokens_at_once(
    tmp_path: Path, family: str, lengths: tuple[int, ...]
) -> None:
    whole, _ = load(write_family(tmp_path / family, family))
    model = SeeingModel(whole)
    texts = [
        [(17 * at + 5 * row) % 500 + 9 for at in range(length + 8)]
        for row, length in enumerate(lengths)
    ]
    batch: list[Any] = []
    for text, length in zip(texts, lengths, strict=True):
        cache = kv.new_row(model)
        model(mx.array([text[:length]]), cache=cache)
        joining = kv.to_batch(cache)
        if batch:
            kv.extend(batch, joining)
        else:
            batch = joining
    for start, stop in ((0, 3), (3, 4), (4, 6), (6, 8)):
        fed = [
            text[length + start : length + stop]
            for text, length in zip(texts, lengths, strict=True)
        ]
        logits = model(mx.array(fed), cache=batch)
        for row, (text, length) in enumerate(zip(texts, lengths, strict=True)):
            plain = model(mx.array([text[: length + stop]]), cache=kv.new_row(model))
            expected = plain[0, length + start :]
            assert mx.allclose(logits[row], expected, atol=1e-3), (row, start)
