"""What the engine reports of itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class EngineState(Enum):
    """What the one model slot of this process is doing."""

    EMPTY = "empty"
    LOADING = "loading"
    READY = "ready"
    GENERATING = "generating"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """State plus memory figures in bytes, as MLX reports them. ranks: a line for each."""

    state: EngineState
    total_bytes: int
    breakdown: dict[str, int] = field(default_factory=dict)
    ranks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Totals since the process started, and the speed of the latest decode step."""

    running: int
    queued: int
    tokens_generated: int
    prompt_tokens_processed: int
    tokens_per_second: float
