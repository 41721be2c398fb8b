"""States wait for their guesser, in order and not without limit."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from backend.engine.drafting.draft_loading import Drafting
from backend.engine.drafting.drafter import LookupDrafter
from backend.engine.drafting.hidden_states import (
    MOST,
    LayerStates,
    PassedStates,
    UnreadStates,
    latest,
    stored_bytes,
)
from backend.engine.planning.plan import CacheCost
from tests.architectures.vlm_shapes import tiny_vlm_model
from tests.engine.kv_models import kv_model, words
from tests.engine.rounds import Rounds, engine_model
from tests.engine.steady_cost import peak_bytes

_SIZE = 1024
_LENGTHS = (1200, 1100)
# Attention and MLP need little memory beside the hidden states.
_NARROW = {
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 32,
}


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


def test_layers_that_run_again_have_no_states_to_read() -> None:
    """A later pass would join states of the earlier one to its own."""
    assert LayerStates(tiny_vlm_model("qwen3_5_text"), [0, 1, 2], 64).found
    assert not LayerStates(tiny_vlm_model("hrm_text"), [0, 1, 2], 64).found


@pytest.mark.usefixtures("each_order", "exact_buffers", "counted_clock")
def test_the_states_that_a_long_prefill_collects_are_charged() -> None:
    """Prompts of different lengths share a pass of many more tokens than a drafter reads."""
    network = kv_model("attention", hidden_size=_SIZE, num_hidden_layers=6, **_NARROW)
    positions = range(1, 6)
    state = 4 * _SIZE * len(positions)
    states = LayerStates(network, positions, _SIZE)
    cost = CacheCost(0, stored_bytes(state))
    drafting = Drafting(4, lambda: [LookupDrafter()], cost=cost, states=states)
    without, collecting = (_prefill_peak(network, own) for own in (None, drafting))
    assert collecting - without <= len(_LENGTHS) * cost.fixed


def _prefill_peak(network: Any, drafting: Drafting | None) -> int:
    """Return the peak bytes of the steps until each of two prompts has a token."""
    peaks: list[int] = []
    for _ in range(2):
        rounds = Rounds(
            engine_model(network, drafting=drafting, prefill_chunk=4096, prompt_cache_bytes=0)
        )
        for ticket, length in enumerate(_LENGTHS):
            rounds.submit(ticket, words(length, ticket), 1)
        peaks.append(peak_bytes(rounds.drain))
        assert not rounds.faults
    return max(peaks)
