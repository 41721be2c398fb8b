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

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.pairs import at_least_in_pairs
from bench.process import backend
from bench.report import Figure, fact
from tests.engine.drafting.heads import write_checkpoint
from wire import backend_pb2 as pb
from wire.backend_pb2_grpc import BackendStub

ROWS = (1, 4, 8)
NEVER_BELOW = 0.97
PROCESSES = 3  # on each side; they run in turn
SCHEMA = (
    '{"type": "array", "minItems": 100, "items": {"type": "object", "properties": {"name":'
    ' {"type": "string"}, "age": {"type": "integer"}}, "required": ["name", "age"],'
    ' "additionalProperties": false}}'
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


@dataclass(frozen=True, slots=True)
class Text:
    """A kind of text.

    prompt: has a placeholder for the row's number.
    bounds: by number of rows, the minimum ratio, if it is not NEVER_BELOW.
    chat: whether the prompt is a message, and not what the model reads.
    """

    name: str
    prompt: str
    grammar: str = ""
    bounds: Mapping[int, float] = field(default_factory=dict)
    chat: bool = True


CODE_AGAIN = "Write this code again, with the class named Line{} instead of Queue:\n" + CODE
JSON = Text("JSON by schema", "List people of town {}.", SCHEMA)
TEXTS = (
    Text("code written again", CODE_AGAIN, bounds={1: 1.5, 4: 1.25}),
    JSON,
    Text("free text", "Tell me a story about lighthouse keeper {}."),
)
TINY_TEXTS = (
    Text("code written again", CODE_AGAIN),
    JSON,
    Text("free text", "Tell me a long story about a fox. {}", bounds={1: 1.2}),
)
# The only text that the model with a head has learnt; its vocabulary has no spaces.
HEAD_TEXTS = (Text("known text", "abc{}", bounds={1: 1.2}, chat=False),)


def measure(model: Path, tiny: Path, tiny_draft: Path) -> Iterator[Figure]:
    """Measure prompt lookup on a model whose steps take noticeable time, a draft model, and a head.

    The head is that of a model of eight layers, and drafts without a setting.

    tiny_draft: a draft model whose step costs about half of that of `tiny`.
    """
    lookup = {"Options": ["prompt_lookup:true"]}
    yield from _figures("prompt lookup", model, lookup, TEXTS, Length(40, 5, 120.0))
    drafts = {"DraftModel": str(tiny_draft)}
    yield from _figures("the tiny draft model", tiny, drafts, TINY_TEXTS, Length(128, 18, 60.0))
    with TemporaryDirectory() as folder:
        head = write_checkpoint(Path(folder, "head"), "mimo", 50, 48, num_hidden_layers=8).path
        yield from _figures("a head (mtp: auto)", head, {}, HEAD_TEXTS, Length(128, 18, 60.0))


def _figures(
    what: str, model: Path, options: Mapping[str, Any], texts: Sequence[Text], length: Length
) -> Iterator[Figure]:
    compare = partial(at_least_in_pairs, pairs=length.pairs, seconds=length.seconds)
    with _backends(model, options) as drafting:
        stub, *_ = drafting
        for text in texts:
            for rows in ROWS:

                def speed(_: int, n_draft: int, text: Text = text, rows: int = rows) -> float:
                    return _speed(stub, text, rows, length.tokens, n_draft)

                speed(0, n_draft=0)
                yield compare(
                    f"tokens/s with {what} / without, {text.name}, {rows} rows",
                    text.bounds.get(rows, NEVER_BELOW),
                    partial(speed, n_draft=0),
                    partial(speed, n_draft=-1),
                )
        yield fact(f"draft tokens of {what} that were accepted, share", *_accepted(stub))
        with _backends(model, {"Options": ["mtp:false"]}) as plain:

            def undrafted(turn: int, stubs: Sequence[BackendStub]) -> float:
                stub = stubs[turn % len(stubs)]
                return _speed(stub, texts[-1], max(ROWS), length.tokens, -1)

            for turn in range(PROCESSES):
                undrafted(turn, drafting)
                undrafted(turn, plain)
            yield compare(
                f"tokens/s without drafting, {what} loaded / no drafter, {max(ROWS)} rows",
                NEVER_BELOW,
                partial(undrafted, stubs=drafting),
                partial(undrafted, stubs=plain),
            )


@contextmanager
def _backends(model: Path, options: Mapping[str, Any]) -> Iterator[list[BackendStub]]:
    with ExitStack() as stack:
        yield [stack.enter_context(backend(model, **options)) for _ in range(PROCESSES)]


def _speed(stub: BackendStub, text: Text, rows: int, tokens: int, n_draft: int) -> float:
    """Return tokens per second of all rows together, each after its first token."""

    def ask(number: int) -> float:
        content = ("Please. " if text.chat else "x") * number + text.prompt.format(number)
        reply = stub.Predict(
            pb.PredictOptions(
                Messages=[pb.Message(role="user", content=content)] if text.chat else [],
                Prompt="" if text.chat else content,
                UseTokenizerTemplate=text.chat,
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
