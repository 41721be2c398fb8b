"""Writes the values for which the protocol has no field as trailing metadata.

After Predict and PredictStream a host needs to know why an answer ended, how many prompt tokens
came from the cache, and how many answer tokens were reasoning. Status and GetMetrics report the
results of drafting if the model drafts, and the use of experts if they stay in the checkpoint's
files; Status reports the ranks if there are several. Only successful calls have these trailers, and
hosts may ignore them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from backend.engine.engine_state import DraftReport, EngineMetrics
from backend.engine.events import Finished

FINISH_REASON = "mlx-finish-reason"
CACHED_TOKENS = "mlx-cached-tokens"
REASONING_TOKENS = "mlx-reasoning-tokens"
STOP_SEQUENCE = "mlx-stop-sequence-bin"
ENDED_BY = "mlx-ended-by"
CONTEXT_SIZE = "mlx-context-size"  # LoadModel: tokens of prompt and answer
TRUNCATED_TOKENS = "mlx-truncated-tokens"  # Embedding and Rerank; absent if none was cut off
DRAFT_WIDTH = "mlx-draft-width"
DRAFTED = "mlx-draft-tokens"
ACCEPTED = "mlx-draft-accepted-tokens"
GAIN = "mlx-draft-gain"
DRAFTERS = "mlx-drafters"
EXPERT_SLOTS = "mlx-expert-slots"
EXPERT_HITS = "mlx-expert-hits"
EXPERT_MISSES = "mlx-expert-misses"
EXPERT_BYTES = "mlx-expert-read-bytes"
EXPERT_SECONDS = "mlx-expert-wait-seconds"
RANK = "mlx-rank"  # Status: a line for each rank

_UNPRINTABLE = re.compile("[^ -~]")


def of(end: Finished, reasoning_tokens: int) -> tuple[tuple[str, str | bytes], ...]:
    """Return the trailers for this end of an answer."""
    trailers: list[tuple[str, str | bytes]] = [
        (FINISH_REASON, end.reason),
        (CACHED_TOKENS, str(end.usage.cached_tokens)),
        (REASONING_TOKENS, str(reasoning_tokens)),
    ]
    if end.stop_sequence:
        trailers.append((STOP_SEQUENCE, end.stop_sequence.encode()))
    if end.repeated:
        trailers.append((ENDED_BY, "repetition"))
    return tuple(trailers)


def of_metrics(metrics: EngineMetrics) -> tuple[tuple[str, str], ...]:
    """Return the trailers of Status and GetMetrics about drafting, and about experts in files."""
    experts = metrics.experts
    if experts is None:
        return _of_drafting(metrics.drafting)
    return (
        *_of_drafting(metrics.drafting),
        (EXPERT_SLOTS, str(experts.slots)),
        (EXPERT_HITS, str(experts.hits)),
        (EXPERT_MISSES, str(experts.misses)),
        (EXPERT_BYTES, str(experts.read_bytes)),
        (EXPERT_SECONDS, f"{experts.wait_seconds:.3f}"),
    )


def _of_drafting(report: DraftReport | None) -> tuple[tuple[str, str], ...]:
    if report is None:
        return ()
    return (
        (DRAFT_WIDTH, str(report.width)),
        (DRAFTED, str(report.proposed)),
        (ACCEPTED, str(report.accepted)),
        (GAIN, f"{report.gain:.2f}"),
        (DRAFTERS, report.drafters),
    )


def of_ranks(lines: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the trailers of Status about ranks. gRPC sends only printable ASCII in them."""
    return tuple((RANK, _UNPRINTABLE.sub("?", line)) for line in lines)
