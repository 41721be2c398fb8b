"""The guard ends repetitive sequences, whatever came before, and no others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backend.engine.events import Finished
from backend.engine.output import RepetitionGuard
from tests.engine.random_models import random_model
from tests.engine.rounds import Rounds, alone, engine_model

TOKENS = st.lists(st.integers(0, 3), max_size=60)


def _ends_at(tokens: list[int], limit: int) -> int | None:
    guard = RepetitionGuard(limit)
    return next((at for at, token in enumerate(tokens) if guard.repeats(token)), None)


@given(TOKENS, st.integers(4, 30))
def test_it_ends_when_the_last_tokens_repeat_a_sequence(tokens: list[int], limit: int) -> None:
    def repeats(end: int) -> bool:
        return any(
            all(tokens[at] == tokens[at - size] for at in range(end - limit + 1, end + 1))
            for size in range(1, end - limit + 2)
        )

    expected = next((end for end in range(limit, len(tokens)) if repeats(end)), None)
    assert _ends_at(tokens, limit) == expected


def test_different_tokens_never_end_a_sequence() -> None:
    assert _ends_at(list(range(5000)), 8) is None


def test_a_repetitive_sequence_ends_with_stop_and_reports_why() -> None:
    model = random_model("full")
    free = alone(engine_model(model), [1, 2, 3], 900, ignore_eos=True)
    rounds = Rounds(engine_model(model, repetition_guard=40))
    rounds.submit(1, [1, 2, 3], 900, ignore_eos=True)
    rounds.drain()
    finished = rounds.received[1].finished
    assert isinstance(finished, Finished)
    tokens = rounds.received[1].tokens
    assert tokens == free.tokens[: len(tokens)]
    assert len(tokens) == (_ends_at(free.tokens, 40) or 0) + 1 < 900
    assert finished.reason == "stop"
    assert finished.repeated
