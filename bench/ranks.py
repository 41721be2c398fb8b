"""The cost of rank 0's messages to another rank, for a model that needs almost no compute.

`make bench BENCH=ranks`: one process against two on this machine, with the same sequences.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.process import ROOT
from bench.report import Figure, at_most, fact

SEQUENCES = 4
STEPS = 300
MOST_SHARE = 0.15  # of a step's time, for control messages between ranks


def measure() -> Iterator[Figure]:
    """The group runs in a process of its own, because MLX can form only one per process."""
    ran = subprocess.run(
        [sys.executable, "-m", "bench.ranks"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = json.loads(ran.stdout.splitlines()[-1])
    yield fact("step of one process, us", found["alone"] * 1e6)
    yield fact("step of two ranks, us", found["divided"] * 1e6)
    yield fact("control per step, bytes", found["bytes"])
    share = found["control"] / found["divided"]
    words = f"{found['control'] * 1e6:.0f} us"
    yield at_most("control / step of two ranks", share, MOST_SHARE, words)


def main() -> None:
    from tests.engine.ranks.divided_models import write_divided
    from tests.engine.ranks.local_group import LocalGroup
    from tests.engine.rounds import Rounds

    def step_seconds(rounds: Rounds) -> float:
        for ticket in range(1, SEQUENCES + 1):
            rounds.submit(ticket, [ticket, 5, 6], 2 * STEPS, ignore_eos=True)
        while rounds.tickets("waiting") or rounds.tickets("prefill"):
            rounds.step()
        spent = []
        for _ in range(STEPS):
            began = time.perf_counter()
            rounds.step()
            spent.append(time.perf_counter() - began)
        for ticket in range(1, SEQUENCES + 1):
            rounds.scheduler.cancel(ticket)
        rounds.drain()
        return statistics.median(spent)

    with tempfile.TemporaryDirectory() as folder, LocalGroup(2) as group:
        model = write_divided(Path(folder), "qwen2")
        alone = step_seconds(Rounds(group.whole(model)))
        rounds = Rounds(group.load(model, parallelism="pipeline"))
        leader = group.leader
        leader.steps, leader.step_seconds, leader.step_bytes = 0, 0.0, 0
        divided = step_seconds(rounds)
        print(
            json.dumps(
                {
                    "alone": alone,
                    "divided": divided,
                    "control": leader.step_seconds / leader.steps,
                    "bytes": leader.step_bytes / leader.steps,
                }
            )
        )


if __name__ == "__main__":
    main()
