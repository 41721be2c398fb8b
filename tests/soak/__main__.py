"""`make soak`: sends one backend, then a gateway with three models, all kinds of requests.

An argument, `backend` or `gateway`, picks one of the two.
"""

from __future__ import annotations

import sys

from bench.process import ROOT
from tests.soak import one_backend, three_models

MODELS = ROOT / "tests" / "models"
SOAKS = {
    "backend": lambda: one_backend.measure(MODELS / "tiny_text", MODELS / "tiny_vision"),
    "gateway": lambda: three_models.measure(MODELS / "tiny_text", MODELS / "tiny_omni"),
}


def main(names: list[str]) -> int:
    if unknown := set(names) - set(SOAKS):
        print(f"soak: {', '.join(unknown)} is unknown: choose from {', '.join(SOAKS)}")
        return 2
    missed = 0
    for name in names or SOAKS:
        for figure in SOAKS[name]():
            print(figure, flush=True)
            missed += figure.met is False
    print(f"{missed} goals missed" if missed else "every goal is met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
