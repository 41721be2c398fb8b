"""The count of an answer's reasoning tokens does not depend on the reader's pace."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import aclosing
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.engine.engine import Engine
from backend.engine.events import Finished, TextDelta, Usage
from backend.engine.generation import Generation
from backend.engine.request import GenerationRequest
from backend.rpc.answer import Answer
from common.chat_events import ChatEvent, ChatMessage, message_of
from tests.rpc.fake_engine import SERVED
from wire import backend_pb2 as pb

ASKED = pb.PredictOptions(
    Messages=[pb.Message(role="user", content="How deep is it?")], UseTokenizerTemplate=True
)


class _Engine:
    """Answers its only request with a generation."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    def submit(self, _: GenerationRequest) -> Generation:
        return self._generation


def _read(
    texts: Sequence[str], behind: Sequence[int], options: pb.PredictOptions = ASKED
) -> tuple[int, ChatMessage]:
    """The count and the answer, for a reader who is always `behind` pieces late."""

    async def read() -> tuple[int, ChatMessage]:
        generation = Generation(lambda: None)
        answer = Answer(cast(Engine, _Engine(generation)), options, SERVED)
        written = list(enumerate(texts, 1))
        paces = itertools.chain(behind, itertools.repeat(1))
        found: list[ChatEvent] = []
        async with aclosing(answer.events()) as events:
            while written:
                now = next(paces)
                for count, text in written[:now]:
                    generation.push(TextDelta(text, Usage(completion_tokens=count)))
                del written[:now]
                found += (await anext(events))[1]
            generation.push(Finished("stop", Usage(completion_tokens=len(texts))))
            found += (await anext(events))[1]
        return answer.reasoning_tokens, message_of(found)

    return asyncio.run(read())


@pytest.mark.parametrize(
    ("texts", "count"),
    [
        (["It", " is", " deep."], 0),
        (["<think>", "Ha", "rbours", " are.", "</think>", "Deep", "."], 4),
        (["<th", "ink>", "Harbours", "</th", "ink>", "\n\n", "Deep."], 3),
        (["<think>", "Harbours", " are"], 3),
        (["<think>", "</think>", "Deep."], 0),
    ],
)
def test_reasoning_tokens_are_counted(texts: list[str], count: int) -> None:
    assert _read(texts, [])[0] == count


def test_a_raw_prompt_has_no_reasoning_tokens() -> None:
    texts = ["<think>", "Harbours", "</think>"]
    assert _read(texts, [], pb.PredictOptions(Prompt="How deep?"))[0] == 0


WORDS = st.lists(st.sampled_from(["a", " b", "\n", "<", "th"]), max_size=4)


@given(WORDS, st.sampled_from(["", "</think>", "</th|ink>"]), WORDS, st.lists(st.integers(1, 9)))
def test_a_slow_reader_gets_the_same_count(
    thought: list[str], closing: str, content: list[str], behind: list[int]
) -> None:
    texts = ["<think>", *thought, *closing.split("|"), *content]
    assert _read(texts, behind) == _read(texts, [])
