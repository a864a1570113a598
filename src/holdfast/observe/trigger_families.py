"""Metrics of triggers, by their queue, under names that other programs know: they have no prefix (requirement M1)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from holdfast.observe.counts import BOUNDS_S, Durations, TriggerNumbers


def trigger_families(triggers: Iterable[TriggerNumbers]) -> Iterator[Metric]:
    """Nothing if there are no triggers in this process. Several of one queue are told together."""
    by_queue: dict[str, list[TriggerNumbers]] = defaultdict(list)
    for counts in triggers:
        by_queue[counts.queue].append(counts)
    if not by_queue:
        return
    consumed = CounterMetricFamily(
        "queue_messages_consumed", "Messages that are done with, by what became of them.", labels=["queue", "status"]
    )
    seconds = HistogramMetricFamily(
        "queue_processing_duration_seconds", "From the receipt of a message to its end.", labels=["queue"]
    )
    delay = HistogramMetricFamily(
        "queue_consume_delay_seconds", "From when a message was written to its receipt.", labels=["queue"]
    )
    calls = CounterMetricFamily("queue_runtime_calls", "Tries of a hand-over to the runtime.", labels=["queue"])
    active = GaugeMetricFamily("queue_active_workers", "Workers that take messages now.", labels=["queue"])
    hits = CounterMetricFamily("queue_dedup_hits", "Messages that had been handed over before.", labels=["queue"])
    lag = GaugeMetricFamily("queue_consumer_lag", "Messages that wait for the group.", labels=["queue"])
    for queue, group in sorted(by_queue.items()):
        for status in sorted({status for counts in group for status in counts.consumed}):
            consumed.add_metric([queue, str(status)], sum(counts.consumed.get(status, 0) for counts in group))
        durations, delays = [counts.durations for counts in group], [counts.delays for counts in group]
        seconds.add_metric([queue], _buckets(durations), sum(each.total_s for each in durations))
        delay.add_metric([queue], _buckets(delays), sum(each.total_s for each in delays))
        calls.add_metric([queue], sum(counts.calls for counts in group))
        active.add_metric([queue], sum(counts.active_workers for counts in group))
        hits.add_metric([queue], sum(counts.dedup_hits for counts in group))
        known = [counts.lag for counts in group if counts.lag is not None]
        if known:
            # Each group has a lag of its own: the worst one tells.
            lag.add_metric([queue], max(known))
    yield from (consumed, seconds, delay, calls, active, hits, lag)


def _buckets(group: list[Durations]) -> list[tuple[str, float]]:
    numbers = [sum(each) for each in zip(*(durations.buckets for durations in group), strict=True)]
    bounds = [f"{bound:g}" for bound in BOUNDS_S] + ["+Inf"]
    return list(zip(bounds, accumulate(numbers), strict=True))
