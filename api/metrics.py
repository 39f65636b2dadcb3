"""What the service measures, for Prometheus.

Source of the names: Prometheus documentation, "Metric and label naming" (base units, unit and
`_total` suffixes).
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardwright.api.jobs.dispatcher import Observation
from shardwright.api.store import Store

_REQUEST_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60)
_STAGE_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300, 600, 1800)
_GAPS = (0.0, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

# A time beside every counter is of use to no query here.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """The metrics of one app."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.requests = Counter(
            "shardwright_http_requests",
            "Requests answered.",
            ("method", "route", "status"),
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            "shardwright_http_request_duration_seconds",
            "Seconds from a request to the start of its answer.",
            ("method", "route"),
            buckets=_REQUEST_SECONDS,
            registry=self.registry,
        )
        self.in_progress = Gauge(
            "shardwright_http_requests_in_progress",
            "Requests that are being answered, event streams too.",
            registry=self.registry,
        )
        self.event_streams = Gauge(
            "shardwright_event_streams", "Streams of events that are open.", registry=self.registry
        )
        self.uploaded = Counter(
            "shardwright_uploaded_bytes",
            "Bytes of programs that were taken in.",
            registry=self.registry,
        )
        self.job_seconds = Histogram(
            "shardwright_job_stage_duration_seconds",
            "Seconds of each stage of jobs.",
            ("kind", "stage"),
            buckets=_STAGE_SECONDS,
            registry=self.registry,
        )
        self.jobs = Counter(
            "shardwright_jobs_finished",
            "Jobs that ended, by how.",
            ("kind", "status"),
            registry=self.registry,
        )
        self.failures = Counter(
            "shardwright_job_failures",
            "Jobs that failed, by the kind of failure.",
            ("kind", "failure"),
            registry=self.registry,
        )
        self.retried = Counter(
            "shardwright_jobs_retried",
            "Jobs that were queued again because their worker ended.",
            ("kind",),
            registry=self.registry,
        )
        self.wait_seconds = Histogram(
            "shardwright_job_wait_duration_seconds",
            "Seconds that jobs waited in the queue.",
            ("kind",),
            buckets=_STAGE_SECONDS,
            registry=self.registry,
        )
        self.gap = Histogram(
            "shardwright_solver_gap_ratio",
            "How far from optimal finished plans can be, as a fraction.",
            buckets=_GAPS,
            registry=self.registry,
        )

    def observe(self, seen: Observation) -> None:
        """Notes what became of a job."""
        job = seen.job
        if seen.what == "started":
            self.wait_seconds.labels(job.kind).observe(seen.waited_s)
            return
        if seen.what == "retried":
            self.retried.labels(job.kind).inc()
            return
        self.jobs.labels(job.kind, seen.what).inc()
        for stage, seconds in seen.stage_seconds.items():
            self.job_seconds.labels(job.kind, stage).observe(seconds)
        if seen.what == "failed":
            self.failures.labels(job.kind, (job.error or {}).get("kind", "internal")).inc()
        gap = (job.summary or {}).get("gap")
        if seen.what == "succeeded" and isinstance(gap, int | float):
            self.gap.observe(gap)

    def watch_store(self, store: Store, queue_limit: int) -> None:
        """Tells the depth of a store's queue whenever metrics are read."""
        self.registry.register(_Queue(store, queue_limit))

    def text(self) -> bytes:
        """All metrics, as Prometheus reads them."""
        return generate_latest(self.registry)


class _Queue(Collector):
    def __init__(self, store: Store, limit: int) -> None:
        self._store = store
        self._limit = limit

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering does not read the database."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The jobs that wait and run, of all servers on this store."""
        counts = self._store.jobs.counts()
        depth, limit = "shardwright_queue_depth", "shardwright_queue_limit"
        yield GaugeMetricFamily(depth, "Jobs that wait.", value=counts["queued"])
        yield GaugeMetricFamily(limit, "Jobs that may wait.", value=self._limit)
        running = "shardwright_jobs_running"
        yield GaugeMetricFamily(running, "Jobs that run.", value=counts["running"])


class RequestMetrics:
    """Counts requests and measures them, by the template of their route."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, and notes how it was answered."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        metrics: Metrics = Request(scope).app.state.metrics
        started = time.perf_counter()
        method = scope["method"] if scope["method"] in _METHODS else "other"

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "none")
                metrics.requests.labels(method, route, message["status"]).inc()
                seconds = time.perf_counter() - started
                metrics.request_seconds.labels(method, route).observe(seconds)
            await send(message)

        with metrics.in_progress.track_inprogress():
            await self._app(scope, receive, noting)
