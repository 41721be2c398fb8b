"""Predicts which experts the next layer selects, so that they are read while this layer computes.

The router of the next layer is applied to the input of this layer, because the state of a token
changes little from one layer to the next. The prediction is computed together with this layer's
own choice, so the host waits for the device no more often than without a prediction. A wrong
prediction costs an unnecessary read, and never changes a result.

Whether reading ahead saves time depends on the disk, on how much of the files is in the system's
page cache, on the device, and on how often predictions are right. So the time is measured: some
passes read ahead, others do not, and most passes are of the faster kind.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import mlx.core as mx

_log = logging.getLogger(__name__)

_NAMES = ("gate", "router")  # the names of routers in all families of mlx-lm
_MOST_TOKENS = 32  # in a pass that may read ahead; larger passes select nearly all experts
_REMEMBERED = 9  # passes of each kind whose times are compared
_TRIED = 5  # passes of each kind before the first comparison
_REFRESH = 32  # one pass in 32 is of the slower kind
_GAIN = 1.03  # minimum gain, because times vary


@dataclass(eq=False)
class Router:
    """A layer's router, which is looked up for each call, because a load may replace it."""

    around: Sequence[Any]  # the modules that may contain the router
    experts: int  # the number of experts
    _usable: bool = field(default=True, init=False)

    def choose(self, x: mx.array, count: int) -> mx.array | None:
        """Return `count` experts for each token; None if the router needs other arguments.

        x: [..., width].
        """
        if not self._usable:
            return None
        found = (block[name] for block in self.around for name in _NAMES if name in block)
        router = next(found, None)
        try:
            made = router(x)  # type: ignore[misc]  # None cannot be called either
            results = made if isinstance(made, tuple) else (made,)
            for values in results:
                if not mx.issubdtype(values.dtype, mx.floating):
                    return values  # type: ignore[no-any-return]
            if results[0].shape[-1] == self.experts:
                return mx.argpartition(results[0], kth=-count, axis=-1)[..., -count:]
        except Exception:
            _log.debug("a router cannot be applied to the input of another layer", exc_info=True)
        self._usable = False
        return None


@dataclass(slots=True)
class _Times:
    """The duration of the latest passes over a number of tokens, by whether they read ahead."""

    passes: int = 0
    seconds: dict[bool, deque[float]] = field(
        default_factory=lambda: {kind: deque(maxlen=_REMEMBERED) for kind in (False, True)}
    )


class Payoff:
    """Decides by measured times which passes read ahead.

    active: whether the current pass reads ahead.
    now: returns the time in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.active = False
        self._now = now
        self._began = 0.0
        self._tokens = 0
        self._times: dict[int, _Times] = {}

    def begin(self, tokens: int) -> None:
        """Begin a pass over `tokens` tokens."""
        self._tokens, self._began = tokens, self._now()
        self.active = tokens <= _MOST_TOKENS and self._choose(
            self._times.setdefault(tokens, _Times())
        )

    def end(self) -> None:
        """End the pass, after its last layer with experts."""
        if times := self._times.get(self._tokens):
            times.passes += 1
            times.seconds[self.active].append(self._now() - self._began)

    def _choose(self, times: _Times) -> bool:
        without, ahead = (times.seconds[kind] for kind in (False, True))
        if min(len(without), len(ahead)) < _TRIED:
            return len(ahead) <= len(without)
        pays = median(ahead) * _GAIN < median(without)
        return pays != (times.passes % _REFRESH == 0)
