"""Inline mode and in-memory apps do not use the stores that variables or `holdfast.toml` name."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from holdfast import Context, Deny, Holdfast, State
from holdfast.errors import Denied, InvalidOption, UnknownJob
from holdfast.testing import ManualClock, drain, inline
from tests.worker.support import working

SECRET = "whsec_" + "QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVowMTIzNDU="
WEBHOOK = "https://hooks.example.org/jobs"


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch, redis_url: str, ledger_url: str, namespace: str) -> str:
    """Set real stores in the environment, as on a production machine. Returns the ledger's URL."""
    monkeypatch.setenv("HOLDFAST_URL", redis_url)
    monkeypatch.setenv("HOLDFAST_LEDGER", ledger_url)
    monkeypatch.setenv("HOLDFAST_NAMESPACE", namespace)
    return ledger_url


def count_file_rows(path: Path, table: str) -> int:
    if not path.exists():
        return 0
    with closing(sqlite3.connect(path)) as file:
        return int(file.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


async def count_rows(url: str, table: str) -> int:
    """Count the rows of a ledger's table; 0 if the ledger does not exist yet."""
    if url.startswith("sqlite:///"):
        return count_file_rows(Path(url.removeprefix("sqlite:///")), table)
    connection = await asyncpg.connect(url)
    try:
        return int(await connection.fetchval(f"SELECT count(*) FROM {table}"))
    finally:
        await connection.close()


class Bank:
    def __init__(self, app: Holdfast) -> None:
        self.charges: list[str] = []

        async def charge(order: str) -> str:
            self.charges.append(order)
            return f"charge {len(self.charges)}"

        @app.task
        async def pay(ctx: Context, order: str) -> str:
            await ctx.step("get order", lambda: order)
            return await ctx.effect(f"charge {order}", charge, order)

        @app.task
        async def request_approval(ctx: Context) -> str:
            return (await ctx.approval("refund")).by[0]

        self.pay = pay
        self.request_approval = request_approval


async def test_an_effect_in_a_test_does_not_suppress_the_real_effect(configured: str) -> None:
    app = Holdfast()
    bank = Bank(app)
    with inline(app):
        assert await (await bank.pay.submit("7")).result() == "charge 1"
        assert await (await bank.request_approval.submit()).state() is State.WAITING_APPROVAL
        assert await (await bank.pay.submit("7")).result() == "charge 1"
    for table in ("idempotency_keys", "job_steps", "jobs", "approvals"):
        assert await count_rows(configured, table) == 0, table
    async with app, working(app):
        assert await (await bank.pay.submit("7")).result(60) == "charge 2"
    assert bank.charges == ["7", "7"]
    assert await count_rows(configured, "idempotency_keys") == 1


async def test_a_blocking_effect_in_a_test_is_isolated_too(configured: str) -> None:
    app = Holdfast()
    acts: list[str] = []

    @app.task
    def pay(ctx: Context) -> None:
        ctx.blocking.effect("k", acts.append, "paid")

    with inline(app):
        await (await pay.submit()).result()
        await (await pay.submit()).result()
    assert acts == ["paid"]
    assert await count_rows(configured, "idempotency_keys") == 0


async def test_an_in_memory_app_does_not_use_the_configured_ledger(configured: str) -> None:
    app = Holdfast("sqlite://", clock=ManualClock())
    bank = Bank(app)
    assert app.settings.embedded
    async with app:
        job = await bank.pay.submit("7")
        await drain(app)
        assert await job.result(0) == "charge 1"
        assert [row.job_id for row in (await app.ledger.queries.jobs()).jobs] == [job.id]
        await bank.pay.submit("8")
    for table in ("idempotency_keys", "job_steps", "jobs", "job_events"):
        assert await count_rows(configured, table) == 0, table
    # A worker of the real deployment restores and runs nothing.
    real = Holdfast(reconcile_interval_s=0.1)
    real_bank = Bank(real)
    async with real, working(real):
        await (await real_bank.pay.submit("9")).result(60)
    assert real_bank.charges == ["9"]


async def test_inline_mode_does_not_connect() -> None:
    """The program under test can open its app although its stores are unreachable."""
    app = Holdfast("redis://127.0.0.1:1", ledger="postgresql://127.0.0.1:1/none", connect_timeout_s=0.2)
    bank = Bank(app)
    outside = app.job("from-outside")
    with inline(app):
        async with app:
            assert app.settings.in_memory
            assert await (await bank.pay.submit("7")).result() == "charge 1"
            assert (await app.ledger.queries.jobs()).jobs == []
            await app.ledger.wait_caught_up()
        with pytest.raises(UnknownJob):
            await outside.info()
    assert (app.settings.url, app.settings.ledger) == ("redis://127.0.0.1:1", "postgresql://127.0.0.1:1/none")
    await app.close()


async def test_inline_mode_does_not_change_an_open_app(tmp_path: Path) -> None:
    app = Holdfast(f"sqlite:///{tmp_path / 'jobs.db'}")
    bank = Bank(app)
    async with app:
        engine, before = app.engine, await bank.pay.submit("1")
        with inline(app):
            assert app.engine is not engine
            inside = await bank.pay.submit("2")
        assert app.engine is engine
        assert await before.state() is State.QUEUED
        with pytest.raises(UnknownJob):
            await inside.info()


async def test_a_denied_job_is_not_in_the_real_audit_log(configured: str) -> None:
    app = Holdfast()
    bank = Bank(app)

    @app.guard
    def never(_: Any) -> Deny:
        return Deny("no")

    with inline(app), pytest.raises(Denied):
        await bank.pay.options(durable=True).submit("7")
    assert await count_rows(configured, "operator_events") == 0


async def test_inline_mode_sends_no_webhook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_WEBHOOK_SECRET", SECRET)
    monkeypatch.setenv("HOLDFAST_WEBHOOKS", f'[{{"url": "{WEBHOOK}", "events": ["job.*"]}}]')
    app = Holdfast("redis://127.0.0.1:1", ledger="postgresql://127.0.0.1:1/none")
    with inline(app):
        job = await Bank(app).pay.options(webhook=WEBHOOK).submit("7")
        assert await job.state() is State.SUCCEEDED
        assert not app.settings.webhooks_enabled


async def test_a_webhook_of_an_in_memory_app_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_WEBHOOK_SECRET", SECRET)
    async with Holdfast("sqlite://") as app:
        with pytest.raises(InvalidOption, match="in-memory"):
            await Bank(app).pay.options(webhook=WEBHOOK).submit("7")
