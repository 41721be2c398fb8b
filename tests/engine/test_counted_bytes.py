"""The prompt cache's byte count equals what MLX holds, after many mixed requests.

An entry that is a view of a larger buffer keeps all of the buffer alive, and a leaked entry is not
counted: only this test notices either.
"""

from __future__ import annotations

import gc
import random

import mlx.core as mx
import numpy as np
import pytest

from backend.engine.device import release_memory
from tests.engine.kv_models import kv_model
from tests.engine.random_models import VOCABULARY
from tests.engine.rounds import MIB, Rounds, engine_model
from tests.long import TEST_LONG

pytestmark = pytest.mark.usefixtures("each_order")
REQUESTS = 200 if TEST_LONG else 100


@pytest.fixture(autouse=True)
def _copies(exact_buffers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """`mx.contiguous` of mlx 0.32.4 leaves up to 16 KiB in a buffer rather than copy it.

    That is little beside the KV of real models, but not of these.
    """
    monkeypatch.setattr(mx, "contiguous", lambda array: mx.array(np.array(array)))


def _held_and_counted(kind: str, cache_bytes: int) -> tuple[int, int]:
    """Bytes that MLX holds beside the model, and bytes that the planner counts."""
    dice = random.Random(7)
    rounds = Rounds(engine_model(kv_model(kind), prompt_cache_bytes=cache_bytes))
    release_memory()  # of other tests
    gc.collect()
    before = mx.get_active_memory()
    prompts = [[dice.randrange(1, VOCABULARY) for _ in range(40)]]
    for ticket in range(1, REQUESTS + 1):
        start = dice.choice(prompts)[: dice.randrange(200)]
        end = [dice.randrange(1, VOCABULARY) for _ in range(dice.randrange(1, 60))]
        prompts.append(start + end)
        rounds.submit(ticket, prompts[-1], dice.choice([1, 5, 12]), ignore_eos=True)
        # in prefill too, where a layer's state may be a view of a whole pass
        if dice.random() < 0.3:
            rounds.scheduler.cancel(dice.randint(max(ticket - 2, 1), ticket))
        for _ in range(dice.choice([0, 0, 1, 8])):
            rounds.step()
    rounds.drain()
    counted = rounds.scheduler.executor.entry_bytes
    assert counted == rounds.scheduler.planner.entries.index.nbytes > MIB // 4
    gc.collect()
    return mx.get_active_memory() - before, counted


@pytest.mark.parametrize("cache_bytes", [64 * MIB, MIB // 2], ids=["all kept", "some evicted"])
@pytest.mark.parametrize("kind", ["attention", "latent"])
def test_entries_hold_the_bytes_that_are_counted(kind: str, cache_bytes: int) -> None:
    held, counted = _held_and_counted(kind, cache_bytes)
    assert held == pytest.approx(counted, rel=0.03)


@pytest.mark.parametrize("kind", ["window", "short convolution", "state space", "gated delta"])
def test_entries_with_snapshots_hold_no_more_than_is_counted(kind: str) -> None:
    """Entries may share a snapshot, which is counted for each of them."""
    held, counted = _held_and_counted(kind, 2 * MIB)
    assert held <= 1.03 * counted
