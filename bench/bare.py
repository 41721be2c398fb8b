"""Plain mlx-lm: `stream_generate` for one prompt, and a loop for several."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.process import ROOT
from cli.backend_process import environment_of


@contextmanager
def loop(model: Path) -> Iterator[Callable[[str, int], float]]:
    """Tokens per second for a prompt, prefill included, in a process like the backend's."""
    child = subprocess.Popen(
        [ROOT / "scripts/python", "-m", "bench.bare", str(model)],
        env=environment_of({}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    asked, answered = child.stdin, child.stdout

    def ask(prompt: str, tokens: int) -> float:
        print(tokens, prompt, file=asked, flush=True)
        return float(answered.readline())

    try:
        yield ask
    finally:
        child.terminate()
        child.wait()


def steps(model_path: Path, width: int, count: int) -> float:
    """Tokens per second of bare greedy decode steps of a small model, in this process.

    MLX and OpenBLAS are set up as the backend does it, so no host can be faster.
    """
    import mlx.core as mx
    from mlx_lm import load

    from backend.engine.blas_threads import blas_threads
    from backend.engine.caching.kv import BatchCache, new_row
    from backend.engine.loading.early_layers import start_layers_early

    mx.disable_compile()
    blas_threads(0)
    model, *_ = load(str(model_path))
    start_layers_early(model)
    cache = BatchCache([new_row(model) for _ in range(width)])
    tokens = mx.arange(width)
    started = time.perf_counter()
    for _ in range(count):
        following = mx.argmax(model(tokens[:, None], cache=cache.layers)[:, -1], axis=-1)
        mx.async_eval(following)
        mx.eval(tokens)
        tokens = following
    return width * count / (time.perf_counter() - started)


def main(model_path: str) -> None:
    import mlx.core as mx
    from mlx_lm import load, stream_generate

    mx.disable_compile()  # as the backend does on a CPU
    model, tokenizer, *_ = load(model_path)
    for line in sys.stdin:
        tokens, _, prompt = line.strip().partition(" ")
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True
        )
        started = time.perf_counter()
        count = sum(1 for _ in stream_generate(model, tokenizer, text, max_tokens=int(tokens)))
        print(count / (time.perf_counter() - started), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
