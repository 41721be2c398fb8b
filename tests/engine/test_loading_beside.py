"""A load beside running streams: they get a step between its stages, and survive its failure."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from backend.engine import worker
from backend.engine.constraints.compiler import ConstraintCompiler
from backend.engine.engine import Engine
from backend.engine.errors import Cancelled, ModelRejected, Overloaded
from backend.engine.events import Event, Finished, TextDelta
from backend.engine.executing import warm_up
from backend.engine.load_request import LoadRequest
from backend.engine.loading import loader, text_builder
from backend.engine.loading.stages import Stages
from backend.engine.request import GenerationRequest, RawPrompt, Sampling
from backend.engine.scheduler import Scheduler
from common.machine_memory import own_memory
from tests.engine.loads import at_once
from tests.engine.random_models import random_model
from tests.engine.rounds import engine_model
from tests.engine.vision.seeing import answer_to, asking

MODELS = Path(__file__).parents[1] / "models"
TEXT, VISION = LoadRequest("text", str(MODELS / "tiny_text")), MODELS / "tiny_vision"
DRAWN = Sampling(temperature=1.0, seed=1)
ENDLESS = GenerationRequest("endless", RawPrompt("One"), DRAWN, ignore_eos=True)


@asynccontextmanager
async def loaded() -> AsyncIterator[Engine]:
    """An engine with a model."""
    engine = Engine()
    engine.start()
    try:
        await engine.load(TEXT)
        yield engine
    finally:
        await engine.stop(10)


@asynccontextmanager
async def streaming() -> AsyncIterator[tuple[Engine, AsyncIterator[Event]]]:
    """An engine with a running answer that never ends."""
    engine = Engine()
    engine.start()
    try:
        await engine.load(LoadRequest("first", TEXT.model_file, context_size=1 << 20))
        async with engine.submit(ENDLESS) as generation:
            events = aiter(generation)
            await anext(events)
            yield engine, events
    finally:
        await engine.stop(10)


def watch_stages(monkeypatch: pytest.MonkeyPatch, on_engine: Callable[[int], None]) -> None:
    """Call `on_engine` with its number at the beginning of each stage on the engine thread."""
    load: Any = loader.load

    def watched(*arguments: Any) -> Stages[Any]:
        stages, count = load(*arguments), 0
        try:
            while True:
                place = next(stages)
                yield place
                if place == "engine":
                    on_engine(count)
                    count += 1
        except StopIteration as end:
            return end.value
        finally:
            stages.close()

    monkeypatch.setattr(loader, "load", watched)


@pytest.mark.parametrize("model", [MODELS / "tiny_text", VISION], ids=lambda path: path.name)
async def test_a_running_stream_gets_a_step_between_all_stages(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with streaming() as (engine, events):
        running = engine._worker._scheduler
        step, steps, at_stage = Scheduler.step, [0], []

        def counted(self: Scheduler) -> None:
            steps[0] += self is running
            step(self)

        monkeypatch.setattr(Scheduler, "step", counted)
        watch_stages(monkeypatch, lambda _: at_stage.append(steps[0]))
        await engine.load(LoadRequest("second", str(model)))
        assert len(at_stage) > 5
        assert all(one < following for one, following in pairwise(at_stage))
        first = await anext(events)  # all text that has not been read yet
        assert isinstance(first, TextDelta)
        assert len(first.joined) >= len(at_stage) - 1  # the first token was read before the load
        with pytest.raises(Cancelled, match="another model was loaded"):
            await anext(events)


async def test_an_abandoned_load_ends_at_the_next_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with streaming() as (engine, events):
        stages: list[int] = []
        loop = asyncio.get_running_loop()

        def leave(stage: int) -> None:
            stages.append(stage)
            if stage == 12:
                loop.call_soon_threadsafe(load.cancel)
                assert engine._abandoned.wait(60)

        watch_stages(monkeypatch, leave)
        before = (await engine.status()).breakdown["mlx_active"]
        load = asyncio.ensure_future(engine.load(LoadRequest("second", str(VISION))))
        with pytest.raises(asyncio.CancelledError):
            await load
        assert stages == list(range(13))
        assert not isinstance(await anext(events), Finished)
        assert engine.require_model().name == "first"
        weights = sum(path.stat().st_size for path in VISION.glob("*.safetensors"))
        assert (await engine.status()).breakdown["mlx_active"] < before + weights // 2


async def test_a_load_with_files_that_never_answer_is_abandoned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with streaming() as (engine, events):
        load, reading, answers = loader.load, threading.Event(), threading.Event()
        closed = asyncio.Event()
        loop = asyncio.get_running_loop()

        def stuck(*_: Any) -> Stages[Any]:
            try:
                reading.set()
                assert answers.wait(60)
                yield "engine"
            finally:
                loop.call_soon_threadsafe(closed.set)

        monkeypatch.setattr(loader, "load", stuck)
        for _ in range(4):
            reading.clear()
            waiting = asyncio.ensure_future(engine.load(TEXT))
            await asyncio.to_thread(reading.wait)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert engine.require_model().name == "first"
        with pytest.raises(Overloaded, match="4 cancelled loads are"):
            await engine.load(TEXT)
        assert not isinstance(await anext(events), Finished)
        monkeypatch.setattr(loader, "load", load)
        answers.set()
        await closed.wait()
        await engine.status()  # the engine thread runs it after those loads have ended
        await engine.load(LoadRequest("second", TEXT.model_file))
        assert engine.require_model().name == "second"


@pytest.mark.parametrize("stage", [3, 12, 20])
async def test_a_load_that_fails_at_any_stage_affects_neither_streams_nor_limits(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with streaming() as (engine, events):

        def fail(at: int) -> None:
            if at == stage:
                raise ModelRejected("it is broken")

        limits: list[int] = []
        monkeypatch.setattr(mx, "set_memory_limit", limits.append)
        monkeypatch.setattr(warm_up, "_SECONDS", 1e9)  # so that the load has enough stages
        watch_stages(monkeypatch, fail)
        with pytest.raises(ModelRejected, match="broken"):
            await engine.load(LoadRequest("second", str(VISION)))
        assert not isinstance(await anext(events), Finished)
        assert engine.require_model().name == "first"
        assert limits == []


async def test_what_a_load_leaves_for_later_is_done_only_while_nothing_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running: list[int] = []
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    def later(*_: Any) -> Stages[None]:
        for _step in range(3):
            yield "engine"
            running.append(engine.metrics().running)
        loop.call_soon_threadsafe(ended.set)

    monkeypatch.setattr(worker, "_QUIET_SECONDS", 0.0)
    monkeypatch.setattr(text_builder, "_later", later)
    engine = Engine()
    engine.start()
    try:
        await engine.load(TEXT)
        async with engine.submit(ENDLESS) as generation:
            events = aiter(generation)
            for _ in range(20):
                await anext(events)
        await asyncio.wait_for(ended.wait(), 60)
    finally:
        await engine.stop(10)
    assert running == [0, 0, 0]


async def test_a_fault_in_the_rest_of_a_load_ends_only_that(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    def later(*_: Any) -> Stages[None]:
        yield "engine"
        loop.call_soon_threadsafe(ended.set)
        raise ValueError("secret")

    monkeypatch.setattr(worker, "_QUIET_SECONDS", 0.0)
    monkeypatch.setattr(text_builder, "_later", later)
    async with loaded() as engine:
        await asyncio.wait_for(ended.wait(), 60)
        assert (await answer_to(engine, asking("word"))).tokens
    assert "the remaining work of a load failed" in caplog.text


async def test_the_rest_of_a_load_ends_with_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def later(*_: Any) -> Stages[None]:
        yield "engine"
        raise AssertionError("the model is gone")

    monkeypatch.setattr(worker, "_QUIET_SECONDS", 3600.0)
    monkeypatch.setattr(text_builder, "_later", later)
    async with loaded() as engine:
        assert engine._worker._later is not None
        await engine.free()
        assert engine._worker._later is None


async def test_grammars_are_ready_before_the_first_one_if_there_is_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The load does not wait for them."""
    ready, load_ended = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    own = ConstraintCompiler.prepare

    def prepare(self: ConstraintCompiler) -> None:
        assert load_ended.wait(60)
        own(self)
        loop.call_soon_threadsafe(ready.set)

    monkeypatch.setattr(ConstraintCompiler, "prepare", prepare)
    async with loaded():
        load_ended.set()
        await asyncio.wait_for(ready.wait(), 60)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc only")
