"""The engine as the servicer uses it: an event loop on one side, the real thread on the other."""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import json
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import soundfile

from backend.engine import engine as engine_module
from backend.engine.commands import Submit
from backend.engine.engine import Engine
from backend.engine.engine_state import EngineState
from backend.engine.errors import (
    Cancelled,
    EngineFailed,
    InvalidRequest,
    ModelRejected,
    NotLoaded,
    Overloaded,
    ShuttingDown,
)
from backend.engine.events import Event, Finished, Progress, TextDelta
from backend.engine.load_request import LoadRequest
from backend.engine.prompting.prompts import PromptBuilder
from backend.engine.request import ChatPrompt, GenerationRequest, RawPrompt, Sampling
from backend.engine.scheduler import Scheduler
from tests.engine.loading_models import write_model
from tests.tasks import begun

# Sampled, because the best token of a random model may be half a character for ever.
DRAWN = Sampling(temperature=1.0, seed=1)
ENDLESS = GenerationRequest("endless", RawPrompt("a b c"), DRAWN, ignore_eos=True)


pytestmark = pytest.mark.usefixtures("each_order")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_model(folder, max_position_embeddings=100_000)


@asynccontextmanager
async def _engine(model: Path | None = None, **settings: Any) -> AsyncIterator[Engine]:
    engine = Engine()
    engine.start()
    try:
        if model is not None:
            await engine.load(LoadRequest("m", str(model), settings=settings))
        yield engine
    finally:
        await engine.stop(10)


async def _all(engine: Engine, request: GenerationRequest) -> list[Progress | TextDelta | Finished]:
    async with engine.submit(request) as generation:
        return [
            event
            async for event in generation
            if isinstance(event, Progress | TextDelta | Finished)
        ]


