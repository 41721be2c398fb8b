"""Metrics of each model for Prometheus: its state, memory, and its backend's own counters."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence

import grpc
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.generation import Stub
from gateway.supervisor.status import ModelStatus, State
from gateway.supervisor.supervisor import Supervisor
from wire import backend_pb2 as pb

_LOOK_LIMIT = 1.0  # seconds; a backend that is busy loading must not block the scrape


# A model and, if its backend answers, its counters since the start.
ModelNow = tuple[ModelStatus, pb.MetricsResponse | None]


async def look(supervisor: Supervisor) -> list[ModelNow]:
    """The state of every model. Loads none, and keeps none loaded."""
    statuses = supervisor.status()
    counts = await asyncio.gather(*(_counts(supervisor.peek(each.name)) for each in statuses))
    return list(zip(statuses, counts, strict=True))


async def _counts(stub: Stub | None) -> pb.MetricsResponse | None:
    if stub is None:
        return None
    with contextlib.suppress(grpc.aio.AioRpcError):
        found: pb.MetricsResponse = await stub.GetMetrics(pb.MetricsRequest(), timeout=_LOOK_LIMIT)
        return found
    return None


def text(models: Sequence[ModelNow]) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Models(models))
    return generate_latest(registry)


class _Models(Collector):
    def __init__(self, models: Sequence[ModelNow]) -> None:
        self._models = models

    def collect(self) -> Iterable[Metric]:
        state = GaugeMetricFamily(
            "gateway_model_state", "1 for the model's current state.", None, _BY
        )
        memory = _gauge("memory_bytes", "Memory that its backend reported last.")
        leases = _gauge("leases", "Requests that use the model, or wait for it.")
        restarts = _counter("restarts", "Starts of its backend after a crash.")
        speed = _gauge(
            "tokens_per_second", "In its latest period of decoding, all answers together."
        )
        written = _counter("generated_tokens", "Tokens that its backend generated since its start.")
        read = _counter("prompt_tokens", "Prompt tokens that its backend computed since its start.")
        for status, counts in self._models:
            name = [status.name]
            for each in State:
                state.add_metric([*name, str(each)], float(status.state is each))
            memory.add_metric(name, status.memory_bytes)
            leases.add_metric(name, status.leases)
            restarts.add_metric(name, status.restarts)
            if counts is not None:
                speed.add_metric(name, counts.tokens_per_second)
                written.add_metric(name, counts.tokens_generated)
                read.add_metric(name, counts.prompt_tokens_processed)
        return (state, memory, leases, restarts, speed, written, read)


_BY = ("model", "state")


def _gauge(name: str, meaning: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"gateway_model_{name}", meaning, None, ("model",))


def _counter(name: str, meaning: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"gateway_model_{name}", meaning, None, ("model",))
