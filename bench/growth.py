"""Checks that the parser's cost per character stays constant, even for hostile answers."""

from __future__ import annotations

import time
from collections.abc import Iterator

from bench.report import Figure, at_most
from common.chat_format import ChatFormat
from common.chat_parser import ChatParser

LONG = 100_000  # characters
PIECES = (4, LONG)
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("save_note", "tide_now")
]
# Name → format, beginning of the answer, repeated part, end.
ANSWERS = {
    "prose": ("hermes", "", "word ", ""),
    "lines": ("hermes", "", "a line\n\n", ""),
    "reasoning": ("hermes", "<think>", "well, ", "</think>"),
    "a long argument": (
        "hermes", '<tool_call>{"name": "save_note", "arguments": {"text": "', "text \\n",
        '"}}</tool_call>'),
    "quotes without escapes": (
        "hermes", '<tool_call>{"name": "save_note", "arguments": {"text": "', '"a", "b", ',
        '"}}</tool_call>'),
    "JSON inside strings": (
        "hermes", '<tool_call>{"name": "save_note", "arguments": {"text": [', '"{"a": 1}", ',
        "]}}</tool_call>"),
    "a list of numbers": (
        "hermes", '<tool_call>{"name": "save_note", "arguments": {"text": [1', ", 12",
        "]}}</tool_call>"),
    "a tagged argument": (
        "qwen3_coder", "<tool_call><function=save_note><parameter=text>", "a < b\n",
        "</parameter></function></tool_call>"),
    "a Python argument": ("pythonic", "[save_note(text='", "text ", "')]"),
    "a Gemma argument": ("gemma4", '<|tool_call>call:save_note{text:<|"|>', "text ", '<|"|>}'),
    "Gemma's missing delimiters": ("gemma4", "", '<|tool_call>call:f{a:<|"|>b}<tool_call|>', ""),
    "Gemma's apostrophes": ("gemma4", "<|tool_call>call:save_note{", "a:'x,", ""),
    "openings": ("hermes", "", "<tool_call>", ""),
    "openings of tags": ("qwen3_coder", "", "<function=f><parameter=a>", ""),
    "openings in reasoning": ("qwen3_coder", "<think>", "<function=f>\n<parameter=a>\n", ""),
    "openings of markup in JSON": ("llama3_json", "", '{"name": "tide_now", "parameters": ', ""),
    "openings of brackets": ("llama3_json", "", "[tide_now(", ""),
    "closings in a value": (
        "glm45", "<tool_call>save_note\n<arg_key>text</arg_key>\n<arg_value>", "</arg_value> ", ""),
    "fences": ("hermes", "", "```\n", ""),
    "depth": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ', "[", ""),
    "blank lines": ("hermes", "", "\n", ""),
    "channels": ("openai", "", "<|channel|>final<|message|>", ""),
}  # fmt: skip


def measure() -> Iterator[Figure]:
    for kind, (name, opening, middle, closing) in ANSWERS.items():
        short, long = (
            opening + middle * (count // len(middle)) + closing for count in (LONG // 4, LONG)
        )
        ratios = [_per_character(name, long, p) / _per_character(name, short, p) for p in PIECES]
        yield at_most(f"parsing {kind}, 100,000 characters / 25,000, each", max(ratios), 2)


def _per_character(name: str, text: str, piece: int) -> float:
    """Return processor seconds per character, the minimum of several parses."""
    pieces = [text[at : at + piece] for at in range(0, len(text), piece)]
    spent = []
    for _ in range(3):
        parser = ChatParser(ChatFormat.named(name), tools=TOOLS)
        begun = time.process_time()
        for part in pieces:
            parser.feed(part)
        parser.finish("length")
        spent.append(time.process_time() - begun)
    return min(spent) / len(text)
