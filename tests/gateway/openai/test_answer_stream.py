"""The chunks of a stream with several choices: begun once each, then usage and the end."""

from __future__ import annotations

import json
from typing import Any

from gateway.calls import Done, Event, Piece, Progress, Usage
from gateway.openai.answer import OpenAIAnswer, chat_answer
from gateway.openai.chat_request import ChatCompletionRequest

ENDED = Done("stop", Usage(prompt_tokens=5, completion_tokens=1))


def asked(**fields: Any) -> ChatCompletionRequest:
    messages = [{"role": "user", "content": "x"}]
    return ChatCompletionRequest.model_validate({"messages": messages, **fields})


def chunks(stream: OpenAIAnswer, *events: tuple[int, Event]) -> list[Any]:
    written = "".join(stream.write(stream.take(event)) for event in events)
    *lines, last = (line.removeprefix("data: ") for line in written.split("\n\n") if line)
    assert last == "[DONE]"
    return [json.loads(line) for line in lines]


def test_every_choice_begins_once_and_the_prompt_counts_once() -> None:
    stream = chat_answer({"id": "a"}, asked(n=2, stream_options={"include_usage": True}))
    found = chunks(stream, (1, Piece("x")), (0, ENDED), (1, ENDED))
    deltas = [(one["index"], one["delta"]) for each in found for one in each["choices"]]
    begun = {"role": "assistant", "content": ""}
    assert deltas == [(1, begun), (1, {"content": "x"}), (0, begun), (0, {}), (1, {})]
    assert [each["usage"] for each in found[:-1]] == [None] * 5
    assert found[-1]["usage"]["prompt_tokens"] == 5
    assert found[-1]["usage"]["completion_tokens"] == 2


def test_progress_is_reported_if_it_is_asked_for() -> None:
    event = Progress(total=9, cached=1, processed=4, ms=2.4)
    for wanted in (True, False):
        stream = chat_answer({"id": "a"}, asked(return_progress=wanted))
        found = chunks(stream, (0, event), (0, ENDED))
        shown = {"total": 9, "cache": 1, "processed": 4, "time_ms": 2}
        assert [each.get("prompt_progress") for each in found].count(shown) == wanted


def test_a_beat_begins_all_choices_and_then_adds_nothing() -> None:
    stream = chat_answer({"id": "a"}, asked(n=2))
    assert "".join(stream.beat()).count('"role":"assistant"') == 2
    assert "".join(stream.beat()).count('"delta":{}') == 1
