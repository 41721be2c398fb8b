"""Loads without an engine: all stages on the test's own thread."""

from __future__ import annotations

from typing import TypeVar

from backend.engine.loading.stages import Stages

Result = TypeVar("Result")


def at_once(stages: Stages[Result]) -> Result:
    """What the load ends with."""
    while True:
        try:
            next(stages)
        except StopIteration as end:
            result: Result = end.value
            return result
