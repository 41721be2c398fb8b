"""Parsing costs the same for every character, however long the answer and however hostile."""

from __future__ import annotations

import time

import pytest

from common.chat_events import Content, merged
from common.chat_format import ChatFormat
from common.chat_parser import parse_chat
from tests.common.chat_replay import plain, stream
from tests.common.corpus import TOOLS

LONG = 100_000
ANSWERS = {
    "prose": ("hermes", "", "word ", ""),
    "lines": ("hermes", "", "a line\n\n", ""),
    "reasoning": ("hermes", "<think>", "well, ", "</think>"),
    "a long argument": (
        "hermes",
        '<tool_call>{"name": "save_note", "arguments": {"text": "',
        "text \\n",
        '"}}</tool_call>',
    ),
    "a list of numbers": (
        "hermes",
        '<tool_call>{"name": "save_note", "arguments": {"text": [1',
        ", 12",
        "]}}</tool_call>",
    ),
    "a tagged argument": (
        "qwen3_coder",
        "<tool_call><function=save_note><parameter=text>",
        "a < b\n",
        "</parameter></function></tool_call>",
    ),
    "a Python argument": ("pythonic", "[save_note(text='", "text ", "')]"),
    "a Gemma argument": ("gemma4", '<|tool_call>call:save_note{text:<|"|>', "text ", '<|"|>}'),
    "openings": ("hermes", "", "<tool_call>", ""),
    "openings of tags": ("qwen3_coder", "", "<function=f><parameter=a>", ""),
    "openings in reasoning": ("qwen3_coder", "<think>", "<function=f>\n<parameter=a>\n", ""),
    "openings of markup in JSON": ("llama3_json", "", '{"name": "tide_now", "parameters": ', ""),
    "openings of brackets": ("llama3_json", "", "[tide_now(", ""),
    "closings in a value": (
        "glm45",
        "<tool_call>save_note\n<arg_key>text</arg_key>\n<arg_value>",
        "</arg_value> ",
        "",
    ),
    "fences": ("hermes", "", "```\n", ""),
    "depth": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ', "[", ""),
    "blank lines": ("hermes", "", "\n", ""),
    "channels": ("openai", "", "<|channel|>final<|message|>", ""),
}  # fmt: skip


def _seconds(name: str, text: str, piece: int) -> float:
    pieces = [text[at : at + piece] for at in range(0, len(text), piece)]
    begun = time.process_time()
    stream(ChatFormat.named(name), pieces, tools=TOOLS, reason="length")
    return time.process_time() - begun


@pytest.mark.parametrize("kind", ANSWERS)
def test_time_grows_with_the_length(kind: str) -> None:
    name, opening, middle, closing = ANSWERS[kind]
    short, long = (
        opening + middle * (count // len(middle)) + closing for count in (LONG // 4, LONG)
    )
    for piece in (4, LONG):
        least = min(_seconds(name, short, piece) for _ in range(3))
        assert _seconds(name, long, piece) < 12 * least + 0.2


def test_a_hundred_thousand_tokens_take_little_time() -> None:
    """0.4 ms, the fastest decode step of the small model, times 100,000, times 2 %."""
    text = "Some words, and then\nsome more. " * (400_000 // 32)
    assert _seconds("hermes", text, 4) < 0.8 * 4


def test_depth_is_not_a_call_stack() -> None:
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
