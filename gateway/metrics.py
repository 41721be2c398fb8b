"""Metrics for Prometheus: of requests, of models, and counters that backends report.

Labels have closed sets of values: routes, known models, statuses.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import grpc
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.calls import Done, Event, Piece, Stub
from gateway.exchange import Exchange
from gateway.supervisor.instance import ModelStatus, State
from gateway.supervisor.supervisor import Supervisor
from wire import backend_pb2 as pb

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
disable_created_metrics()  # type: ignore[no-untyped-call]
_OTHER = "other"  # replaces a client's own text
_METHODS = frozenset("GET HEAD POST PUT PATCH DELETE OPTIONS".split())
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
_FIELDS = pb.MetricsResponse.DESCRIPTOR.fields


class Metrics:
    """The counters of one gateway, in a separate registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter(
            "requests",
            "Requests that ended, by route and HTTP status (499: the client disconnected).",
            ("method", "path", "status"),
        )
        self.first_byte = self._seconds(
            "first_byte", "Time from the request to the first byte of the body."
        )
        self.duration = self._seconds("request", "Time from the request to the answer's end.")
        self.prompt_tokens = self._counter(
            "prompt_tokens", "Tokens of the prompts of answers that ended."
        )
        self.completion_tokens = self._counter("completion_tokens", "Tokens of answers that ended.")
        self.running_streams = Gauge(
            "gateway_running_streams", "Streams that are currently open.", registry=self.registry
        )
        self.first_token = self._seconds(
            "model_first_token", "Time from the request to the answer's first part.", "model"
        )
        self.inter_token = self._seconds(
            "model_inter_token",
            "Time between parts of an answer: single tokens unless they are very fast.",
            "model",
            (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0),
        )
        self.queue = self._seconds(
            "model_queue", "Time to the first part, less the prefill time.", "model"
        )

    def _counter(self, name: str, meaning: str, labels: Sequence[str] = ("path",)) -> Counter:
        return Counter(f"gateway_{name}", meaning, labels, registry=self.registry)

    def _seconds(
        self, name: str, meaning: str, label: str = "path", buckets: Sequence[float] = _SECONDS
    ) -> Histogram:
        return Histogram(
            f"gateway_{name}_seconds", meaning, (label,), buckets=buckets, registry=self.registry
        )

    def observe(self, seen: Exchange, status: int) -> None:
        path = seen.route or _OTHER
        method = seen.method if seen.method in _METHODS else _OTHER
        self.requests.labels(method, path, str(status)).inc()
        self.duration.labels(path).observe(seen.seconds)
        if seen.first_byte is not None:
            self.first_byte.labels(path).observe(seen.first_byte)
        if seen.prompt_tokens or seen.completion_tokens:
            self.prompt_tokens.labels(path).inc(seen.prompt_tokens)
            self.completion_tokens.labels(path).inc(seen.completion_tokens)

    def text(self, models: Sequence[ModelNow]) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry) + generate_latest(_Models(models))


class AnswerTimes:
    """The arrival times of the parts of a request's answers, for the histograms of its model.

    since: when the request began, by `time.monotonic`.
    """

    def __init__(self, metrics: Metrics, model: str, since: float) -> None:
        self._first = metrics.first_token.labels(model)
        self._between = metrics.inter_token.labels(model)
        self._queue = metrics.queue.labels(model)
        self._since = since
        self._waited: dict[int, float] = {}  # before the first part, by answer
        self._latest: dict[int, float] = {}

    def take(self, answer: int, event: Event) -> None:
        if isinstance(event, Piece):
            now = time.monotonic()
            if answer in self._latest:
                self._between.observe(now - self._latest[answer])
            else:
                self._waited[answer] = now - self._since
                self._first.observe(self._waited[answer])
            self._latest[answer] = now
        elif isinstance(event, Done) and answer in self._waited:
            self._queue.observe(max(self._waited[answer] - event.usage.prefill_ms / 1000, 0.0))


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


def _family(kind: Callable[..., Any], name: str, meaning: str) -> Any:
    return kind(f"gateway_model_{name}", meaning, None, ("model",))
