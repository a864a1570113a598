"""Prometheus metrics from counters and store gauges (requirement M1), and a small server for them.

`MetricsCollector` does no I/O. Counters describe this process. Gauges describe the stores and are the same from every
process: aggregate them with `max by (…)`. Metrics of the outbox and of triggers have names that other programs know,
and therefore no prefix.

`serve_metrics` serves `/metrics`, `/livez` and `/readyz` on the event loop of a worker, upkeep or triggers. A blocked
loop answers none of them, so that a liveness probe fails by its own timeout.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, Protocol

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from holdfast.aio import serve_tcp
from holdfast.errors import InvalidOption
from holdfast.observe.counters import BOUNDS_S, OTHER_TENANTS, Counters, Histogram, OutboxStats, TriggerStats


def outbox_metrics(numbers: OutboxStats | None, backlog: int | None) -> Iterator[Metric]:
    """Metrics of the outbox. `numbers` is None without a relay; `backlog` without a reachable outbox."""
    if backlog is not None:
        yield GaugeMetricFamily("outbox_backlog", "Events not yet published.", value=backlog)
    if numbers is None:
        return
    results = {"success": numbers.success, "failure": numbers.failure, "dead": numbers.dead}
    total = CounterMetricFamily("outbox_publish", "Attempts to publish an event, by result.", labels=["result"])
    seconds = HistogramMetricFamily(
        "outbox_publish_seconds",
        "Duration of publish attempts, until the broker confirmed or the attempt failed.",
        labels=["result"],
    )
    for result, durations in results.items():
        total.add_metric([result], sum(durations.buckets))
        seconds.add_metric([result], _histogram_buckets(durations), durations.total_s)
    yield total
    yield seconds
    delay = HistogramMetricFamily("outbox_publish_delay_seconds", "Time from the write of an event to its publication.")
    delay.add_metric([], _histogram_buckets(numbers.delay), numbers.delay.total_s)
    yield delay


def _histogram_buckets(durations: Histogram) -> list[tuple[str, float]]:
    bounds = [f"{bound:g}" for bound in BOUNDS_S] + ["+Inf"]
    return list(zip(bounds, accumulate(durations.buckets), strict=True))


def trigger_metrics(triggers: Iterable[TriggerStats]) -> Iterator[Metric]:
    """Metrics of this process's triggers, if it has any. Triggers of one queue are aggregated."""
    by_queue: dict[str, list[TriggerStats]] = defaultdict(list)
    for counts in triggers:
        by_queue[counts.queue].append(counts)
    if not by_queue:
        return
    consumed = CounterMetricFamily(
        "queue_messages_consumed", "Messages handled, by status.", labels=["queue", "status"]
    )
    seconds = HistogramMetricFamily(
        "queue_processing_duration_seconds",
        "Time from the receipt of a message to the end of its processing.",
        labels=["queue"],
    )
    delay = HistogramMetricFamily(
        "queue_consume_delay_seconds", "Time from the write of a message to its receipt.", labels=["queue"]
    )
    calls = CounterMetricFamily("queue_runtime_calls", "Calls to the runtime, including retries.", labels=["queue"])
    active = GaugeMetricFamily("queue_active_workers", "Workers that consume messages.", labels=["queue"])
    hits = CounterMetricFamily("queue_dedup_hits", "Messages skipped as duplicates.", labels=["queue"])
    lag = GaugeMetricFamily("queue_consumer_lag", "Messages not yet consumed by the group.", labels=["queue"])
    for queue, group in sorted(by_queue.items()):
        for status in sorted({status for counts in group for status in counts.consumed}):
            consumed.add_metric([queue, str(status)], sum(counts.consumed.get(status, 0) for counts in group))
        durations, delays = [counts.durations for counts in group], [counts.delays for counts in group]
        seconds.add_metric([queue], _summed_buckets(durations), sum(each.total_s for each in durations))
        delay.add_metric([queue], _summed_buckets(delays), sum(each.total_s for each in delays))
        calls.add_metric([queue], sum(counts.calls for counts in group))
        active.add_metric([queue], sum(counts.active_workers for counts in group))
        hits.add_metric([queue], sum(counts.dedup_hits for counts in group))
        known = [counts.lag for counts in group if counts.lag is not None]
        if known:
            # Each consumer group has its own lag: report the largest.
            lag.add_metric([queue], max(known))
    yield from (consumed, seconds, delay, calls, active, hits, lag)


