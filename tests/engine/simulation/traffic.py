"""Seeded conversations: chats, agents with growing contexts, bursts; some clients disconnect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from backend.engine.planning.prefix_index import PrefixKey

Kind = Literal["chat", "agent", "burst"]

LIMIT = 4096  # the output limit in tokens of every request; answers are shorter
_VOCABULARY = 150_000
_LONGEST = 100_000  # tokens of an agent's context
_LEAVES = 0.05  # share of requests whose client disconnects
_BURST = 24  # requests within a second
_SYSTEMS: dict[Kind, Sequence[int]] = {
    "chat": (60, 250, 400, 900, 1500),
    "agent": (2000, 4500, 9000),
    "burst": (1200, 3000),
}
# The share of each kind among new conversations.
_SHARES: dict[Kind, float] = {"chat": 0.86, "agent": 0.11, "burst": 0.03}


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation.

    new: tokens from the user or from tools. answer: tokens. pause: seconds since the last answer.
    patience: seconds after which the client disconnects; None if it does not.
    """

    new: int
    answer: int
    pause: float
    patience: float | None


@dataclass(frozen=True, slots=True)
class Conversation:
    """Consecutive turns. start: seconds. system: the shared system prompt. seed: of its tokens."""

    kind: Kind
    start: float
    system: PrefixKey
    turns: tuple[Turn, ...]
    seed: int

    def tokens(self, turn: int) -> NDArray[np.integer]:
        """The new tokens of a turn, then the tokens of its answer."""
        drawn = np.random.default_rng((self.seed, turn))
        wanted = self.turns[turn]
        return drawn.integers(1, _VOCABULARY, wanted.new + wanted.answer, dtype=np.int32)


def conversations(seed: int, requests: int, load: float) -> list[Conversation]:
    """Conversations with `requests` turns in all, by start time. load: turns per second."""
    drawn = np.random.default_rng(seed)
    systems = {
        kind: [PrefixKey(drawn.integers(1, _VOCABULARY, length)) for length in lengths]
        for kind, lengths in _SYSTEMS.items()
    }
    made: list[tuple[Kind, int, list[list[Turn]]]] = []
    left = requests
    while left > 0:
        kind: Kind = drawn.choice(list(_SHARES), p=list(_SHARES.values()))
        lengths = systems[kind]
        weights = np.array([1 / rank for rank in range(1, len(lengths) + 1)])
        system = int(drawn.choice(len(lengths), p=weights / weights.sum()))
        grouped = _turns(drawn, kind, len(lengths[system]))
        grouped = _cut(grouped, left)
        left -= sum(map(len, grouped))
        made.append((kind, system, grouped))
    starts = np.sort(drawn.uniform(0, requests / load, len(made)))
    chosen = [
        Conversation(
            kind,
            float(start) + (float(drawn.uniform()) if kind == "burst" else 0.0),
            systems[kind][system],
            tuple(turns),
            int(drawn.integers(1 << 62)),
        )
        for start, (kind, system, grouped) in zip(starts, made, strict=True)
        for turns in grouped
    ]
    return sorted(chosen, key=lambda chat: chat.start)


def _turns(drawn: np.random.Generator, kind: Kind, system: int) -> list[list[Turn]]:
    """The turns of conversations that begin at the same time."""
    if kind == "chat":
        count = int(drawn.integers(1, 7))
        return [[_turn(drawn, 60, 0.9, 110, 0.8, 40.0) for _ in range(count)]]
    if kind == "burst":
        return [[_turn(drawn, 300, 0.8, 60, 0.6, 0.0)] for _ in range(_BURST)]
    target = float(np.exp(drawn.uniform(np.log(max(2000, system)), np.log(_LONGEST))))
    turns = [_turn(drawn, 700, 1.0, 60, 0.8, 3.0)]
    size = system + turns[0].new + turns[0].answer
    while size < target and len(turns) < 40:
        turn = _turn(drawn, 900, 1.2, 60, 0.8, 3.0)
        size += turn.new + turn.answer
        if size > _LONGEST:
            break
        turns.append(turn)
    return [turns]


def _turn(
    drawn: np.random.Generator, new: float, spread: float, answer: float, wide: float, pause: float
) -> Turn:
    """A turn with log-normal lengths (by median) and an exponential pause (by mean)."""
    leaves = drawn.random() < _LEAVES
    return Turn(
        new=int(np.clip(drawn.lognormal(np.log(new), spread), 4, 20_000)),
        answer=int(np.clip(drawn.lognormal(np.log(answer), wide), 1, 600)),
        pause=float(drawn.exponential(pause)) if pause else 0.0,
        patience=float(drawn.exponential(8.0)) if leaves else None,
    )


def _cut(grouped: list[list[Turn]], left: int) -> list[list[Turn]]:
    """The first `left` turns."""
    kept: list[list[Turn]] = []
    for turns in grouped:
        if left > 0:
            kept.append(turns[:left])
            left -= len(turns)
    return kept
