"""Slow work on one prompt does not delay short ones."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from backend.engine.embedding.encoding import Piece
from backend.engine.engine import Engine
from backend.engine.events import Finished
from backend.engine.load_request import LoadRequest
from backend.engine.preparing import _characters
from backend.engine.prompting.prompts import BuiltPrompt, PromptBuilder
from backend.engine.request import ChatPrompt, GenerationRequest, Prompt, RawPrompt
from tests.tasks import begun

TINY = Path(__file__).parents[1] / "models" / "tiny_text"
MESSAGE = {"role": "user", "content": "Hello!"}
LARGE = "x" * 100_000
SHORT = RawPrompt("Hello!")
SLOW: dict[str, Prompt] = {
    "text": RawPrompt(LARGE),
    "message": ChatPrompt(({"role": "user", "content": LARGE},)),
    "many messages": ChatPrompt((MESSAGE,) * 5000),
    "tools": ChatPrompt((MESSAGE,), ({"type": "function", "function": {"name": LARGE}},)),
    "calls": ChatPrompt((MESSAGE, {"role": "assistant", "content": "", "tool_calls": [LARGE]})),
    "arguments": ChatPrompt((MESSAGE,), None, {"x": LARGE}),
}


def request(prompt: Prompt) -> GenerationRequest:
    return GenerationRequest("one", prompt, max_tokens=2, count_only=True)


async def finished(engine: Engine, prompt: Prompt) -> Finished:
    async with engine.submit(request(prompt)) as generation:
        async for event in generation:
            if isinstance(event, Finished):
                return event
    raise AssertionError("a generation ends with Finished")


@pytest.mark.parametrize("case", SLOW)
async def test_a_short_prompt_overtakes_slow_ones(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, go_on = PromptBuilder.build, threading.Event()

    def slow(self: PromptBuilder, prompt: Prompt, *given: Any, **named: Any) -> BuiltPrompt:
        if prompt is not SHORT:
            assert go_on.wait(60)
        return build(self, SHORT, *given, **named)

    engine = Engine()
    engine.start()
    try:
        await engine.load(LoadRequest("tiny", str(TINY)))
        monkeypatch.setattr(PromptBuilder, "build", slow)
        waiting = [engine.submit(request(SLOW[case])) for _ in range(4)]
        assert (await finished(engine, SHORT)).usage.prompt_tokens
        go_on.set()
        for generation in waiting:
            async with generation:
                assert any([isinstance(event, Finished) async for event in generation])
    finally:
        go_on.set()
        await engine.stop(10)


async def test_a_short_text_to_embed_overtakes_slow_ones() -> None:
    go_on = threading.Event()

    def slow() -> list[Piece]:
        assert go_on.wait(60)
        return []

    engine = Engine()
    engine.start()
    try:
        await engine.load(LoadRequest("tiny", str(TINY)))
        waiting = [await begun(engine.encode(slow, 100_000)) for _ in range(4)]
        assert (await engine.encode(list, 10)).outputs == ()
        assert not any(encoding.done() for encoding in waiting)
        go_on.set()
        await asyncio.gather(*waiting)
    finally:
        go_on.set()
        await engine.stop(10)


class Uncopied(str):
    """A text that fails if it is copied."""

    __slots__ = ()

    def __repr__(self) -> str:
        raise AssertionError("repr() of a large text would block all other threads")


def test_a_prompt_is_measured_without_a_copy() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": Uncopied(LARGE)}]}
    assert _characters(ChatPrompt((message,), ({"x": [1, None]},), {"y": "z"})) > len(LARGE)
