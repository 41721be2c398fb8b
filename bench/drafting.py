"""Speculative decoding: tokens per second with and without it, on repetitive and on free text.

Several rows decode in one batch. Rounds with and without drafting alternate. The first round of
each warms up, stores the prompts, and lets the backend learn how many tokens to draft per step.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.constraints import SCHEMA
from bench.process import backend
from bench.report import Figure, at_least, fact
from wire import backend_pb2 as pb
from wire.backend_pb2_grpc import BackendStub

TOKENS = 128
ROUNDS = 3
ROWS = (1, 4, 8)
NEVER_BELOW = 0.97

CODE = """class Queue:
    def __init__(self, size):
        self.items = []
        self.size = size

    def push(self, item):
        if len(self.items) >= self.size:
            raise OverflowError("the queue is full")
        self.items.append(item)
"""


@dataclass(frozen=True, slots=True)
class Text:
    """A kind of text.

    key: its part in the name of a measurement. prompt: with a placeholder for the row's number.
    bounds: (number of rows, least ratio).
    """

    key: str
    name: str
    prompt: str
    grammar: str = ""
    bounds: tuple[tuple[int, float], ...] = ()


REPEATED = "Write this code again, with the class named Line{} instead of Queue:\n" + CODE
TEXTS = (
    Text("code", "code written again", REPEATED, bounds=((1, 1.5), (4, 1.25))),
    Text("json", "JSON by schema", "List people of town {}.", SCHEMA),
    Text("free", "free text", "Tell me a story about lighthouse keeper {}."),
)
TINY_TEXTS = (
    Text("counting", "counting", "Count to 6{}."),
    Text("story", "a story", "Tell me a long story about a fox. {}", bounds=((1, 1.2),)),
)


def lookup(model: Path, texts: tuple[Text, ...] = TEXTS) -> Iterator[Figure]:
    """Prompt lookup on a model whose steps cost something; about four minutes for each text."""
    with backend(model) as plain, backend(model, Options=["prompt_lookup:true"]) as guessing:
        yield from _figures("prompt lookup", guessing, plain, texts)


def draft_model(model: Path, draft: Path, texts: tuple[Text, ...] = TINY_TEXTS) -> Iterator[Figure]:
    """A draft model whose step costs about half of its model's."""
    with backend(model) as plain, backend(model, DraftModel=str(draft)) as guessing:
        yield from _figures("the tiny draft model", guessing, plain, texts)


def _figures(
    what: str, guessing: BackendStub, plain: BackendStub, texts: tuple[Text, ...]
) -> Iterator[Figure]:
    for text in texts:
        for rows in ROWS:
            ratio, detail = _ratio(guessing, plain, text, rows)
            name = f"tokens/s with {what} / without, {text.name}, {rows} rows"
            yield at_least(name, ratio, dict(text.bounds).get(rows, NEVER_BELOW), detail)
    yield fact(f"guesses of {what} that were right, share", *_accepted(guessing))


def _ratio(guessing: BackendStub, plain: BackendStub, text: Text, rows: int) -> tuple[float, str]:
    speeds: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS + 1):
        for stub, found in zip((guessing, plain), speeds, strict=True):
            found.append(_speed(stub, text, rows))
    ours, theirs = (statistics.median(found[1:]) for found in speeds)
    return ours / theirs, f"{ours:.1f} / {theirs:.1f}"


def _speed(stub: BackendStub, text: Text, rows: int) -> float:
    """Tokens per second of all rows together, each after its first token."""

    def ask(number: int) -> float:
        reply = stub.Predict(
            pb.PredictOptions(
                Messages=[pb.Message(role="user", content=text.prompt.format(number))],
                UseTokenizerTemplate=True,
                Tokens=TOKENS,
                IgnoreEOS=True,
                Grammar=text.grammar,
            )
        )
        return float((reply.tokens - 1) / (reply.timing_token_generation / 1e3))

    with ThreadPoolExecutor(rows) as pool:
        return sum(pool.map(ask, range(rows)))


def _accepted(stub: BackendStub) -> tuple[float, str]:
    _, call = stub.GetMetrics.with_call(pb.MetricsRequest())
    shown = dict(call.trailing_metadata())
    right, made = (int(shown[f"mlx-draft-{name}"]) for name in ("accepted-tokens", "tokens"))
    return right / max(made, 1), f"{right} / {made}"
