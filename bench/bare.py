"""mlx-lm's own `stream_generate` with nothing around it: prompts in, tokens/s out."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.process import ROOT, environment_of


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
