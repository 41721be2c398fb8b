"""Speculative decoding: tokens per second with and without it, on repetitive and on free text.

Several rows decode in one batch. Rounds with and without drafting alternate in one process, where
`NDraft` -1 turns drafting off. A round before them stores the prompts, and lets the backend learn
how many tokens to draft per step. Requests without drafting are also compared with a backend that
loaded no drafter; two processes with the same model differ in speed by up to 4 %, so that
comparison has several of each. The prompts of a batch differ in length, as those of clients do.
Equal prompts would favour the side without drafting: its sequences would stay equally long and so
need no mask, which saves 2 % of the time at 4 rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.pairs import at_least_in_pairs
from bench.process import backend
from bench.report import Figure, fact
from wire import backend_pb2 as pb
from wire.backend_pb2_grpc import BackendStub

ROWS = (1, 4, 8)
NEVER_BELOW = 0.97
PROCESSES = 3  # of each side; they take turns
SCHEMA = json.dumps(
    {
        "type": "array",
        "minItems": 100,
        "items": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
            "required": ["name", "age"],
            "additionalProperties": False,
        },
    }
)

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
class Length:
    """Tokens of an answer, the minimum number of pairs of rounds, and seconds for all of them."""

    tokens: int
    pairs: int
    seconds: float


LENGTH = Length(40, 5, 120.0)  # with a model whose steps take noticeable time
TINY_LENGTH = Length(128, 18, 60.0)


@dataclass(frozen=True, slots=True)
class Text:
    """A kind of text.

    key: a part of the measurement's name. prompt: has a placeholder for the row's number.
    bounds: (number of rows, minimum ratio).
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
    Text("code", "code written again", REPEATED),
    Text("json", "JSON by schema", "List people of town {}.", SCHEMA),
    Text("free", "free text", "Tell me a long story about a fox. {}", bounds=((1, 1.2),)),
)


def lookup(model: Path, texts: tuple[Text, ...] = TEXTS) -> Iterator[Figure]:
    """Prompt lookup on a model whose steps take noticeable time."""
    with _backends(model) as plain, _backends(model, Options=["prompt_lookup:true"]) as guessing:
        yield from _figures("prompt lookup", guessing[0], texts, LENGTH)
        yield _unguessed("prompt lookup", guessing, plain, texts[-1], LENGTH)


def draft_model(model: Path, draft: Path, texts: tuple[Text, ...] = TINY_TEXTS) -> Iterator[Figure]:
    """A draft model whose step costs about half of its model's."""
    with _backends(model) as plain, _backends(model, DraftModel=str(draft)) as guessing:
        yield from _figures("the tiny draft model", guessing[0], texts, TINY_LENGTH)
        yield _unguessed("the tiny draft model", guessing, plain, texts[-1], TINY_LENGTH)


@contextmanager
def _backends(model: Path, **options: Any) -> Iterator[list[BackendStub]]:
    with ExitStack() as stack:
        yield [stack.enter_context(backend(model, **options)) for _ in range(PROCESSES)]


def _figures(
    what: str, stub: BackendStub, texts: tuple[Text, ...], length: Length
) -> Iterator[Figure]:
    for text in texts:
        for rows in ROWS:

            def speed(_turn: int, n_draft: int, text: Text = text, rows: int = rows) -> float:
                return _speed(stub, text, rows, length.tokens, n_draft)

            speed(0, n_draft=0)
            yield at_least_in_pairs(
                f"tokens/s with {what} / without, {text.name}, {rows} rows",
                dict(text.bounds).get(rows, NEVER_BELOW),
                partial(speed, n_draft=0),
                partial(speed, n_draft=-1),
                pairs=length.pairs,
                seconds=length.seconds,
            )
    yield fact(f"guesses of {what} that were right, share", *_accepted(stub))


def _unguessed(
    what: str,
    guessing: Sequence[BackendStub],
    plain: Sequence[BackendStub],
    text: Text,
    length: Length,
) -> Figure:
    rows = max(ROWS)

    def speed(turn: int, stubs: Sequence[BackendStub]) -> float:
        return _speed(stubs[turn % len(stubs)], text, rows, length.tokens, -1)

    for turn in range(PROCESSES):
        speed(turn, guessing)
        speed(turn, plain)
    return at_least_in_pairs(
        f"tokens/s without drafting, {what} loaded / no drafter, {rows} rows",
        NEVER_BELOW,
        partial(speed, stubs=guessing),
        partial(speed, stubs=plain),
        pairs=length.pairs,
        seconds=length.seconds,
    )


def _speed(stub: BackendStub, text: Text, rows: int, tokens: int, n_draft: int) -> float:
    """Tokens per second of all rows together, each after its first token."""

    def ask(number: int) -> float:
        content = "Please. " * number + text.prompt.format(number)
        reply = stub.Predict(
            pb.PredictOptions(
                Messages=[pb.Message(role="user", content=content)],
                UseTokenizerTemplate=True,
                Tokens=tokens,
                IgnoreEOS=True,
                Grammar=text.grammar,
                NDraft=n_draft,
            )
        )
        return float((reply.tokens - 1) / (reply.timing_token_generation / 1e3))

    with ThreadPoolExecutor(rows) as pool:
        return sum(pool.map(ask, range(rows)))


def _accepted(stub: BackendStub) -> tuple[float, str]:
    _, call = stub.GetMetrics.with_call(pb.MetricsRequest())
    shown = dict(call.trailing_metadata())
    right, made = int(shown["mlx-draft-accepted-tokens"]), int(shown["mlx-draft-tokens"])
    return right / max(made, 1), f"{right} / {made}"
