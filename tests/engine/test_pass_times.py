"""The time that the executor reports for its passes."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partialmethod
from typing import Any

import pytest

from backend.engine import device
from backend.engine.executing.batch import DecodeBatch
from backend.engine.executing.choosing import Sampled
from backend.engine.executing.executor import Executor
from backend.engine.executing.executor_sequence import ExecutorSequence
from backend.engine.planning.plan import (
    DecodeTimed,
    PlannerEvent,
    Prefill,
    PrefillTimed,
    Start,
    StepPlan,
)
from backend.engine.request import GenerationRequest, RawPrompt
from tests.engine.modelled_device import BUILD, ModelledDevice, modelled
from tests.engine.random_models import random_model
from tests.engine.rounds import Rounds, engine_model
from tests.engine.test_parity import HEAVY

_STREAMS = range(1, 5)
_PAUSE = 250  # milliseconds


class Ticking:
    """A model of which every pass takes one second of a clock that otherwise stands still."""

    def __init__(self, model: Any) -> None:
        self._model, self.seconds = model, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.seconds += 1
        return self._model(*arguments, **named)


@pytest.mark.parametrize("order", ["cpu", "gpu"])
def test_each_of_two_passes_in_a_step_is_timed_separately(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU has computed the first one by the time the second one is launched."""
    monkeypatch.setattr(device, "may_wait_within_a_step", lambda: True)
    gpu = ModelledDevice(lambda rows, tokens, behind: 1.0, ahead=0.0)
    with modelled(gpu) if order == "gpu" else nullcontext():
        model = engine_model(random_model("full"))
        model.model = ticking = gpu.slow(model.model) if order == "gpu" else Ticking(model.model)
        executor = Executor(model, clock=lambda: ticking.seconds)
        timed = _two_passes(executor)
    assert [tokens for tokens, _ in timed] == [4, 40]
    assert [seconds for _, seconds in timed] == pytest.approx([1.0, 1.0], rel=0.01)


def test_the_time_of_a_step_on_a_cpu_includes_the_wait_for_its_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "may_wait_within_a_step", lambda: True)
    model = engine_model(random_model("full"), **HEAVY)
    model.model = ticking = Ticking(model.model)
    read_early = DecodeBatch.read_early

    def reading(self: DecodeBatch) -> list[Sampled]:
        ticking.seconds += 0.5
        return read_early(self)

    monkeypatch.setattr(DecodeBatch, "read_early", reading)
    monkeypatch.setattr(
        Executor, "__init__", partialmethod(Executor.__init__, clock=lambda: ticking.seconds)
    )
    rounds = Rounds(model)
    rounds.submit(1, [1, 2, 3], 8, ignore_eos=True)
    for _ in range(5):
        rounds.step()
    assert rounds.gauges.tokens_per_second == pytest.approx(1 / 1.5)


def _two_passes(executor: Executor) -> list[tuple[int, float]]:
    """The tokens and the reported seconds of two passes in one step."""
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
    return [(one.tokens, one.seconds) for one in timed]


def _seconds(rows: int, tokens: int, behind: int) -> float:
    """Of a pass on a slow GPU: 10 ms, and 4 ms for each token of a prompt."""
    return 0.01 + (0.004 * rows * tokens if tokens > 1 else 0.001 * rows)


def _streams(gpu: ModelledDevice) -> Rounds:
    """Four streams that decode, on this device; call it within `modelled`."""
    model = engine_model(random_model("full"), prefill_chunk=512, stall_ms=_PAUSE)
    model.model = gpu.slow(model.model)
    rounds = Rounds(model)
    for number in _STREAMS:
        rounds.submit(number, [number] * 12, 10_000, ignore_eos=True)
    while not all(rounds.received[number].text for number in _STREAMS):
        rounds.step()
        assert not rounds.faults
    for _ in range(4):
        rounds.step()
    gpu.passes.clear()
    return rounds


@pytest.fixture(scope="module")
def beside_streams() -> tuple[ModelledDevice, list[PlannerEvent], float]:
    """Prompts of many lengths, one after the other, beside four streams.

    Returns the device, all events, and the streams' longest gap in seconds of the device's clock.
    """
    gpu = ModelledDevice(_seconds)
    with modelled(gpu):
        rounds = _streams(gpu)
        events: list[PlannerEvent] = []
        settle = rounds.scheduler.executor.settle

        def watched(*, idle: bool) -> list[PlannerEvent]:
            found = settle(idle=idle)
            events.extend(found)
            return found

        rounds.scheduler.executor.settle = watched  # type: ignore[method-assign]
        longest, since = 0.0, dict.fromkeys(_STREAMS, gpu.now)
        texts = {number: rounds.received[number].text for number in _STREAMS}
        for number, length in enumerate((199, 37, 300, 1500, 120), 5):
            rounds.submit(number, [number] * length, 6, ignore_eos=True)
            while rounds.received[number].finished is None:
                rounds.step()
                assert not rounds.faults
                for stream in _STREAMS:
                    if rounds.received[stream].text != texts[stream]:
                        texts[stream] = rounds.received[stream].text
                        longest = max(longest, gpu.now - since[stream])
                        since[stream] = gpu.now
    return gpu, events, longest


