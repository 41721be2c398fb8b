"""mlx-lm's own BatchGenerator with nothing around it; prints tokens per second."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map


def main(model_path: str, width: int, tokens: int) -> float:
    """Same weights in float32, same prompts, prefill included, greedy; the first run warms up."""
    from mlx_lm.generate import BatchGenerator
    from mlx_lm.utils import load_model, load_tokenizer

    mx.disable_compile()
    model, _ = load_model(Path(model_path), lazy=True)
    model.update(tree_map(_float32, model.parameters()))
    mx.eval(model.parameters())
    tokenizer: Any = load_tokenizer(Path(model_path))
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"Tell me story {number}."}], add_generation_prompt=True
        )
        for number in range(width)
    ]

    def run() -> float:
        generator = BatchGenerator(model, max_tokens=tokens, completion_batch_size=width)
        generator.insert(prompts)
        started, count = time.perf_counter(), 0
        while responses := generator.next_generated():
            count += len(responses)
        return count / (time.perf_counter() - started)

    run()
    return run()


def _float32(value: mx.array) -> mx.array:
    return value.astype(mx.float32) if mx.issubdtype(value.dtype, mx.floating) else value


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
