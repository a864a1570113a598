"""Events are part of the user's transaction on every driver: written on commit, not on rollback."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import aiosqlite
import asyncpg
import msgspec
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.event import listens_for
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session

from holdfast import Holdfast
from holdfast.core.publishing import LANES, lane_of
from holdfast.errors import Conflict, InvalidOption, InvalidPayload, PayloadTooLarge, UsageError
from holdfast.execution.backend import backend_of
from holdfast.ledger.port.messages import ENGINE_DESTINATION, OutboxEvent, OutboxStatus
from holdfast.outbox.writer import NewOutboxEvent, payload_of
from tests.outbox.support import Deployment

_CREATE_USER_TABLE = "CREATE TABLE own (word TEXT)"


@pytest.fixture
async def deployment(make_deployment: Callable[..., Any]) -> AsyncIterator[Deployment]:
    """A deployment whose database also has a table of the user."""
    deployment: Deployment = await make_deployment()
    await deployment.store()
    if deployment.url.startswith("sqlite:"):
        with closing(sqlite3.connect(file_path(deployment.url))) as connection:
            connection.execute(_CREATE_USER_TABLE)
        yield deployment
    else:
        admin = await asyncpg.connect(deployment.url)
        await admin.execute(_CREATE_USER_TABLE)
        yield deployment
        await admin.execute("DROP TABLE own")
        await admin.close()


def file_path(url: str) -> str:
    return url.removeprefix("sqlite:///")


def sqlalchemy_url(url: str, *, sync: bool = False) -> str:
    if url.startswith("sqlite:"):
        return url if sync else url.replace("sqlite:", "sqlite+aiosqlite:", 1)
    return url.replace("postgresql:", "postgresql+asyncpg:", 1)


# One context manager per driver: begins a transaction, yields the connection and a function to run SQL, commits or not.


@asynccontextmanager
async def on_async_connection(url: str, commit: bool) -> AsyncIterator[tuple[Any, Any]]:
    engine = create_async_engine(sqlalchemy_url(url))
    async with engine.connect() as connection:
        yield connection, lambda sql: connection.execute(text(sql))
        await (connection.commit() if commit else connection.rollback())
    await engine.dispose()


@asynccontextmanager
async def on_async_session(url: str, commit: bool) -> AsyncIterator[tuple[Any, Any]]:
    engine = create_async_engine(sqlalchemy_url(url))
    async with AsyncSession(engine) as session:
        yield session, lambda sql: session.execute(text(sql))
        await (session.commit() if commit else session.rollback())
    await engine.dispose()


@asynccontextmanager
async def on_scoped_session(url: str, commit: bool) -> AsyncIterator[tuple[Any, Any]]:
    engine = create_async_engine(sqlalchemy_url(url))
    session = async_scoped_session(async_sessionmaker(engine), scopefunc=lambda: 1)
    yield session, lambda sql: session.execute(text(sql))
    await (session.commit() if commit else session.rollback())
    await session.remove()
    await engine.dispose()


@asynccontextmanager
async def on_asyncpg(url: str, commit: bool) -> AsyncIterator[tuple[Any, Any]]:
    connection = await asyncpg.connect(url)
    transaction = connection.transaction()
    await transaction.start()
    yield connection, connection.execute
    await (transaction.commit() if commit else transaction.rollback())
    await connection.close()


@asynccontextmanager
async def on_asyncpg_pool(url: str, commit: bool) -> AsyncIterator[tuple[Any, Any]]:
    async with asyncpg.create_pool(url, min_size=1, max_size=1) as pool, pool.acquire() as connection:
        transaction = connection.transaction()
        await transaction.start()
        yield connection, connection.execute
        await (transaction.commit() if commit else transaction.rollback())


@asynccontextmanager
async def on_aiosqlite(url: str, commit: bool) -> AsyncIterator[tuple[Any, Any]]:
    async with aiosqlite.connect(file_path(url)) as connection:
        yield connection, connection.execute
        await (connection.commit() if commit else connection.rollback())


COMMON_DRIVERS = [on_async_connection, on_async_session, on_scoped_session]
DRIVERS = {"postgres": [*COMMON_DRIVERS, on_asyncpg, on_asyncpg_pool], "sqlite": [*COMMON_DRIVERS, on_aiosqlite]}


def drivers(deployment: Deployment) -> list[Any]:
    return DRIVERS["sqlite" if deployment.url.startswith("sqlite:") else "postgres"]


async def user_rows(deployment: Deployment) -> list[str]:
    if deployment.url.startswith("sqlite:"):
        with closing(sqlite3.connect(file_path(deployment.url))) as file:
            return [row[0] for row in file.execute("SELECT word FROM own")]
    connection = await asyncpg.connect(deployment.url)
    try:
        return [row[0] for row in await connection.fetch("SELECT word FROM own")]
    finally:
        await connection.close()


async def test_a_commit_writes_exactly_one_event(deployment: Deployment) -> None:
    for number, driver in enumerate(drivers(deployment)):
        async with driver(deployment.url, True) as (connection, execute):
            await execute(f"INSERT INTO own VALUES ('{number}')")
            written = await deployment.app.outbox.add(
                connection, "orders", key=f"o-{number}", payload={"n": number}, headers={"X-Event-Name": "order.paid"}
            )
        found = await deployment.events(key=f"o-{number}")
        assert [event.id for event in found] == [written], driver.__name__
        (event,) = found
        assert (event.destination, event.topic, event.tenant_id, event.status) == (
            "default",
            "orders",
            "default",
            OutboxStatus.NEW,
        )
        assert msgspec.json.decode(event.payload) == {"n": number}
        assert event.headers == {"x-event-name": "order.paid"}
        now_ms = await (await deployment.store()).now_ms()
        assert abs(now_ms - event.created_at_ms) < 10_000
    assert await user_rows(deployment) == [str(number) for number in range(len(drivers(deployment)))]


async def test_a_rollback_writes_nothing(deployment: Deployment) -> None:
    for driver in drivers(deployment):
        async with driver(deployment.url, False) as (connection, execute):
            await execute("INSERT INTO own VALUES ('x')")
            await deployment.app.outbox.add(connection, "orders", key="o", payload=1)
    assert await deployment.events() == []
    assert await user_rows(deployment) == []


async def test_many_are_written_in_order(deployment: Deployment) -> None:
    for number, driver in enumerate(drivers(deployment)):
        async with driver(deployment.url, True) as (connection, _):
            events = [NewOutboxEvent(topic=f"t{number}", key="k", payload=each) for each in range(120)]
            ids = await deployment.app.outbox.add_many(connection, events)
            assert await deployment.app.outbox.add_many(connection, []) == []
        found = await deployment.events(topic=f"t{number}")
        assert [event.id for event in found] == ids
        assert [msgspec.json.decode(event.payload) for event in found] == list(range(120))


@pytest.mark.parametrize("commit", [True, False])
async def test_sqlite3(tmp_path: Path, commit: bool) -> None:
    async with Holdfast(f"sqlite:///{tmp_path / 'app.db'}") as app:
        with closing(sqlite3.connect(tmp_path / "app.db")) as connection:
            connection.execute(_CREATE_USER_TABLE)
            connection.execute("INSERT INTO own VALUES ('x')")
            app.outbox.add_sync(connection, "orders", payload={"n": 1})
            app.outbox.add_many_sync(connection, [NewOutboxEvent(topic="orders", payload=n) for n in (2, 3)])
            assert connection.in_transaction
            connection.commit() if commit else connection.rollback()
        assert await count_waiting(app) == (3 if commit else 0)


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("kind", ["connection", "session"])
async def test_blocking_sqlalchemy(tmp_path: Path, commit: bool, kind: str) -> None:
    async with Holdfast(f"sqlite:///{tmp_path / 'app.db'}") as app:
        await count_waiting(app)
        engine = create_engine(f"sqlite:///{tmp_path / 'app.db'}")
        with Session(engine) if kind == "session" else engine.connect() as connection:
            app.outbox.add_sync(connection, "orders", payload={"n": 1})
            connection.commit() if commit else connection.rollback()
        engine.dispose()
        assert await count_waiting(app) == int(commit)


async def count_waiting(app: Holdfast) -> int:
    backend = backend_of(app)
    assert backend.outbox is not None
    return (await (await backend.outbox.open()).backlog()).waiting


async def test_bytes_are_read_unchanged(deployment: Deployment) -> None:
    raw = bytes(range(256))
    async with drivers(deployment)[-1](deployment.url, True) as (connection, _):
        await deployment.app.outbox.add(connection, "files", payload=raw)
    (event,) = await deployment.events()
    assert payload_of(event) == (raw, False)


async def test_a_given_event_id_is_unique(deployment: Deployment) -> None:
    for number, driver in enumerate(drivers(deployment)):
        async with driver(deployment.url, True) as (connection, _):
            assert await deployment.app.outbox.add(connection, "t", payload=1, event_id=f"e{number}") == f"e{number}"
        async with driver(deployment.url, False) as (connection, _):
            with pytest.raises(Conflict, match="already exists"):
                await deployment.app.outbox.add(connection, "t", payload=1, event_id=f"e{number}")
    assert len(await deployment.events()) == len(drivers(deployment))


async def test_tenants_do_not_share_ids(deployment: Deployment) -> None:
    async with drivers(deployment)[-1](deployment.url, True) as (connection, _):
        for tenant in ("acme", "globex"):
            await deployment.app.outbox.add(connection, "t", payload=1, event_id="e", tenant_id=tenant)
    assert [event.tenant_id for event in await deployment.events()] == ["acme", "globex"]


async def test_a_missing_table_error_names_the_migration_command(
    empty_postgres_url: str, tmp_path: Path, deployment: Deployment
) -> None:
    empty = f"sqlite:///{tmp_path / 'empty.db'}"
    for url, kinds in ((empty_postgres_url, DRIVERS["postgres"]), (empty, DRIVERS["sqlite"])):
        for driver in kinds:
            async with driver(url, False) as (connection, _):
                with pytest.raises(UsageError, match="holdfast migrate up --ledger"):
                    await deployment.app.outbox.add(connection, "t", payload=1)


async def test_an_unsupported_connection_error_names_the_supported_ones(deployment: Deployment, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"builtins\.dict.*AsyncConnection.*asyncpg.*aiosqlite"):
        await deployment.app.outbox.add({}, "t", payload=1)
    with pytest.raises(UsageError, match=r"builtins\.dict.*sqlite3"):
        deployment.app.outbox.add_sync({}, "t", payload=1)
    with closing(sqlite3.connect(tmp_path / "x.db")) as blocking, pytest.raises(UsageError, match="add_sync"):
        await deployment.app.outbox.add(blocking, "t", payload=1)
    async with aiosqlite.connect(tmp_path / "x.db") as connection:
        with pytest.raises(UsageError, match="use add,"):
            deployment.app.outbox.add_sync(connection, "t", payload=1)
    engine = create_async_engine("sqlite+aiosqlite://")
    with pytest.raises(UsageError, match="in a transaction"):
        await deployment.app.outbox.add(engine, "t", payload=1)
    await engine.dispose()


async def test_a_connection_in_autocommit_is_refused(postgres_url: str, tmp_path: Path, deployment: Deployment) -> None:
    outbox = deployment.app.outbox
    connection = await asyncpg.connect(postgres_url)
    with pytest.raises(UsageError, match="not in a transaction"):
        await outbox.add(connection, "t", payload=1)
    await connection.close()
    async with aiosqlite.connect(tmp_path / "x.db", isolation_level=None) as lite:
        with pytest.raises(UsageError, match="not in a transaction"):
            await outbox.add(lite, "t", payload=1)
    engine = create_async_engine(sqlalchemy_url(postgres_url), isolation_level="AUTOCOMMIT")
    async with engine.connect() as connection_in_autocommit:
        with pytest.raises(UsageError, match="AUTOCOMMIT"):
            await outbox.add(connection_in_autocommit, "t", payload=1)
    async with AsyncSession(engine) as session:
        with pytest.raises(UsageError, match="AUTOCOMMIT"):
            await outbox.add(session, "t", payload=1)
    await engine.dispose()
    changed = create_async_engine(sqlalchemy_url(postgres_url))
    async with changed.connect() as connection_in_autocommit:
        await connection_in_autocommit.execution_options(isolation_level="AUTOCOMMIT")
        with pytest.raises(UsageError, match="AUTOCOMMIT"):
            await outbox.add(connection_in_autocommit, "t", payload=1)
    await changed.dispose()
    blocking = create_engine(f"sqlite:///{tmp_path / 'x.db'}", isolation_level="AUTOCOMMIT")
    with Session(blocking) as session, pytest.raises(UsageError, match="not in a transaction"):
        outbox.add_sync(session, "t", payload=1)
    blocking.dispose()


@pytest.mark.parametrize("commit", [True, False])
async def test_sqlalchemy_with_explicit_begin(tmp_path: Path, commit: bool) -> None:
    """SQLAlchemy's setup for savepoints on SQLite: an event listener begins transactions, not the driver."""
    async with Holdfast(f"sqlite:///{tmp_path / 'app.db'}") as app:
        await count_waiting(app)
        engine = create_engine(f"sqlite:///{tmp_path / 'app.db'}")

        @listens_for(engine, "connect")
        def _(connection: Any, _: Any) -> None:
            connection.isolation_level = None

        @listens_for(engine, "begin")
        def _(connection: Any) -> None:
            connection.exec_driver_sql("BEGIN")

        with engine.connect() as connection:
            app.outbox.add_sync(connection, "orders", payload={"n": 1})
            connection.commit() if commit else connection.rollback()
        engine.dispose()
        assert await count_waiting(app) == int(commit)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"topic": ""}, "topic"),
        ({"topic": "a\nb"}, "control"),
        ({"topic": "x" * 256}, "255"),
        ({"key": "\ud800"}, "control"),
        ({"key": "k" * 1_001}, "1000"),
        ({"destination": ENGINE_DESTINATION}, "options"),
        ({"tenant_id": ""}, "tenant_id"),
        ({"event_id": ""}, "event_id"),
        ({"headers": {"a": "b\r\nc"}}, "control"),
        ({"headers": {"a": 1}}, "string"),
        ({"headers": {"X-Dedup-Key": "1"}}, "event_id"),
        ({"headers": {"a": "x" * 70_000}}, "65,536"),
    ],
)
def test_invalid_fields_are_refused(fields: dict[str, Any], error: str) -> None:
    with closing(sqlite3.connect(":memory:")) as connection, pytest.raises(InvalidOption, match=error):
        app().outbox.add_sync(connection, **{"topic": "t", "payload": 1, **fields})


def app(**settings: Any) -> Holdfast:
    return Holdfast("sqlite://", **settings)


def test_a_too_large_payload_and_one_that_is_not_json_are_refused() -> None:
    with closing(sqlite3.connect(":memory:")) as connection:
        small = app(payload_limit=10).outbox
        for payload in ("x" * 20, b"x" * 20):
            with pytest.raises(PayloadTooLarge):
                small.add_sync(connection, "t", payload=payload)
        with pytest.raises(InvalidPayload):
            small.add_sync(connection, "t", payload=object())


def test_lanes() -> None:
    lanes = {lane_of("d", "t", f"k{number}", "") for number in range(2_000)}
    assert lanes == set(range(LANES))
    assert lane_of("d", "t", "k", "one") == lane_of("d", "t", "k", "two")
    assert {lane_of("d", "t", None, f"e{number}") for number in range(2_000)} == set(range(LANES))


def test_events_are_rows() -> None:
    assert {"tenant_id", "id", "key", "payload", "headers"} <= set(OutboxEvent.__struct_fields__)
