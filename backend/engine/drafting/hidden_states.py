"""Collects the hidden states from which heads draft, and stores them until they are read."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from backend.engine.caching import kv
from backend.engine.patching import patch
from backend.engine.planning.draft_width import CATCH_UP
from backend.engine.sampling.logits_head import StateSource

MOST = CATCH_UP  # tokens whose states a drafter gets; fewer than twice as many are stored
TOGETHER = 16  # passes whose states are divided together, which costs little more than one pass
_TRIAL = (1, 2, 3)


class LayerStates(StateSource):
    """The inputs of some layers of a model, which EAGLE-3 and DFlash read.

    mlx-lm returns no hidden states, and mlx-vlm returns them only for a few families
    (`capture_layer_ids`), so the layers are patched to record their inputs.

    positions: the indices of the layers.
    found: whether the model has these layers, and their inputs are its states.
    """

    def __init__(self, model: Any, positions: Sequence[int], size: int) -> None:
        self._positions = tuple(positions)
        self._at: dict[int, mx.array] = {}  # by layer, the inputs in the current pass
        layers = list(getattr(model, "layers", ()))
        self.found = bool(positions) and 0 <= min(positions) <= max(positions) < len(layers)
        if self.found:
            for position in set(positions):
                patch(layers[position], partial(self._pass, position))
            with self.watched() as seen:
                model(mx.array([_TRIAL]), cache=kv.new_row(model))
            shapes = [hidden.shape for hidden in seen]
            # States are left over if layers run again, or in another order.
            self.found = shapes == [(1, len(_TRIAL), size * len(positions))] and not self._at

    def _pass(self, position: int, own: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        if self._seen is not None and args and isinstance(args[0], mx.array):
            if position == min(self._positions):
                self._at = {}  # an earlier pass may have failed
            self._at[position] = collected = self._collected(args[0])
            if collected is not args[0]:
                # Copied before the layer runs, or the states of all tokens would stay in memory.
                args = (*mx.depends([args[0]], [collected]), *args[1:])
            if position == max(self._positions) and len(self._at) == len(set(self._positions)):
                self._seen.append(mx.concatenate([self._at[at] for at in self._positions], -1))
                self._at = {}
        return own(layer, *args, **kwargs)


def stored_bytes(state: int) -> int:
    """Return the most bytes of a sequence's states: unread ones, and those being divided."""
    return 2 * (MOST + TOGETHER) * state


def latest(seen: Sequence[mx.array], rows: int) -> mx.array | None:
    """Return the states of the latest pass; None if its `rows` rows ran one after another."""
    return seen[-1] if seen and seen[-1].shape[0] == rows else None


class UnreadStates:
    """The states of a sequence's latest tokens, from each of which the next token was chosen.

    If a drafter does not read them for a long time, the oldest are dropped, so fewer draft tokens
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
        """Drop all states; return those of the latest MOST tokens, [tokens, size], or None."""
        parts, excess = list(self._parts), max(self._tokens - MOST, 0)
        self.clear()
        if excess:
            parts[0] = parts[0][excess:]
        if len(parts) < 2:
            return parts[0] if parts else None
        return mx.concatenate(parts)

    def clear(self) -> None:
        self._parts.clear()
        self._tokens = 0


class PassedStates:
    """Hidden states of a batch's latest decode steps, not yet divided among the rows.

    Each step adds the states of one token per row. Steps without draft tokens add states too, so
    adding must cost next to nothing.
    """

    def __init__(self) -> None:
        self._passes: list[mx.array] = []

    @property
    def nbytes(self) -> int:
        return sum(passed.nbytes for passed in self._passes)

    def add(self, passed: mx.array, rows: Sequence[UnreadStates]) -> None:
        """Append the states of a pass, [rows, 1, size].

        rows: where the states of each row are stored, in the order of the pass.
        """
        self._passes.append(passed)
        if len(self._passes) >= TOGETHER:
            self.flush(rows)

    def flush(self, rows: Sequence[UnreadStates]) -> None:
        """Divide all states among the rows."""
        if self._passes:
            together = mx.concatenate(self._passes, axis=1)
            self._passes.clear()
            distribute(together, rows, [(0, together.shape[1])] * len(rows))


def distribute(
    passed: mx.array, rows: Sequence[UnreadStates], positions: Sequence[tuple[int, int]]
) -> None:
    """Append states, [rows, tokens, size], to the unread states of each row.

    The states are copied, because a view of `passed` would keep the states of all rows in memory.

    positions: the range of tokens to append for each row.
    """
    parts = [mx.contiguous(passed[row, start:stop]) for row, (start, stop) in enumerate(positions)]
    mx.async_eval(parts)
    for own, part in zip(rows, parts, strict=True):
        own.add(part)
