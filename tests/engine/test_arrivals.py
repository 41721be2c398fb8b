"""Short prompts that arrive together start together, and none waits for one that never arrives."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from backend.engine import device, worker
from backend.engine.commands import Cancel, Submit
from backend.engine.engine import Engine
from backend.engine.events import Finished
from backend.engine.load_request import LoadRequest
from backend.engine.planning.plan import StepPlan
from backend.engine.planning.planner import Planner
from backend.engine.prompting.prompts import PromptBuilder
from backend.engine.request import GenerationRequest, RawPrompt, Sampling
from backend.engine.scheduler import Scheduler
from backend.engine.worker import Worker
from tests.engine.random_models import random_model
from tests.engine.rounds import Rounds, alone, engine_model
from tests.polling import until

pytestmark = pytest.mark.usefixtures("each_order")

MODEL = Path(__file__).parents[1] / "models" / "tiny_text"
PROMPTS = [f"{word} is a word" for word in ("One", "Two", "Three", "Four", "Five")]


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """The plans of all steps; the first prompt waits for the others without a time limit."""
    made: list[StepPlan] = []
    plan = Planner.plan

    def watched(self: Planner, now: float, events: Any) -> StepPlan:
        made.append(plan(self, now, events))
        return made[-1]

    monkeypatch.setattr(Planner, "plan", watched)
    monkeypatch.setattr(worker, "_GATHER_SECONDS", 3600.0)
    return made


@asynccontextmanager
async def loaded() -> AsyncIterator[Engine]:
    engine = Engine()
    engine.start()
    try:
        await engine.load(LoadRequest("tiny", str(MODEL)))
        yield engine
    finally:
        await engine.stop(10)


async def _answer(engine: Engine, prompt: str) -> list[Any]:
    request = GenerationRequest(prompt, RawPrompt(prompt), Sampling(), max_tokens=4)
    async with engine.submit(request) as generation:
        return [event async for event in generation]


async def test_prompts_that_arrive_together_start_in_one_step(
    plans: list[StepPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    build, announce, submit = PromptBuilder.build, Worker.announce, Scheduler.submit
    arrived, first_taken = threading.Event(), threading.Event()

    def waiting(self: Any, prompt: Any, *rest: Any, **named: Any) -> Any:
        assert (arrived if prompt.text == PROMPTS[0] else first_taken).wait(60)
        return build(self, prompt, *rest, **named)

    def watched(self: Any, command: Any) -> None:
        submit(self, command)
        first_taken.set()

    def counted(self: Worker, ticket: int) -> None:
        announce(self, ticket)
        if len(self._announced) == len(PROMPTS):
            arrived.set()

    async with loaded() as engine:
        monkeypatch.setattr(PromptBuilder, "build", waiting)
        monkeypatch.setattr(Scheduler, "submit", watched)
        monkeypatch.setattr(Worker, "announce", counted)
        monkeypatch.setattr(worker, "_GATHER_SECONDS", 60.0)  # the threads may be slow
        plans.clear()
        answers = await asyncio.gather(*(_answer(engine, prompt) for prompt in PROMPTS))
    assert all(isinstance(events[-1], Finished) for events in answers)
    starts = [len(plan.start) for plan in plans if plan.start]
    assert starts == [len(PROMPTS)]


def test_a_command_is_not_missed_as_its_announcement_is_withdrawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Worker(lambda _: None, lambda _: None)

    class Inbox(queue.Queue[Any]):
        """The command comes immediately after the queue was found to be empty."""

        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            try:
                return super().get(block, timeout)
            except queue.Empty:
                self.put(Cancel(1))
                made.withdraw(1)
                raise

    monkeypatch.setattr(Worker, "_only_waiting", True)
    monkeypatch.setattr(made, "_inbox", Inbox())
    made.announce(1)
    made._gather_until = time.monotonic() + 60
    assert made._next_command(block=False) == Cancel(1)


def test_a_prompt_waits_only_if_another_has_just_come(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Worker(lambda _: None, lambda _: None)
    made._scheduler = Rounds(engine_model(random_model("full"))).scheduler
    waits = []
    for ticket, now in enumerate((100.0, 100.2, 100.24, 100.3), 1):
        request = GenerationRequest(str(ticket), RawPrompt(""))
        monkeypatch.setattr(time, "monotonic", lambda now=now: now)
        made._handle(Submit(0, ticket, request, [1, 2, 3], 4))
        waits.append(made._linger_until > now)
    assert waits == [False, False, True, False]


def _rounds_after(first_limit: int) -> Rounds:
    """The rounds in which one of several prompts was completed, while the others arrived."""
    rounds = Rounds(engine_model(random_model("full")))
    rounds.submit(1, [1, 2, 3], 1)
    rounds.drain()  # so that the duration of a pass is known
    rounds.more = True
    rounds.submit(2, [2, 3, 4], first_limit, ignore_eos=True)
    rounds.step()
    rounds.more = False
    return rounds


def test_the_streams_of_a_burst_begin_together() -> None:
    rounds = _rounds_after(9)
    for ticket in (3, 4, 5):
        rounds.submit(ticket, [ticket, 3, 4], 9, ignore_eos=True)
    begun = []
    while rounds.scheduler.busy:
        begun.append([len(rounds.received[ticket].tokens) for ticket in (2, 3, 4, 5)])
        rounds.step()
    together = next(counts for counts in begun if any(counts))
    assert min(together) > 0
    for ticket in (2, 3, 4, 5):
        expected = alone(rounds.model, [ticket, 3, 4], 9, ignore_eos=True)
        assert rounds.received[ticket].tokens == expected.tokens


def test_a_first_token_is_delivered_at_once_if_nobody_follows() -> None:
    rounds = _rounds_after(9)
    assert not rounds.received[2].tokens
    rounds.step()
    assert rounds.received[2].tokens


def test_an_answer_of_one_token_does_not_wait_for_a_burst() -> None:
    assert _rounds_after(1).received[2].finished is not None


@pytest.mark.parametrize("leaver", [2, 3])
def test_a_sequence_of_a_burst_can_leave(leaver: int) -> None:
    rounds = _rounds_after(9)
    for ticket in (3, 4, 5):
        rounds.submit(ticket, [ticket, 3, 4], 9, ignore_eos=True)
    rounds.scheduler.cancel(leaver)
    rounds.drain()
    for ticket in {2, 3, 4, 5} - {leaver}:
        expected = alone(rounds.model, [ticket, 3, 4], 9, ignore_eos=True)
        assert rounds.received[ticket].tokens == expected.tokens


async def test_the_load_has_measured_how_long_passes_take(
    plans: list[StepPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a load that has run prompts, the first request has passes as long as later requests."""
    monkeypatch.setattr(device, "warm_up_tokens", lambda *_: 512)
    async with loaded() as engine:
        await asyncio.to_thread(until, lambda: engine._worker._later is None)
        plans.clear()
        await _answer(engine, "word " * 300)
    sizes = [part.end - part.start for plan in plans for group in plan.prefill for part in group]
    assert sizes[0] > 64


async def test_a_refused_or_cancelled_prompt_delays_no_other(
    plans: list[StepPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    build = PromptBuilder.build
    leaver: list[asyncio.Task[Any]] = []

    def failing(self: Any, prompt: Any, *rest: Any, **named: Any) -> Any:
        if "Three" in prompt.text:
            raise RuntimeError("injected")
        if "Four" in prompt.text:
            leaver[0].get_loop().call_soon_threadsafe(leaver[0].cancel)
        return build(self, prompt, *rest, **named)

    monkeypatch.setattr(PromptBuilder, "build", failing)
    async with loaded() as engine:
        tasks = [asyncio.ensure_future(_answer(engine, prompt)) for prompt in PROMPTS]
        leaver.append(tasks[3])
        answers = await asyncio.gather(*tasks, return_exceptions=True)
    ended = [isinstance(answer, list) for answer in answers]
    assert ended == [True, True, False, ended[3], True]
