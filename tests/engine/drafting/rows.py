"""Decodes one row as a lone one in a batch is: plain and overlapped, or with guesses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from backend.engine import kv
from backend.engine.drafting.drafter import Drafter
from backend.engine.drafting.verify import verify_step
from backend.engine.penalties import Past
from backend.engine.request import Sampling
from backend.engine.sampling import BatchSampler

CHUNK = 512


class RowSampler:
    """The row's own sampler for any number of successive steps."""

    def __init__(self, sampling: Sampling, vocabulary: int) -> None:
        self._sampling = sampling
        self._vocabulary = vocabulary
        self._by_width: dict[int, BatchSampler] = {}

    def __call__(self, logits: mx.array, fed: mx.array, steps: list[int]) -> mx.array:
        width = len(steps)
        if width not in self._by_width:
            copies = [self._sampling] * width
            self._by_width[width] = BatchSampler(copies, [Past((), 0, 1)] * width, self._vocabulary)
        return self._by_width[width](logits, fed, steps)


@dataclass
class Tally:
    """What guessing did: passes of the model, guesses, guesses that were right."""

    passes: int = 0
    proposed: int = 0
    accepted: int = 0


def prefilled(model: Any, prompt: Sequence[int]) -> list[Any]:
    """A cache that holds all of the prompt but its last token."""
    cache = kv.new_row(model)
    for start in range(0, len(prompt) - 1, CHUNK):
        chunk = list(prompt[start : min(start + CHUNK, len(prompt) - 1)])
        model(mx.array([chunk]), cache=cache)
        kv.evaluate(cache)
    return cache


def decode(
    model: Any,
    cache: list[Any],
    prompt: Sequence[int],
    count: int,
    sampler: RowSampler,
    drafter: Drafter | None = None,
    most: int = 8,
) -> tuple[list[int], Tally]:
    """`count` tokens after the prompt. A step is overlapped where no guess is to be had."""
    tally, tokens = Tally(), list(prompt)
    pending = mx.array([prompt[-1]], dtype=mx.uint32)
    step = 0  # tokens generated, `pending` among them
    while step < count:
        if drafter is not None and drafter.ready(len(prompt) + step):
            latest = cast(int, pending.item())
            if step:
                tokens.append(latest)
            draft = drafter.propose(tokens, min(most, count - step - 1))
            if draft:
                found = verify_step(model, cache, latest, draft, sampler, step)
                tokens += found[:-1]
                pending = mx.array(found[-1:], dtype=mx.uint32)
                drafter.record(len(draft), len(found) - 1)
                step += len(found)
                tally.passes += 1
                tally.proposed += len(draft)
                tally.accepted += len(found) - 1
                continue
            known = True
        else:
            known = step == 0
        fed = pending
        pending = sampler(model(fed[None], cache=cache)[0], fed, [step])
        mx.async_eval(pending)
        if not known:
            tokens.append(cast(int, fed.item()))
        step += 1
        tally.passes += 1
    return [*tokens[len(prompt) :], cast(int, pending.item())], tally
