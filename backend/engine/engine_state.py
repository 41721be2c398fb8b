"""The engine's state and metrics, as reported by Status and GetMetrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from backend.engine.heartbeat import Heartbeat


class EngineState(Enum):
    """The state of the process's model."""

    EMPTY = "empty"
    LOADING = "loading"
    READY = "ready"
    GENERATING = "generating"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """The engine's state, its memory in bytes as MLX reports it, and a line of text per rank."""

    state: EngineState
    total_bytes: int
    breakdown: dict[str, int] = field(default_factory=dict)
    ranks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftReport:
    """The current state of drafting.

    width: maximum number of draft tokens that a step checks for each sequence.
    proposed, accepted: number of draft tokens since the load.
    gain: measured tokens per second, as a multiple of those of steps without draft tokens.
    drafters: names of the drafters, for logs.
    """

    width: int = 0
    proposed: int = 0
    accepted: int = 0
    gain: float = 1.0
    drafters: str = ""


@dataclass(slots=True)
class ExpertCounts:
    """Counts of experts that stay in the checkpoint's files; written by the engine thread.

    slots: number of experts of a layer that fit in memory.
    experts: number of experts of a layer.
    layers: number of layers with experts.
    hits: experts that a layer used in a pass and that were in memory.
    misses: experts that a layer used in a pass and that had to be read.
    ahead_hits: those of the misses whose reads had begun before the layer selected them.
    wasted_bytes: bytes of experts that were read ahead and not used.
    wait_seconds: seconds for which the engine waited for reads.
    """

    slots: int
    experts: int
    layers: int
    hits: int = 0
    misses: int = 0
    read_bytes: int = 0
    wait_seconds: float = 0.0
    ahead_hits: int = 0
    wasted_bytes: int = 0


@dataclass(slots=True)
class Gauges:
    """Numbers since the start of the engine thread, which it writes and any thread reads.

    tokens_per_second: of the latest decode step, without the time of prefill.
    queued: requests that wait or are being prepared, at the latest `Engine.metrics`.
    preemptions: sequences that were preempted to free memory.
    unstored: number of answers whose KV was larger than the whole prompt cache.
    drafting: the results of drafting; None if the model does not draft.
    experts: the use of experts, if they stay in the checkpoint's files.
    """

    tokens_generated: int = 0
    prompt_tokens_processed: int = 0
    tokens_per_second: float = 0.0
    running: int = 0
    queued: int = 0
    preemptions: int = 0
    unstored: int = 0
    drafting: DraftReport | None = None
    experts: ExpertCounts | None = None
    heartbeat: Heartbeat = field(default_factory=Heartbeat.fresh)
