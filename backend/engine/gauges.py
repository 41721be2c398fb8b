"""Counters that the engine thread maintains for Status and GetMetrics."""

from __future__ import annotations

from dataclasses import dataclass, field

from backend.engine.engine_state import DraftReport, ExpertCounts
from backend.engine.heartbeat import Heartbeat


@dataclass(slots=True)
class Gauges:
    """Numbers that the engine thread writes and any thread reads.

    The totals count from the start of the engine thread.

    tokens_per_second: of the latest decode step, without the time of prefill.
    preemptions: sequences that were preempted to free memory.
    unstored: number of answers whose KV was larger than the whole prompt cache.
    drafting: the results of drafting, if the model drafts.
    experts: the use of experts, if they stay in the checkpoint's files.
    heartbeat: the record of the current step.
    """

    tokens_generated: int = 0
    prompt_tokens_processed: int = 0
    tokens_per_second: float = 0.0
    running: int = 0
    preemptions: int = 0
    unstored: int = 0
    drafting: DraftReport | None = None
    experts: ExpertCounts | None = None
    heartbeat: Heartbeat = field(default_factory=Heartbeat.fresh)
