"""The hidden states from which heads draft: where they come from, and those not read yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from backend.engine.caching import kv
from backend.engine.patching import patch
from backend.engine.sampling.logits_head import StateSource

MOST = 256  # tokens whose states are kept; older ones too, if they are in the same array
_TOGETHER = 16  # passes whose states are passed on together, which costs little more than one


_TRIAL = (1, 2, 3)


class LayerStates(StateSource):
    """The states of a model in front of some of its layers, which EAGLE-3 and DFlash read.

    mlx-lm returns no hidden states, and mlx-vlm does for a few families only
    (`capture_layer_ids`). In the models of both, a layer receives what the layers before it have
    made, so the layers are patched to pass it on.

    positions: the layers, counted from 0.
    found: whether the model has these layers and passes them its states.
    """

    def __init__(self, model: Any, positions: Sequence[int], size: int) -> None:
        self._positions = tuple(positions)
        self._at: dict[int, mx.array] = {}  # the states of the pass so far
        layers = list(getattr(model, "layers", ()))
        self.found = bool(positions) and 0 <= min(positions) <= max(positions) < len(layers)
        if self.found:
            for position in set(positions):
                patch(layers[position], partial(self._pass, position))
            with self.watched() as seen:
                model(mx.array([_TRIAL]), cache=kv.new_row(model))
            shapes = [hidden.shape for hidden in seen]
            self.found = shapes == [(1, len(_TRIAL), size * len(positions))]

    def _pass(self, position: int, own: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        if self._seen is not None and args and isinstance(args[0], mx.array):
            if position == min(self._positions):
                self._at = {}  # an earlier pass may have failed
            self._at[position] = args[0]
            if position == max(self._positions) and len(self._at) == len(set(self._positions)):
                self._seen.append(mx.concatenate([self._at[at] for at in self._positions], -1))
                self._at = {}
        return own(layer, *args, **kwargs)


def latest(seen: Sequence[mx.array], rows: int) -> mx.array | None:
    """Return the states of a pass over this many rows; None if its rows ran one by one."""
    return seen[-1] if seen and seen[-1].shape[0] == rows else None


class UnreadStates:
    """States of a sequence's latest tokens: those from which the next token of each was chosen.

    A drafter that has not been asked for a long time misses some, so fewer of its draft tokens
    are right.
    """

    def __init__(self) -> None:
        self._parts: deque[mx.array] = deque()
        self._tokens = 0

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def add(self, states: mx.array) -> None:
        """Append the states of the next tokens, [tokens, size]."""
        self._parts.append(states)
        self._tokens += states.shape[0]
        while self._tokens - self._parts[0].shape[0] >= MOST:
            self._tokens -= self._parts.popleft().shape[0]

    def take(self) -> mx.array | None:
        """Return and forget all states, [tokens, size]; None if there are none."""
        parts = list(self._parts)
        self.clear()
        if len(parts) < 2:
            return parts[0] if parts else None
        return mx.concatenate(parts)

    def clear(self) -> None:
        self._parts.clear()
        self._tokens = 0


class PassedStates:
    """Hidden states of a batch's latest decode steps that no drafter has requested yet.

    A step adds states of one token per sequence. Steps without draft tokens add them too, so adding
    must cost next to nothing.
    """

    def __init__(self) -> None:
        self._passes: list[mx.array] = []

    @property
    def nbytes(self) -> int:
        return sum(passed.nbytes for passed in self._passes)

    def add(self, passed: mx.array, rows: Sequence[UnreadStates]) -> None:
        """Append the states of a pass, [rows, 1, size].

        rows: the states of each row, in the order of the pass.
        """
        self._passes.append(passed)
        if len(self._passes) >= _TOGETHER:
            self.flush(rows)

    def flush(self, rows: Sequence[UnreadStates]) -> None:
        """Append them to the states of each row."""
        if self._passes:
            together = mx.concatenate(self._passes, axis=1)
            self._passes.clear()
            distribute(together, rows, [(0, together.shape[1])] * len(rows))


def distribute(
    passed: mx.array, rows: Sequence[UnreadStates], positions: Sequence[tuple[int, int]]
) -> None:
    """Append states, [rows, tokens, size], to those of each row.

    positions: for each row, its range of tokens.

    The states are copied, because a view of `passed` would keep the states of all rows alive.
    """
    parts = [mx.contiguous(passed[row, start:stop]) for row, (start, stop) in enumerate(positions)]
    mx.async_eval(parts)
    for own, part in zip(rows, parts, strict=True):
        own.add(part)
