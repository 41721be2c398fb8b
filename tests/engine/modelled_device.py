"""A device whose passes take a known time, on a clock of its own, under the real engine.

The engine and MLX run unchanged; only time is modelled. The device computes passes one after the
other, in the order of their launches, while the host goes on, and MLX's own waiting is modelled
too: a launch returns only when little of the queued work is left, and whoever reads a result waits
until the launch that computed it has ended. So the times that the engine measures can be compared
with the true ones, whatever else the machine does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from backend.engine import device
from backend.engine.executing import batch, choosing
from backend.engine.executing.step_times import StepTimes
from backend.engine.scheduler import Scheduler

BUILD = 0.002  # seconds that the host takes to build a pass's graph
_SMALL = 64  # numbers; larger arrays are not remembered, because that would delay their release


@dataclass
class ModelledDevice:
    """The device and its clock.

    seconds: duration of a pass with these rows, tokens per row and tokens before. ahead: seconds of
    queued work with which a launch returns. passes: rows, tokens per row, and seconds of all passes
    that were started.
    """

    seconds: Callable[[int, int, int], float]
    ahead: float = 0.005
    now: float = 0.0
    free: float = 0.0  # when everything that was started will have been computed
    passes: list[tuple[int, int, float]] = field(default_factory=list)
    _built: list[tuple[int, int, float]] = field(default_factory=list)
    _ends: dict[int, tuple[mx.array, float]] = field(default_factory=dict)

    def slow(self, model: Any) -> Any:
        """The model with this device's times."""
        return _Slow(model, self)

    def build(self, rows: int, tokens: int, behind: int) -> None:
        """Build a pass, which the next launch starts."""
        self.now += BUILD
        self._built.append((rows, tokens, self.seconds(rows, tokens, behind)))

    def start(self, arrays: Any) -> list[mx.array]:
        """Start what computes the arrays; returns all of them."""
        leaves: Any = tree_flatten(arrays)
        found = [one for _, one in leaves if isinstance(one, mx.array)]
        new = [array for array in found if id(array) not in self._ends]
        if new and self._built:
            work = sum(seconds for _, _, seconds in self._built)
            self.passes += self._built
            self._built.clear()
            self.free = max(self.free, self.now) + work
            self.now = max(self.now, self.free - self.ahead)
        for array in new:
            if array.size <= _SMALL:
                self._ends[id(array)] = array, max(self.free, self.now)
        return found

    def wait(self, arrays: Any) -> None:
        """Wait until the arrays are computed."""
        ends = [
            self._ends[id(array)][1] if id(array) in self._ends else self.free
            for array in self.start(arrays)
        ]
        self.now = max([self.now, *ends])


class _Slow:
    def __init__(self, model: Any, device: ModelledDevice) -> None:
        self._model, self._device = model, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, tokens: mx.array, cache: Any = None, **named: Any) -> Any:
        behind = max((int(layer.offset) for layer in cache if _plain(layer)), default=0)
        rows, width = map(int, tokens.shape)
        self._device.build(rows, width, behind)
        return self._model(tokens, cache=cache, **named)


def _plain(layer: Any) -> bool:
    return isinstance(getattr(layer, "offset", None), int)


@contextmanager
def modelled(device_: ModelledDevice) -> Iterator[None]:
    """Let all waiting and all clocks of the engine be those of the device, in GPU order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "may_wait_within_a_step", lambda: False)
        start: Any = mx.async_eval
        evaluate: Any = mx.eval
        fitting = choosing.fitting

        def started(*arrays: Any) -> None:
            start(*arrays)
            device_.start(arrays)

        def evaluated(*arrays: Any) -> None:
            evaluate(*arrays)
            device_.wait(arrays)

        def read(checked: mx.array) -> tuple[list[int], list[int]]:
            device_.wait([checked])
            return fitting(checked)

        patch.setattr(mx, "async_eval", started)
        patch.setattr(mx, "eval", evaluated)
        for module in (batch, choosing):
            patch.setattr(module, "fitting", read)
        patch.setattr(Scheduler, "_now", lambda _: device_.now)
        make: Any = StepTimes.__init__
        patch.setattr(StepTimes, "__init__", lambda self, _: make(self, lambda: device_.now))
        yield
