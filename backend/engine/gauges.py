"""What the engine thread tells of itself without being asked."""

from __future__ import annotations

from dataclasses import dataclass, field

from backend.engine.guess_width import GuessReport
from backend.engine.heartbeat import Heartbeat


@dataclass(slots=True)
class Gauges:
    """Plain numbers for Status and GetMetrics: written on the engine thread, read on any.

    The totals count from the start of the thread. tokens_per_second is that of the latest step.
    preemptions: sequences that lost their KV to memory and were computed again. unstored: answers
    whose KV was larger than the whole prompt cache. guessing: what drafting does, where the model
    drafts.
    heartbeat: which step runs.
    """

    tokens_generated: int = 0
    prompt_tokens_processed: int = 0
    tokens_per_second: float = 0.0
    running: int = 0
    preemptions: int = 0
    unstored: int = 0
    guessing: GuessReport | None = None
    heartbeat: Heartbeat = field(default_factory=Heartbeat.fresh)
