"""Predicts which experts the next layer selects, so that they are read while this layer computes.

The router of the next layer is applied to the input of this layer, because the state of a token
changes little from one layer to the next. The prediction is computed together with this layer's
own choice, so the host waits for the device no more often than without a prediction. A wrong
prediction costs an unnecessary read, and never changes a result.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

_log = logging.getLogger(__name__)

_NAMES = ("gate", "router")  # the names of routers in all families of mlx-lm
MOST_TOKENS = 32  # in a pass that reads ahead; larger passes select nearly all experts


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
