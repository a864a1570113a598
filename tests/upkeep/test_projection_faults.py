"""Outages of the ledger and kills of the projector: every event is projected exactly once (requirement L3)."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import asyncpg
import pytest

from holdfast.core.states import State
from holdfast.verification.chaos.servers import PostgresServer
from tests.conftest import MakePostgres
from tests.ledger.projection_rig import QUEUE
from tests.servers import find_server
from tests.upkeep.projector_rig import ProjectorRig
from tools.servers import POSTGRES

#: Timeouts of the ledger, short to keep the tests fast.
TIMEOUTS = {"connect_timeout_s": 2.0, "reply_timeout_s": 1.0}


@pytest.mark.timeout(300)
async def test_repeated_kill_9_of_the_projector(redis_url: str, namespace: str, ledger_url: str) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    async with ProjectorRig(redis_url, ledger_url, namespace) as rig, AsyncExitStack() as stack:
        await rig.reopen_intake()
        ids = []
        arguments = (redis_url, ledger_url, namespace)
        child = await stack.enter_async_context(_child(*arguments))
        for _ in range(3):
            # The successor stands by while the first projector is killed during its work.
            successor = await stack.enter_async_context(_child(*arguments))
            for _ in range(5):
                ids += await rig.run_mixed_jobs(60)
            await asyncio.sleep(rng.uniform(0, 0.1))
            child.kill()
            child = successor
        await rig.wait_settled()
        states = await rig.check(ids)
    assert len(states) == 3 * 5 * 60


@asynccontextmanager
async def _child(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a projector in a child process; it is killed at the end."""
    command = [sys.executable, "-m", "tests.upkeep.projector_process", *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_kill_9_of_postgresql_during_a_batch(redis_url: str, namespace: str, make_postgres: MakePostgres) -> None:
    server = make_postgres()
    async with ProjectorRig(redis_url, server.url, namespace, **TIMEOUTS) as rig:
        await rig.reopen_intake()
        await rig.start()
        ids = []
        for pause_s in (0.0, 0.02, 0.1):
            ids += await rig.run_mixed_jobs(300)
            await asyncio.sleep(pause_s)
            await asyncio.to_thread(server.kill)
            ids += await rig.run_mixed_jobs(300)
            await asyncio.to_thread(server.start)
        await rig.wait_settled()
        assert len(await rig.check(ids)) == 1_800


async def test_postgresql_is_down_for_a_while(redis_url: str, namespace: str, make_postgres: MakePostgres) -> None:
    server = make_postgres(fsync=False)
    async with ProjectorRig(redis_url, server.url, namespace, **TIMEOUTS) as rig:
        await rig.reopen_intake()
        projector = await rig.start()
        ids = await rig.run_mixed_jobs(90)
        await rig.wait_settled()
        await asyncio.to_thread(server.stop)
        for _ in range(5):
            # Neither submission nor work needs the ledger.
            ids += await rig.run_mixed_jobs(90)
        assert projector.counts.projected < 5 * len(ids)
        await asyncio.to_thread(server.start)
        await rig.wait_settled()
        await rig.check(ids)


async def test_postgresql_is_paused(redis_url: str, namespace: str, make_postgres: MakePostgres) -> None:
    server = make_postgres(fsync=False)
    async with ProjectorRig(redis_url, server.url, namespace, **TIMEOUTS) as rig:
        await rig.reopen_intake()
        await rig.start()
        ids = await rig.run_mixed_jobs(30)
        server.pause()
        ids += await rig.run_mixed_jobs(30)
        # Longer than the reply timeout: the batch in flight is abandoned, but may be committed on resume.
        await asyncio.sleep(2.5)
        server.resume()
        await rig.wait_settled()
        await rig.check(ids)


async def test_postgresql_is_read_only(redis_url: str, namespace: str, make_postgres: MakePostgres) -> None:
    server = make_postgres(fsync=False)
    async with ProjectorRig(redis_url, server.url, namespace, **TIMEOUTS) as rig:
        await rig.reopen_intake()
        await rig.start()
        ids = await rig.run_mixed_jobs(30)
        await rig.wait_settled()
        server.execute("ALTER SYSTEM SET default_transaction_read_only = on")
        server.execute("SELECT pg_reload_conf()")
        ids += await rig.run_mixed_jobs(30)
        await asyncio.sleep(0.5)
        assert not await rig.is_caught_up()
        connection = await asyncpg.connect(server.url)
        await connection.execute("SET default_transaction_read_only = off")
        await connection.execute("ALTER SYSTEM RESET default_transaction_read_only")
        await connection.execute("SELECT pg_reload_conf()")
        await connection.close()
        await rig.wait_settled()
        await rig.check(ids)


async def test_postgresql_is_out_of_connections(redis_url: str, namespace: str, make_postgres: MakePostgres) -> None:
    server = make_postgres(fsync=False, max_connections="8", superuser_reserved_connections="0")
    async with ProjectorRig(redis_url, server.url, namespace, **TIMEOUTS) as rig:
        await rig.ledger.close()
        connections: list[asyncpg.Connection] = []
        with pytest.raises(asyncpg.TooManyConnectionsError):
            await _connect_until_refused(server, connections)
        await rig.start()
        await rig.engine.attach_reader(QUEUE)
        ids = await rig.run_mixed_jobs(30)
        await asyncio.sleep(0.5)
        for connection in connections:
            await connection.close()
        await rig.ledger.open()
        await rig.wait_settled()
        await rig.check(ids)


async def _connect_until_refused(server: PostgresServer, connections: list[asyncpg.Connection]) -> None:
    while True:
        connections.append(await asyncpg.connect(server.url))


async def test_a_table_is_locked_by_another_session(
    redis_url: str, namespace: str, make_postgres: MakePostgres
) -> None:
    server = make_postgres(fsync=False)
    async with ProjectorRig(redis_url, server.url, namespace, **TIMEOUTS) as rig:
        await rig.reopen_intake()
        await rig.start()
        ids = await rig.run_mixed_jobs(30)
        await rig.wait_settled()
        connection = await asyncpg.connect(server.url)
        async with connection.transaction():
            await connection.execute("LOCK TABLE jobs IN ACCESS EXCLUSIVE MODE")
            ids += await rig.run_mixed_jobs(30)
            await asyncio.sleep(2.5)
        await connection.close()
        await rig.wait_settled()
        await rig.check(ids)


async def test_postgresql_terminates_the_sessions(redis_url: str, namespace: str, postgres_url: str) -> None:
    async with ProjectorRig(redis_url, postgres_url, namespace) as rig:
        await rig.reopen_intake()
        await rig.start()
        ids = []
        connection = await asyncpg.connect(postgres_url)
        for _ in range(10):
            ids += await rig.run_mixed_jobs(60)
            await connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        await connection.close()
        await rig.wait_settled()
        await rig.check(ids)


@pytest.fixture
def small_disk() -> Iterator[PostgresServer]:
    """A PostgreSQL server on a disk of 160 MB."""
    folder = Path(f"/tmp/holdfast-small-disk-{os.getpid()}")
    folder.mkdir(exist_ok=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160m,mode=0777", "tmpfs", folder], check=False)
    if mounted.returncode:
        folder.rmdir()
        pytest.skip("a small disk needs the right to mount one; run as root")
    server = PostgresServer(find_server(POSTGRES), {"max_wal_size": "32MB", "min_wal_size": "32MB"}, parent=folder)
    try:
        yield server
    finally:
        server.remove()
        subprocess.run(["umount", folder], check=True)
        folder.rmdir()


async def test_a_full_disk(redis_url: str, namespace: str, small_disk: PostgresServer) -> None:
    from tests.conftest import migrate

    server = small_disk
    server.start()
    migrate(server.url)
    async with ProjectorRig(redis_url, server.url, namespace) as rig:
        await rig.reopen_intake()
        await rig.start()
        ids = await rig.run_mixed_jobs(60)
        await rig.wait_settled()
        ballast = server.folder / "ballast"
        await asyncio.to_thread(_fill_disk, ballast)
        for _ in range(10):
            ids += await rig.submit(500)
            await rig.work()
        await asyncio.sleep(1)
        assert not await _is_caught_up(rig)
        ballast.unlink()
        if not await _is_up(server):
            # PostgreSQL stops when its log has no space; an operator starts it again.
            await asyncio.to_thread(server.restart)
        await rig.wait_settled()
        states = await rig.check(ids)
    assert sum(state is State.SUCCEEDED for state in states.values()) == 5_020


def _fill_disk(ballast: Path) -> None:
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            try:
                while file.write(b"x" * size) == size:
                    continue
            except OSError:
                continue


async def _is_caught_up(rig: ProjectorRig) -> bool:
    try:
        return await rig.is_caught_up()
    except Exception:  # noqa: BLE001 - down is not caught up
        return False


async def _is_up(server: PostgresServer) -> bool:
    try:
        connection = await asyncpg.connect(server.url, timeout=2)
    except (OSError, TimeoutError, asyncpg.PostgresError):
        return False
    await connection.close()
    return True


async def test_foreign_messages_that_cannot_be_stored_stop_nothing(postgres_rig: ProjectorRig) -> None:
    """Foreign messages with text that no database stores are dead-lettered; other jobs continue."""
    rig = postgres_rig
    await rig.reopen_intake()
    await rig.start()
    ids = await rig.run_mixed_jobs(9)
    messages = [
        {"type": "add\x00", "task_id": "x\x00", "payload": "{}"},
        {"task_id": "a" * 100_000, "payload": "\x00"},
        {"z": "\x00"},
    ]
    await _add_messages(rig, messages)
    await rig.claim()
    ids += await rig.run_mixed_jobs(9)
    # Dead letters move on once they are confirmed; until then engine and ledger differ.
    await rig.wait_settled()
    await rig.check(ids, anomalies=None)


@pytest.fixture
async def postgres_rig(redis_url: str, postgres_url: str, namespace: str) -> AsyncIterator[ProjectorRig]:
    async with ProjectorRig(redis_url, postgres_url, namespace) as rig:
        yield rig


async def _add_messages(rig: ProjectorRig, messages: list[dict[str, str]]) -> None:
    import redis.asyncio

    async with redis.asyncio.from_url(rig.settings.url) as client:
        keys = [key async for key in client.scan_iter(match=f"*{rig.settings.namespace}*task*")]
        streams = [key for key in keys if await client.type(key) == b"stream"]
        assert streams, keys
        for message in messages:
            await client.xadd(streams[0], message)  # type: ignore[arg-type]
