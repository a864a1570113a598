"""Effects in the user's database (requirement E3): key, write and result are committed together or not at all."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine

from holdfast import Context
from holdfast.core.job import EMPTY_META, Claim, Lease
from holdfast.effects import create_keys_table
from holdfast.errors import EffectMismatch, InvalidPayload, Unavailable, UsageError
from holdfast.verification.chaos.servers import PostgresServer

KINDS = [
    "asyncpg pool",
    "asyncpg connection",
    "engine",
    "sessions",
    "session",
    "connection",
    "sqlite",
    "sqlite sessions",
]


def context(job_id: str = "j", attempt: int = 1, tenant_id: str = "t") -> Context:
    lease = Lease("q", job_id, "1-0", 1, "w")
    return Context(Claim(lease, "task", b"{}", tenant_id, "", "", attempt, 0, 0, EMPTY_META))


class Bank:
    """A user's database with payments."""

    def __init__(self, database: Any, count: Callable[[], Awaitable[int]]) -> None:
        self.database = database
        self.count = count

    async def pay(self, handle: Any, cents: int) -> dict[str, int]:
        await insert_payment(handle, cents)
        return {"paid": cents}


async def insert_payment(handle: Any, cents: int) -> None:
    if isinstance(handle, asyncpg.Connection | asyncpg.pool.PoolConnectionProxy):
        await handle.execute("INSERT INTO payments VALUES ($1)", cents)
    else:
        await handle.execute(text("INSERT INTO payments VALUES (:cents)"), {"cents": cents})


def to_sqlalchemy_url(url: str) -> str:
    return url.replace("postgresql://", "postgresql+asyncpg://").replace("sqlite:///", "sqlite+aiosqlite:///")


async def make_tables(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE payments (cents integer)"))
    await create_keys_table(engine)
    await create_keys_table(engine)


@pytest.fixture(params=KINDS)
async def bank(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bank]:
    kind: str = request.param
    sqlite = kind.startswith("sqlite")
    url = f"sqlite:///{tmp_path / 'own.db'}" if sqlite else request.getfixturevalue("empty_postgres_url")
    engine = create_async_engine(to_sqlalchemy_url(url))
    await make_tables(engine)

    async def count() -> int:
        async with engine.connect() as connection:
            return int((await connection.execute(text("SELECT count(*) FROM payments"))).scalar_one())

    if kind == "asyncpg pool":
        async with asyncpg.create_pool(url, min_size=0) as pool:
            yield Bank(pool, count)
    elif kind == "asyncpg connection":
        connection = await asyncpg.connect(url)
        yield Bank(connection, count)
        await connection.close()
    elif kind.endswith("sessions"):
        yield Bank(async_sessionmaker(engine, expire_on_commit=False), count)
    elif kind == "session":
        async with AsyncSession(engine) as session:
            yield Bank(session, count)
    elif kind == "connection":
        async with engine.connect() as open_connection:
            yield Bank(open_connection, count)
    else:
        yield Bank(engine, count)
    await engine.dispose()


async def test_the_write_happens_once_and_its_result_is_returned_again(bank: Bank) -> None:
    assert await context().transaction(bank.database, "pay:1", bank.pay, 5) == {"paid": 5}
    assert await context(attempt=2).transaction(bank.database, "pay:1", bank.pay, 5) == {"paid": 5}
    assert await bank.count() == 1
    assert await context(tenant_id="u").transaction(bank.database, "pay:1", bank.pay, 5) == {"paid": 5}
    assert await bank.count() == 2


async def test_a_function_that_fails_writes_nothing(bank: Bank) -> None:
    async def fail(handle: Any) -> None:
        await insert_payment(handle, 1)
        raise LookupError("no such account")

    with pytest.raises(LookupError):
        await context().transaction(bank.database, "k", fail)
    assert await bank.count() == 0

    async def succeed(handle: Any) -> str | None:
        await insert_payment(handle, 1)
        return None

    # The key is released and accepts any function.
    assert await context().transaction(bank.database, "k", succeed) is None
    assert await bank.count() == 1


async def test_a_result_that_is_not_json_writes_nothing(bank: Bank) -> None:
    async def odd(handle: Any) -> object:
        await insert_payment(handle, 1)
        return object()

    with pytest.raises(InvalidPayload):
        await context().transaction(bank.database, "k", odd)
    assert await bank.count() == 0


async def test_another_function_or_other_arguments_are_an_error(bank: Bank) -> None:
    async def other(handle: Any, cents: int) -> None:
        await insert_payment(handle, cents)

    await context().transaction(bank.database, "k", bank.pay, 5)
    with pytest.raises(EffectMismatch, match="other arguments"):
        await context().transaction(bank.database, "k", bank.pay, 6)
    with pytest.raises(EffectMismatch, match=r"belongs to Bank\.pay"):
        await context().transaction(bank.database, "k", other, 5)
    assert await bank.count() == 1


@pytest.mark.parametrize("bank", ["asyncpg pool", "engine", "sessions", "sqlite", "sqlite sessions"], indirect=True)
async def test_concurrent_duplicates_wait_for_the_first_result(bank: Bank) -> None:
    runs = 0

    async def slow(handle: Any, cents: int) -> int:
        nonlocal runs
        runs += 1
        await insert_payment(handle, cents)
        await asyncio.sleep(0.2)
        return runs

    calls = [context(job_id=f"j{number}").transaction(bank.database, "k", slow, 5) for number in range(4)]
    assert await asyncio.gather(*calls) == [1] * 4
    assert (await bank.count(), runs) == (1, 1)


@pytest.mark.parametrize("bank", ["asyncpg pool", "engine"], indirect=True)
async def test_a_duplicate_of_a_failed_call_runs(bank: Bank) -> None:
    begun = asyncio.Event()

    async def flaky(handle: Any) -> str:
        await insert_payment(handle, 1)
        if not begun.is_set():
            begun.set()
            await asyncio.sleep(0.1)
            raise ConnectionError("the first one fails")
        return "second"

    first = asyncio.create_task(context().transaction(bank.database, "k", flaky))
    await begun.wait()
    assert await context(job_id="other").transaction(bank.database, "k", flaky) == "second"
    with pytest.raises(ConnectionError):
        await first
    assert await bank.count() == 1


async def test_a_missing_table_error_names_the_command_to_create_it(empty_postgres_url: str, tmp_path: Path) -> None:
    async def do_nothing(handle: Any) -> None: ...

    sqlite = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'own.db'}")
    postgres = create_async_engine(to_sqlalchemy_url(empty_postgres_url))
    async with asyncpg.create_pool(empty_postgres_url, min_size=0) as pool:
        for database in (sqlite, postgres, pool):
            with pytest.raises(UsageError, match="holdfast effects create-table"):
                await context().transaction(database, "k", do_nothing)
        await create_keys_table(pool)
        await context().transaction(pool, "k", do_nothing)
    await sqlite.dispose()
    await postgres.dispose()


