"""`python -m tests.fuzz.guided TARGET RUNS FOLDER`: fuzzes one target, guided by its coverage.

FOLDER gets the inputs found: those that reach new code, in `corpus`, and the one that fails.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["common", "backend", "gateway"]):
    from tests.fuzz.targets import TARGETS

CPU_SECONDS = 10.0
"""Processor time for one input. The limit in elapsed time is longer, because a busy machine may not
run this process for minutes."""
SEEDS = Path(__file__).parent / "corpus"


def main(name: str, runs: str, folder: str) -> None:
    found = Path(folder) / "corpus"
    found.mkdir(parents=True, exist_ok=True)
    limits = [f"-runs={runs}", "-max_len=4096", "-timeout=300", "-rss_limit_mb=2048"]
    places = [f"-artifact_prefix={folder}/", str(found), str(SEEDS / name)]
    target = TARGETS[name]

    def limited(given: bytes) -> None:
        before = time.process_time()
        target(given)
        assert time.process_time() - before < CPU_SECONDS

    atheris.Setup([sys.argv[0], *limits, *places], limited)
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
