"""Extreme texts: depth, numbers, and markers that never come."""

from __future__ import annotations

import cProfile
import pstats

from common.chat_events import Content, merged
from common.chat_format import ChatFormat
from common.chat_parser import parse_chat
from tests.common.chat_replay import plain, stream
from tests.common.corpus import TOOLS


def test_depth_does_not_use_the_call_stack() -> None:
    deep = "[" * 20_000 + "]" * 20_000
    text = f'<tool_call>{{"name": "f", "arguments": {{"a": {deep}}}}}</tool_call>'
    message = parse_chat(text, ChatFormat.named("hermes"), tools=TOOLS)
    assert message.tool_calls[0].arguments == f'{{"a": {deep}}}'


def test_elements_deeper_than_the_call_stack_are_text() -> None:
    mark = "]<]minimax[>["
    text = f'{mark}<tool_call>\n{mark}<invoke name="f">{f"{mark}<a>" * 2_000}'
    message = parse_chat(text, ChatFormat.named("minimax_m3"), tools=TOOLS)
    assert (message.content, message.tool_calls) == (text, [])


def test_deep_python_brackets_are_read_in_linear_time() -> None:
    """Twice the brackets take about twice the calls of functions."""
    steps = []
    for depth in (1_000, 2_000):
        text = f"[save_note(path={'(' * depth}{')' * depth})]"
        profile = cProfile.Profile()
        message = profile.runcall(parse_chat, text, ChatFormat.named("lfm2"), tools=TOOLS)
        assert message.tool_calls[0].name == "save_note"
        steps.append(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]
    assert steps[1] < 3 * steps[0]


def test_text_is_shown_at_once() -> None:
    format_ = ChatFormat.named("hermes")
    text = "No marker: <b> and `x` and {"
    events = stream(format_, list(text), tools=TOOLS)
    assert merged(events) == [Content(text)]
    assert len(events) >= len(text) - 3


def test_numbers_beyond_python_limits() -> None:
    digits = "9" * 6000
    text = f'<tool_call>{{"name": "f", "arguments": {{"a": {digits}, "b": 1e999}}}}</tool_call>'
    message = parse_chat(text, ChatFormat.named("hermes"), tools=TOOLS)
    assert message.tool_calls[0].arguments == f'{{"a": {digits}, "b": 1e999}}'
    assert plain(parse_chat("1e999", ChatFormat.named("hermes"), tools=TOOLS))[0] == "1e999"
