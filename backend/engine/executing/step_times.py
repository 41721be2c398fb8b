"""Measures the device's times of steps and passes, which the planner learns from."""

from __future__ import annotations

from collections.abc import Callable

from backend.engine.device import may_wait_within_a_step


class StepTimes:
    """The times of decode steps and passes.

    clock: seconds. in_order: whether the device computes within the call that launches, as a CPU
    does: what was launched first is then done first.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.in_order = may_wait_within_a_step()
        self._began = 0.0  # this step
        self._decode_began = 0.0  # the step that is read next
        self._decode_launched = 0.0
        self._decoded = 0.0  # seconds of the latest decode step, until they were reported
        self._ready = 0.0  # when the device was last known to have finished something
        self._alike: tuple[object, ...] = ()  # what the latest step was, if it only decoded
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
        """Seconds of the decode step that was read; 0 if none was, since the latest call."""
        decoded, self._decoded = self._decoded, 0.0
        return decoded

    def since_alike(self, step: tuple[object, ...]) -> float:
        """Seconds since the previous step, if that did the same; otherwise 0.

        step: what this one does; empty if it does more than decode.
        """
        now = self.clock()
        seconds = now - self._read if step and step == self._alike else 0.0
        self._alike, self._read = step, now
        return seconds

    def finished(self, launched: float, done: float) -> float:
        """Seconds of the work that was launched and waited for. done: its end, at the latest."""
        began = max(self._ready, launched)
        self._ready = min(self.clock(), done)
        return self._ready - began

    def waited(self, began: float) -> float:
        """Seconds of work that was computed while this thread waited."""
        self._ready = self.clock()
        return self._ready - began
