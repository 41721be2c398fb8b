"""How a load is cut, so that it never stops the streams of the model that still serves.

A load is one generator. Whoever drives it runs it from one `yield` to the next on the thread that
the generator has just asked for: `engine` for whatever makes or evaluates an array of MLX, one
stage between two steps of the running sequences; `files` for all else that takes time. A stage
cannot be interrupted, so none should take much longer than `stall_ms`. To close the
generator, on the engine thread, abandons the load.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Literal, TypeVar

Place = Literal["engine", "files"]

_Result = TypeVar("_Result")

Stages = Generator[Place, None, _Result]


def at_once(stages: Stages[_Result]) -> _Result:
    """What the stages end with, all of them on the caller's thread."""
    while True:
        try:
            next(stages)
        except StopIteration as end:
            result: _Result = end.value
            return result
