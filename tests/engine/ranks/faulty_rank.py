"""A normal rank with two faults: its first load is refused, and it raises at the token POISON."""

from __future__ import annotations

import os
import sys
from typing import Any
from unittest.mock import patch

from backend.__main__ import main
from backend.engine.errors import ModelRejected
from backend.engine.executor import Executor
from backend.engine.loading.weights import load_model
from backend.engine.plan import PlannerEvent, StepPlan
from backend.engine.ranks import followed_model

POISON = 77

_load, _launch = load_model, Executor.launch
_loads = 0


def load(*arguments: Any, **named: Any) -> Any:
    global _loads
    _loads += 1
    if _loads == 1:
        raise ModelRejected("model 'model' cannot be loaded: its disk is on fire")
    return _load(*arguments, **named)


def launch(executor: Executor, plan: StepPlan) -> list[PlannerEvent]:
    if any(POISON in start.tokens for start in plan.start):
        raise RuntimeError("injected")
    return _launch(executor, plan)


if __name__ == "__main__":
    with patch.object(followed_model, "load_model", load), patch.object(Executor, "launch", launch):
        sys.exit(main([], os.environ))
