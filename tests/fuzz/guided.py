"""`python -m tests.fuzz.guided TARGET RUNS FOLDER`: fuzzes one target, guided by its coverage.

FOLDER gets the inputs found: those that reach new code, in `corpus`, and the one that fails.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["common", "backend", "gateway"]):
    from tests.fuzz.targets import TARGETS

SEEDS = Path(__file__).parent / "corpus"


def main(name: str, runs: str, folder: str) -> None:
    found = Path(folder) / "corpus"
    found.mkdir(parents=True, exist_ok=True)
    limits = [f"-runs={runs}", "-max_len=4096", "-timeout=20", "-rss_limit_mb=2048"]
    places = [f"-artifact_prefix={folder}/", str(found), str(SEEDS / name)]
    atheris.Setup([sys.argv[0], *limits, *places], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
