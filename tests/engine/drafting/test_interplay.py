"""Guesses beside everything else that a loaded model does: adapters, files of KV, little memory.

A course of requests, some of which are cancelled, is played on an engine that drafts, twice: the
second engine starts from the files that the first has written. Every answer is that of an engine
that neither drafts nor stores. The schedules of `test_parity` are in the guessers' own tests; here
prompt lookup and the draft model play them.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from backend.engine.caching import kv
from backend.engine.disk_cache.use import DiskUse
from backend.engine.drafting.batch_drafter import DraftModel, ModelDrafter
from backend.engine.drafting.draft_loading import Drafting
from backend.engine.drafting.drafter import Drafter, DraftRequest, LookupDrafter
from backend.engine.engine import Engine
from backend.engine.load_request import AdapterRequest, LoadRequest
from backend.engine.planning.draft_width import DraftWidth
from backend.engine.planning.pace import Pace
from backend.engine.planning.plan import StepPlan
from backend.engine.planning.planner import Planner
from backend.engine.request import GenerationRequest, Sampling, TokenPrompt
from tests.engine.drafting.drafters import drafter_of
from tests.engine.drafting.heads import VOCABULARY, text, write_checkpoint
from tests.engine.random_models import random_model
from tests.engine.rounds import Rounds, engine_model
from tests.engine.test_loading_adapters import write_adapter
from tests.engine.test_parity import check_schedule
from tests.engine.vision.seeing import Outcome, answer_to, asking
from tests.long import TEST_LONG

pytestmark = [pytest.mark.timeout(1200), pytest.mark.usefixtures("small_grammars")]
SCHEDULES = int(os.environ.get("GUESS_SCHEDULES", "40" if TEST_LONG else "2"))
COURSES = 5 if TEST_LONG else 1
REQUESTS = 10
PREFIX = 70  # tokens that prompts share, enough for a file


@dataclass(frozen=True)
class Drafts:
    """A model, and how to load it so that it drafts."""

    model: Path
    draft_model: str = ""
    settings: dict[str, Any] = field(default_factory=dict)


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Drafts]:
    @cache
    def written(name: str) -> Drafts:
        if name == "mtp":
            folder = tmp_path_factory.mktemp(name)
            return Drafts(write_checkpoint(folder, "mimo").path, settings={"mtp": True})
        if name in ("eagle", "dflash"):
            drafter = drafter_of("full", name)
            return Drafts(drafter.parent / "model", str(drafter))
        model = drafter_of("full", "eagle").parent / "model"
        if name == "lookup":
            return Drafts(model, settings={"prompt_lookup": True})
        return Drafts(model, str(model), {"prompt_lookup": True})

    return written


def _requests(dice: random.Random) -> list[GenerationRequest]:
    common = text(dice, PREFIX)
    found: list[GenerationRequest] = []
    for at in range(REQUESTS):
        prompt = [*common[: dice.choice([10, PREFIX])], *text(dice, dice.randrange(2, 12))]
        sampling = Sampling(
            temperature=dice.choice([0.0, 1.0]),
            seed=at,
            repetition=dice.choice([1.0, 1.0, 1.3]),
            logit_bias=dice.choice([(), ((5, 2.0),)]),
        )
        use = DiskUse(answer=dice.random() < 0.5)
        tokens = dice.choice([3, 12, 24])
        found.append(
            asking(
                TokenPrompt(tuple(prompt)),
                max_tokens=tokens,
                ignore_eos=True,
                sampling=sampling,
                disk=use,
            )
        )
    return found


async def _play(
    engine: Engine, requests: Sequence[GenerationRequest], dice: random.Random
) -> list[Outcome | None]:
    """The answers; None for requests that are cancelled after a few events."""

    async def cancelled(request: GenerationRequest, events: int) -> None:
        async with engine.submit(request) as generation:
            async for _ in generation:
                events -= 1
                if events <= 0:
                    return

    tasks: list[asyncio.Task[Any]] = []
    for request in requests:
        if dice.random() < 0.2:
            tasks.append(asyncio.create_task(cancelled(request, dice.randrange(1, 8))))
        else:
            tasks.append(asyncio.create_task(answer_to(engine, request)))
        if dice.random() < 0.4:
            await dice.choice(tasks)
    return list(await asyncio.gather(*tasks))


@pytest.mark.parametrize(
    "name", ["lookup", "model", "mtp", "eagle", "dflash"] if TEST_LONG else ["eagle"]
)
@pytest.mark.usefixtures("guesses_always")
async def test_answers_with_adapters_and_files_are_those_without_guesses(
    name: str,
    drafts: Callable[[str], Drafts],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What other tests have left in memory is not the engine's.
    left, set_limit = mx.get_active_memory(), mx.set_memory_limit
    monkeypatch.setattr(mx, "set_memory_limit", lambda limit: set_limit(left + limit))
    found = drafts(name)
    keys = mx.random.split(mx.random.key(1), 2)
    lora = {
        f"model.layers.0.mlp.down_proj.lora_{part}": 0.05 * mx.random.normal(shape, key=key)
        for part, shape, key in zip("ab", ((64, 4), (4, 32)), keys, strict=True)
    }
    write_adapter(tmp_path / "adapter", lora)
    plain = LoadRequest(
        "model",
        str(found.model),
        str(tmp_path),
        adapters=(AdapterRequest("adapter"),),
        settings={"load_trial": False},
    )
    dice = random.Random(name)
    courses = [_requests(dice) for _ in range(COURSES)]
    engine = Engine()
    engine.start()
    await engine.load(plain)
    expected = [
        await asyncio.gather(*(answer_to(engine, replace(one, disk=DiskUse())) for one in course))
        for course in courses
    ]
    await engine.stop(10)
    settings = (
        plain.settings
        | found.settings
        | {
            "prompt_cache_dir": str(tmp_path / "files"),
            "prompt_cache_mib": 1,
            "memory_limit_mib": 3,
            "parallel": 4,
        }
    )
    loading = replace(plain, draft_model=found.draft_model, settings=settings)
    reused = 0
    for _ in range(2):
        engine = Engine()
        engine.start()
        await engine.load(loading)
        for course, wanted in zip(courses, expected, strict=True):
            got = await _play(engine, course, dice)
            for one, other in zip(got, wanted, strict=True):
                assert one is None or (one.tokens, one.text) == (other.tokens, other.text)
            # How many of them ran at once, left memory for draft tokens, and found stored KV, is
            # chance: alone each drafts, and those with a common prefix find it.
            for request, other in zip(course, wanted, strict=True):
                one = await answer_to(engine, request)
                assert (one.tokens, one.text) == (other.tokens, other.text)
                reused += one.cached_tokens > 0
        while (await engine.status()).breakdown["draft_kv_cache"]:
            pass
        guessing = engine.metrics().drafting
        assert guessing is not None
        assert guessing.proposed > 20 * COURSES
        await engine.stop(10)
    assert reused > 4 * COURSES


class Stumbling:
    """A guesser that fails at a random call, for good."""

    nbytes = 0

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int] | None]:
        if self._dice.random() < 0.1:
            raise RuntimeError("a fault of this drafter's")
        return [[one.tokens[-1]] for one in requests]

    def forget(self, sequences: Collection[int]) -> None:
        """Do nothing: it keeps nothing."""


@pytest.mark.parametrize("name", ["lookup", "model", "stumbling"])
def test_every_row_gets_the_answer_that_it_gets_without_guesses(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dice = random.Random(7)
    monkeypatch.setattr(
        DraftWidth, "choose", lambda self, rows, longest, most: dice.choice([0, most // 2, most])
    )
    network = random_model("full")
    draft = DraftModel(network, VOCABULARY - 6, VOCABULARY, 120)
    drafters: dict[str, Callable[[], list[Drafter]]] = {
        "lookup": lambda: [LookupDrafter()],
        "model": lambda: [LookupDrafter(), ModelDrafter(draft, Pace(24, 250))],
        "stumbling": lambda: [Stumbling(dice), LookupDrafter()],
    }
    plain = engine_model(network, slots=8)
    cost = kv.cost(network) if name == "model" else None
    drafting = Drafting(6, drafters[name], cost=cost)
    model = engine_model(network, slots=8, drafting=drafting)
    for seed in range(SCHEDULES):
        check_schedule(model, seed, plain)
    failed = [one for one in caplog.messages if one.startswith("a drafter failed")]
    assert bool(failed) is (name == "stumbling")


@pytest.mark.parametrize(("n_draft", "most"), [(0, 12), (None, 60)])
def test_steps_without_guesses_seldom_need_a_new_plan(
    n_draft: int | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planning is a large part of a small model's step, which guesses that do not pay must spare.

    Here they are given up from the first step on.
    """

    def give_up(self: DraftWidth, rows: int, longest: int, most: int) -> int:
        self._give_up({})
        self._rested = rows, 7
        return 0

    monkeypatch.setattr(DraftWidth, "choose", give_up)
    decided: list[int] = []
    decide = Planner._decide

    def noted(self: Planner, now: float) -> StepPlan:
        decided.append(1)
        return decide(self, now)

    monkeypatch.setattr(Planner, "_decide", noted)
    model = random_model("full")
    drafting = Drafting(8, lambda: [LookupDrafter()])
    answers = []
    for served in (engine_model(model), engine_model(model, drafting=drafting)):
        decided.clear()
        rounds = Rounds(served)
        for ticket in range(3):
            rounds.submit(ticket, [3, 5, 7 + ticket], 160, ignore_eos=True, n_draft=n_draft)
        rounds.drain()
        answers.append([rounds.received[ticket].tokens for ticket in range(3)])
        assert len(answers[-1][0]) == 160
    assert answers[0] == answers[1]
    assert len(decided) < most
