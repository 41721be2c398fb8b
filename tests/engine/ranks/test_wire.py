"""Messages between ranks survive serialisation, and other bytes are refused."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.engine.executing.score_plan import Continuation, ScorePlan
from backend.engine.ranks.wire import (
    Abandon,
    Add,
    Agreed,
    Failed,
    Join,
    LoadReport,
    LoadShard,
    Message,
    Plain,
    Signal,
    Step,
    WireError,
    decode,
    encode,
    name_of,
)
from tests.engine.planning.test_planner import random_course

SCORES = ScorePlan([4], (Continuation((5, 6), 1), Continuation()))
MESSAGES: list[Message] = [
    *Signal, Abandon(3),
    LoadShard(1, {"model": "m", "settings": {"parallel": 2, "dtype": "auto"}}, 10.0),
    Agreed(2, ({"a": 1}, {"a": [1, 2]})),
    Add(1, (1, 2, 3), 9),
    Add(2, (1, 2), 9, prompt_logprobs=True),
    Add(3, (4,), 9, scores=SCORES, side_by_side=True),
    Plain((1, 2)),
    Join(1, 2, {"mlx": "0.32.4"}),
    LoadReport(2, {"cost": {"windowed": [[1, 2]]}}),
    LoadReport(2, refusal="its weights take too much"),
    Failed("decode: ValueError"),
]  # fmt: skip


def plain(value: Any) -> Any:
    """The fields of a message, with every sequence as a list."""
    if dataclasses.is_dataclass(value):
        parts = {one.name: plain(getattr(value, one.name)) for one in dataclasses.fields(value)}
        return type(value).__name__, parts
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return value


@pytest.mark.parametrize("message", MESSAGES, ids=name_of)
def test_a_message_survives_serialisation(message: Message) -> None:
    assert plain(decode(encode(message))) == plain(message)


def test_every_plan_survives_serialisation() -> None:
    plans = 0
    for seed in random.Random(2).sample(range(100_000), 20):
        for _, _, plan in random_course(seed).course:
            assert plain(decode(encode(Step(plan)))) == plain(Step(plan))
            plans += 1
    assert plans > 200


def test_a_plan_that_only_decodes_is_small() -> None:
    course = random_course(0).course
    small = [plan for _, _, plan in course if plan.only_decodes and len(plan.decode) == 1]
    assert small
    assert max(len(encode(Step(plan))) for plan in small if not plan.join) < 100


@given(st.binary(max_size=64))
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data)


@pytest.mark.parametrize(
    "text",
    [
        "Step {}",
        'Step {"plan":{"number":"1"}}',
        'Step {"plan":{"number":1,"dance":true}}',
        'Clear {"file":"/etc/passwd"}',
        'Signal {"file":"/etc/passwd"}',
        'Signal "dance"',
        "Unknown {}",
        "Agreed " + "[" * 100_000,
    ],
)
def test_a_message_with_other_fields_is_refused(text: str) -> None:
    with pytest.raises(WireError):
        decode(text.encode())
