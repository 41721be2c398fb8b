"""`python -m tests.engine.ranks.ended_loads FOLDER WHAT`: is rank 0 of a group.

cancelled: cancels loads, each after one stage more, then loads; prints the results as JSON.
refused: rank 1 refuses between collectives, which ends the process.
later: after the first answer, does what the load has left, then asks again; prints the results.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

from backend.engine.load_request import LoadRequest
from backend.engine.loading.loader import load
from backend.engine.loading.stages import at_once
from tests.engine.ranks.divided_models import write_divided
from tests.engine.ranks.faulty_rank import REFUSES
from tests.engine.ranks.local_group import LocalGroup
from tests.engine.rounds import Rounds

_MOST_STAGES = 24  # the first tokens, the trial and a part of the warm-up are among them


def cancelled(folder: Path) -> dict[str, object]:
    with LocalGroup(2) as group:
        model = write_divided(folder, "qwen2")
        group.load(model)
        request = LoadRequest("model", str(model), settings={"rank_timeout": 20})
        for stages in range(1, _MOST_STAGES):
            begun = threading.Event()
            loading = load(request, 100 + stages, begun, group.leader)
            for _ in range(stages):
                next(loading)
            begun.set()
            loading.close()
        rounds = Rounds(group.load(model))
        rounds.submit(1, [1, 2, 3], 5, ignore_eos=True)
        rounds.drain()
        return {"tokens": len(rounds.received[1].tokens), "causes": group.causes}


def refused(folder: Path) -> None:
    os.environ[REFUSES] = "1"
    with LocalGroup(2, "tests.engine.ranks.faulty_rank") as group:
        group.load(write_divided(folder, "qwen2"), rank_timeout=10)


def later(folder: Path) -> dict[str, object]:
    with LocalGroup(2) as group:
        model = group.load(write_divided(folder, "qwen2"))
        rounds = Rounds(model)
        prompt = list(range(1, 20))
        rounds.submit(1, prompt, 5, ignore_eos=True)
        rounds.drain()
        assert model.later is not None
        at_once(model.later)
        rounds.submit(2, [*prompt, 30], 5, ignore_eos=True)
        rounds.drain()
        finished = rounds.received[2].finished
        assert finished is not None
        return {"cached": finished.usage.cached_tokens, "causes": group.causes}


if __name__ == "__main__":
    found = {"cancelled": cancelled, "refused": refused, "later": later}[sys.argv[2]](
        Path(sys.argv[1])
    )
    print(json.dumps(found), flush=True)
