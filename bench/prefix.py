"""Time to the first token of a 1,480-token prompt, cold and with its prefix in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bench.process import backend, stream, words
from bench.report import Figure, at_least
from wire import backend_pb2 as pb

TOKENS = 1480


def measure(model: Path) -> Iterator[Figure]:
    with backend(model) as stub:
        stream(stub, "Warm up.", 8)
        count = TOKENS // 4
        while stub.TokenizeString(pb.PredictOptions(Prompt=words(count))).length < TOKENS - 36:
            count += 1
        prompt = words(count)
        cold = stream(stub, prompt, 4)
        warm = stream(stub, prompt, 4)
    if cold.prompt_tokens != warm.prompt_tokens:
        raise RuntimeError(f"prompt_tokens differ: {cold.prompt_tokens}, {warm.prompt_tokens}")
    yield at_least(
        f"cold / warm time to first token, {cold.prompt_tokens} tokens",
        cold.first / warm.first,
        20,
        f"{cold.first:.2f} / {warm.first:.2f} s",
    )
