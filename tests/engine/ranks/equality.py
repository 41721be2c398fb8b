"""`python -m tests.engine.ranks.equality SIZE SCHEDULES FOLDER NAME:WAY…`: runs rank 0 of a group.

Plays random schedules on models that the group divides, and compares every answer with that of the
whole model in this process. A NAME is a small random model's or a model directory. Prints a line of
JSON per model: the schedules, the tokens compared, the seeds of the schedules in which an answer
differed, and how often each special case occurred.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections import Counter
from pathlib import Path

from backend.engine import scheduler
from backend.engine.executing.score_plan import Continuation, ScorePlan
from backend.engine.model import EngineModel
from backend.engine.request import Sampling
from tests.engine.ranks.divided_models import write_divided
from tests.engine.ranks.local_group import LocalGroup
from tests.engine.rounds import Received, Rounds
from tests.engine.test_parity import check_schedule

_LARGE = {"memory_limit_mib": 4096, "prompt_cache_mib": 256}  # for models that are not tiny
SPECIAL = -1  # the seed of the schedule in `_special`


def main(size: int, schedules: int, folder: Path, asked: list[str]) -> None:
    scheduler._MATCHER_BYTES = 0  # as for the schedules of one process
    with LocalGroup(size) as group:
        for one in asked:
            name, _, way = one.partition(":")
            if (given := Path(name)).is_dir():
                model, sizes = given, _LARGE
            else:
                model, sizes = write_divided(folder / name, name), {}
            whole = group.whole(model, **sizes)
            divided = group.load(model, parallelism=way, **sizes)
            seen: Counter[str] = Counter()
            different = []
            for seed in range(schedules):
                try:
                    seen += check_schedule(divided, seed, whole)
                except AssertionError:
                    print(f"{one} on {size} ranks, seed {seed}", file=sys.stderr)
                    traceback.print_exc()
                    different.append(seed)
            if _special(divided) != _special(whole):
                different.append(SPECIAL)
            assert not group.causes, group.causes
            shards = [shard["bytes"] for shard in group.leader.shards]
            found = {
                "model": one,
                "ranks": size,
                "schedules": schedules,
                "tokens": seen.pop("tokens compared"),
                "different": different,
                "whole": whole.weights_bytes,
                "shards": shards,
                "seen": seen,
            }
            print(json.dumps(found), flush=True)


def _special(model: EngineModel) -> list[tuple[list[int], str, list[float]]]:
    """Fields that random schedules do not use: stop strings, prompt log-probabilities, scores."""
    rounds = Rounds(model)
    prompt = list(range(1, 50))
    rounds.submit(1, prompt, 20, stop=("<7", "3>"))
    rounds.submit(2, prompt[:30], 10, sampling=Sampling(temperature=1.5, seed=3), stop=("1",))
    rounds.submit(3, prompt[5:], 4, prompt_logprobs=2)
    plan = ScorePlan(prompt, (Continuation((5, 6, 7)), Continuation((9,)), Continuation((5, 8))))
    rounds.score(4, plan)
    rounds.drain()
    return [_facts(received) for received in rounds.received.values()]


def _facts(received: Received) -> tuple[list[int], str, list[float]]:
    end = received.finished
    assert end is not None, received.error
    scores = [one for score in end.scores for one in score]
    if end.prompt_logprobs is not None:
        scores += end.prompt_logprobs.rest
    return received.tokens, end.reason, [round(one.logprob, 2) + 0.0 for one in scores]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
