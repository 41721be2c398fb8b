"""How near a modelled machine comes to what was measured on a real one."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from backend.engine.planning.planner import Planner
from backend.engine.planning.prefix_index import PrefixKey
from tests.engine.simulation.replay import Replay
from tests.engine.simulation.setup import Setup, measured
from tests.engine.simulation.traffic import Conversation, Turn

MOST_ERROR = 0.2
_SEED = 1
_WARM = (8, 16, 64, 512)  # tokens of the prompts before a burst
_QUIET = 60.0  # seconds from their start to the burst


def burst(setup: Setup, prompts: Sequence[int], answer: int) -> float:
    """Tokens per second of prompts that arrive within 20 ms at a server that is warm and idle.

    prompts: their tokens. answer: tokens of each answer. The time begins with the first token.
    """
    dice, empty = random.Random(_SEED), PrefixKey(())
    warm = [Conversation("chat", 0.0, empty, tuple(Turn(n, 2, 1.0, None) for n in _WARM), 0)]
    asked = [
        Conversation("chat", _QUIET + dice.uniform(0, 0.02), empty, (Turn(n, answer, 0, None),), at)
        for at, n in enumerate(prompts, 1)
    ]
    made = Replay(setup, Planner(setup.limits), [*warm, *asked]).run()
    runs = made.requests[len(_WARM) :]
    began = min(run.first or 0.0 for run in runs)
    return len(prompts) * answer / (max(run.ended for run in runs) - began)


def agreement() -> Iterator[tuple[str, float, float]]:
    """The figures of [[measured]]: name, as simulated, and as measured."""
    dice = random.Random(_SEED)
    for one in measured():
        for rows, speed in zip(one.rows, one.decode, strict=True):
            prompts = [dice.randint(46, 57) for _ in range(rows)]
            name = f"{one.machine.name}, {one.model.name}, answers at once: {rows}, tokens/s"
            yield name, burst(one.setup(rows), prompts, 128), speed
        if one.prefill is not None:
            tokens, speed = one.prefill
            seconds = one.setup(1).prefill_seconds(1, tokens, 0) + one.machine.shape
            yield (
                f"{one.machine.name}, {one.model.name}, prefill, tokens/s",
                tokens / seconds,
                speed,
            )
