"""The engine's state and metrics, as reported by Status and GetMetrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class EngineState(Enum):
    """The state of the process's model."""

    EMPTY = "empty"
    LOADING = "loading"
    READY = "ready"
    GENERATING = "generating"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """State plus memory figures in bytes, as MLX reports them. ranks: one line of text per rank."""

    state: EngineState
    total_bytes: int
    breakdown: dict[str, int] = field(default_factory=dict)
    ranks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GuessReport:
    """The current state of drafting.

    width: guesses that a step may check for each sequence.
    proposed, accepted: guesses since the load.
    gain: measured tokens per second, relative to plain steps.
    guessers: their names, for logs.
    """

    width: int = 0
    proposed: int = 0
    accepted: int = 0
    gain: float = 1.0
    guessers: str = ""


@dataclass(slots=True)
class ExpertCounts:
    """How experts are used that stay in the checkpoint's files; written by the engine thread.

    slots: experts of each layer that fit in memory. experts: of each layer. layers: with experts.
    hits, misses: experts that a layer used in a pass and that were in memory or had to be read.
    wait_seconds: for which the engine waited for reads.
    """

    slots: int
    experts: int
    layers: int
    hits: int = 0
    misses: int = 0
    read_bytes: int = 0
    wait_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Totals since the process started, and the speed of the latest decode step.

    guessing: the results of drafting; None if the model does not draft.
    experts: None unless experts stay in the checkpoint's files.
    """

    running: int
    queued: int
    tokens_generated: int
    prompt_tokens_processed: int
    tokens_per_second: float
    guessing: GuessReport | None = None
    experts: ExpertCounts | None = None