async def test_a_load_returns_freed_memory_between_blocks_in_use() -> None:
    blocks = [bytearray(64 << 10) for _ in range(3000)]
    kept = blocks[::32]
    full = own_memory()
    del blocks
    async with loaded():
        assert own_memory() < full - (100 << 20)
    assert kept


@pytest.mark.parametrize("kind", ["full", "window", "hybrid", "recurrent"])
@pytest.mark.parametrize(("seconds", "longest"), [(1e9, 128), (0.0, 8)])
def test_the_warm_up_runs_a_prompt_a_token_and_a_batch_if_there_is_time(
    kind: str, seconds: float, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(kind)
    seen: set[tuple[int, ...]] = set()
    call = type(model).__call__

    def shown(self: Any, inputs: mx.array, *arguments: Any, **named: Any) -> Any:
        seen.add(inputs.shape)
        return call(self, inputs, *arguments, **named)

    engine = engine_model(model, prefill_chunk=256)
    monkeypatch.setattr(warm_up, "_SECONDS", seconds)
    monkeypatch.setattr(type(model), "__call__", shown)
    at_once(warm_up.warm_up(engine, 256))
    most = max(tokens for _, tokens in seen)
    if seconds:
        assert {(1, 1), (2, 1)} <= seen
        assert most >= longest
    else:
        assert {rows for rows, _ in seen} == {1}
        assert most <= longest


def test_a_model_that_fails_in_its_warm_up_is_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = random_model("full")
    engine = engine_model(model)

    def broken(*_: Any, **__: Any) -> Any:
        raise ValueError("secret")

    monkeypatch.setattr(type(model), "__call__", broken)
    at_once(warm_up.warm_up(engine, 64))
    assert "warm-up: " in caplog.text
