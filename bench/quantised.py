"""The speed of a 4-bit checkpoint, against the same one converted to dense weights at load."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.process import backend, stream, words
from bench.report import Figure, at_least
from wire.backend_pb2_grpc import BackendStub

ROUNDS = 3
PROMPT_WORDS = 10  # about 40 tokens
TOKENS = 10
OPTIONS = ("prompt_cache_mib:0",)


def measure(model: Path) -> Iterator[Figure]:
    """Rounds alternate between two running backends, one of which works at a time."""
    with tempfile.TemporaryDirectory() as folder:
        packed = _in_four_bits(model, Path(folder) / "packed")
        with (
            backend(packed, Options=[*OPTIONS, "dequantize:true"]) as dense,
            backend(packed, Options=[*OPTIONS, "dequantize:false"]) as kept,
        ):
            for stub in (dense, kept):
                stream(stub, "Hello.", 2)
            yield _compared("prompt tokens/s", _prefill, dense, kept)
            for width in (1, 4):
                yield _compared(
                    f"tokens/s at {width} streams",
                    lambda stub, width=width: _decode(stub, width),  # type: ignore[misc]
                    dense,
                    kept,
                )


def _compared(
    name: str, speed: Callable[[BackendStub], float], dense: BackendStub, kept: BackendStub
) -> Figure:
    rounds = [(speed(dense), speed(kept)) for _ in range(ROUNDS)]
    ours, theirs = map(statistics.median, zip(*rounds, strict=True))
    return at_least(
        f"{name}, 4 bits made dense / kept", ours / theirs, 1, f"{ours:.1f} / {theirs:.1f}"
    )


def _prefill(stub: BackendStub) -> float:
    run = stream(stub, words(PROMPT_WORDS), 1)
    return run.prompt_tokens / run.seconds


def _decode(stub: BackendStub, width: int) -> float:
    """Tokens per second after each stream's first."""

    def ask(number: int) -> float:
        run = stream(stub, f"Story {number}.", TOKENS)
        return (run.tokens - 1) / (run.seconds - run.first)

    with ThreadPoolExecutor(width) as pool:
        return sum(pool.map(ask, range(width)))


def _in_four_bits(model: Path, folder: Path) -> Path:
    """The checkpoint quantised by mlx-lm."""
    from mlx_lm.utils import load, quantize_model, save

    dense, tokenizer, config = load(str(model), lazy=True, return_config=True)
    packed, config = quantize_model(dense, config, group_size=64, bits=4)
    save(folder, model, packed, tokenizer, config)
    return folder
