"""psycopg 3, sync and async: events and jobs belong to the transaction with every connection setup."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import msgspec
import psycopg
import pytest
from psycopg import AsyncClientCursor, AsyncRawCursor, ClientCursor, RawCursor
from psycopg.rows import dict_row, namedtuple_row
from psycopg_pool import AsyncConnectionPool, ConnectionPool
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine

from holdfast import Holdfast
from holdfast.errors import Conflict, UnknownJob, UsageError
from holdfast.outbox.writer import NewOutboxEvent
from holdfast.upkeep.relay_service import run_relay
from tests.outbox.support import Deployment, run_jobs, until


@pytest.fixture
def ledger_url(postgres_url: str) -> str:
    return postgres_url


# Connection setups of applications. `connect_sync` and `connect_async` begin a transaction, then commit or roll back.

SETUPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "autocommit": {"autocommit": True},
    "dict rows": {"row_factory": dict_row},
    "named tuples": {"row_factory": namedtuple_row},
    "raw cursors": {"cursor_factory": RawCursor},
    "client cursors": {"cursor_factory": ClientCursor},
    "no prepared statements": {"prepare_threshold": None},
    "pipeline": {},
    "autocommit, pipeline": {"autocommit": True},
}
_ASYNC_CURSORS = {RawCursor: AsyncRawCursor, ClientCursor: AsyncClientCursor}

commit_and_rollback = pytest.mark.parametrize("commit", [True, False], ids=["commit", "rollback"])
every_setup = pytest.mark.parametrize("setup", SETUPS)


@contextmanager
def connect_sync(url: str, setup: str = "plain", *, commit: bool = True) -> Iterator[Any]:
    with psycopg.connect(url, **SETUPS[setup]) as connection:
        if "pipeline" in setup:
            with connection.pipeline(), connection.transaction(force_rollback=not commit):
                yield connection
        elif connection.autocommit:
            with connection.transaction(force_rollback=not commit):
                yield connection
        else:
            yield connection
            connection.commit() if commit else connection.rollback()


@asynccontextmanager
async def connect_async(url: str, setup: str = "plain", *, commit: bool = True) -> AsyncIterator[Any]:
    options = dict(SETUPS[setup])
    if "cursor_factory" in options:
        options["cursor_factory"] = _ASYNC_CURSORS[options["cursor_factory"]]
    async with await psycopg.AsyncConnection.connect(url, **options) as connection:
        if "pipeline" in setup:
            async with connection.pipeline(), connection.transaction(force_rollback=not commit):
                yield connection
        elif connection.autocommit:
            async with connection.transaction(force_rollback=not commit):
                yield connection
        else:
            yield connection
            await (connection.commit() if commit else connection.rollback())


@commit_and_rollback
@every_setup
async def test_events_belong_to_the_transaction(deployment: Deployment, setup: str, commit: bool) -> None:
    outbox = deployment.app.outbox
    headers = {"note": "100% %s $1 'quoted'"}
    with connect_sync(deployment.url, setup, commit=commit) as connection:
        sync_id = outbox.add_sync(connection, "sync", key="%s", payload={"note": "'; DROP TABLE own; --"})
        many = outbox.add_many_sync(
            connection, [NewOutboxEvent(topic="sync", payload=n, headers=headers) for n in range(3)]
        )
    async with connect_async(deployment.url, setup, commit=commit) as connection:
        async_id = await outbox.add(connection, "async", key="$1", payload={"note": "%(name)s"})
        await outbox.add_many(connection, [NewOutboxEvent(topic="async", payload=n) for n in range(3)])
    found = await deployment.events()
    if not commit:
        assert found == []
        return
    assert [event.id for event in found][:4] == [sync_id, *many]
    assert found[0].key == "%s"
    assert found[1].headers == headers
    assert msgspec.json.decode(found[0].payload) == {"note": "'; DROP TABLE own; --"}
    assert [event.topic for event in found] == ["sync"] * 4 + ["async"] * 4
    assert (found[4].id, found[4].key) == (async_id, "$1")
    now_ms = await (await deployment.store()).now_ms()
    assert all(abs(now_ms - event.created_at_ms) < 60_000 for event in found)


async def test_rolling_back_a_savepoint_removes_its_events(deployment: Deployment) -> None:
    outbox = deployment.app.outbox
    with connect_sync(deployment.url) as connection:
        outbox.add_sync(connection, "kept", payload=1)
        with connection.transaction(force_rollback=True):
            outbox.add_sync(connection, "lost", payload=2)
        outbox.add_sync(connection, "kept", payload=3)
    async with connect_async(deployment.url, "autocommit") as connection:
        async with connection.transaction(force_rollback=True):
            await outbox.add(connection, "lost", payload=4)
        await outbox.add(connection, "kept", payload=5)
    assert [(event.topic, event.payload) for event in await deployment.events()] == [
        ("kept", "1"),
        ("kept", "3"),
        ("kept", "5"),
    ]


async def test_a_connection_in_autocommit_is_refused(deployment: Deployment) -> None:
    outbox = deployment.app.outbox
    with psycopg.connect(deployment.url, autocommit=True) as connection:
        with pytest.raises(UsageError, match=r"not in a transaction.*with connection\.transaction\(\)"):
            outbox.add_sync(connection, "t", payload=1)
        with connection.pipeline():
            # Sent and not answered yet: libpq reports "active", although the statement will be committed immediately.
            connection.execute("SELECT 1")
            with pytest.raises(UsageError, match="not in a transaction"):
                outbox.add_sync(connection, "t", payload=1)
    async with await psycopg.AsyncConnection.connect(deployment.url, autocommit=True) as async_connection:
        with pytest.raises(UsageError, match=r"not in a transaction.*async with connection\.transaction\(\)"):
            await outbox.add(async_connection, "t", payload=1)
        await async_connection.execute("BEGIN")
        await outbox.add(async_connection, "explicit begin", payload=1)
        await async_connection.execute("COMMIT")
    assert [event.topic for event in await deployment.events()] == ["explicit begin"]


async def test_errors_name_the_right_function(deployment: Deployment) -> None:
    with connect_sync(deployment.url) as connection, pytest.raises(UsageError, match="use add_sync"):
        await deployment.app.outbox.add(connection, "t", payload=1)
    async with connect_async(deployment.url) as connection:
        with pytest.raises(UsageError, match="use add,"):
            deployment.app.outbox.add_sync(connection, "t", payload=1)
    for cursor in (psycopg.Cursor, psycopg.AsyncCursor):
        with pytest.raises(UsageError, match="psycopg"):
            deployment.app.outbox.add_sync(object.__new__(cursor), "t", payload=1)


@pytest.mark.parametrize("setup", ["plain", "autocommit", "pipeline"])
async def test_errors_name_the_remedy(deployment: Deployment, empty_postgres_url: str, setup: str) -> None:
    outbox = deployment.app.outbox
    with connect_sync(deployment.url, setup) as connection:
        outbox.add_sync(connection, "t", payload=1, event_id="e")
    with pytest.raises(Conflict, match="already exists"), connect_sync(deployment.url, setup) as connection:
        outbox.add_sync(connection, "t", payload=1, event_id="e")
    with pytest.raises(Conflict, match="already exists"):
        async with connect_async(deployment.url, setup) as connection:
            await outbox.add(connection, "t", payload=1, event_id="e")
    with pytest.raises(UsageError, match="holdfast migrate up"), connect_sync(empty_postgres_url, setup) as connection:
        outbox.add_sync(connection, "t", payload=1)
    with pytest.raises(UsageError, match="holdfast migrate up"):
        async with connect_async(empty_postgres_url, setup) as connection:
            await outbox.add(connection, "t", payload=1)


async def test_connections_of_a_pool(deployment: Deployment) -> None:
    with ConnectionPool(deployment.url, min_size=1, max_size=1) as pool, pool.connection() as connection:
        deployment.app.outbox.add_sync(connection, "pooled", payload=1)
    async with AsyncConnectionPool(deployment.url, min_size=1, max_size=1, open=False) as async_pool:
        async with async_pool.connection() as async_connection:
            await deployment.app.outbox.add(async_connection, "pooled", payload=2)
        with pytest.raises(ZeroDivisionError):
            async with async_pool.connection() as async_connection:
                await deployment.app.outbox.add(async_connection, "lost", payload=1 / 0)
    assert [(event.topic, event.payload) for event in await deployment.events()] == [("pooled", "1"), ("pooled", "2")]


@commit_and_rollback
async def test_sqlalchemy_on_psycopg(deployment: Deployment, commit: bool) -> None:
    url = deployment.url.replace("postgresql:", "postgresql+psycopg:", 1)
    engine = create_engine(url)
    with engine.connect() as connection:
        connection.execute(text("SELECT 1"))
        deployment.app.outbox.add_sync(connection, "sync", payload=1)
        connection.commit() if commit else connection.rollback()
    engine.dispose()
    async_engine = create_async_engine(url)
    async with async_engine.connect() as async_connection:
        await deployment.app.outbox.add(async_connection, "async", payload=1)
        await (async_connection.commit() if commit else async_connection.rollback())
    await async_engine.dispose()
    autocommit_engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with autocommit_engine.connect() as connection, pytest.raises(UsageError, match="AUTOCOMMIT"):
        deployment.app.outbox.add_sync(connection, "t", payload=1)
    autocommit_engine.dispose()
    assert [event.topic for event in await deployment.events()] == (["sync", "async"] if commit else [])


# Jobs ------------------------------------------------------------------------------------------------


@pytest.fixture
async def app(redis_url: str, postgres_url: str, namespace: str) -> AsyncIterator[Holdfast]:
    app = Holdfast(redis_url, ledger=postgres_url, namespace=namespace)

    @app.task(queue="mail")
    async def double(number: int) -> int:
        return number * 2

    async with app:
        yield app


async def test_jobs_run_after_the_commit_and_never_after_a_rollback(app: Holdfast) -> None:
    double, url = app.tasks["double"], app.settings.ledger
    assert url is not None

    def submit(commit: bool) -> list[Any]:
        with connect_sync(url, commit=commit) as connection:
            task = double.options(connection=connection)
            outer = task.submit_sync(1)
            with connection.transaction(force_rollback=True):
                inner = task.submit_sync(2)
        return [outer, inner]

    ran, undone = await asyncio.to_thread(submit, True)
    lost = await asyncio.to_thread(submit, False)
    async with connect_async(url, "autocommit") as connection:
        many = await double.options(connection=connection).submit_many([(3,), (4,)])
        assert await app.engine.get("mail", [many[0].id]) == [None], "nothing before the commit"
    async with connect_async(url, "dict rows", commit=False) as connection:
        lost.append(await double.options(connection=connection).submit(5))
    async with run_jobs(app, ["mail"]):
        assert [await job.result(timeout=60) for job in (ran, *many)] == [2, 6, 8]
        for job in (undone, *lost):
            with pytest.raises(UnknownJob):
                await job.result(timeout=5)


async def test_a_waiting_relay_is_woken_by_the_commit(app: Holdfast) -> None:
    double, url = app.tasks["double"], app.settings.ledger
    assert url is not None
    async with run_relay(app):
        async with connect_async(url) as connection:
            job = await double.options(connection=connection).submit(1)

        async def job_exists() -> bool:
            return (await app.engine.get("mail", [job.id]))[0] is not None

        await until(job_exists)
