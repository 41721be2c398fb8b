"""Loads are divided into stages, so that the streams of the current model continue meanwhile.

A load is one generator. Its driver runs it from one `yield` to the next, on the thread that the
generator has just requested: `engine` for everything that creates or evaluates an MLX array, one
stage between two steps of the running sequences; `files` for everything else that takes time. A
stage cannot be interrupted, so none should take much longer than `stall_ms`. Closing the generator,
on the engine thread, abandons the load.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Literal, TypeVar

StageThread = Literal["engine", "files"]

_Result = TypeVar("_Result")

Stages = Generator[StageThread, None, _Result]


def at_once(stages: Stages[_Result]) -> _Result:
    """Run all stages on the caller's thread; returns their result."""
    while True:
        try:
            next(stages)
        except StopIteration as end:
            result: _Result = end.value
            return result
