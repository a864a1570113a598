"""Messages of every kind, then a scrape: trigger metrics have exactly the expected names and values."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast import Deny, Holdfast
from holdfast.brokers.memory import MemoryBroker
from holdfast.ledger.port.messages import ExecutionStatus
from holdfast.observe.counters import Counters
from holdfast.observe.prometheus import MetricsCollector, StoreGauges, serve_metrics
from holdfast.triggers.config import TriggerEntry
from holdfast.triggers.service import TriggerService, TriggersReadiness
from holdfast.triggers.state import TriggerCounters
from tests.observe.support import eventually, fetch, scrape


@pytest.fixture
async def app(tmp_path: Path) -> AsyncIterator[Holdfast]:
    app = Holdfast(f"sqlite:///{tmp_path / 'jobs.db'}")

    @app.task
    async def ship(order: int) -> int:
        return order

    @app.guard
    async def no_thirteen(request: Any) -> Deny | None:
        return Deny("bad luck") if "13" in str(request.payload) else None

    async with app:
        yield app


def entry(namespace: str, name: str = "orders", **more: Any) -> TriggerEntry:
    values = {
        "name": name,
        "queue_name": "orders",
        "consumer_group": name,
        "adapter": {"type": "memory", "connection": {"name": namespace}},
        "runtime": {"task": "ship"},
        "metrics": {"export_interval": 0.01},
    }
    return TriggerEntry.model_validate(values | more)


@asynccontextmanager
async def run_triggers(triggers: TriggerService) -> AsyncIterator[None]:
    task = asyncio.create_task(triggers.run())
    try:
        yield
    finally:
        triggers.stop()
        await task


def select_trigger_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """Metrics of triggers, without buckets."""
    return {
        name: value
        for name, value in metrics.items()
        if name.startswith("queue_") and not name.startswith("queue_lag") and "_bucket" not in name
    }


async def test_the_counters_match_what_happened(app: Holdfast, namespace: str) -> None:
    broker = MemoryBroker.named(namespace)
    for body, key in (
        (b"1", "a"),
        (b"2", "b"),
        (b"2", "b"),
        (b"3", "c"),
        (b"13", "d"),
        (b"not json", "e"),
        (b"[]", "f"),
    ):
        broker.write("orders", body, {"x-dedup-key": key})
    async with run_triggers(TriggerService(app, [entry(namespace, concurrency=3)])):

        async def done() -> bool:
            return (await scrape(app)).get('queue_processing_duration_seconds_count{queue="orders"}') == 7

        await eventually(done, "all messages")
        metrics = select_trigger_metrics(await scrape(app))
        total_s = metrics.pop('queue_processing_duration_seconds_sum{queue="orders"}')
        assert 0 < total_s < 20
        assert metrics.pop('queue_consume_delay_seconds_sum{queue="orders"}') >= 0
        assert metrics == {
            'queue_messages_consumed_total{queue="orders",status="success"}': 3,
            'queue_messages_consumed_total{queue="orders",status="duplicate"}': 1,
            'queue_messages_consumed_total{queue="orders",status="rejected"}': 1,
            'queue_messages_consumed_total{queue="orders",status="unparsable"}': 1,
            'queue_messages_consumed_total{queue="orders",status="failed"}': 1,
            'queue_dedup_hits_total{queue="orders"}': 1,
            'queue_active_workers{queue="orders"}': 3,
            'queue_consumer_lag{queue="orders"}': 0,
            'queue_processing_duration_seconds_count{queue="orders"}': 7,
            'queue_consume_delay_seconds_count{queue="orders"}': 7,
            'queue_runtime_calls_total{queue="orders"}': 6,
        }
    after = await scrape(app)
    assert after['queue_active_workers{queue="orders"}'] == 0
    assert after['queue_messages_consumed_total{queue="orders",status="success"}'] == 3


async def test_the_lag_of_a_paused_trigger(app: Holdfast, namespace: str) -> None:
    broker = MemoryBroker.named(namespace)
    triggers = TriggerService(app, [entry(namespace)])
    async with run_triggers(triggers):

        async def ready() -> bool:
            return triggers.ready

        await eventually(ready, "the start")
        await triggers._built[0].trigger.pause()
        for number in range(5):
            broker.write("orders", str(number).encode())

        async def lags() -> bool:
            return (await scrape(app)).get('queue_consumer_lag{queue="orders"}') == 5

        await eventually(lags, "the lag")


async def test_a_trigger_with_disabled_metrics_is_not_exported(app: Holdfast, namespace: str) -> None:
    async with run_triggers(TriggerService(app, [entry(namespace, metrics={"enabled": False})])):
        assert select_trigger_metrics(await scrape(app)) == {}


def test_triggers_of_one_queue_share_their_metrics() -> None:
    one, two, other = TriggerCounters("q", lag=3), TriggerCounters("q", lag=5), TriggerCounters("r")
    for number, counts in enumerate((one, two, other), 1):
        counts.consumed[ExecutionStatus.SUCCESS] = number
        counts.dedup_hits, counts.active_workers = number, 10 * number
        counts.durations.add([0.001] * number)
        counts.delays.add([0.002] * number)
        counts.calls = number
    families = MetricsCollector(
        "x", Counters(triggers={"a": one, "b": two, "c": other}), StoreGauges(engine_up=True)
    ).collect()
    metrics = {
        (sample.name, sample.labels["queue"], sample.labels.get("status", "")): sample.value
        for family in families
        if family.name.startswith("queue_")
        for sample in family.samples
        if sample.labels.get("le") in (None, "+Inf")
    }
    assert {name: value for name, value in metrics.items() if value} == {
        ("queue_messages_consumed_total", "q", "success"): 3,
        ("queue_messages_consumed_total", "r", "success"): 3,
        ("queue_processing_duration_seconds_bucket", "q", ""): 3,
        ("queue_processing_duration_seconds_bucket", "r", ""): 3,
        ("queue_processing_duration_seconds_count", "q", ""): 3,
        ("queue_processing_duration_seconds_count", "r", ""): 3,
        ("queue_processing_duration_seconds_sum", "q", ""): pytest.approx(0.003),
        ("queue_processing_duration_seconds_sum", "r", ""): pytest.approx(0.003),
        ("queue_consume_delay_seconds_bucket", "q", ""): 3,
        ("queue_consume_delay_seconds_bucket", "r", ""): 3,
        ("queue_consume_delay_seconds_count", "q", ""): 3,
        ("queue_consume_delay_seconds_count", "r", ""): 3,
        ("queue_consume_delay_seconds_sum", "q", ""): pytest.approx(0.006),
        ("queue_consume_delay_seconds_sum", "r", ""): pytest.approx(0.006),
        ("queue_runtime_calls_total", "q", ""): 3,
        ("queue_runtime_calls_total", "r", ""): 3,
        ("queue_active_workers", "q", ""): 30,
        ("queue_active_workers", "r", ""): 30,
        ("queue_dedup_hits_total", "q", ""): 3,
        ("queue_dedup_hits_total", "r", ""): 3,
        ("queue_consumer_lag", "q", ""): 5,
    }


async def test_readiness_is_served_next_to_the_metrics() -> None:
    async def text() -> tuple[bytes, str]:
        return b"x 1\n", "text/plain"

    ready = False

    async def readiness() -> TriggersReadiness:
        return TriggersReadiness(ready=ready, failing=[])

    async with serve_metrics("127.0.0.1", 0, text, readiness) as port:
        assert (await fetch(port, "/readyz"))[0].startswith("HTTP/1.1 503")
        ready = True
        assert (await fetch(port, "/readyz"))[1] == '{"ready":true,"failing":[]}'
        assert (await fetch(port, "/readyz", method="POST"))[0].startswith("HTTP/1.1 405")
    async with serve_metrics("127.0.0.1", 0, text) as port:
        assert (await fetch(port, "/readyz"))[0].startswith("HTTP/1.1 404")
