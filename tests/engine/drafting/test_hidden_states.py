"""States wait for their guesser, in order and not without limit."""

from __future__ import annotations

import mlx.core as mx
import pytest

from backend.engine.drafting.hidden_states import MOST, PassedStates, UnreadStates, latest


def test_states_are_taken_once_in_the_order_in_which_they_came() -> None:
    unread = UnreadStates()
    assert unread.take() is None
    unread.add(mx.array([[1.0], [2.0]]))
    unread.add(mx.array([[3.0]]))
    assert unread.nbytes == 12
    found = unread.take()
    assert found is not None
    assert found.tolist() == [[1.0], [2.0], [3.0]]
    assert unread.take() is None


def test_the_oldest_states_are_dropped() -> None:
    unread = UnreadStates()
    for at in range(2 * MOST):
        unread.add(mx.array([[float(at)]]))
    found = unread.take()
    assert found is not None
    assert found.shape == (MOST, 1)
    assert found[0, 0] == MOST


def test_states_of_rows_that_ran_one_by_one_are_not_mistaken_for_those_of_all() -> None:
    whole, one = mx.zeros((2, 3, 4)), mx.zeros((1, 3, 4))
    assert latest([one, whole], 2) is whole
    assert latest([one, one], 2) is None
    assert latest([], 1) is None


def test_states_of_steps_without_guesses_are_handed_out_in_order() -> None:
    rows, passed = [UnreadStates() for _ in range(3)], PassedStates()
    for step in range(100):
        passed.add(mx.array([[[float(step), float(row)]] for row in range(3)]), rows)
    assert passed.nbytes + sum(own.nbytes for own in rows) == 100 * 3 * 8
    passed.flush(rows)
    assert passed.nbytes == 0
    for row, own in enumerate(rows):
        found = own.take()
        assert found is not None
        assert found.tolist() == [[step, row] for step in range(100)]


@pytest.mark.usefixtures("exact_buffers")
def test_states_hold_no_more_than_is_counted_after_others_have_left() -> None:
    mx.synchronize()
    before = mx.get_active_memory()
    rows, passed = [UnreadStates() for _ in range(16)], PassedStates()
    for step in range(40):
        states = mx.full((16, 1, 16384), step, dtype=mx.float32)
        mx.eval(states)
        passed.add(states, rows)
    passed.flush(rows)
    own = rows[3]
    del rows, states
    mx.synchronize()
    assert mx.get_active_memory() - before == pytest.approx(own.nbytes, rel=0.03)
    taken = own.take()
    assert taken is not None
    assert taken[:, 0].tolist() == list(range(40))