def _text(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


@contextmanager
def _file_thread_busy(engine: Engine) -> Iterator[None]:
    """Let no load read files, however slow the rest of the test is."""
    go = threading.Event()
    engine._files.submit(go.wait)
    try:
        yield
    finally:
        go.set()


async def _serves(engine: Engine) -> None:
    events = await _all(
        engine, GenerationRequest("1", RawPrompt("a"), max_tokens=3, ignore_eos=True)
    )
    assert events[-1].usage.completion_tokens == 3


async def test_one_request_from_submit_to_the_last_event(model: Path) -> None:
    async with _engine(model) as engine:
        request = GenerationRequest("1", RawPrompt("a b c"), max_tokens=7, ignore_eos=True)
        events = await _all(engine, request)
        assert isinstance(events[-1], Finished)
        assert events[-1].usage.completion_tokens == 7
        assert (await engine.status()).state is EngineState.READY


async def test_nothing_is_served_before_and_during_a_load(model: Path) -> None:
    async with _engine() as engine:
        assert (await engine.status()).state is EngineState.EMPTY
        with pytest.raises(NotLoaded):
            engine.submit(ENDLESS)
        with _file_thread_busy(engine):
            load = await begun(engine.load(LoadRequest("m", str(model))))
            assert (await engine.status()).state is EngineState.LOADING
            for ask in (lambda: engine.submit(ENDLESS), engine.require_model):
                with pytest.raises(NotLoaded, match="in progress"):
                    ask()
        await load
        assert engine.require_model().name == "m"


async def test_the_model_serves_new_requests_while_another_one_loads(model: Path) -> None:
    async with _engine(model) as engine:
        with _file_thread_busy(engine):
            load = await begun(engine.load(LoadRequest("n", str(model))))
            assert (await engine.status()).state is EngineState.LOADING
            await _serves(engine)
            assert engine.require_model().name == "m"
            assert not load.done()
        await load
        assert engine.require_model().name == "n"
        await _serves(engine)


async def test_two_concurrent_loads_run_one_after_the_other(model: Path) -> None:
    async with _engine() as engine:
        await asyncio.gather(*(engine.load(LoadRequest(n, str(model))) for n in ("a", "b", "c")))
        assert (engine.loaded and engine.loaded.name) == "c"
        await _serves(engine)


async def test_a_failed_load_keeps_the_model_and_its_running_rows(
    model: Path, tmp_path: Path
) -> None:
    async with _engine(model) as engine, engine.submit(ENDLESS) as generation:
        events = aiter(generation)
        await anext(events)
        with pytest.raises(ModelRejected):
            await engine.load(LoadRequest("empty", str(tmp_path)))
        assert not isinstance(await anext(events), Finished)
        assert engine.require_model().name == "m"


async def test_an_abandoned_load_changes_nothing(model: Path) -> None:
    async with _engine(model) as engine:
        load = await begun(engine.load(LoadRequest("other", str(model))))
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        assert engine.require_model().name in ("m", "other")
        await _serves(engine)


async def test_free_and_another_load_end_running_rows(model: Path) -> None:
    async with _engine(model) as engine:
        for end in (lambda: engine.load(LoadRequest("again", str(model))), engine.free):
            async with engine.submit(ENDLESS) as generation:
                events = aiter(generation)
                await anext(events)
                await end()
                with pytest.raises(Cancelled):
                    async for _ in events:
                        pass
        with pytest.raises(NotLoaded):
            engine.submit(ENDLESS)
        assert await engine.free() is False


async def test_free_releases_the_memory(model: Path) -> None:
    async with _engine() as engine:
        gc.collect()
        before = mx.get_active_memory()
        for _ in range(3):
            await engine.load(LoadRequest("m", str(model)))
            await _all(engine, GenerationRequest("1", RawPrompt("a " * 60), max_tokens=30))
            assert mx.get_active_memory() > before + 10_000
            await engine.free()
            gc.collect()
            assert mx.get_active_memory() <= before + 1_000


@pytest.mark.usefixtures("exact_buffers")
async def test_status_is_consistent_while_many_requests_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine thread measures between two steps; here it takes one step for each status."""
    asked, step = threading.Semaphore(0), Scheduler.step

    def step_if_asked(scheduler: Scheduler) -> None:
        asked.acquire()
        step(scheduler)

    wide = write_model(tmp_path, hidden_size=1024, head_dim=128, max_position_embeddings=100_000)
    gc.collect()
    before = mx.get_active_memory()
    async with _engine(wide, parallel=16) as engine:
        answers = [
            asyncio.create_task(_all(engine, replace(ENDLESS, prompt=prompt, max_tokens=tokens)))
            for prompt, tokens in ((RawPrompt("a b " * 9 * n), 20 + 5 * n) for n in range(1, 17))
        ]
        monkeypatch.setattr(Scheduler, "step", step_if_asked)
        looks: list[dict[str, int]] = []
        while not all(answer.done() for answer in answers):
            asked.release()
            looks.append((await engine.status()).breakdown)
        asked.release(1000)
        for answer in answers:
            assert isinstance(answer.result()[-1], Finished)
    for look in looks:
        held = look.pop("mlx_active") - before
        look.pop("mlx_cache")
        assert sum(look.values()) == pytest.approx(held, rel=0.05)
    assert len(looks) > 100  # the longest answer has as many steps
    assert len({look["kv_cache"] for look in looks}) > 3


async def test_status_does_not_wait_for_a_step_if_a_recent_measurement_is_known(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, release = threading.Event(), threading.Event()
    step = Scheduler.step

    def held(scheduler: Scheduler) -> None:
        entered.set()
        release.wait()
        step(scheduler)

    async with _engine(model) as engine:
        generation = engine.submit(ENDLESS)
        await anext(aiter(generation))
        measured = (await engine.status()).breakdown
        monkeypatch.setattr("backend.engine.engine._MEASURE_SECONDS", None)
        monkeypatch.setattr(Scheduler, "step", held)
        await asyncio.to_thread(entered.wait)
        try:
            assert (await engine.status()).breakdown == measured
        finally:
            release.set()
            generation.cancel()


async def test_the_queue_is_bounded_and_cancelling_makes_room(model: Path) -> None:
    async with _engine(model, parallel=1, max_queue=2) as engine:
        admitted = [engine.submit(ENDLESS) for _ in range(3)]
        with pytest.raises(Overloaded, match="3 requests"):
            engine.submit(ENDLESS)
        with pytest.raises(Overloaded, match="3 requests"):
            engine.refuse_when_full()
        admitted[1].cancel()
        engine.refuse_when_full()
        admitted.append(engine.submit(ENDLESS))
        for generation in admitted:
            generation.cancel()
        assert engine.metrics().queued <= 1
        await _serves(engine)


async def test_recordings_are_counted_until_they_are_done(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(16_000), 16_000, format="WAV")
    second = base64.b64encode(file.getvalue()).decode()
    monkeypatch.setattr(engine_module, "_MOST_RECORDINGS", 100_000)
    async with _engine(model) as engine:
        async with engine.recording(second) as samples:
            assert len(samples) == 16_000
            with pytest.raises(Overloaded, match="the recordings of other requests take"):
                async with engine.recording(second):
                    pass
        async with engine.recording(second):
            pass


async def test_the_reader_of_a_cancelled_request_gets_an_error(model: Path) -> None:
    async with _engine(model) as engine, engine.submit(ENDLESS) as generation:
        await anext(aiter(generation))
        generation.cancel()
        with pytest.raises(Cancelled):
            async for _ in generation:
                pass


async def test_a_slow_reader_gets_the_same_text_in_fewer_pieces(model: Path) -> None:
    request = GenerationRequest("1", RawPrompt("a b"), DRAWN, max_tokens=60, ignore_eos=True)
    async with _engine(model) as engine:
        eager = await _all(engine, request)
        async with engine.submit(request) as generation:
            await _all(engine, replace(request, max_tokens=200))
            assert generation.over
            late = [event async for event in generation]
        assert _text(late) == _text(eager)
        assert len(late) == 2


async def test_prompts_that_cannot_be_served_are_refused_with_the_reason(model: Path) -> None:
    async with _engine(model) as engine:
        size = engine.require_model().context_size
        long = GenerationRequest("1", RawPrompt("a b " * size))
        with pytest.raises(InvalidRequest, match=f"tokens > {size - 1} maximum"):
            await _all(engine, long)
        with pytest.raises(InvalidRequest, match=r"tokens\[1\] is 999999"):
            await engine.detokenize([1, 999_999])
        await _serves(engine)


async def test_messages_without_a_chat_template_are_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((model / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    async with _engine(model) as engine:
        chat = GenerationRequest("1", ChatPrompt(({"role": "user", "content": "Hi"},)))
        with pytest.raises(InvalidRequest, match="no chat template"):
            await _all(engine, chat)
        await _serves(engine)


async def test_a_templates_own_refusal_reaches_the_client(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    (model / "chat_template.jinja").write_text(
        "{{ raise_exception('roles must alternate') if messages|length > 1 else 'a' }}"
    )
    async with _engine(model) as engine:
        turn = {"role": "user", "content": "Hi"}
        turns = (turn, {"role": "assistant", "content": "Hello"}, turn)
        with pytest.raises(InvalidRequest, match="roles must alternate"):
            await _all(engine, GenerationRequest("1", ChatPrompt(turns)))


async def test_there_is_exactly_one_bos_token(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    config = json.loads((model / "tokenizer_config.json").read_text())
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    bos = next(iter(tokenizer["model"]["vocab"]))
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": bos}))
    (model / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    async with _engine(model) as engine:
        alone = len(await engine.tokenize("b c"))
        chat = ChatPrompt(({"role": "user", "content": "b c"},))
        counts = []
        for prompt in (chat, RawPrompt(f"{bos}b c")):
            events = await _all(engine, GenerationRequest("1", prompt, max_tokens=1))
            counts.append(events[-1].usage.prompt_tokens)
        assert counts == [alone + 1] * 2


async def test_stop_abandons_a_load(model: Path) -> None:
    async with _engine() as engine:
        load = await begun(engine.load(LoadRequest("m", str(model))))
        await engine.stop(10)
        with pytest.raises((Cancelled, ShuttingDown, RuntimeError, asyncio.CancelledError)):
            await asyncio.wait_for(load, 60)


async def test_stop_refuses_a_free_that_waits_for_a_load(model: Path) -> None:
    """The engine thread has ended by then and would not answer."""
    async with _engine() as engine:
        load = await begun(engine.load(LoadRequest("m", str(model))))
        free = await begun(engine.free())
        await engine.stop(10)
        await asyncio.wait({load})
        with pytest.raises(ShuttingDown):
            await asyncio.wait_for(free, 60)


async def test_stop_refuses_texts_that_wait_to_be_tokenised(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begins, goes_on = threading.Event(), threading.Event()

    def wait(builder: PromptBuilder, text: str) -> list[int]:
        begins.set()
        goes_on.wait()
        return []

    async with _engine(model) as engine:
        monkeypatch.setattr(PromptBuilder, "tokenize", wait)
        calls = [await begun(engine.tokenize("a")) for _ in range(2)]
        await asyncio.to_thread(begins.wait)
        try:
            await engine.stop(10)
            for call in calls:
                with pytest.raises(ShuttingDown):
                    await asyncio.wait_for(call, 60)
        finally:
            goes_on.set()


async def test_stop_ends_all_requests_and_refuses_new_ones(model: Path) -> None:
    async with _engine(model) as engine:
        generation = engine.submit(ENDLESS)
        await anext(aiter(generation))
        await engine.stop(10)
        with pytest.raises(ShuttingDown):
            async for _ in generation:
                pass
        for refused in (lambda: engine.submit(ENDLESS), engine.require_model):
            with pytest.raises((ShuttingDown, NotLoaded)):
                refused()


async def test_a_fatal_error_is_reported(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Scheduler) -> None:
        raise RuntimeError("injected")

    async with _engine(model) as engine:
        monkeypatch.setattr(Scheduler, "step", broken)
        running = await begun(_all(engine, ENDLESS))
        assert "injected" in await engine.failed()
        assert (await engine.status()).state is EngineState.FAILED
        with pytest.raises(ShuttingDown):
            engine.submit(ENDLESS)
        await engine.stop(0)
        with pytest.raises(ShuttingDown, match="send the request again"):
            await running


async def test_a_fault_at_the_arrival_of_a_request_ends_no_other(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _engine(model) as engine, engine.submit(ENDLESS) as running:
        await anext(aiter(running))
        with monkeypatch.context() as patch:

            def broken(_: Scheduler, command: Submit) -> None:
                raise RuntimeError("injected")

            patch.setattr(Scheduler, "submit", broken)
            failing = asyncio.ensure_future(_all(engine, ENDLESS))
            failed = asyncio.ensure_future(engine.failed())
            await asyncio.wait({failing, failed}, return_when=asyncio.FIRST_COMPLETED)
        assert not failed.done()
        with pytest.raises(EngineFailed, match="RuntimeError"):
            await failing
        failed.cancel()
        await _serves(engine)
        assert not running.over


async def test_equal_seeds_repeat_and_others_differ(model: Path) -> None:
    async with _engine(model) as engine:

        async def draw(seed: int) -> str:
            sampling = Sampling(temperature=1.0, seed=seed)
            request = GenerationRequest(
                "1", RawPrompt("a"), sampling, max_tokens=20, ignore_eos=True
            )
            return _text(await _all(engine, request))

        seeds = [0, 1, 2, 3]
        alone = [await draw(seed) for seed in seeds]
        assert alone == list(await asyncio.gather(*map(draw, seeds)))
        assert len(set(alone)) == len(seeds)


async def test_a_free_whose_caller_disconnects_is_still_carried_out(model: Path) -> None:
    async with _engine(model) as engine, engine.submit(ENDLESS) as generation:
        events = aiter(generation)
        await anext(events)
        free = await begun(engine.free())
        free.cancel()
        with pytest.raises(asyncio.CancelledError):
            await free
        with pytest.raises(Cancelled):
            async for _ in events:
                pass


class _Ranks:
    """Takes the place of the connections to other ranks."""

    dropped = False

    def drop(self) -> None:
        self.dropped = True

    def close(self) -> None:
        """Do nothing."""


async def test_other_ranks_drop_the_model_although_the_caller_of_free_disconnects(
    model: Path,
) -> None:
    async with _engine(model) as engine:
        ranks: Any = _Ranks()
        engine._leader = ranks
        free = await begun(engine.free())
        free.cancel()
        with pytest.raises(asyncio.CancelledError):
            await free
        assert ranks.dropped


async def test_token_ids_beyond_the_vocabulary_never_reach_the_model(tmp_path: Path) -> None:
    """MLX checks no bounds: such an id reads out of bounds, or crashes the process."""
    model = write_model(tmp_path)
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["added_tokens"] += [
        {"id": size + 5, "content": "<|far|>", "special": True, "single_word": False,
         "lstrip": False, "rstrip": False, "normalized": False}
    ]  # fmt: skip
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, size + 5]}))
    async with _engine(model) as engine:
        with pytest.raises(InvalidRequest, match=r"<\|far\|>"):
            await _all(engine, GenerationRequest("1", RawPrompt("a <|far|> b")))
        await _serves(engine)


async def test_abandoned_texts_delay_no_prompt(model: Path) -> None:
    async with _engine(model) as engine:
        held = threading.Event()
        texts = [await begun(engine._texts.run(lambda _: held.wait(60), None)) for _ in range(64)]
        with pytest.raises(Overloaded, match="texts"):
            await engine.tokenize("a")
        for text in texts:
            text.cancel()
        await _serves(engine)
        held.set()


async def test_slow_prompts_of_other_kinds_delay_no_short_one(model: Path) -> None:
    async with _engine(model) as engine:
        release = threading.Event()
        pools = engine._preparer._threads
        for stage in ("long", "media", "video", "grammar", "disk"):
            for _ in range(8):
                pools[stage].submit(release.wait, 60)
        await _serves(engine)
        release.set()


async def test_progress_is_reported_if_requested(model: Path) -> None:
    async with _engine(model, prefill_chunk=16) as engine:
        prompt = RawPrompt("a b c " * 40)
        request = GenerationRequest(
            "1", prompt, max_tokens=3, ignore_eos=True, stream_progress=True
        )
        events = await _all(engine, request)
        progress = [event for event in events if isinstance(event, Progress)]
        assert events[: len(progress)] == progress
        total = events[-1].usage.prompt_tokens
        assert {event.usage.prompt_tokens for event in progress} == {total}
        processed = [event.processed for event in progress]
        assert processed[0] == 0
        assert processed == sorted(set(processed))
        assert total - 16 <= processed[-1] <= total
        quiet = await _all(engine, replace(request, stream_progress=False))
        assert not any(isinstance(event, Progress) for event in quiet)
        assert _text(quiet) == _text(events)
