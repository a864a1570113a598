"""Queries of the reconciler: correct pages, read by an index."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest
from sqlalchemy import insert, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from holdfast.core.job import JobKey
from holdfast.core.states import FINAL, State
from holdfast.ledger.queries.reconciliation import SqlRecovery, _open_page, _recent_page
from holdfast.schema import feed_positions, jobs
from holdfast.schema.columns import metadata

DAY: Final = timedelta(days=1)
NOW: Final = datetime.now(UTC).replace(microsecond=0)
OPEN: Final = [state for state in State if state not in FINAL]


@pytest.fixture
async def store(ledger_url: str) -> AsyncIterator[AsyncEngine]:
    url = ledger_url.replace("postgresql://", "postgresql+asyncpg://").replace("sqlite://", "sqlite+aiosqlite://")
    engine = create_async_engine(url)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    yield engine
    await engine.dispose()


def row(job_id: str, state: State = State.QUEUED, **fields: Any) -> dict[str, Any]:
    return {
        "tenant_id": "default",
        "job_id": job_id,
        "queue": "default",
        "job_type": "t",
        "state": state.value,
        "priority": 1,
        "last_seq": 1,
        "idempotency_key": job_id,
        "payload": "{}",
        "meta": None,
        "created_at": NOW,
        "updated_at": NOW,
        "finished_at": NOW if state in FINAL else None,
        "dlq_id": job_id if state in (State.FAILED, State.DLQ_RECORDED) else None,
    } | fields


async def fill(store: AsyncEngine, rows: list[dict[str, Any]]) -> None:
    async with store.begin() as connection:
        await connection.execute(insert(jobs), rows)


@pytest.mark.parametrize("limit", [1, 3, 7, 500])
async def test_open_jobs_are_listed_in_pages_each_once(store: AsyncEngine, limit: int) -> None:
    rows = [
        row(f"{tenant}-{queue}-{state}-{number}", state, tenant_id=tenant, queue=queue, created_at=NOW - number * DAY)
        for tenant in ("acme", "default", "zeta")
        for queue in ("default", "other")
        for state in State
        for number in range(3)
    ]
    # Many with the same time, and a tenant with ended jobs only.
    rows += [row(f"same-{number:02}") for number in range(10)]
    rows += [row("over", State.FAILED, tenant_id="ended")]
    await fill(store, rows)
    pages = [page async for page in SqlRecovery(store).open_jobs("default", limit)]
    found = [job.key for page in pages for job in page]
    assert len(found) == len(set(found))
    assert set(found) == {
        JobKey(each["tenant_id"], "default", each["job_id"])
        for each in rows
        if each["queue"] == "default" and State(each["state"]) not in FINAL
    }
    assert all(len(page) == limit for page in pages[:-1])


async def test_submission_keys_are_those_in_their_window_and_of_open_jobs(store: AsyncEngine) -> None:
    old = NOW - 3 * DAY
    await fill(
        store,
        [
            row("fresh", State.SUCCEEDED, idempotency_key="k-fresh"),
            row("old-open", State.SUSPENDED, idempotency_key="k-open", created_at=old),
            row("old-ended", State.SUCCEEDED, idempotency_key="k-ended", created_at=old),
            row("no-key"),
            row("elsewhere", queue="other", idempotency_key="k-other"),
            row("theirs", tenant_id="acme", idempotency_key="k-fresh"),
            row("short", State.SUCCEEDED, idempotency_key="k-short", meta='{"key_window_ms":5000}'),
            row("short-open", idempotency_key="k-short-open", meta='{"key_window_ms":5000}'),
        ],
    )
    day_ms = 86_400_000
    keys = [key async for page in SqlRecovery(store).submission_keys("default", day_ms, 1) for key in page]
    assert {(key.tenant_id, key.key, key.job_id) for key in keys} == {
        ("default", "k-fresh", "fresh"),
        ("acme", "k-fresh", "theirs"),
        ("default", "k-open", "old-open"),
        ("default", "k-short", "short"),
        ("default", "k-short-open", "short-open"),
    }
    expiries = {key.job_id: key.expires_at_ms for key in keys}
    now_ms = round(NOW.timestamp() * 1000)
    assert expiries["fresh"] == now_ms + day_ms
    # The key of an open job does not expire: the engine sets its end when the job ends.
    assert expiries["old-open"] >= now_ms + day_ms
    # A job's own window applies once the job has ended.
    assert expiries["short"] == now_ms + 5000
    assert expiries["short-open"] >= now_ms + day_ms


async def test_queues_are_those_with_a_feed_position(store: AsyncEngine) -> None:
    async with store.begin() as connection:
        await connection.execute(
            insert(feed_positions),
            [
                {"feed": feed, "position": position, "nonce": "", "updated_at": NOW}
                for feed, position in (("b", "1-0"), ("a", "2-0"), ("unread", ""))
            ],
        )
    assert await SqlRecovery(store).queues() == ["a", "b"]


async def test_open_jobs_are_read_by_an_index(store: AsyncEngine) -> None:
    ended = [row(f"done-{number:05}", State.SUCCEEDED, created_at=NOW - number * DAY / 100) for number in range(5_000)]
    await fill(store, [*ended, *(row(f"open-{state}", state) for state in OPEN)])
    cursor = (1, NOW - 10 * DAY, "x")
    plans = {
        "jobs_by_state": _open_page("default", "default", cursor, None, 500),
        "jobs_by_time": _recent_page("default", "default", (NOW - DAY / 2, ""), 500),
    }
    for index, query in plans.items():
        plan = await explain(store, query)
        assert index in plan, plan
        assert "Seq Scan" not in plan
        assert "SCAN jobs" not in plan


async def explain(store: AsyncEngine, query: Any) -> str:
    on_sqlite = store.dialect.name == "sqlite"
    dialect = sqlite.dialect() if on_sqlite else postgresql.dialect()
    if on_sqlite:
        statement = str(query.compile(dialect=dialect, compile_kwargs={"literal_binds": False}))
        values = tuple(_plain(value) for value in query.compile(dialect=dialect).params.values())
        async with store.connect() as connection:
            found = await connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", values)
            return "\n".join(str(each) for each in found.all())
    statement = str(query.compile(dialect=dialect, compile_kwargs={"literal_binds": True}))
    async with store.connect() as connection:
        await connection.execute(text("ANALYZE jobs"))
        found = await connection.exec_driver_sql(f"EXPLAIN {statement}")
        return "\n".join(each[0] for each in found.all())


def _plain(value: Any) -> Any:
    return round(value.timestamp() * 1000) if isinstance(value, datetime) else value
