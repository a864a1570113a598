"""From counters and what was seen of the stores to Prometheus metrics (requirement M1). Pure: asks nobody.

Counters are of this process. Gauges are of the stores, the same whichever process is asked: `max by (…)` them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from holdfast.observe.counts import BOUNDS_S, Counts, Durations
from holdfast.observe.outbox_families import outbox_families
from holdfast.observe.trigger_families import trigger_families


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSight:
    """A queue at one moment."""

    queue: str
    #: Names of its streams, and how long they are.
    streams: dict[str, int]
    task_stream: str
    group: str
    pending: int
    #: Jobs in line, and those and the running ones.
    waiting: int
    backlog: int
    backlog_alert: int | None
    states: dict[str, int]
    workers: int
    dead_letters: int
    retrying_ratio: float
    #: How far the ledger is behind the feed; None: there is no ledger apart, or it does not answer.
    feed_lag_entries: int | None = None
    feed_lag_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What a scrape has seen."""

    engine_up: bool
    queues: list[QueueSight] = field(default_factory=list)
    #: None: there is no ledger.
    ledger_up: bool | None = None
    dlq_pending: dict[str, int] = field(default_factory=dict)
    approvals_waiting: dict[str, int] = field(default_factory=dict)
    alerts: Iterable[str] = ()
    #: Events of the outbox that wait; None: there is none, or it does not answer.
    outbox_backlog: int | None = None


#: Counters without labels: name, help, field.
_PLAIN: Final = (
    ("jobs_submitted", "Jobs accepted by this process.", "submitted"),
    ("jobs_duplicate", "Submissions that met a job with their idempotency key.", "duplicates"),
    ("jobs_claimed", "Jobs leased to this process.", "claimed"),
    ("jobs_adopted", "Messages of other programs that became jobs.", "adopted"),
    ("jobs_suspended", "Runs whose job was suspended.", "suspended"),
    ("jobs_held", "Runs whose job now waits for an approval.", "held"),
    ("jobs_released", "Runs that were given back.", "released"),
    ("jobs_promoted", "Jobs put in line because they were due.", "promoted"),
    ("jobs_poisoned", "Poison pills: jobs that lost too many leases.", "poisoned"),
    ("heartbeats", "Signs of life of long runs, at most one per interval and run.", "heartbeats"),
    ("leases_lost", "Runs that were stopped because their lease was lost.", "leases_lost"),
    ("stale_settles", "Verdicts that came too late and changed nothing.", "stale_settles"),
    ("illegal_moves", "Moves refused by the state table (WF_STATE_TRANSITION_INVALID).", "illegal_moves"),
    ("intake_refused", "Submissions refused: intake paused, over its limit, or the feed is full.", "intake_refused"),
    ("engine_reconnects", "Times the engine answered again after it had not.", "reconnects"),
    ("effect_duplicates", "Effects that may have happened twice.", "effect_duplicates"),
    ("ledger_events", "Events brought from the feed to the ledger.", "projected"),
    ("ledger_anomalies", "Events that did not fit the ledger's story.", "anomalies"),
    ("feed_forks", "Times a feed was found to be another one.", "forks"),
)


