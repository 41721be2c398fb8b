"""The hidden states of a sequence that no guesser has read yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import mlx.core as mx

MOST = 256  # tokens whose states are kept; older ones too, if they are in the same array
_TOGETHER = 16  # passes whose states are handed out together, which costs little more than one


class StateSource(Protocol):
    """Where the hidden states come from that a guesser reads."""

    def watched(self) -> AbstractContextManager[list[mx.array]]:
        """Collect the states of each pass, [rows, tokens, size]; the last ones count."""
        ...


def latest(seen: Sequence[mx.array], rows: int) -> mx.array | None:
    """Return the states of a pass over this many rows; None if its rows ran one by one."""
    return seen[-1] if seen and seen[-1].shape[0] == rows else None


class UnreadStates:
    """States of a sequence's latest tokens: those from which the next token of each was chosen.

    A guesser that has not been asked for a long time misses some, which makes its guesses worse.
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
    """Hidden states of a batch's latest decode steps that no guesser has requested yet.

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
            self.hand_out(rows)

    def hand_out(self, rows: Sequence[UnreadStates]) -> None:
        """Append them to the states of each row."""
        if self._passes:
            together = mx.concatenate(self._passes, axis=1)
            self._passes.clear()
            distribute(together, rows, [(0, together.shape[1])] * len(rows))


def distribute(
    passed: mx.array, rows: Sequence[UnreadStates], places: Sequence[tuple[int, int]]
) -> None:
    """Append states, [rows, tokens, size], to those of each row.

    places: for each row, its range of tokens.

    The states are copied, because a view of `passed` would keep the states of all rows alive.
    """
    parts = [mx.contiguous(passed[row, start:stop]) for row, (start, stop) in enumerate(places)]
    mx.async_eval(parts)
    for own, part in zip(rows, parts, strict=True):
        own.add(part)
