"""The time that the executor reports for its passes."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from backend.engine.executing.executor import Executor
from backend.engine.executing.executor_sequence import ExecutorSequence
from backend.engine.planning.plan import Prefill, PrefillTimed, Start, StepPlan
from backend.engine.request import GenerationRequest, RawPrompt
from tests.engine.random_models import random_model
from tests.engine.rounds import engine_model


class Ticking:
    """A model of which every pass takes one second of a clock that otherwise stands still."""

    def __init__(self, model: Any) -> None:
        self._model, self.seconds = model, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.seconds += 1
        return self._model(*arguments, **named)


@pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="a GPU computes later")
def test_each_of_two_passes_in_a_step_is_timed_separately() -> None:
    """The CPU has computed the first one by the time the second one is launched."""
    model = engine_model(random_model("full"))
    model.model = ticking = Ticking(model.model)
    executor = Executor(model, clock=lambda: ticking.seconds)
    prompts = {1: [1, 2, 3, 4], 2: [5] * 40}
    for number, prompt in prompts.items():
        request = GenerationRequest(str(number), RawPrompt(""))
        executor.add(ExecutorSequence(number, request, prompt, 8))
    starts = tuple(Start(number, tuple(prompt), None, 1, ()) for number, prompt in prompts.items())
    passes = tuple((Prefill(number, 0, len(prompts[number])),) for number in prompts)
    executor.launch(StepPlan(1, start=starts, prefill=passes))
    executor.read()
    events = executor.settle(idle=True)
    timed = [event for event in events if isinstance(event, PrefillTimed)]
    assert [(one.tokens, one.seconds) for one in timed] == [(4, 1.0), (40, 1.0)]
