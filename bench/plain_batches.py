"""`python -m bench.plain_batches FOLDER`: mlx-lm without a server.

Each line of standard input is JSON, and so is each line of output. A list of requests is served by
BatchGenerator, with a cache of prompts, and an object with a prompt by `stream_generate`. A number
N asks for the kernels in a decode step of N rows, of mlx-lm and of the backend. An object with the
number `compiled` asks for the speeds of so many rows in plain steps and in compiled ones.

`python -m bench.plain_batches FOLDER CONFIG N` writes a checkpoint with random weights, which does
not generate the first N tokens.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten

from backend.engine.mlx_lm_import import import_mlx_lm
from tests.engine.kernels import kernels


def write(folder: Path, config: dict[str, Any], first: int) -> None:
    """Write a checkpoint with random weights in bfloat16, or in 4 bits if the config says so.

    first: the lowest token that it generates, because those of the tokenizer may have no text.
    """
    import_mlx_lm()  # in less than half the time
    architecture = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model: Any = architecture.Model(architecture.ModelArgs.from_dict(config))
    shared = model.model.embed_tokens  # the embeddings of inputs and outputs
    shared.weight = (
        mx.where(mx.arange(config["vocab_size"])[:, None] < first, 0.01, 1) * shared.weight
    )
    model.set_dtype(mx.bfloat16)
    if "quantization" in config:
        quantize(model, **config["quantization"])
    weights: Any = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))


class Plain:
    """mlx-lm, with the settings of its server."""

    def __init__(self, folder: str) -> None:
        from mlx_lm import load
        from mlx_lm.models.cache import LRUPromptCache

        self.model, self._tokenizer, *_ = load(folder)
        if mx.default_device() == mx.Device(mx.cpu):
            mx.disable_compile()  # as the backend does on a CPU
            self.model.set_dtype(mx.float32)
        self._prompts = LRUPromptCache()

    def alone(self, prompt: str, tokens: int) -> float:
        """Return tokens per second for one message, prefill included."""
        from mlx_lm import stream_generate

        read = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True
        )
        began = time.perf_counter()
        count = sum(1 for _ in stream_generate(self.model, self._tokenizer, read, tokens))
        return count / (time.perf_counter() - began)

    def serve(self, requests: list[list[Any]]) -> dict[str, Any]:
        """Serve requests of [prompt, tokens, start].

        start: seconds after the call; negative means after the first token of the first request.
        Returns the fields of a `bench.process.Run` for each, and MLX's peak memory in bytes.
        """
        from mlx_lm.generate import BatchGenerator

        prompts = [self._tokenizer.encode(prompt) for prompt, _, _ in requests]
        arrivals: list[list[float]] = [[] for _ in requests]
        started = [0.0] * len(requests)
        numbers: dict[int, int] = {}
        generator, began, left = BatchGenerator(self.model), time.perf_counter(), len(requests)
        waiting = list(range(len(requests)))
        while left:
            for at in list(waiting):
                _, tokens, start = requests[at]
                elapsed = time.perf_counter() - began
                if elapsed >= start >= 0 or (start < 0 and arrivals[0]):
                    waiting.remove(at)
                    started[at] = elapsed
                    cache, rest = self._prompts.fetch_nearest_cache("it", prompts[at])
                    caches = None if cache is None else [cache]
                    known = prompts[at][: len(prompts[at]) - len(rest)]
                    (uid,) = generator.insert([rest], [tokens], caches, [known])
                    numbers[uid] = at
            for one in generator.next()[1]:
                at = numbers[one.uid]
                arrivals[at].append(time.perf_counter() - began - started[at])
                if one.finish_reason is not None:
                    self._prompts.insert_cache("it", one.all_tokens, one.prompt_cache)
                    left -= 1
        generator.close()
        runs = [
            {
                "arrivals": seen,
                "tokens": len(seen),
                "prompt_tokens": len(prompt),
                "started": begin,
                "seconds": seen[-1],
            }
            for seen, prompt, begin in zip(arrivals, prompts, started, strict=True)
        ]
        return {"runs": runs, "peak": mx.get_peak_memory()}

    def kernels(self, rows: int) -> tuple[int, int]:
        """Return the kernels of a greedy decode step of sequences of different lengths.

        Returns those of mlx-lm and those of the backend.
        """
        from mlx_lm.generate import BatchGenerator

        from backend.engine.token_text import ByteStream
        from tests.engine.rounds import Rounds, engine_model

        prompts = [list(range(1, 20 + at)) for at in range(rows)]
        generator = BatchGenerator(self.model)
        generator.insert(prompts, [100] * rows)
        while len(generator.next()[1]) < rows:
            pass
        theirs = counted(generator.next)
        generator.close()
        model = engine_model(self.model, slots=rows, memory_limit=1 << 40)
        text = ByteStream(lambda _: b"x", strip_first_space=False)
        rounds = Rounds(replace(model, new_text=lambda _: text))
        for ticket, prompt in enumerate(prompts):
            rounds.submit(ticket, prompt, 100, ignore_eos=True)
        while len(rounds.tickets("decode")) < rows:
            rounds.step()
        for _ in range(3):
            rounds.step()
        return theirs, counted(rounds.step)


def counted(step: Callable[[], object]) -> int:
    """Return the number of kernels that a call starts; a view of an array needs none."""
    found = 0

    def counting(real: Callable[..., None]) -> Callable[..., None]:
        def run(*arrays: Any) -> None:
            nonlocal found
            found += kernels(arrays)
            real(*arrays)

        return run

    with (
        patch.object(mx, "eval", counting(mx.eval)),
        patch.object(mx, "async_eval", counting(mx.async_eval)),
    ):
        step()
    return found


def main(folder: str, config: str = "", first: str = "") -> None:
    if config:
        write(Path(folder), json.loads(config), int(first))
        return
    from bench import compiled_step  # it imports mlx-lm

    plain = Plain(folder)
    for line in sys.stdin:
        asked: Any = json.loads(line)
        match asked:
            case int():
                answer: Any = plain.kernels(asked)
            case {"compiled": rows, "tokens": tokens}:
                answer = compiled_step.speeds(plain.model, rows, tokens)[1:]
            case {"prompt": prompt, "tokens": tokens}:
                answer = plain.alone(prompt, tokens)
            case _:
                answer = plain.serve(asked)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *sys.argv[2:])
