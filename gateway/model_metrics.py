"""Metrics of each model for Prometheus: its state, memory, and its backend's own counters."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import grpc
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.calls import Stub
from gateway.supervisor.instance import ModelStatus, State
from gateway.supervisor.supervisor import Supervisor
from wire import backend_pb2 as pb

_SCRAPE_LIMIT = 1.0  # seconds; a backend that is busy loading must not block the scrape
_G, _C = GaugeMetricFamily, CounterMetricFamily
# By field of MetricsResponse, or key of its trailing metadata: mlx-draft-* if the model drafts,
# mlx-expert-* if its experts stay in the checkpoint's files.
_COUNTED = {
    "tokens_per_second": (_G, "tokens_per_second", "Latest decode speed of all answers together."),
    "tokens_generated": (_C, "generated_tokens", "Tokens generated since the backend's start."),
    "prompt_tokens_processed": (_C, "prompt_tokens", "Prompt tokens since the backend's start."),
    "mlx-draft-width": (_G, "draft_width", "Draft tokens that a step may check for each sequence."),
    "mlx-draft-tokens": (_C, "draft_tokens", "Draft tokens checked since the load."),
    "mlx-draft-accepted-tokens": (_C, "draft_accepted_tokens", "Draft tokens that were accepted."),
    "mlx-draft-gain": (_G, "draft_gain", "Decode speed, relative to plain steps."),
    "mlx-expert-hits": (_C, "expert_hits", "Experts that a pass used and that were in memory."),
    "mlx-expert-misses": (_C, "expert_misses", "Experts that a pass had to read."),
    "mlx-expert-ahead-hits": (_C, "expert_ahead_hits", "Those of the misses that were read ahead."),
    "mlx-expert-read-bytes": (_C, "expert_read_bytes", "Bytes read from weight files."),
    "mlx-expert-wasted-bytes": (_C, "expert_wasted_bytes", "Bytes that were read ahead in vain."),
    "mlx-expert-wait-seconds": (_C, "expert_wait_seconds", "Seconds spent waiting for reads."),
}
# A model and, if its backend answers, its counters since the start.
ModelNow = tuple[ModelStatus, Mapping[str, float]]


async def collect(supervisor: Supervisor) -> list[ModelNow]:
    """Return the state and counters of every model. This loads no model and keeps none loaded."""
    statuses = supervisor.status()
    counts = await asyncio.gather(*(_counts(supervisor.peek(each.name)) for each in statuses))
    return list(zip(statuses, counts, strict=True))


async def _counts(stub: Stub | None) -> Mapping[str, float]:
    if stub is not None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            call: Any = stub.GetMetrics(pb.MetricsRequest(), timeout=_SCRAPE_LIMIT)
            found = {field.name: getattr(await call, field.name) for field in _FIELDS}
            found |= await call.trailing_metadata() or ()
            return {key: float(found[key]) for key in _COUNTED if key in found}
    return {}


def text(models: Sequence[ModelNow]) -> bytes:
    return generate_latest(_Models(models))


class _Models(Collector):
    def __init__(self, models: Sequence[ModelNow]) -> None:
        self._models = models

    def collect(self) -> Iterable[Metric]:
        state = _G("gateway_model_state", "1 for the current state.", None, ("model", "state"))
        memory = _family(_G, "memory_bytes", "Memory that its backend reported last.")
        leases = _family(_G, "leases", "Requests that use the model, or wait for it.")
        restarts = _family(_C, "restarts", "Starts of its backend after a crash.")
        counted = {key: _family(*row) for key, row in _COUNTED.items()}
        for status, counts in self._models:
            name = [status.name]
            for each in State:
                state.add_metric([*name, str(each)], float(status.state is each))
            memory.add_metric(name, status.memory_bytes)
            leases.add_metric(name, status.leases)
            restarts.add_metric(name, status.restarts)
            for key, count in counts.items():
                counted[key].add_metric(name, count)
        return (state, memory, leases, restarts, *counted.values())


_FIELDS = pb.MetricsResponse.DESCRIPTOR.fields


def _family(kind: Callable[..., Any], name: str, meaning: str) -> Any:
    return kind(f"gateway_model_{name}", meaning, None, ("model",))
