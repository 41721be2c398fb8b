"""A normal rank with two faults: its first load is refused, and it raises at the token POISON.

With REFUSES in its environment it refuses its first load between two collectives of MLX instead.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from backend.__main__ import main
from backend.engine.errors import ModelRejected
from backend.engine.executing.executor import Executor
from backend.engine.loading import traits
from backend.engine.loading.weights import load_model
from backend.engine.planning.plan import PlannerEvent, StepPlan
from backend.engine.ranks import follower

POISON = 77
REFUSES = "TEST_RANK_REFUSES"

_load, _launch = load_model, Executor.launch
_loads = 0


def load(*arguments: Any, **named: Any) -> Any:
    global _loads
    _loads += 1
    if _loads == 1 and REFUSES not in os.environ:
        raise ModelRejected("model 'model' cannot be loaded: its disk is on fire")
    return _load(*arguments, **named)


def refuse(*_: Any, **__: Any) -> Any:
    raise ModelRejected("model 'model' cannot be loaded: its first pass is refused")


def launch(executor: Executor, plan: StepPlan) -> list[PlannerEvent]:
    if any(POISON in start.tokens for start in plan.start):
        raise RuntimeError("injected")
    return _launch(executor, plan)


if __name__ == "__main__":
    with ExitStack() as faults:
        faults.enter_context(patch.object(follower, "load_model", load))
        faults.enter_context(patch.object(Executor, "launch", launch))
        if REFUSES in os.environ:
            faults.enter_context(patch.object(traits, "pass_cost", refuse))
        sys.exit(main([], os.environ))