def _summed_buckets(group: list[Histogram]) -> list[tuple[str, float]]:
    numbers = [sum(each) for each in zip(*(durations.buckets for durations in group), strict=True)]
    bounds = [f"{bound:g}" for bound in BOUNDS_S] + ["+Inf"]
    return list(zip(bounds, accumulate(numbers), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueGauges:
    """Gauges of one queue."""

    queue: str
    #: Stream name → length.
    streams: dict[str, int]
    task_stream: str
    group: str
    pending: int
    #: Ready jobs; then ready and running ones.
    waiting: int
    backlog: int
    backlog_alert: int | None
    states: dict[str, int]
    workers: int
    dead_letters: int
    retrying_ratio: float
    #: How many jobs may run at a time, over all workers; None: no limit.
    concurrency: int | None = None
    #: Lag of the ledger behind the feed; None without a separate ledger, or if it is unreachable.
    feed_lag_entries: int | None = None
    feed_lag_s: float | None = None
    #: 1: engine and ledger were compared in this epoch of the engine; None without a ledger.
    verified: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreGauges:
    """Gauges of the stores, read at a scrape."""

    engine_up: bool
    queues: list[QueueGauges] = field(default_factory=list)
    #: None without a ledger.
    ledger_up: bool | None = None
    dlq_pending: dict[str, int] = field(default_factory=dict)
    approvals_waiting: dict[str, int] = field(default_factory=dict)
    alerts: Iterable[str] = ()
    #: Unpublished events of the outbox; None without one, or if it is unreachable.
    outbox_backlog: int | None = None


#: Maximum length of a tenant's name in a label.
_TENANT_LIMIT: Final = 200

#: Counters without labels: name, help, field.
_PLAIN: Final = (
    ("jobs_submitted", "Jobs accepted by this process.", "submitted"),
    ("jobs_duplicate", "Submissions whose idempotency key was already known.", "duplicates"),
    ("jobs_claimed", "Jobs leased to this process.", "claimed"),
    ("jobs_adopted", "Foreign messages adopted as jobs.", "adopted"),
    ("jobs_suspended", "Runs whose job was suspended.", "suspended"),
    ("jobs_held", "Runs whose job now waits for an approval.", "held"),
    ("jobs_released", "Runs released unfinished.", "released"),
    ("jobs_promoted", "Due jobs made ready.", "promoted"),
    ("jobs_poisoned", "Poison pills: jobs that lost too many leases.", "poisoned"),
    ("heartbeats", "Heartbeat events of long runs, at most one per interval and run.", "heartbeats"),
    ("leases_lost", "Runs stopped because their lease was lost.", "leases_lost"),
    ("stale_settles", "Verdicts refused because the lease was stale.", "stale_settles"),
    ("illegal_moves", "Moves refused by the state table (WF_STATE_TRANSITION_INVALID).", "illegal_moves"),
    ("intake_refused", "Submissions refused: intake paused, backlog at its limit, or feed full.", "intake_refused"),
    ("engine_reconnects", "Times the engine recovered after it was unreachable.", "reconnects"),
    ("effect_duplicates", "Effects that may have happened twice.", "effect_duplicates"),
    ("ledger_events", "Events written from the feed to the ledger.", "projected"),
    ("notices_unreadable", "Notices of other programs that could not be read.", "unreadable"),
    (
        "values_unreadable",
        "Controls and records that other programs changed and that could not be read.",
        "unreadable_values",
    ),
    ("ledger_anomalies", "Events that the ledger could not record as they came.", "anomalies"),
    ("feed_forks", "Feed forks detected.", "forks"),
    ("engine_corrections", "Jobs of an engine that went back in time, set to the ledger's state.", "corrected"),
)


class MetricsCollector(Collector):
    """All metrics of one scrape."""

    def __init__(self, prefix: str, counts: Counters, gauges: StoreGauges) -> None:
        self._prefix = prefix
        self._counts = counts
        self._gauges = gauges

    def collect(self) -> Iterator[Metric]:
        yield from self._runs()
        yield from self._counters()
        yield from self._stores()
        yield from self._queues()
        yield from trigger_metrics(self._counts.triggers.values())
        yield from outbox_metrics(self._counts.outbox, self._gauges.outbox_backlog)

    # Of this process ---------------------------------------------------------------------------------

    def _runs(self) -> Iterator[Metric]:
        counts = self._counts
        results = {
            "succeeded": counts.succeeded,
            "retry": counts.retried,
            # A malformed message is dead-lettered at once.
            "dead": counts.dead + counts.malformed,
            "skipped": counts.skipped,
            "not_due": counts.not_due,
        }
        yield self._counter("task_process", "Runs and messages by result.", "result", results)
        seconds = HistogramMetricFamily(
            f"{self._prefix}_task_process_seconds",
            "Duration of runs, from slot to verdict.",
            labels=["result"],
        )
        durations = {"succeeded": counts.run_succeeded, "retry": counts.run_retried, "dead": counts.run_dead}
        for result, kind in durations.items():
            seconds.add_metric([result], _buckets(kind), kind.total_s)
        yield seconds
        dead = counts.dead + counts.malformed + counts.moved_to_dlq
        yield CounterMetricFamily(f"{self._prefix}_task_dlq", "Jobs dead-lettered.", value=dead)
        yield self._tenant_failures()

    def _tenant_failures(self) -> Metric:
        failures = self._counts.tenant_failures
        family = CounterMetricFamily(
            f"{self._prefix}_tenant_failures",
            "Runs that ended in a retry, a suspension or a dead letter, by tenant.",
            labels=["tenant", "result"],
        )
        totals: Counter[tuple[str, str]] = Counter()
        for tenant, results in [*failures.by_tenant.items(), (OTHER_TENANTS, failures.others)]:
            for result, number in results.items():
                # Shortened names may be equal: a series that occurs twice would make the whole scrape invalid.
                totals[_tenant_label(tenant), result] += number
        for labels, number in sorted(totals.items()):
            family.add_metric(list(labels), number)
        return family

    def _counters(self) -> Iterator[Metric]:
        counts = self._counts
        for name, text, source in _PLAIN:
            yield CounterMetricFamily(f"{self._prefix}_{name}", text, value=getattr(counts, source))
        reclaims = {"claimed": counts.reclaimed, "error": counts.reclaim_errors}
        yield self._counter("stream_reclaim", "Expired leases reclaimed, and failed attempts.", "result", reclaims)
        attempts = {"delivered": counts.webhooks_delivered, "failed": counts.webhooks_failed}
        yield self._counter("webhooks", "Attempts to deliver a webhook.", "result", attempts)

    # Of the stores -------------------------------------------------------------------------------------

    def _stores(self) -> Iterator[Metric]:
        gauges = self._gauges
        yield self._gauge("engine_up", "Whether the engine answered.", value=gauges.engine_up)
        if gauges.ledger_up is not None:
            yield self._gauge("ledger_up", "Whether the ledger answered.", value=gauges.ledger_up)
        pending = self._gauge("dlq_pending", "Jobs in dlq_pending, by tenant.", labels=["tenant"])
        for tenant, number in gauges.dlq_pending.items():
            pending.add_metric([tenant], number)
        yield pending
        waiting = self._gauge("approvals_waiting", "Approval requests not yet decided.", labels=["tenant"])
        for tenant, number in gauges.approvals_waiting.items():
            waiting.add_metric([tenant], number)
        yield waiting
        alerts = self._gauge("alerts_standing", "Active alerts.", labels=["alert"])
        for alert in sorted(set(gauges.alerts)):
            alerts.add_metric([alert], 1)
        yield alerts

    def _queues(self) -> Iterator[Metric]:
        length = self._gauge("stream_length", "Entries of a stream.", labels=["stream"])
        pending = self._gauge("stream_pending", "Entries delivered and not acknowledged.", labels=["stream", "group"])
        jobs = self._gauge("jobs", "Open jobs.", labels=["queue", "state"])
        lag = self._gauge("queue_lag", "Ready jobs not yet claimed.", labels=["queue"])
        backlog = self._gauge("backlog", "Ready and running jobs.", labels=["queue"])
        threshold = self._gauge("backlog_alert", "Backlog at which an alert is raised.", labels=["queue"])
        concurrency = self._gauge(
            "concurrency_limit", "Limit of running jobs, over all workers; absent without one.", labels=["queue"]
        )
        workers = self._gauge("active_workers", "Workers that claim from the queue.", labels=["queue"])
        dead_letters = self._gauge("dead_letters", "Dead letters kept by the engine.", labels=["queue"])
        ratio = self._gauge("retrying_ratio", "Share of open jobs that wait for a retry.", labels=["queue"])
        behind = self._gauge("feed_lag_entries", "Feed entries not yet in the ledger.", labels=["queue"])
        behind_s = self._gauge(
            "feed_lag_seconds", "Age of the oldest feed entry not yet in the ledger.", labels=["queue"]
        )
        verified = self._gauge(
            "queue_verified", "1 once engine and ledger were compared since the engine was started.", labels=["queue"]
        )
        for queue in self._gauges.queues:
            for stream, number in queue.streams.items():
                length.add_metric([stream], number)
            pending.add_metric([queue.task_stream, queue.group], queue.pending)
            for state, number in queue.states.items():
                jobs.add_metric([queue.queue, state], number)
            pairs = (
                (lag, queue.waiting),
                (backlog, queue.backlog),
                (threshold, queue.backlog_alert),
                (concurrency, queue.concurrency),
                (workers, queue.workers),
                (dead_letters, queue.dead_letters),
                (ratio, queue.retrying_ratio),
                (behind, queue.feed_lag_entries),
                (behind_s, queue.feed_lag_s),
                (verified, queue.verified),
            )
            for family, value in pairs:
                if value is not None:
                    family.add_metric([queue.queue], value)
        yield from (length, pending, jobs, lag, backlog, threshold, concurrency, workers, dead_letters, ratio)
        yield from (behind, behind_s, verified)

    def _counter(self, name: str, text: str, label: str, values: dict[str, int]) -> Metric:
        family = CounterMetricFamily(f"{self._prefix}_{name}", text, labels=[label])
        for value, number in values.items():
            family.add_metric([value], number)
        return family

    def _gauge(
        self, name: str, text: str, *, value: float | None = None, labels: list[str] | None = None
    ) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"{self._prefix}_{name}", text, value=value, labels=labels)


def _tenant_label(tenant: str) -> str:
    """A tenant's name for a label: valid UTF-8, not too long."""
    return tenant[:_TENANT_LIMIT].encode("utf-8", "replace").decode()


def _buckets(durations: Histogram) -> list[tuple[str, float]]:
    bounds = [f"{bound:g}" for bound in BOUNDS_S] + ["+Inf"]
    return list(zip(bounds, accumulate(durations.buckets), strict=True))


_log: Final = logging.getLogger("holdfast.metrics")

_HEAD_LIMIT: Final = 16 * 1024
#: For a request and its response, together.
_TIMEOUT_S: Final = 10.0
#: Connections at a time. Others are refused: each may hold a whole response.
_MOST_CONNECTIONS: Final = 32
_TEXT: Final = "text/plain; charset=utf-8"
_JSON: Final = "application/json"

#: Returns the metrics text and its content type.
Exposition = Callable[[], Awaitable[tuple[bytes, str]]]


class LivenessResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Response of a liveness check."""

    status: str


class Readiness(Protocol):
    """Whether the process is ready; encoded as JSON with its other fields."""

    @property
    def ready(self) -> bool: ...


ReadinessCheck = Callable[[], Awaitable[Readiness]]


@asynccontextmanager
async def serve_metrics(
    host: str,
    port: int,
    exposition: Exposition,
    readiness: ReadinessCheck | None = None,
    *,
    timeout_s: float = _TIMEOUT_S,
) -> AsyncIterator[int]:
    """Serve until the block ends; yields the port (0 selects a free one).

    With `readiness`, `/readyz` answers 200 or 503. A connection ends after `timeout_s` in any case.

    Raises `InvalidOption` if it cannot listen on the port.
    """
    open_connections = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal open_connections
        open_connections += 1
        try:
            async with asyncio.timeout(timeout_s):
                is_refused = open_connections > _MOST_CONNECTIONS
                writer.write(await _answer(reader, exposition, readiness, is_refused=is_refused))
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError) as exc:
            _log.debug("scrape aborted: %r", exc)
        except Exception:  # noqa: BLE001 - top of a connection
            _log.exception("scrape failed unexpectedly")
        finally:
            open_connections -= 1
            # A client that does not read would keep the rest of its response in memory.
            writer.transport.abort()

    async with AsyncExitStack() as stack:
        try:
            bound = await stack.enter_async_context(serve_tcp(answer, host, port, limit=_HEAD_LIMIT))
        except OSError as exc:
            raise InvalidOption(
                f"cannot serve metrics on {host}:{port}: {exc.strerror or exc}; choose another port"
            ) from exc
        _log.info("metrics on http://%s:%d/metrics", host, bound)
        yield bound


async def _answer(
    reader: asyncio.StreamReader, exposition: Exposition, readiness: ReadinessCheck | None, *, is_refused: bool
) -> bytes:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        return _response("431 Request Header Fields Too Large", _TEXT, b"the headers are too large; send fewer\n")
    if is_refused:
        # After the request: a connection that is closed with unread data is reset, and the client gets no response.
        return _response("503 Service Unavailable", _TEXT, b"too many connections; retry later\n")
    return await _reply(head, exposition, readiness)


async def _reply(head: bytes, exposition: Exposition, readiness: ReadinessCheck | None) -> bytes:
    method, _, rest = head.partition(b" ")
    path = rest.partition(b" ")[0].partition(b"?")[0]
    if path not in (b"/metrics", b"/livez", b"/readyz") or (path == b"/readyz" and readiness is None):
        paths = b"/metrics, /livez or /readyz" if readiness else b"/metrics or /livez"
        return _response("404 Not Found", _TEXT, b"not found; use " + paths + b"\n")
    if method not in (b"GET", b"HEAD"):
        return _response("405 Method Not Allowed", _TEXT, b"only GET and HEAD are allowed\n")
    status, content_type = "200 OK", _JSON
    if path == b"/livez":
        body = msgspec.json.encode(LivenessResponse(status="ok"))
    elif path == b"/readyz" and readiness is not None:
        found = await readiness()
        body = msgspec.json.encode(found)
        status = status if found.ready else "503 Service Unavailable"
    else:
        body, content_type = await exposition()
    return _response(status, content_type, body, send=method == b"GET")


def _response(status: str, content_type: str, body: bytes, *, send: bool = True) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (body if send else b"")
