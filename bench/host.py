"""The time that Python takes for a decode step, against mlx-lm's BatchGenerator in the same run.

The model computes almost nothing. Counted is the processor time of the thread that steps, without
the model's own graph and without MLX's launches and waits, which both sides have in common.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler
from mlx_lm.utils import load_tokenizer

from backend.engine.caching import kv
from backend.engine.commands import Submit
from backend.engine.device import detect, prepare
from backend.engine.engine_state import Gauges
from backend.engine.model import EngineModel
from backend.engine.outbox import Outbox
from backend.engine.request import GenerationRequest, Sampling, TokenPrompt
from backend.engine.sampling.logits_head import LogitsHead
from backend.engine.scheduler import Scheduler
from backend.engine.token_text import TokenTexts
from backend.engine.units import MIB
from bench.report import Figure, at_most

STEPS = 100  # in a round
ROUNDS = 9
CASES = {
    "greedy": (Sampling(), {1: 1.45, 8: 1.4, 32: 1.3}),
    "top_p": (Sampling(temperature=0.9, top_p=0.95), {1: 1.3, 8: 1.3, 32: 1.3}),
}
_LAYERS, _VOCABULARY = 8, 512

Step = Callable[[], object]


class _Watch:
    """Adds up the thread's processor time, except that of MLX calls and of the model's graph."""

    def __init__(self) -> None:
        self._excluded = 0.0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            started = time.thread_time()
            try:
                return call(*given, **named)
            finally:
                self._excluded += time.thread_time() - started

        return timed

    def milliseconds(self, step: Step, count: int) -> float:
        """Return milliseconds per step."""
        self._excluded = 0.0
        started = time.thread_time()
        for _ in range(count):
            step()
        return (time.thread_time() - started - self._excluded) * 1000 / count


class _Model:
    """A model that looks its logits up, and appends zeros to its KV. Its calls are not counted."""

    def __init__(self, watch: _Watch) -> None:
        self.layers = [None] * _LAYERS
        self._table = mx.random.normal((_VOCABULARY, _VOCABULARY), key=mx.random.key(0))
        self._run = watch.around(self._pass)

    def __call__(self, tokens: mx.array, cache: Sequence[Any]) -> mx.array:
        logits: mx.array = self._run(tokens, cache)
        return logits

    def _pass(self, tokens: mx.array, cache: Sequence[Any]) -> mx.array:
        new = mx.zeros((tokens.shape[0], 1, tokens.shape[1], 8))
        cache[0].make_mask(tokens.shape[1], return_array=False, window_size=None)
        for layer in cache:
            turned = mx.fast.rope(
                new, 8, traditional=False, base=1e4, scale=1.0, offset=layer.offset
            )
            keys, _ = layer.update_and_fetch(turned, new)
            new = new + keys[..., -1:, :] * 0
        return self._table[tokens] + new[:, 0, :, :1]


def measure(folder: Path) -> Iterator[Figure]:
    """folder: a checkpoint, of which only the tokenizer is used."""
    prepare(detect())
    texts = TokenTexts(load_tokenizer(folder))
    for name, (sampling, bounds) in CASES.items():
        for rows, bound in bounds.items():
            ours, theirs = _of_a_step(texts, sampling, rows)
            yield at_most(
                f"ms of Python per step, {name}, {rows} rows / BatchGenerator",
                ours / theirs,
                bound,
                f"{ours:.3f} / {theirs:.3f}",
            )


def _of_a_step(texts: TokenTexts, sampling: Sampling, rows: int) -> tuple[float, float]:
    """Return medians of alternating rounds: ours, and mlx-lm's."""
    watch = _Watch()
    model = _Model(watch)
    prompts = [[1 + at % 50 for at in range(12 + row)] for row in range(rows)]
    limit = STEPS * (ROUNDS + 2)
    sides = [
        _scheduler(model, texts, sampling, prompts, limit).step,
        _theirs(model, sampling, prompts, limit),
    ]
    times: list[list[float]] = [[], []]
    with ExitStack() as unwatched:
        for owner, name in ((mx, "async_eval"), (mx, "eval"), (mx.array, "tolist")):
            call = watch.around(getattr(owner, name))
            unwatched.enter_context(patch.object(owner, name, call))
        for side in sides:
            watch.milliseconds(side, STEPS)  # the first steps also prefill
        for _ in range(ROUNDS):
            for own, side in zip(times, sides, strict=True):
                own.append(watch.milliseconds(side, STEPS))
    ours, theirs = map(min, times)
    return ours, theirs


def _scheduler(
    model: Any, texts: TokenTexts, sampling: Sampling, prompts: Sequence[list[int]], limit: int
) -> Scheduler:
    """Return a scheduler in which these prompts wait.

    limit: tokens of each answer.
    """
    outbox = Outbox(lambda _: None)
    outbox.interval = 0.01
    engine = EngineModel(
        model=model,
        head=LogitsHead(model, _VOCABULARY, ""),
        vocabulary=_VOCABULARY,
        end_tokens=frozenset(),
        new_text=texts.stream,
        cost=kv.cost(model),
        slots=len(prompts),
        weights_bytes=0,
        memory_limit=2048 * MIB,
        prompt_cache_bytes=64 * MIB,
        max_cache_entries=0,
        prefill_chunk=512,
        stall_ms=250,
    )

    def report(where: str, fault: BaseException) -> None:
        raise RuntimeError(where) from fault

    scheduler = Scheduler(engine, outbox.publish, report, Gauges(), outbox.flush)
    for ticket, prompt in enumerate(prompts, 1):
        request = GenerationRequest(str(ticket), TokenPrompt(tuple(prompt)), sampling)
        scheduler.submit(Submit(1, ticket, request, prompt, limit))
    return scheduler


def _theirs(model: Any, sampling: Sampling, prompts: Sequence[list[int]], limit: int) -> Step:
    generator = BatchGenerator(
        model,
        max_tokens=limit,
        sampler=make_sampler(sampling.temperature, sampling.top_p),
        completion_batch_size=len(prompts),
        prefill_batch_size=len(prompts),
        stream=mx.default_stream(mx.default_device()),
    )
    generator.insert([list(prompt) for prompt in prompts])
    step: Step = generator.next
    return step
