"""Known jobs, then a scrape: every metric has exactly the expected value."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from holdfast import Fatal, Holdfast, Retry
from holdfast.core.job import Claim, Lease, Meta
from holdfast.core.states import State
from holdfast.core.verdict import Hold, Release, Settlement, SettleResult, Succeed, Verdict
from holdfast.engine.port.jobs import RetryVia
from holdfast.engine.port.operators import QueueControl
from holdfast.errors import EngineUnavailable, IntakeRefused, InvalidOption, TransitionInvalid
from holdfast.execution.backend import backend_of
from holdfast.execution.spec import TaskPolicy, TaskSpec
from holdfast.observe.counters import BOUNDS_S, Counters, Histogram
from holdfast.observe.prometheus import serve_metrics
from holdfast.testing import drain
from holdfast.upkeep.engine_tasks import Reclaimer
from holdfast.upkeep.ledger_tasks import LedgerTasks
from holdfast.upkeep.loop import QueueSelection
from holdfast.upkeep.projector import Projector
from holdfast.worker.in_flight import Run
from holdfast.worker.settler import record_durations
from holdfast.worker.worker import Worker
from tests.observe.support import eventually, fetch, scrape

QUEUE = "default"


def make(url: str, namespace: str, **more: Any) -> Holdfast:
    # Long enough for a busy machine to renew in time, short enough to wait until one lease expires.
    leases: dict[str, Any] = {"visibility_timeout_s": 2, "heartbeat_interval_s": 0.1, "reclaim_interval_s": 0.05}
    app = Holdfast(url, namespace=namespace, **leases, **more)

    @app.task
    async def ok() -> int:
        return 1

    @app.task
    def in_a_thread() -> int:
        return 2

    @app.task(retry=Retry(max_retries=1, base=0.01, jitter=None))
    async def flaky() -> str:
        raise ValueError("always")

    @app.task(retry=Retry(base=3600, cap=7200, jitter=None))
    async def retry_later() -> None:
        raise ValueError("not now")

    @app.task
    async def fatal() -> None:
        raise Fatal("no")

    @app.task(on_exhausted="suspend")
    async def suspend() -> None:
        raise Fatal("who knows")

    return app


@pytest.fixture
async def app(engine_url: str, namespace: str) -> AsyncIterator[Holdfast]:
    async with make(engine_url, namespace) as app:
        yield app


async def submit(app: Holdfast, name: str, **options: Any) -> str:
    task = app.tasks[name]
    return (await (task.options(**options) if options else task).submit()).id


async def lose_a_lease(app: Holdfast) -> None:
    """A worker claims a job and stops renewing; another one reclaims it. Then the first one settles."""
    await submit(app, "ok")
    (claim,) = await app.engine.claim("ghost", [QUEUE], 1, 1000)

    async def reclaimed() -> bool:
        await drain(app)
        return (await app.engine.get(QUEUE, [claim.job_id]))[0].state is State.SUCCEEDED  # type: ignore[union-attr]

    await eventually(reclaimed, "the job to be reclaimed")
    assert await app.engine.settle([Settlement(claim, Succeed(b"1"), 0)]) == [SettleResult.STALE]


async def drain_all(app: Holdfast, retries: int) -> None:
    async def done() -> bool:
        await drain(app)
        return app.engine.counters.retried == retries and not (await app.engine.stats(QUEUE)).states.get(State.RETRYING)

    await eventually(done, "all retries to be over")


async def test_the_counters_match_what_happened(app: Holdfast) -> None:
    for name, number in {"ok": 3, "in_a_thread": 2, "flaky": 2, "fatal": 1, "suspend": 1}.items():
        for _ in range(number):
            await submit(app, name)
    first = await submit(app, "ok", idempotency_key="same")
    assert await submit(app, "ok", idempotency_key="same") == first
    await drain_all(app, retries=2)
    await lose_a_lease(app)

    for _ in range(3):
        with pytest.raises(TransitionInvalid):
            await app.engine.move(QUEUE, first, State.QUEUED, actor="eve", reason="again")
    waiting = await submit(app, "retry_later")
    await drain(app)
    await app.engine.move(QUEUE, waiting, State.DLQ_PENDING, actor="ada", reason="permanent")
    await app.engine.set_control(QUEUE, QueueControl(intake_paused=True, backlog_alert=50))
    with pytest.raises(IntakeRefused):
        await submit(app, "ok")

    metrics = await scrape(app)
    expected = {
        'task_process_total{result="succeeded"}': 7,
        'task_process_total{result="retry"}': 3,
        'task_process_total{result="dead"}': 3,
        'task_process_total{result="skipped"}': 0,
        'task_process_total{result="not_due"}': 0,
        'task_process_seconds_count{result="succeeded"}': 7,
        'task_process_seconds_count{result="retry"}': 3,
        'task_process_seconds_count{result="dead"}': 3,
        "task_dlq_total": 4,
        'stream_reclaim_total{result="claimed"}': 1,
        'stream_reclaim_total{result="error"}': 0,
        "jobs_submitted_total": 12,
        "jobs_duplicate_total": 1,
        "jobs_suspended_total": 1,
        "jobs_claimed_total": 14,
        "stale_settles_total": 1,
        "leases_lost_total": 0,
        "illegal_moves_total": 3,
        "intake_refused_total": 1,
        "engine_up": 1,
        f'backlog{{queue="{QUEUE}"}}': 0,
        f'backlog_alert{{queue="{QUEUE}"}}': 50,
        f'queue_lag{{queue="{QUEUE}"}}': 0,
        f'retrying_ratio{{queue="{QUEUE}"}}': 0,
    }
    assert {name: metrics.get(name) for name in expected} == expected


async def test_the_gauges_of_a_queue(app: Holdfast, namespace: str) -> None:
    for _ in range(5):
        await submit(app, "ok")
    claims = await app.engine.claim("w1", [QUEUE], 2, 1000)
    await submit(app, "ok", delay=3600)
    assert f'concurrency_limit{{queue="{QUEUE}"}}' not in await scrape(app)
    await app.engine.set_control(QUEUE, QueueControl(concurrency=2))
    metrics = await scrape(app)
    stream = f"{namespace}:stream:task"
    expected = {
        f'stream_length{{stream="{stream}"}}': 5,
        f'stream_pending{{group="cg:workers",stream="{stream}"}}': 2,
        f'queue_lag{{queue="{QUEUE}"}}': 3,
        f'backlog{{queue="{QUEUE}"}}': 5,
        f'concurrency_limit{{queue="{QUEUE}"}}': 2,
        f'active_workers{{queue="{QUEUE}"}}': 1,
        f'jobs{{queue="{QUEUE}",state="running"}}': 2,
        f'jobs{{queue="{QUEUE}",state="queued"}}': 4,
    }
    assert {name: metrics.get(name) for name in expected} == expected
    assert len(claims) == 2
    if app.settings.url.startswith("redis"):
        redis: Any = Redis.from_url(app.settings.url)
        assert await redis.xlen(stream) == 5
        await redis.aclose()


async def test_the_retrying_ratio_of_a_queue(app: Holdfast) -> None:
    await submit(app, "retry_later")
    await drain(app)
    for _ in range(3):
        await submit(app, "ok")
    await app.engine.claim("w1", [QUEUE], 1, 1000)
    assert (await scrape(app))[f'retrying_ratio{{queue="{QUEUE}"}}'] == 0.25


@pytest.mark.redis
async def test_messages_of_known_jobs_are_skipped_or_not_due(redis_url: str, namespace: str) -> None:
    async with make(redis_url, namespace, retry_via={QUEUE: RetryVia.SCHEDULE}) as app:
        ended = await submit(app, "ok")
        await drain(app)
        later = await submit(app, "ok", delay=3600)
        redis: Any = Redis.from_url(redis_url)
        stream = f"{namespace}:stream:task"
        for job_id in (ended, ended, later):
            await redis.xadd(stream, {"task_id": job_id, "type": "ok", "payload": "{}"})
        await redis.xadd(stream, {"task_id": "broken"})
        await redis.xadd(stream, {"task_id": "foreign", "type": "ok", "payload": "{}"})
        await redis.aclose()

        async def all_read() -> bool:
            counts = app.engine.counters
            return counts.succeeded + counts.skipped + counts.not_due + counts.malformed >= 6

        # Not `drain`: it does not see foreign messages, and does not count every claim that it ends.
        worker = Worker(app, queues=[QUEUE], upkeep=False)
        running = asyncio.create_task(worker.run())
        await eventually(all_read, "all messages to be read")
        worker.drain()
        await running
        metrics = await scrape(app)
    expected = {
        'task_process_total{result="succeeded"}': 2,
        'task_process_total{result="skipped"}': 2,
        'task_process_total{result="not_due"}': 1,
        'task_process_total{result="dead"}': 1,
        "task_dlq_total": 1,
        "jobs_adopted_total": 1,
    }
    assert {name: metrics[name] for name in expected} == expected


async def test_a_failed_reclaim_is_counted(app: Holdfast, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object) -> None:
        raise EngineUnavailable("gone")

    monkeypatch.setattr(app.engine, "reclaim", refuse)
    reclaimer = Reclaimer(app.engine, QueueSelection(app.engine, [QUEUE]), app.settings, "r")
    for _ in range(2):
        with pytest.raises(EngineUnavailable):
            await reclaimer._run_once()
    assert (await scrape(app))['stream_reclaim_total{result="error"}'] == 2


async def test_process_counters_are_served_while_the_engine_is_unreachable(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    await submit(app, "ok")

    async def refuse(*_: object) -> None:
        raise EngineUnavailable("gone")

    monkeypatch.setattr(app.engine, "queues", refuse)
    metrics = await scrape(app)
    assert (metrics["engine_up"], metrics["jobs_submitted_total"]) == (0, 1)
    assert not any(name.startswith("backlog") for name in metrics)


async def test_the_feed_lag_of_the_ledger(redis_url: str, ledger_url: str, namespace: str) -> None:
    async with make(redis_url, namespace, ledger=ledger_url) as app:
        for number in range(3):
            await submit(app, "ok", idempotency_key=str(number))
        await asyncio.sleep(0.05)
        metrics = await scrape(app)
        assert metrics["ledger_up"] == 1
        assert metrics[f'feed_lag_entries{{queue="{QUEUE}"}}'] == 3
        assert 0.05 <= metrics[f'feed_lag_seconds{{queue="{QUEUE}"}}'] < 20
        backend = backend_of(app)
        assert backend.ledger is not None
        ledger_tasks = LedgerTasks(app.engine, backend.ledger, app.settings, name="b")
        ledger_tasks.start()
        try:

            async def caught_up() -> bool:
                return (await scrape(app))[f'feed_lag_entries{{queue="{QUEUE}"}}'] == 0

            await eventually(caught_up, "the ledger to catch up")
            assert (await scrape(app))["ledger_events_total"] == 3
        finally:
            await ledger_tasks.stop()


async def test_unconfirmed_dead_letters_are_counted_by_tenant(
    redis_url: str, postgres_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make(redis_url, namespace, ledger=postgres_url) as app:
        for tenant in ("acme", "acme", "globex"):
            await submit(app, "fatal", tenant_id=tenant)
        await drain(app)
        backend = backend_of(app)
        assert backend.ledger is not None
        projector = Projector(app.engine, backend.ledger, name="p")
        # Dead letters are never confirmed to the engine.
        monkeypatch.setattr(projector._confirmer, "confirm_all", lambda _: asyncio.sleep(0, 1))
        running = asyncio.create_task(projector.run())
        try:

            async def recorded() -> bool:
                return (await scrape(app)).get('dlq_pending{tenant="acme"}') == 2

            await eventually(recorded, "the dead letters to be recorded")
            metrics = await scrape(app)
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
    assert metrics['dlq_pending{tenant="globex"}'] == 1
    assert metrics[f'jobs{{queue="{QUEUE}",state="dlq_pending"}}'] == 3


async def test_an_unreachable_ledger_is_reported(redis_url: str, namespace: str, tmp_path: Path) -> None:
    ledger = "postgresql://unknown:x@127.0.0.1:1/none"
    async with make(redis_url, namespace, ledger=ledger, connect_timeout_s=0.5) as app:
        metrics = await scrape(app)
    assert (metrics["engine_up"], metrics["ledger_up"]) == (1, 0)


async def test_only_metrics_are_served(app: Holdfast) -> None:
    async def text() -> tuple[bytes, str]:
        return b"x 1\n", "text/plain"

    async with serve_metrics("127.0.0.1", 0, text) as port:
        assert (await fetch(port, "/"))[0].startswith("HTTP/1.1 404")
        assert (await fetch(port, method="POST"))[0].startswith("HTTP/1.1 405")
        assert await fetch(port, method="HEAD") != await fetch(port)
        assert (await fetch(port, "/metrics?x=1"))[1] == "x 1\n"
        # A client that disconnects silently, and one with an endless request head, do no harm.
        for request in (b"", b"GET /metrics" + b"x" * 100_000):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request)
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
        assert (await fetch(port))[1] == "x 1\n"
        with pytest.raises(InvalidOption, match=str(port)):
            async with serve_metrics("127.0.0.1", port, text):
                pass


def test_only_applied_settlements_count_as_runs() -> None:
    counts = Counters()
    claim = Claim(Lease("q", "j", "1", 1, "w"), "t", b"{}", "a", "k", "t", 1, 0, 0, Meta())
    verdicts: list[Verdict] = [Succeed(b"1"), Succeed(b"1"), Succeed(b"1"), Release("given back"), Hold("approval")]
    runs = [Run(claim, TaskSpec("t", lambda: None, TaskPolicy())) for _ in verdicts]
    for run, verdict in zip(runs, verdicts, strict=True):
        run.settlement, run.took_s = Settlement(claim, verdict, 0), 0.5
    record_durations(
        counts,
        runs,
        [SettleResult.APPLIED, SettleResult.STALE, SettleResult.ALREADY, SettleResult.APPLIED, SettleResult.APPLIED],
    )
    assert (sum(counts.run_succeeded.buckets), counts.run_succeeded.total_s) == (1, 0.5)
    assert sum(counts.run_retried.buckets) + sum(counts.run_dead.buckets) == 0


def test_a_duration_is_in_the_bucket_that_prometheus_expects() -> None:
    durations = Histogram()
    durations.add([BOUNDS_S[-1] + 1, 0, BOUNDS_S[0], math.nextafter(BOUNDS_S[0], 1), BOUNDS_S[-1]])
    durations.add([0.0])
    assert durations.buckets == [3, 1, *[0] * (len(BOUNDS_S) - 3), 1, 1]
    assert durations.total_s == pytest.approx(2 * BOUNDS_S[0] + 2 * BOUNDS_S[-1] + 1)
