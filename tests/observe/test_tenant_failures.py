"""Failures by tenant: bounded, and an alert when one tenant's jobs fail in a healthy deployment (requirement M2)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast import Context, Fatal, Holdfast, Retry, Worker
from holdfast.core.job import Claim, Failure, Lease, Meta
from holdfast.core.verdict import DeadLetter, Settlement, SettleResult, Succeed
from holdfast.observe.counters import MAX_TENANTS, OTHER_TENANTS, Counters, TenantFailures, count_settlements
from holdfast.observe.prometheus import MetricsCollector, StoreGauges
from holdfast.operations.metrics import render_metrics
from holdfast.testing import drain
from tests.observe.support import eventually, samples, scrape
from tests.observe.test_alert_rules import RULES, promtool

ALERT = "HoldfastTenantDeadLetters"


def make(url: str, namespace: str, **more: Any) -> Holdfast:
    app = Holdfast(url, namespace=namespace, **more)

    @app.task(retry=Retry(max_retries=1, base=0.01, jitter=None))
    async def import_row(ctx: Context, row: int) -> int:
        if ctx.tenant_id == "globex":
            raise Fatal("no such column")
        if ctx.tenant_id == "initech":
            raise ValueError("always")
        return row

    @app.task(retry=Retry(max_retries=0), on_exhausted="suspend")
    async def park() -> None:
        raise ValueError("parked")

    return app


@pytest.fixture
async def app(engine_url: str, namespace: str) -> AsyncIterator[Holdfast]:
    async with make(engine_url, namespace) as app:
        yield app


def of_tenants(found: Mapping[str, float]) -> dict[str, float]:
    start = "tenant_failures_total{"
    return {name.removeprefix(start).rstrip("}"): value for name, value in found.items() if name.startswith(start)}


# Counting ------------------------------------------------------------------------------------------


async def test_failures_are_counted_by_tenant(app: Holdfast) -> None:
    task = app.tasks["import_row"]
    for tenant, number in (("acme", 5), ("globex", 3), ("initech", 2)):
        for row in range(number):
            await task.options(tenant_id=tenant).submit(row)
    await app.tasks["park"].options(tenant_id="acme").submit()

    async def is_done() -> bool:
        await drain(app)
        return app.engine.counters.dead == 5

    await eventually(is_done, "the retries")
    assert of_tenants(await scrape(app)) == {
        'result="dead",tenant="globex"': 3,
        'result="dead",tenant="initech"': 2,
        'result="retry",tenant="initech"': 2,
        'result="suspended",tenant="acme"': 1,
    }


async def test_poison_pills_are_dead_letters_of_their_tenant(engine_url: str, namespace: str) -> None:
    async with make(engine_url, namespace, visibility_timeout_s=0.3, heartbeat_interval_s=0.1, max_deliveries=1) as app:
        engine = app.engine
        await app.tasks["import_row"].options(tenant_id="globex").submit(1)
        assert await engine.claim("gone", ["default"], 1, 0)

        async def is_dead_lettered() -> bool:
            await engine.reclaim("other", ["default"], 10)
            return engine.counters.poisoned == 1

        await eventually(is_dead_lettered, "the poison pill")
        assert of_tenants(await scrape(app)) == {'result="dead",tenant="globex"': 1}


def settlement(tenant: str, verdict: Any) -> Settlement:
    claim = Claim(Lease("q", "j", "1", 1, "w"), "t", b"{}", tenant, "k", "t", 1, 0, 0, Meta())
    return Settlement(claim, verdict, 0)


def count(counts: Counters, tenant: str, verdict: Any, answer: SettleResult = SettleResult.APPLIED) -> None:
    count_settlements(counts, [settlement(tenant, verdict)], [answer])


FAILURE = Failure("E", "broken")


def test_only_applied_failures_count() -> None:
    counts = Counters()
    count(counts, "acme", Succeed(b"1"))
    count(counts, "acme", DeadLetter(FAILURE), SettleResult.STALE)
    count(counts, "acme", DeadLetter(FAILURE), SettleResult.ALREADY)
    assert not counts.tenant_failures.by_tenant
    count(counts, "acme", DeadLetter(FAILURE))
    assert counts.tenant_failures.by_tenant == {"acme": {"dead": 1}}


# Cardinality ---------------------------------------------------------------------------------------


def test_the_number_of_tenants_is_bounded_and_no_failure_is_lost() -> None:
    failures = TenantFailures()
    for number in range(10 * MAX_TENANTS):
        failures.add(f"tenant-{number}", "dead")
        failures.add("flood", "dead")
        failures.add("flood", "retry")
    assert len(failures.by_tenant) == MAX_TENANTS
    # The tenant with many failures keeps its own count, whatever the others do.
    assert failures.by_tenant["flood"] == {"dead": 10 * MAX_TENANTS, "retry": 10 * MAX_TENANTS}
    total = sum(results["dead"] for results in failures.by_tenant.values()) + failures.others["dead"]
    assert total == 20 * MAX_TENANTS


def test_hostile_tenants_are_labels_of_a_valid_scrape() -> None:
    counts = Counters()
    hostile = ['a"b', "a\\b", "a\nb", "<script>", "\ud800", "x" * 10_000, OTHER_TENANTS, "", "x" * 10_000 + "y"]
    for tenant in hostile:
        counts.tenant_failures.add(tenant, "dead")
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(MetricsCollector("holdfast", counts, StoreGauges(engine_up=True)))
    text = generate_latest(registry).decode()
    found = [
        sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "holdfast_tenant_failures_total"
    ]
    assert sum(sample.value for sample in found) == len(hostile)
    labels = [sample.labels["tenant"] for sample in found]
    assert len(labels) == len(set(labels))
    assert max(map(len, labels)) <= 200


# The alert -----------------------------------------------------------------------------------------


def evaluate(scrapes: Sequence[str], tmp_path: Path, expected: Mapping[str, Sequence[Mapping[str, str]]]) -> None:
    """Evaluate alerts on scrapes, one a minute; the last one stays. Fails if other alerts fire than expected."""
    series: dict[str, list[str]] = {}
    for number, text in enumerate(scrapes):
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = ",".join(f"{name}={json.dumps(value)}" for name, value in sample.labels.items())
                series.setdefault(f"{sample.name}{{{labels}}}", ["_"] * number).append(f"{sample.value:g}")
    minutes = len(scrapes)
    case = {
        "name": "real samples",
        "interval": "1m",
        "input_series": [
            {"series": name, "values": " ".join([*values, f"{values[-1]}x10"])} for name, values in series.items()
        ],
        "alert_rule_test": [
            {
                "eval_time": f"{minutes}m",
                "alertname": alert,
                "exp_alerts": [{"exp_labels": labels} for labels in firing],
            }
            for alert, firing in expected.items()
        ],
    }
    rules = RULES.read_text(encoding="utf-8")
    # promtool compares annotations, too; the rules' own tests check them.
    without = "\n".join(
        line
        for line in rules.splitlines()
        if not line.strip().startswith(("annotations:", "summary:", "description:", "runbook:"))
    )
    (tmp_path / "rules.yml").write_text(without, encoding="utf-8")
    document = {"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": [case]}
    (tmp_path / "tests.yml").write_text(json.dumps(document), encoding="utf-8")
    done = promtool("test", "rules", str(tmp_path / "tests.yml"))
    assert done.returncode == 0, done.stdout + done.stderr


async def run_deployment(app: Holdfast, work: Sequence[tuple[str, int]]) -> list[str]:
    """Run jobs of tenants with a real worker; scrapes before, between and after."""
    scrapes = []
    async with app:
        worker = Worker(app)
        running = asyncio.create_task(worker.run())
        try:
            scrapes.append((await render_metrics(app))[0].decode())
            for tenant, number in work:
                task = app.tasks["import_row"].options(tenant_id=tenant)
                await task.submit_many([(row,) for row in range(number)])
                counters, target = (
                    app.engine.counters,
                    sum(count for _, count in work[: work.index((tenant, number)) + 1]),
                )

                async def is_done(counters: Counters = counters, target: int = target) -> bool:
                    return counters.succeeded + counters.dead >= target

                await eventually(is_done, f"the jobs of {tenant}")
                scrapes.append((await render_metrics(app))[0].decode())
        finally:
            worker.drain()
            await running
    return scrapes


async def test_one_tenants_dead_letters_raise_an_alert_in_a_healthy_deployment(
    engine_url: str, namespace: str, tmp_path: Path
) -> None:
    scrapes = await run_deployment(make(engine_url, namespace), [("acme", 300), ("globex", 30), ("umbrella", 300)])
    last = samples(scrapes[-1])
    assert last['task_process_total{result="dead"}'] / last['task_process_total{result="succeeded"}'] == 0.05
    evaluate(
        scrapes,
        tmp_path,
        {
            ALERT: [{"severity": "warning", "tenant": "globex"}],
            # All others are quiet: the deployment as a whole is healthy.
            "HoldfastFailures": [],
            "HoldfastDlqPendingGrowing": [],
            "HoldfastRetryingRatio": [],
            "HoldfastNoActiveWorkers": [],
        },
    )


async def test_a_few_dead_letters_raise_no_alert(engine_url: str, namespace: str, tmp_path: Path) -> None:
    scrapes = await run_deployment(make(engine_url, namespace), [("acme", 100), ("globex", 5)])
    evaluate(scrapes, tmp_path, {ALERT: []})
