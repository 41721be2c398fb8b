"""The cost of the chat parser, and how early it streams the arguments of a call.

Costs are per token, against a decode step, and over a very long answer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.process import backend, stream
from bench.report import Figure, at_most
from common.chat_events import ToolCallArguments
from common.chat_format import ChatFormat
from common.chat_parser import ChatParser

TEXT = {"type": "object", "properties": {"text": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "write", "parameters": TEXT}}]
PIECE = 4  # characters of a token
SHORT, LONG = 10_000, 100_000
ROUNDS = 5

PROSE = 'The quick brown fox, <b>as ever</b>, jumps over 3 lazy dogs: {"n": [1, 2]}.\n'
ANSWERS: dict[str, Callable[[int], str]] = {
    "an answer": lambda size: _repeated(PROSE, size),
    "reasoning": lambda size: "<think>\n" + _repeated(PROSE, size),
    "a call": lambda size: (
        '<tool_call>\n{"name": "write", "arguments": {"text": "'
        + _repeated("line after line \\n", size)
        + '"}}\n</tool_call>'
    ),
}
VALUE = "x" * 40
CALLS = {
    "hermes": '<tool_call>\n{"name": "write", "arguments": {"text": "' + VALUE,
    "llama3_json": '{"name": "write", "parameters": {"text": "' + VALUE,
    "mistral": '[TOOL_CALLS]write[ARGS]{"text": "' + VALUE,
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>write<｜tool▁sep｜>"
    '{"text": "' + VALUE,
    "openai": '<|channel|>commentary to=functions.write<|message|>{"text": "' + VALUE,
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.write:0"
    '<|tool_call_argument_begin|>{"text": "' + VALUE,
    "qwen3_coder": "<tool_call>\n<function=write>\n<parameter=text>\n" + VALUE,
    "glm45": "<tool_call>write\n<arg_key>text</arg_key>\n<arg_value>" + VALUE,
    "minimax_m2": '<minimax:tool_call>\n<invoke name="write">\n<parameter name="text">' + VALUE,
    "gemma4": '<|tool_call>call:write{text:<|"|>' + VALUE,
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="write">\n'
    '<｜DSML｜parameter name="text" string="true">' + VALUE,
}
"""The beginning of a call, up to the middle of its first value."""


def measure(model: Path) -> Iterator[Figure]:
    with backend(model) as stub:
        stream(stub, "Hello!", 8)
        run = stream(stub, "Tell me a long story.", 300)
    step = run.seconds / run.tokens
    for name, text in ANSWERS.items():
        short, long = _per_token(text(SHORT * PIECE)), _per_token(text(LONG * PIECE))
        yield at_most(
            f"parsing {name}, share of a decode step of the tiny model",
            short / step,
            0.02,
            f"{short * 1e6:.1f} of {step * 1e6:.0f} us",
        )
        yield at_most(f"parsing {name}, 100,000 tokens / 10,000, per token", long / short, 1.5)
    for name in CALLS:
        yield at_most(f"parsing {name}, tokens of a value before its first event", _lag(name), 2)


def _repeated(text: str, size: int) -> str:
    return (text * (size // len(text) + 1))[:size]


def _per_token(text: str) -> float:
    """Seconds per piece, median of several parses."""
    pieces = [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
    seconds = []
    for _ in range(ROUNDS):
        parser = ChatParser(ChatFormat.named("hermes", "qwen3"), tools=TOOLS, partial_calls=True)
        started = time.perf_counter()
        for piece in pieces:
            parser.feed(piece)
        parser.finish("length")
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds) / len(pieces)


def _lag(name: str) -> int:
    """Pieces of a value that are parsed before the parser emits the first part of that value."""
    text = CALLS[name]
    parser = ChatParser(ChatFormat.named(name), tools=TOOLS, partial_calls=True)
    began = 0
    for at in range(0, len(text), PIECE):
        events = parser.feed(text[at : at + PIECE])
        if any(isinstance(event, ToolCallArguments) and "x" in event.text for event in events):
            return began
        began += at + PIECE > text.index(VALUE)
    return began
