"""The cost of a grammar: time per token of constrained rows against unconstrained rows."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.process import backend
from bench.report import Figure, at_most
from wire import backend_pb2 as pb
from wire.backend_pb2_grpc import BackendStub

TOKENS = 48
ROUNDS = 3
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


def measure(model: Path) -> Iterator[Figure]:
    """Rounds with and without a grammar alternate; the schema is compiled beforehand."""
    with backend(model) as stub:
        _milliseconds(stub, 1, SCHEMA)
        for width in (1, 4):
            bound, free = [], []
            for _ in range(ROUNDS):
                bound.append(_milliseconds(stub, width, SCHEMA))
                free.append(_milliseconds(stub, width, ""))
            with_grammar, without = statistics.median(bound), statistics.median(free)
            yield at_most(
                f"ms per token with / without a grammar, {width} streams",
                with_grammar / without,
                1.15,
                f"{with_grammar:.1f} / {without:.1f}",
            )


def _milliseconds(stub: BackendStub, width: int, grammar: str) -> float:
    """Milliseconds per token after the first, mean of the streams."""

    def ask(number: int) -> float:
        reply = stub.Predict(
            pb.PredictOptions(
                Messages=[pb.Message(role="user", content=f"List people of town {number}.")],
                UseTokenizerTemplate=True,
                Tokens=TOKENS,
                IgnoreEOS=True,
                Grammar=grammar,
            )
        )
        return float(reply.timing_token_generation / (reply.tokens - 1))

    with ThreadPoolExecutor(width) as pool:
        return statistics.mean(pool.map(ask, range(width)))
