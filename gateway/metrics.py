"""Metrics for Prometheus. Labels have closed sets of values: routes, known models, statuses."""

from __future__ import annotations

import time
from collections.abc import Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from gateway.calls import Done, Event, Piece
from gateway.exchange import Exchange

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
disable_created_metrics()  # type: ignore[no-untyped-call]
_OTHER = "other"  # replaces a client's own text
_METHODS = frozenset("GET HEAD POST PUT PATCH DELETE OPTIONS".split())


class Metrics:
    """The counters of one gateway, in a registry of their own."""

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

    def text(self) -> bytes:
        return generate_latest(self.registry)


class AnswerTimes:
    """Records in the histograms when the parts of one answer of a model arrived.

    since: when its request began, by `time.monotonic`.
    """

    def __init__(self, metrics: Metrics, model: str, since: float) -> None:
        self._first = metrics.first_token.labels(model)
        self._between = metrics.inter_token.labels(model)
        self._queue = metrics.queue.labels(model)
        self._since = since
        self._waited: float | None = None  # before the first part
        self._latest = since

    def take(self, event: Event) -> None:
        if isinstance(event, Piece):
            now = time.monotonic()
            if self._waited is None:
                self._waited = now - self._since
                self._first.observe(self._waited)
            else:
                self._between.observe(now - self._latest)
            self._latest = now
        elif isinstance(event, Done) and self._waited is not None:
            self._queue.observe(max(self._waited - event.usage.prefill_ms / 1000, 0.0))