class Families(Collector):
    """All metrics of one scrape."""

    def __init__(self, prefix: str, counts: Counts, sight: Sight) -> None:
        self._prefix = prefix
        self._counts = counts
        self._sight = sight

    def collect(self) -> Iterator[Metric]:
        yield from self._runs()
        yield from self._counters()
        yield from self._stores()
        yield from self._queues()
        yield from trigger_families(self._counts.triggers.values())
        yield from outbox_families(self._counts.outbox, self._sight.outbox_backlog)

    # Of this process ---------------------------------------------------------------------------------

    def _runs(self) -> Iterator[Metric]:
        counts = self._counts
        results = {
            "succeeded": counts.succeeded,
            "retry": counts.retried,
            # A message that cannot be read is dead at once.
            "dead": counts.dead + counts.malformed,
            "skipped": counts.skipped,
            "not_due": counts.not_due,
        }
        yield self._counter("task_process", "Runs and messages by what came of them.", "result", results)
        seconds = HistogramMetricFamily(
            f"{self._prefix}_task_process_seconds",
            "How long runs took, from their slot to their verdict.",
            labels=["result"],
        )
        durations = {"succeeded": counts.run_succeeded, "retry": counts.run_retried, "dead": counts.run_dead}
        for result, kind in durations.items():
            seconds.add_metric([result], _buckets(kind), kind.total_s)
        yield seconds
        dead = counts.dead + counts.malformed + counts.given_up
        yield CounterMetricFamily(f"{self._prefix}_task_dlq", "Jobs that became dead letters.", value=dead)

    def _counters(self) -> Iterator[Metric]:
        counts = self._counts
        for name, text, source in _PLAIN:
            yield CounterMetricFamily(f"{self._prefix}_{name}", text, value=getattr(counts, source))
        reclaims = {"claimed": counts.reclaimed, "error": counts.reclaim_errors}
        yield self._counter(
            "stream_reclaim", "Lost leases taken over, and looks for them that failed.", "result", reclaims
        )
        tries = {"delivered": counts.webhooks_delivered, "failed": counts.webhooks_failed}
        yield self._counter("webhooks", "Tries to deliver a webhook.", "result", tries)

    # Of the stores -------------------------------------------------------------------------------------

    def _stores(self) -> Iterator[Metric]:
        sight = self._sight
        yield self._gauge("engine_up", "Whether the engine answered.", value=sight.engine_up)
        if sight.ledger_up is not None:
            yield self._gauge("ledger_up", "Whether the ledger answered.", value=sight.ledger_up)
        pending = self._gauge("dlq_pending", "Jobs in dlq_pending, by tenant.", labels=["tenant"])
        for tenant, number in sight.dlq_pending.items():
            pending.add_metric([tenant], number)
        yield pending
        waiting = self._gauge("approvals_waiting", "Questions that people have not answered.", labels=["tenant"])
        for tenant, number in sight.approvals_waiting.items():
            waiting.add_metric([tenant], number)
        yield waiting
        alerts = self._gauge("alerts_standing", "Alerts that stand at the moment.", labels=["alert"])
        for alert in sorted(set(sight.alerts)):
            alerts.add_metric([alert], 1)
        yield alerts

    def _queues(self) -> Iterator[Metric]:
        length = self._gauge("stream_length", "Entries of a stream.", labels=["stream"])
        pending = self._gauge("stream_pending", "Entries delivered and not acknowledged.", labels=["stream", "group"])
        jobs = self._gauge("jobs", "Open jobs.", labels=["queue", "state"])
        lag = self._gauge("queue_lag", "Jobs in line that nobody has taken.", labels=["queue"])
        backlog = self._gauge("backlog", "Jobs in line or running.", labels=["queue"])
        threshold = self._gauge("backlog_alert", "The backlog that raises an alert.", labels=["queue"])
        workers = self._gauge("active_workers", "Workers that claim from the queue.", labels=["queue"])
        letters = self._gauge("dead_letters", "Dead letters that the engine keeps.", labels=["queue"])
        ratio = self._gauge("retrying_ratio", "The part of the open work that waits for a retry.", labels=["queue"])
        behind = self._gauge("feed_lag_entries", "Feed entries that are not in the ledger.", labels=["queue"])
        behind_s = self._gauge("feed_lag_seconds", "Age of the oldest of them.", labels=["queue"])
        for seen in self._sight.queues:
            for stream, number in seen.streams.items():
                length.add_metric([stream], number)
            pending.add_metric([seen.task_stream, seen.group], seen.pending)
            for state, number in seen.states.items():
                jobs.add_metric([seen.queue, state], number)
            pairs = (
                (lag, seen.waiting),
                (backlog, seen.backlog),
                (threshold, seen.backlog_alert),
                (workers, seen.workers),
                (letters, seen.dead_letters),
                (ratio, seen.retrying_ratio),
                (behind, seen.feed_lag_entries),
                (behind_s, seen.feed_lag_s),
            )
            for family, value in pairs:
                if value is not None:
                    family.add_metric([seen.queue], value)
        yield from (length, pending, jobs, lag, backlog, threshold, workers, letters, ratio, behind, behind_s)

    def _counter(self, name: str, text: str, label: str, values: dict[str, int]) -> Metric:
        family = CounterMetricFamily(f"{self._prefix}_{name}", text, labels=[label])
        for value, number in values.items():
            family.add_metric([value], number)
        return family

    def _gauge(
        self, name: str, text: str, *, value: float | None = None, labels: list[str] | None = None
    ) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"{self._prefix}_{name}", text, value=value, labels=labels)


def _buckets(durations: Durations) -> list[tuple[str, float]]:
    bounds = [f"{bound:g}" for bound in BOUNDS_S] + ["+Inf"]
    return list(zip(bounds, accumulate(durations.buckets), strict=True))
