"""`python -m tests.engine.ranks.lone_faults FOLDER`: runs rank 0 beside a faulty rank 1.

Prints the results of loads and requests as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from backend.engine.errors import EngineError
from tests.engine.loading_models import read_weights, write_weights
from tests.engine.ranks.divided_models import write_divided
from tests.engine.ranks.faulty_rank import POISON
from tests.engine.ranks.local_group import LocalGroup
from tests.engine.rounds import Rounds

OWN = Path("/proc/self/cwd/model")  # a path that names another folder in each process


def main(folder: Path) -> None:
    model = write_divided(folder / "model", "qwen2")
    elsewhere = write_divided(folder / "elsewhere/model", "qwen2")
    weights = read_weights(elsewhere)
    weights["model.norm.weight"] *= 2
    write_weights(elsewhere, weights)

    def start_elsewhere(command: list[str], environ: dict[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env=environ, cwd=elsewhere.parent)

    found = {}
    os.chdir(folder)
    faulty = "tests.engine.ranks.faulty_rank"
    with LocalGroup(2, faulty, start=start_elsewhere, failing=True) as group:
        try:
            group.load(model)
        except EngineError as refusal:
            found["first load"] = f"{type(refusal).__name__}: {refusal}"
        try:
            group.load(OWN)
        except EngineError as refusal:
            found["other weights"] = f"{type(refusal).__name__}: {refusal}"
        rounds = Rounds(group.load(model))
        rounds.submit(1, [1, 2, 3], 5, ignore_eos=True)
        rounds.drain()
        found["third load"] = str(len(rounds.received[1].tokens))
        rounds.submit(2, [1, 2, POISON], 5)
        try:
            rounds.drain()
        except EngineError as loss:
            found["poison"] = f"{type(loss).__name__}: {loss}"
        found["cause"] = "; ".join(group.causes)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
