"""A row's shift goes wherever its KV goes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache

from backend.engine import kv
from backend.engine.vision.row_shift import BatchShift, RowShift

SHIFTS = st.lists(st.integers(-500, 500), min_size=1, max_size=6)


@settings(max_examples=60)
@given(SHIFTS, SHIFTS, st.data())
def test_rows_keep_their_shift_through_a_batch(
    left: list[int], right: list[int], data: st.DataObject
) -> None:
    batch = RowShift.merge([RowShift(shift) for shift in left])
    batch.extend(RowShift.merge([RowShift(shift) for shift in right]))
    rows = [*left, *right]
    assert batch.shifts.tolist() == rows
    stay = sorted(data.draw(st.sets(st.integers(0, len(rows) - 1), min_size=1)))
    batch.filter(stay)
    assert batch.shifts.tolist() == [rows[at] for at in stay]
    assert [batch.extract(at).shift for at in range(len(stay))] == [rows[at] for at in stay]


def test_the_engine_takes_it_for_a_layer_like_any_other() -> None:
    row = [KVCache(), RowShift(-7)]
    copy = kv.clone(row)
    row[-1].shift = 0
    assert copy[-1].shift == -7
    assert kv.can_batch(copy)
    assert kv.can_trim(copy)
    assert kv.always_trims(copy)
    assert kv.trim(copy, 0)
    batch = kv.copies(copy, 2)
    assert isinstance(batch[-1], BatchShift)
    assert batch[-1].trim(3) == 3
    kv.keep(batch, [1])
    assert batch[-1].extract(0).shift == -7
