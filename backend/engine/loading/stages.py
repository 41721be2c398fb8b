"""Divides a load into stages, so that the streams of the current model continue meanwhile.

A load is a generator. Its driver runs the generator from one `yield` to the next, on the thread
that the generator has yielded: `engine` for everything that creates or evaluates an MLX array, one
stage between two steps of the running sequences; `files` for everything else that takes time. A
stage cannot be interrupted, so no stage should take much longer than `stall_ms`. The load is
abandoned by closing the generator on the engine thread.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Literal, TypeVar

StageThread = Literal["engine", "files"]

_Result = TypeVar("_Result")

Stages = Generator[StageThread, None, _Result]


def at_once(stages: Stages[_Result]) -> _Result:
    """Run all stages on the caller's thread, and return their result."""
    while True:
        try:
            next(stages)
        except StopIteration as end:
            result: _Result = end.value
            return result
