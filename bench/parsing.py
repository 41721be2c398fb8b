"""What the chat parser costs: per token against a decode step, and over a very long answer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.process import backend, stream
from bench.report import Figure, at_most
from common.chat_format import ChatFormat
from common.chat_parser import ChatParser

TOOLS = [{"type": "function", "function": {"name": "write", "parameters": {"type": "object"}}}]
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


def _repeated(text: str, size: int) -> str:
    return (text * (size // len(text) + 1))[:size]


def _per_token(text: str) -> float:
    """Seconds per piece, median of several parses."""
    pieces = [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
    seconds = []
    for _ in range(ROUNDS):
        parser = ChatParser(ChatFormat.named("hermes", "qwen3"), tools=TOOLS)
        started = time.perf_counter()
        for piece in pieces:
            parser.feed(piece)
        parser.finish("length")
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds) / len(pieces)
