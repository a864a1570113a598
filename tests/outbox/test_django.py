"""Django on PostgreSQL and on SQLite: events and jobs belong to `transaction.atomic()`, nested blocks included."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast import Holdfast
from holdfast.errors import UnknownJob
from holdfast.execution.backend import backend_of
from holdfast.ledger.port.messages import ENGINE_DESTINATION, OutboxEvent, OutboxStatus
from tests.outbox.support import run_jobs, until

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(params=["postgres", "sqlite"])
async def app(request: pytest.FixtureRequest, tmp_path: Path, namespace: str) -> AsyncIterator[Holdfast]:
    """The worker's side, on the same stores as the Django program."""
    if request.param == "sqlite":
        app = Holdfast(f"sqlite:///{tmp_path / 'app.db'}", namespace=namespace)
    else:
        app = Holdfast(
            request.getfixturevalue("redis_url"), ledger=request.getfixturevalue("postgres_url"), namespace=namespace
        )

    @app.task(queue="mail")
    def double(number: int) -> int:
        return number * 2

    async with app:
        # Creates the database file on SQLite.
        backend = backend_of(app)
        assert backend.outbox is not None
        await backend.outbox.open()
        yield app


async def run_program(app: Holdfast) -> dict[str, Any]:
    database = app.settings.ledger or app.settings.url
    command = [sys.executable, "-W", "error", "-m", "tests.outbox.django_program"]
    process = await asyncio.create_subprocess_exec(
        *command,
        database,
        app.settings.url,
        app.settings.namespace,
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    results: dict[str, Any] = json.loads(out)
    return results


async def events(app: Holdfast) -> list[OutboxEvent]:
    backend = backend_of(app)
    assert backend.outbox is not None
    return (await (await backend.outbox.open()).find(None, limit=100))[::-1]


async def test_events_and_jobs_belong_to_the_transaction(app: Holdfast) -> None:
    results = await run_program(app)
    written = await events(app)
    event_id, committed = results["case_a_commit_leaves_order_events_and_job"]
    (lost,) = results["case_a_rollback_leaves_nothing"]
    outer, inner = results["case_a_nested_block_is_a_savepoint"]
    other_alias = results["case_another_alias_is_used_by_its_name"]
    from_view, refused = results["case_an_async_view"]
    assert refused == "SynchronousOnlyOperation"

    assert results["orders"] == ["committed"]
    plain = [event for event in written if event.destination != ENGINE_DESTINATION]
    assert [event.topic for event in plain] == ["orders", "many", "many", "many", "kept", "by hand", "once"]
    assert (plain[0].id, plain[0].key) == (event_id, "%s")
    assert msgspec.json.decode(plain[0].payload) == {"note": "100% 'quoted' %(x)s"}
    backend = backend_of(app)
    assert backend.outbox is not None
    now_ms = await (await backend.outbox.open()).now_ms()
    assert all(abs(now_ms - event.created_at_ms) < 60_000 for event in written)

    async def submitted() -> bool:
        return all(
            event.status is OutboxStatus.SENT for event in await events(app) if event.destination == ENGINE_DESTINATION
        )

    async with run_jobs(app, ["mail"]):
        await until(submitted)
        for job_id, result in ((committed, 2), (outer, 6), (other_alias, 10), (from_view, 12)):
            assert await app.job(job_id, "mail").result(timeout=60) == result
    for job_id in (lost, inner):
        with pytest.raises(UnknownJob):
            await app.job(job_id, "mail").info()

    for scenario, error in {
        "case_outside_of_a_transaction": "UsageError: this connection is not in a transaction, so the event would be "
        "committed immediately; open one: `with transaction.atomic():`",
        "case_async_call": "UsageError: django.utils.connection.ConnectionProxy is not supported here; use add_sync",
        "case_a_cache": "UsageError: django.utils.connection.ConnectionProxy is not a supported connection",
        "case_a_database_without_the_table": "UsageError: the database of this connection has no table outbox_events",
        "case_an_existing_event_id": "Conflict: an event with this id already exists",
        "case_an_already_broken_block": "TransactionManagementError",
    }.items():
        assert results[scenario].startswith(error), scenario
