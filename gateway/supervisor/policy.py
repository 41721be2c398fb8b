"""Decides which models to unload, and when to try again.

Everything here is a pure function of its arguments; times are seconds of one clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

T = TypeVar("T")
LONGEST_PAUSE = 30.0
GOOD_RUN = 60.0  # seconds of service after which a crash counts as the first


@dataclass(frozen=True, slots=True)
class Loaded(Generic[T]):
    """A model that has a backend, or is getting one. `memory` in bytes, 0 if unknown."""

    model: T
    memory: int
    busy: bool  # in use by a request, or being loaded
    pinned: bool
    last_used: float
    idle_after: float  # seconds; 0: never


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits for the whole gateway; 0 means none."""

    models: int = 0
    memory: int = 0  # bytes

    def hold(self, models: int, memory: int) -> bool:
        return (not self.models or models <= self.models) and (
            not self.memory or memory <= self.memory
        )


@dataclass(frozen=True, slots=True)
class Failures:
    """Failed loads and crashes in a row, the last error, and the time of the next try."""

    count: int = 0
    retry_at: float = 0.0
    sentence: str = ""


def to_unload(loaded: Sequence[Loaded[T]], coming: int, limits: Limits) -> list[Loaded[T]] | None:
    """Return the models to unload so that one more of `coming` bytes fits; None if impossible.

    The least recently used come first, and none is unloaded without need.
    """

    def fits(without: Sequence[Loaded[T]]) -> bool:
        stay = [model for model in loaded if model not in without]
        return limits.hold(len(stay) + 1, sum(model.memory for model in stay) + coming)

    idle = [model for model in loaded if not model.busy and not model.pinned]
    idle.sort(key=lambda model: model.last_used)
    leaving: list[Loaded[T]] = []
    while not fits(leaving):
        if not idle:
            return None
        leaving.append(idle.pop(0))
    for model in reversed(leaving[:]):
        spared = [other for other in leaving if other is not model]
        if fits(spared):
            leaving = spared
    return leaving


def may_fit(loaded: Sequence[Loaded[T]], coming: int, limits: Limits) -> bool:
    """Return whether a model of `coming` bytes would fit if no loaded model were in use."""
    return to_unload([replace(model, busy=False) for model in loaded], coming, limits) is not None


def over_limits(loaded: Sequence[Loaded[T]], limits: Limits) -> list[Loaded[T]]:
    """Return the models to unload because loaded ones have grown; never the one that was used last.

    A single model over the limit stays: it would be loaded again by the next request.
    """
    if not loaded:
        return []
    latest = max(loaded, key=lambda model: model.last_used)
    others = [model for model in loaded if model is not latest]
    leaving = to_unload(others, latest.memory, limits)
    if leaving is None:  # the models in use exceed the limits alone; unload all others
        return [model for model in others if not model.busy and not model.pinned]
    return leaving


def idle(loaded: Sequence[Loaded[T]], now: float) -> list[Loaded[T]]:
    """Return the models without a request for longer than their setting allows."""
    return [
        model
        for model in loaded
        if model.idle_after > 0
        and not model.busy
        and not model.pinned
        and now - model.last_used >= model.idle_after
    ]


def after_failure(before: Failures, sentence: str, ran: float, now: float) -> Failures:
    """Count one more failure.

    ran: seconds of service before it; 0 for a load that failed.

    After the first failure the model may be started again at once; after the second in a row and
    each further one there is a pause of 1, 2, 4 … 30 s.
    """
    count = 1 if ran >= GOOD_RUN else before.count + 1
    pause = 0.0 if count == 1 else min(LONGEST_PAUSE, 2.0 ** min(count - 2, 10))
    return Failures(count, now + pause, sentence)


def remembered(failures: Failures, last_used: float, now: float) -> bool:
    """Return whether another failure now would continue this series of failures."""
    return failures.count > 0 and now < max(failures.retry_at, last_used) + GOOD_RUN