async def test_unsupported_databases_and_open_transactions_are_errors(tmp_path: Path) -> None:
    async def do_nothing(handle: Any) -> None: ...

    with pytest.raises(UsageError, match="AsyncEngine"):
        await context().transaction("postgresql://…", "k", do_nothing)
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'own.db'}")
    async with AsyncSession(engine) as session:
        await session.execute(text("SELECT 1"))
        with pytest.raises(UsageError, match="without an open one"):
            await context().transaction(session, "k", do_nothing)
    await engine.dispose()


CRASH = """
import asyncio, os, sys
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine
from tests.effects.test_transaction import context, insert_payment, to_sqlalchemy_url
import asyncpg

async def pay(handle, cents):
    await insert_payment(handle, cents)
    print("written", flush=True)
    await asyncio.sleep(60)

async def main(kind, url):
    if kind == "asyncpg":
        async with asyncpg.create_pool(url, min_size=0) as pool:
            await context().transaction(pool, "k", pay, 5)
    else:
        await context().transaction(create_async_engine(to_sqlalchemy_url(url)), "k", pay, 5)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["asyncpg", "sqlalchemy", "sqlite"])
async def test_a_process_killed_between_write_and_commit_writes_nothing_and_can_run_again(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'own.db'}" if kind == "sqlite" else request.getfixturevalue("empty_postgres_url")
    engine = create_async_engine(to_sqlalchemy_url(url))
    await make_tables(engine)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CRASH, kind, url, stdout=subprocess.PIPE, env=environment
    )
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), 20) == b"written\n"
    process.send_signal(signal.SIGKILL)
    await process.wait()

    async def pay(handle: Any, cents: int) -> int:
        await insert_payment(handle, cents)
        return cents

    assert await context(attempt=2).transaction(engine, "k", pay, 5) == 5
    async with engine.connect() as connection:
        assert (await connection.execute(text("SELECT count(*) FROM payments"))).scalar_one() == 1
        assert (await connection.execute(text("SELECT state FROM idempotency_keys"))).scalar_one() == "done"
    await engine.dispose()


@pytest.mark.faults
async def test_an_unreachable_database_raises_unavailable(make_postgres: Callable[..., PostgresServer]) -> None:
    server = make_postgres(migrated=False)
    engine = create_async_engine(to_sqlalchemy_url(server.url))
    await make_tables(engine)
    server.kill()

    async def do_nothing(handle: Any) -> str:
        return "done"

    with pytest.raises(Unavailable):
        await context().transaction(engine, "k", do_nothing)
    with pytest.raises(Unavailable):
        async with asyncpg.create_pool(server.url, min_size=0) as pool:
            await context().transaction(pool, "k", do_nothing)
    server.start()
    assert await context().transaction(engine, "k", do_nothing) == "done"

    async def file_is_missing(handle: Any) -> None:
        raise FileNotFoundError("the user's own")

    with pytest.raises(FileNotFoundError):
        await context().transaction(engine, "k2", file_is_missing)
    await engine.dispose()


async def test_a_plain_function_is_refused_and_writes_nothing(bank: Bank) -> None:
    def pay_plainly(_: Any, cents: int) -> int:
        return cents

    pay: Any = pay_plainly
    with pytest.raises(UsageError, match="takes an async function"):
        await context().transaction(bank.database, "k", pay, 5)
    assert await context().transaction(bank.database, "k", bank.pay, 5) == {"paid": 5}


def test_a_transaction_in_a_plain_task_is_refused() -> None:
    with pytest.raises(UsageError, match="make the task an `async def`"):
        context().transaction(object(), "k", insert_payment, 5).close()
