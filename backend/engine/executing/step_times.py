"""Measures how long the device takes for steps and passes, for the planner."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from backend.engine import device


class StepTimes:
    """The times of decode steps and passes.

    A GPU works while the host continues, so the end of a pass is known only if the host waits for
    it before starting other work. The host therefore builds the graph of the next pass, waits, and
    only then starts that pass. Decode steps without a pass between them are not separated, nor are
    passes that a plan starts ahead.

    wait: replaces `mx.eval`.
    in_order: whether work ends in the order of the launches, within them, as on a CPU.
    """

    def __init__(
        self, clock: Callable[[], float], wait: Callable[[Sequence[Any]], object] | None = None
    ) -> None:
        self.clock = clock
        self._wait = wait
        self.in_order = device.may_wait_within_a_step()
        self._began = 0.0  # when this step began
        self._starts: float | None = None  # when the first pass of this decode step was started
        # decode steps in flight: when each started, and the arrays that it computes
        self._steps: list[tuple[float, Sequence[Any]]] = []
        self._decoded: list[float] = []  # seconds of decode steps that were not reported yet
        self._ready = 0.0  # when the device was last known to have finished something
        # the contents of the latest step; empty if it did more than decode
        self._latest_kind: tuple[object, ...] = ()
        self._read = 0.0

    def begin(self) -> None:
        """Record that a step is about to be launched."""
        self._began, self._starts = self.clock(), None

    def decode_starts(self) -> None:
        """Record that a pass of the decode step is about to be started."""
        if self._starts is None:
            self._starts = self.clock()

    def decode_launched(self, arrays: Sequence[Any]) -> None:
        """Record that the decode step has been started, which computes these small arrays."""
        if self.in_order and arrays:
            self._ready = self.clock()
            self._decoded.append(self._ready - self._began)
        elif arrays:
            self._steps.append((self._began if self._starts is None else self._starts, arrays))

    def decode_finished(self) -> None:
        """Record that the host has waited for the decode step that it started last."""
        self._ready = self.clock()
        if self.in_order and self._decoded:
            self._decoded[-1] = self._ready - self._began

    def decode_read(self, *, ahead: bool) -> None:
        """Record that tokens were read; the latest step may still be in flight if `ahead`."""
        while len(self._steps) > ahead:
            self._end_decode()

    def wait_for_decode(self) -> None:
        """Wait until the device has computed all decode steps that were started."""
        self.decode_read(ahead=False)

    def take_decoded(self) -> list[float]:
        """Return the seconds of each decode step that has ended since the last call."""
        decoded, self._decoded = self._decoded, []
        return decoded

    def since_same_step(self, step: tuple[object, ...]) -> float:
        """Return the seconds since the previous step if it had the same contents; otherwise 0.

        step: the contents of this step; empty if it does more than decode.
        """
        now = self.clock()
        seconds = now - self._read if step and step == self._latest_kind else 0.0
        self._latest_kind, self._read = step, now
        return seconds

    def finished(self, launched: float, done: float) -> float:
        """Return the seconds of work that was launched at a time and waited for.

        done: the latest time at which the work can have ended.
        """
        began = max(self._ready, launched)
        self._ready = min(self.clock(), done)
        return self._ready - began

    def waited(self, began: float) -> float:
        """Return the seconds of work for which this thread has waited since `began`."""
        self._ready = self.clock()
        return self._ready - began

    def _end_decode(self) -> None:
        started, arrays = self._steps.pop(0)
        with contextlib.suppress(Exception):  # raised again when the tokens are read
            (self._wait or mx.eval)(arrays)
        self._decoded.append(self.finished(started, self.clock()))
