"""Extreme texts: depth, numbers, and markers that never come."""

from __future__ import annotations

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
