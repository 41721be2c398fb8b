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

from backend.engine.engine_state import DraftReport, Gauges
from backend.engine.events import Finished

CONTEXT_SIZE = "mlx-context-size"  # LoadModel: tokens of prompt and answer
TRUNCATED_TOKENS = "mlx-truncated-tokens"  # Embedding and Rerank; absent if none was cut off

_UNPRINTABLE = re.compile("[^ -~]")


def of(end: Finished, reasoning_tokens: int) -> tuple[tuple[str, str | bytes], ...]:
    trailers: list[tuple[str, str | bytes]] = [
        ("mlx-finish-reason", end.reason),
        ("mlx-cached-tokens", str(end.usage.cached_tokens)),
        ("mlx-reasoning-tokens", str(reasoning_tokens)),
    ]
    if end.stop_sequence:
        trailers.append(("mlx-stop-sequence-bin", end.stop_sequence.encode()))
    if end.repeated:
        trailers.append(("mlx-ended-by", "repetition"))
    return tuple(trailers)


def of_metrics(metrics: Gauges) -> tuple[tuple[str, str], ...]:
    """Return the trailers of Status and GetMetrics about drafting, and about experts in files."""
    experts = metrics.experts
    if experts is None:
        return _of_drafting(metrics.drafting)
    return (
        *_of_drafting(metrics.drafting),
        ("mlx-expert-slots", str(experts.slots)),
        ("mlx-expert-hits", str(experts.hits)),
        ("mlx-expert-misses", str(experts.misses)),
        ("mlx-expert-ahead-hits", str(experts.ahead_hits)),
        ("mlx-expert-read-bytes", str(experts.read_bytes)),
        ("mlx-expert-wasted-bytes", str(experts.wasted_bytes)),
        ("mlx-expert-wait-seconds", f"{experts.wait_seconds:.3f}"),
    )


def _of_drafting(report: DraftReport | None) -> tuple[tuple[str, str], ...]:
    if report is None:
        return ()
    return (
        ("mlx-draft-width", str(report.width)),
        ("mlx-draft-tokens", str(report.proposed)),
        ("mlx-draft-accepted-tokens", str(report.accepted)),
        ("mlx-draft-gain", f"{report.gain:.2f}"),
        ("mlx-drafters", report.drafters),
    )


def of_ranks(lines: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the trailers of Status about ranks. gRPC sends only printable ASCII in them."""
    return tuple(("mlx-rank", _UNPRINTABLE.sub("?", line)) for line in lines)
