"""Backlog alerts: raised once and cleared once, with any number of monitors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from holdfast import Holdfast, schema
from holdfast.engine.port.operators import QueueControl
from holdfast.errors import LedgerUnavailable
from holdfast.execution.backend import backend_of
from holdfast.testing import drain
from holdfast.upkeep.backlog_monitor import BacklogMonitor
from holdfast.upkeep.loop import QueueSelection
from holdfast.upkeep.upkeep import Upkeep
from holdfast.worker.worker import Worker
from tests.observe.support import eventually, scrape

KEY = "backlog:default"


def make(url: str, namespace: str, **more: Any) -> Holdfast:
    app = Holdfast(url, namespace=namespace, **more)

    @app.task
    async def ok() -> None:
        return None

    return app


@pytest.fixture(params=["embedded", "redis"])
def urls(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    if request.param == "embedded":
        return {"url": f"sqlite:///{tmp_path / 'holdfast.db'}"}
    return {"url": request.getfixturevalue("redis_url"), "ledger": request.getfixturevalue("postgres_url")}


@pytest.fixture
async def app(urls: dict[str, str], namespace: str) -> AsyncIterator[Holdfast]:
    async with make(urls["url"], namespace, ledger=urls.get("ledger"), backlog_alert=10) as app:
        yield app


def make_monitor(app: Holdfast, *, ledger: bool = True) -> BacklogMonitor:
    return BacklogMonitor(
        app.engine, QueueSelection(app.engine, ()), app.settings, backend_of(app).ledger if ledger else None
    )


async def fill(app: Holdfast, number: int) -> None:
    await app.tasks["ok"].submit_many([()] * number)


async def alert_events(app: Holdfast) -> list[tuple[str, str, str]]:
    table = schema.operator_events
    query = select(table).where(table.c.type.like("alert.%")).order_by(table.c.at)
    async with app.ledger.queries.engine.connect() as connection:
        return [(row.type, row.target_id, row.reason) for row in await connection.execute(query)]


async def finish_jobs(app: Holdfast, number: int) -> None:
    """Claim and finish `number` jobs."""
    from holdfast.core.verdict import Settlement, Succeed

    claims = await app.engine.claim("w", ["default"], number, 1000)
    assert len(claims) == number
    await app.engine.settle([Settlement(claim, Succeed(b"null"), claim.claimed_at_ms) for claim in claims])


async def test_an_alert_is_raised_once_and_cleared_below_the_threshold(
    app: Holdfast, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "holdfast.upkeep")
    monitors = [make_monitor(app) for _ in range(3)]

    async def check() -> None:
        await asyncio.gather(*(monitor.check() for monitor in monitors))

    await fill(app, 9)
    await check()
    assert await alert_events(app) == []
    assert "alerts_standing" not in str(await scrape(app))

    await fill(app, 1)
    for _ in range(3):
        await check()
    (raised,) = await alert_events(app)
    assert raised == ("alert.backlog", "default", "the backlog is 10, the threshold is 10")
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [(record.__dict__["alert"], record.__dict__["backlog"]) for record in warnings] == [(KEY, 10)]
    assert (await scrape(app))[f'alerts_standing{{alert="{KEY}"}}'] == 1

    await finish_jobs(app, 1)
    await check()
    assert len(await alert_events(app)) == 1, "at 90 % it still stands"

    await finish_jobs(app, 1)
    for _ in range(3):
        await check()
    assert [kind for kind, *_ in await alert_events(app)] == ["alert.backlog", "alert.backlog_cleared"]
    assert f'alerts_standing{{alert="{KEY}"}}' not in await scrape(app)

    await fill(app, 5)
    await check()
    assert [kind for kind, *_ in await alert_events(app)] == ["alert.backlog", "alert.backlog_cleared", "alert.backlog"]


async def test_an_operators_threshold_overrides_the_setting(app: Holdfast) -> None:
    await fill(app, 12)
    await app.engine.set_control("default", QueueControl(backlog_alert=20))
    monitor = make_monitor(app)
    await monitor.check()
    assert await alert_events(app) == []
    await app.engine.set_control("default", QueueControl(backlog_alert=5))
    await monitor.check()
    assert [kind for kind, *_ in await alert_events(app)] == ["alert.backlog"]


async def test_an_alert_of_a_dead_process_is_cleared_by_another(app: Holdfast) -> None:
    await fill(app, 10)
    await make_monitor(app).check()
    await drain(app)
    app.engine.counters.alerts.clear()
    await make_monitor(app).check()
    assert [kind for kind, *_ in await alert_events(app)] == ["alert.backlog", "alert.backlog_cleared"]


async def test_an_alert_waits_for_an_unreachable_ledger(app: Holdfast, monkeypatch: pytest.MonkeyPatch) -> None:
    await fill(app, 10)
    monitor = make_monitor(app)
    backend = backend_of(app)
    assert backend.ledger is not None
    operator_store = type(backend.ledger.operators)
    with monkeypatch.context() as patched:

        async def refuse(*_: object) -> bool:
            raise LedgerUnavailable("gone")

        patched.setattr(operator_store, "raise_alert", refuse)
        await monitor.check()
    assert await alert_events(app) == []
    await monitor.check()
    assert [kind for kind, *_ in await alert_events(app)] == ["alert.backlog"]


async def test_without_a_ledger_each_process_logs_its_own_alerts(
    redis_url: str, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "holdfast.upkeep")
    async with make(redis_url, namespace, backlog_alert=3) as app:
        monitor = make_monitor(app, ledger=False)
        await fill(app, 3)
        for _ in range(3):
            await monitor.check()
        assert (await scrape(app))[f'alerts_standing{{alert="{KEY}"}}'] == 1
        await drain(app)
        for _ in range(3):
            await monitor.check()
        assert f'alerts_standing{{alert="{KEY}"}}' not in await scrape(app)
    levels = [record.levelname for record in caplog.records if record.name == "holdfast.upkeep"]
    assert levels == ["WARNING", "INFO"]


async def test_without_a_threshold_there_is_no_alert(redis_url: str, namespace: str) -> None:
    async with make(redis_url, namespace) as app:
        await fill(app, 100)
        await make_monitor(app).check()
        assert not app.engine.counters.alerts


@pytest.mark.parametrize("process", ["worker", "upkeep"])
async def test_workers_and_upkeep_monitor_the_backlog(app: Holdfast, process: str) -> None:
    await app.engine.set_control("default", QueueControl(paused=True))
    await fill(app, 10)
    worker, upkeep = Worker(app), Upkeep(app.engine, [], app.settings, backend_of(app).ledger)
    running = asyncio.create_task(worker.run() if process == "worker" else upkeep.run())

    async def raised() -> Any:
        return await alert_events(app)

    try:
        assert [kind for kind, *_ in await eventually(raised, "the alert")] == ["alert.backlog"]
    finally:
        worker.drain()
        upkeep.stop()
        await running
