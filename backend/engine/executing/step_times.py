"""Measures the device's times of steps and passes, which the planner learns from."""

from __future__ import annotations

from collections.abc import Callable

from backend.engine.device import may_wait_within_a_step


class StepTimes:
    """The times of decode steps and passes.

    clock: seconds. in_order: whether the device computes within the call that launches, as a CPU
    does, so that work ends in the order of the launches.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.in_order = may_wait_within_a_step()
        self._began = 0.0  # of this step
        self._decode_began = 0.0  # of the step that is read next
        self._decode_launched = 0.0
        self._decoded = 0.0  # seconds of the latest decode step that were not reported yet
        self._ready = 0.0  # when the device was last known to have finished something
        # what the latest step did; empty if it did more than decode
        self._latest_kind: tuple[object, ...] = ()
        self._read = 0.0

    def begin(self) -> None:
        """Record that a step is about to be launched."""
        self._began = self.clock()

    def decode_launched(self) -> None:
        self._decode_launched = self.clock()

    def decode_read(self, *, any_tokens: bool) -> None:
        """Record that the tokens of the previous step have been read."""
        if any_tokens:
            now, began = self.clock(), max(self._ready, self._decode_began)
            if self.in_order:
                now, began = self._decode_launched, self._began
            self._decoded = now - began
            self._ready = now
        self._decode_began = self._began

    def take_decoded(self) -> float:
        """Seconds of the decode step that was read since the last call; 0 if none was."""
        decoded, self._decoded = self._decoded, 0.0
        return decoded

    def since_same_step(self, step: tuple[object, ...]) -> float:
        """Seconds since the previous step if that step was the same; otherwise 0.

        step: what this step does; empty if it does more than decode.
        """
        now = self.clock()
        seconds = now - self._read if step and step == self._latest_kind else 0.0
        self._latest_kind, self._read = step, now
        return seconds

    def finished(self, launched: float, done: float) -> float:
        """Seconds of work that was launched and waited for.

        launched, done: when it was launched, and the latest time at which it can have ended.
        """
        began = max(self._ready, launched)
        self._ready = min(self.clock(), done)
        return self._ready - began

    def waited(self, began: float) -> float:
        """Seconds that work took while this thread waited for it."""
        self._ready = self.clock()
        return self._ready - began
