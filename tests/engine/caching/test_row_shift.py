"""A row's position shift moves with its KV."""

from __future__ import annotations

import mlx.core as mx
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.engine.caching import kv
from backend.engine.caching.layer_kv import LayerKV, RowShift
from tests.long import examples

SHIFTS = st.lists(st.integers(-500, 500), min_size=1, max_size=6)


def _row(shift: int) -> kv.RowCache:
    keys = LayerKV()
    keys.update_and_fetch(mx.ones((1, 1, 3, 4)), mx.ones((1, 1, 3, 4)))
    return [keys, RowShift(shift)]


@settings(max_examples=examples(60))
@given(SHIFTS, SHIFTS, st.data())
def test_rows_keep_their_shift_in_a_batch(
    left: list[int], right: list[int], data: st.DataObject
) -> None:
    batch = kv.BatchCache([_row(shift) for shift in left])
    batch.join([(_row(shift), 0) for shift in right])
    rows = [*left, *right]
    assert batch.layers[-1].shifts.tolist() == rows
    stay = sorted(data.draw(st.sets(st.integers(0, len(rows) - 1), min_size=1)))
    batch.leave([at for at in range(len(rows)) if at not in stay])
    shifts = [rows[at] for at in stay]
    assert [batch.extract(at)[-1].shift for at in range(len(stay))] == shifts
    assert batch.layers[-1].shifts.tolist() == shifts


def test_the_engine_treats_it_like_any_layer() -> None:
    row = _row(-7)
    copy = kv.clone(row)
    row[-1].shift = 0
    assert copy[-1].shift == -7
    assert kv.can_batch(copy)
    assert kv.can_trim(copy)
    assert kv.always_trims(copy)
    assert kv.trim(copy, 1)
    assert kv.BatchCache([copy]).extract(0)[-1].shift == -7
