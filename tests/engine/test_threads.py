"""Where the system allows no more threads, requests are answered or refused; none waits."""

from __future__ import annotations

import asyncio
import errno
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from backend.engine.blas_threads import BlasThreads
from backend.engine.constraints.spec import ConstraintSpec
from backend.engine.constraints.trial import Trial
from backend.engine.engine import Engine
from backend.engine.errors import REFUSED, Overloaded
from backend.engine.events import Finished
from backend.engine.load_request import LoadRequest
from backend.engine.request import ChatPrompt, GenerationRequest, Prompt, RawPrompt
from backend.engine.threads import reserved_threads

TINY = Path(__file__).parents[1] / "models" / "tiny_text"
YES = ConstraintSpec("gbnf", 'root ::= "yes"')
WAIT = 240.0  # seconds, on a busy machine too


@asynccontextmanager
async def started() -> AsyncIterator[Engine]:
    engine = Engine()
    engine.start()
    try:
        await engine.load(LoadRequest("tiny", str(TINY)))
        yield engine
    finally:
        await engine.stop(10)


async def finished(
    engine: Engine, prompt: Prompt, constraint: ConstraintSpec | None = None
) -> Finished:
    long = isinstance(prompt, RawPrompt) and len(prompt.text) > 1000  # an answer takes too long
    request = GenerationRequest("one", prompt, max_tokens=4, constraint=constraint, count_only=long)
    async with asyncio.timeout(WAIT), engine.submit(request) as generation:
        async for event in generation:
            if isinstance(event, Finished):
                return event
    raise AssertionError("a generation ends with Finished")


@pytest.mark.parametrize(
    "prompt",
    [
        RawPrompt("Hello!"),
        RawPrompt("word " * 7_000),
        ChatPrompt(({"role": "user", "content": "Hello!"},)),
    ],
    ids=["short", "long", "message"],
)
async def test_requests_are_answered_by_the_threads_of_the_start(
    prompt: Prompt, request: pytest.FixtureRequest
) -> None:
    async with started() as engine:
        limit: pytest.MonkeyPatch = request.getfixturevalue("no_more_threads")
        assert (await finished(engine, prompt)).usage.prompt_tokens
        assert await asyncio.wait_for(engine.tokenize("Hello!"), WAIT)
        assert await asyncio.wait_for(engine.free(), WAIT)
        limit.undo()


async def test_a_grammar_is_refused_until_there_are_threads_again(
    request: pytest.FixtureRequest,
) -> None:
    async with started() as engine:
        limit: pytest.MonkeyPatch = request.getfixturevalue("no_more_threads")
        with pytest.raises(Overloaded) as caught:
            await finished(engine, RawPrompt("Hello!"), YES)
        assert str(caught.value) == REFUSED
        limit.undo()
        assert (await finished(engine, RawPrompt("Hello!"), YES)).reason == "stop"


@pytest.mark.usefixtures("no_more_threads")
def test_an_engine_without_its_threads_is_refused() -> None:
    with pytest.raises(Overloaded):
        Engine()


async def test_a_first_load_without_threads_is_refused(request: pytest.FixtureRequest) -> None:
    """MLX and OpenBLAS would hang, or end the process."""
    engine = Engine()
    engine.start()
    limit: pytest.MonkeyPatch = request.getfixturevalue("no_more_threads")
    limit.delitem(sys.modules, "mlx.core", raising=False)
    with pytest.raises(Overloaded):
        await engine.load(LoadRequest("tiny", str(TINY)))
    limit.undo()
    assert await engine.load(LoadRequest("tiny", str(TINY)))
    await engine.stop(10)


@pytest.mark.usefixtures("no_more_threads")
def test_the_number_of_blas_threads_stays_without_a_thread_to_adjust_it() -> None:
    numbers: list[int] = []
    threads = BlasThreads(2, lambda: 0.0, numbers.append)
    threads.follow()
    threads.rest()
    assert numbers == [2]


def test_threads_exist_before_there_is_work() -> None:
    threads = reserved_threads(3, "three")
    names = [thread.name for thread in threading.enumerate()]
    assert sum(name.startswith("three") for name in names) == 3
    threads.shutdown()


@pytest.mark.parametrize(
    "fault",
    [
        OSError(errno.EMFILE, "Too many open files"),
        OSError(errno.EFBIG, "File too large"),
        BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
        MemoryError(),
    ],
    ids=["files", "size", "processes", "memory"],
)
async def test_a_grammar_that_the_system_refuses_is_no_internal_error(
    fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise fault

    async with started() as engine:
        monkeypatch.setattr(Trial, "__init__", refuse)
        with pytest.raises(Overloaded):
            await finished(engine, RawPrompt("Hello!"), YES)
        monkeypatch.undo()
        assert (await finished(engine, RawPrompt("Hello!"), YES)).reason == "stop"