def test_every_pass_beside_streams_is_reported_with_its_own_time(
    beside_streams: tuple[ModelledDevice, list[PlannerEvent], float],
) -> None:
    gpu, events, longest = beside_streams
    passes = [(tokens, seconds) for rows, tokens, seconds in gpu.passes if tokens > 1]
    reported = [(one.tokens, one.seconds) for one in events if isinstance(one, PrefillTimed)]
    assert [tokens for tokens, _ in reported] == [tokens for tokens, _ in passes]
    assert [seconds for _, seconds in reported] == [
        pytest.approx(seconds, rel=0.2) for _, seconds in passes
    ]
    assert longest < 3 * _PAUSE / 1000


def test_the_time_of_decode_steps_beside_prompts_contains_no_prefill(
    beside_streams: tuple[ModelledDevice, list[PlannerEvent], float],
) -> None:
    gpu, events, _ = beside_streams
    steps = [seconds for _, tokens, seconds in gpu.passes if tokens == 1]
    reported = [one.seconds for one in events if isinstance(one, DecodeTimed)]
    assert max(reported) < 1.5 * max(steps)
    assert sum(reported) == pytest.approx(sum(steps), rel=0.2)


def test_the_reported_speed_contains_no_prefill() -> None:
    gpu = ModelledDevice(_seconds)
    speeds: set[float] = set()
    with modelled(gpu):
        rounds = _streams(gpu)
        rounds.submit(5, [5] * 300, 1, ignore_eos=True)
        while rounds.received[5].finished is None:
            rounds.step()
            speeds.add(rounds.gauges.tokens_per_second)
    decode = 4 / _seconds(4, 1, 0)
    assert [min(speeds), max(speeds)] == [pytest.approx(decode, rel=0.2)] * 2


@pytest.mark.parametrize("change", ["join", "leave"])
def test_the_step_after_a_change_of_the_batch_waits_for_no_later_step(change: str) -> None:
    """The tokens that it reads are computed before the step that was launched meanwhile."""
    gpu = ModelledDevice(_seconds)
    with modelled(gpu):
        rounds = _streams(gpu)
        read = rounds.scheduler.executor.read
        left: list[float] = []  # seconds of work that the device has after each read

        def reading() -> list[Sampled]:
            sampled = read()
            left.append(gpu.free - gpu.now)
            return sampled

        rounds.scheduler.executor.read = reading  # type: ignore[method-assign]
        if change == "join":
            rounds.submit(5, [5] * 20, 100, ignore_eos=True)
            while rounds.tickets("decode") != [*_STREAMS, 5]:
                rounds.step()
        else:
            rounds.scheduler.cancel(1)
            rounds.step()
    assert not rounds.faults
    assert min(left) > 0.0


def test_the_device_does_not_wait_between_the_passes_of_a_lone_prompt() -> None:
    """The host builds each pass while the device computes the one before, which is still timed."""
    gpu = ModelledDevice(lambda rows, tokens, behind: 0.02 + 1e-4 * rows * tokens)
    with modelled(gpu):
        model = engine_model(random_model("full"), prefill_chunk=64, stall_ms=50)
        model.model = gpu.slow(model.model)
        rounds = Rounds(model)
        for number, length in enumerate((300, 2000), 1):
            gpu.passes.clear()
            began = gpu.now
            rounds.submit(number, [number] * length, 1, ignore_eos=True)
            rounds.drain()
        idle = gpu.now - began - sum(seconds for *_, seconds in gpu.passes)
    count = len(gpu.passes)
    assert count > 30
    assert idle < count * BUILD / 2
    pace = rounds.scheduler.planner.pace
    assert pace.seconds(64) == pytest.approx(0.02 + 64e-4, rel=0.2)


@pytest.mark.usefixtures("each_order")
def test_a_prompt_without_an_answer_ends_in_the_step_of_its_last_pass() -> None:
    rounds = Rounds(engine_model(random_model("full"), prefill_chunk=32))
    rounds.submit(1, [5] * 150, 1, prompt_only=True)
    while rounds.received[1].finished is None:
        rounds.step()
        assert rounds.scheduler._plan.prefill
