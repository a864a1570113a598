"""Metrics of the outbox, under names that other programs know: they have no prefix (requirement M1)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from holdfast.observe.counts import BOUNDS_S, Durations, OutboxNumbers


def outbox_families(numbers: OutboxNumbers | None, backlog: int | None) -> Iterator[Metric]:
    """`numbers` is None where no relay runs; `backlog` where there is no outbox, or it does not answer."""
    if backlog is not None:
        yield GaugeMetricFamily("outbox_backlog", "Events that wait to be published.", value=backlog)
    if numbers is None:
        return
    results = {"success": numbers.success, "failure": numbers.failure, "dead": numbers.dead}
    total = CounterMetricFamily("outbox_publish", "Tries to publish an event.", labels=["result"])
    seconds = HistogramMetricFamily(
        "outbox_publish_seconds", "How long the broker took to confirm, or not to.", labels=["result"]
    )
    for result, durations in results.items():
        total.add_metric([result], sum(durations.buckets))
        seconds.add_metric([result], _buckets(durations), durations.total_s)
    yield total
    yield seconds
    delay = HistogramMetricFamily(
        "outbox_publish_delay_seconds", "From when events were written to when they were sent."
    )
    delay.add_metric([], _buckets(numbers.delay), numbers.delay.total_s)
    yield delay


def _buckets(durations: Durations) -> list[tuple[str, float]]:
    bounds = [f"{bound:g}" for bound in BOUNDS_S] + ["+Inf"]
    return list(zip(bounds, accumulate(durations.buckets), strict=True))
