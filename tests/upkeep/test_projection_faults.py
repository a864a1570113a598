"""The ledger fails in every way that a database can, and the projector is killed for good: no event is missing, none is
there twice (requirement L3)."""

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
from tests.upkeep.projector_rig import World
from tools.servers import POSTGRES

#: A ledger that is silent counts as down after this; short, so that tests are.
PATIENCE = {"connect_timeout_s": 2.0, "reply_timeout_s": 1.0}


@pytest.mark.timeout(300)
async def test_kill_9_of_the_projector_again_and_again(redis_url: str, namespace: str, ledger_url: str) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    chance = random.Random(seed)
    async with World(redis_url, ledger_url, namespace) as world, AsyncExitStack() as ends:
        await world.admit()
        ids = []
        arguments = (redis_url, ledger_url, namespace)
        child = await ends.enter_async_context(_child(*arguments))
        for _ in range(3):
            # It stands by while the first one is killed in the middle of its work.
            successor = await ends.enter_async_context(_child(*arguments))
            for _ in range(5):
                ids += await world.lives(60)
            await asyncio.sleep(chance.uniform(0, 0.1))
            child.kill()
            child = successor
        await world.settled_down()
        told = await world.check(ids)
    assert len(told) == 3 * 5 * 60


@asynccontextmanager
async def _child(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A projector's process that is there, and gone at the end."""
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


async def test_kill_9_of_postgresql_in_mid_batch(redis_url: str, namespace: str, make_postgres: MakePostgres) -> None:
    server = make_postgres()
    async with World(redis_url, server.url, namespace, **PATIENCE) as world:
        await world.admit()
        await world.start()
        ids = []
        for pause_s in (0.0, 0.02, 0.1):
            ids += await world.lives(300)
            await asyncio.sleep(pause_s)
            await asyncio.to_thread(server.kill)
            ids += await world.lives(300)
            await asyncio.to_thread(server.start)
        await world.settled_down()
        assert len(await world.check(ids)) == 1_800


async def test_postgresql_is_down_for_a_while(redis_url: str, namespace: str, make_postgres: MakePostgres) -> None:
    server = make_postgres(fsync=False)
    async with World(redis_url, server.url, namespace, **PATIENCE) as world:
        await world.admit()
        projector = await world.start()
        ids = await world.lives(90)
        await world.settled_down()
        await asyncio.to_thread(server.stop)
        for _ in range(5):
            # Neither submission nor work asks the ledger.
            ids += await world.lives(90)
        assert projector.counts.projected < 5 * len(ids)
        await asyncio.to_thread(server.start)
        await world.settled_down()
        await world.check(ids)


async def test_postgresql_stands_still(redis_url: str, namespace: str, make_postgres: MakePostgres) -> None:
    server = make_postgres(fsync=False)
    async with World(redis_url, server.url, namespace, **PATIENCE) as world:
        await world.admit()
        await world.start()
        ids = await world.lives(30)
        server.pause()
        ids += await world.lives(30)
        # Longer than its patience: what was under way is given up, though it may be committed when it wakes up.
        await asyncio.sleep(2.5)
        server.resume()
        await world.settled_down()
        await world.check(ids)


async def test_a_read_only_postgresql(redis_url: str, namespace: str, make_postgres: MakePostgres) -> None:
    server = make_postgres(fsync=False)
    async with World(redis_url, server.url, namespace, **PATIENCE) as world:
        await world.admit()
        await world.start()
        ids = await world.lives(30)
        await world.settled_down()
        server.execute("ALTER SYSTEM SET default_transaction_read_only = on")
        server.execute("SELECT pg_reload_conf()")
        ids += await world.lives(30)
        await asyncio.sleep(0.5)
        assert not await world.caught_up()
        connection = await asyncpg.connect(server.url)
        await connection.execute("SET default_transaction_read_only = off")
        await connection.execute("ALTER SYSTEM RESET default_transaction_read_only")
        await connection.execute("SELECT pg_reload_conf()")
        await connection.close()
        await world.settled_down()
        await world.check(ids)


async def test_a_postgresql_without_a_free_connection(
    redis_url: str, namespace: str, make_postgres: MakePostgres
) -> None:
    server = make_postgres(fsync=False, max_connections="8", superuser_reserved_connections="0")
    async with World(redis_url, server.url, namespace, **PATIENCE) as world:
        await world.ledger.close()
        taken: list[asyncpg.Connection] = []
        with pytest.raises(asyncpg.TooManyConnectionsError):
            await _take_all(server, taken)
        await world.start()
        await world.engine.attach_reader(QUEUE)
        ids = await world.lives(30)
        await asyncio.sleep(0.5)
        for connection in taken:
            await connection.close()
        await world.ledger.open()
        await world.settled_down()
        await world.check(ids)


async def _take_all(server: PostgresServer, taken: list[asyncpg.Connection]) -> None:
    while True:
        taken.append(await asyncpg.connect(server.url))


async def test_somebody_locks_a_table(redis_url: str, namespace: str, make_postgres: MakePostgres) -> None:
    server = make_postgres(fsync=False)
    async with World(redis_url, server.url, namespace, **PATIENCE) as world:
        await world.admit()
        await world.start()
        ids = await world.lives(30)
        await world.settled_down()
        connection = await asyncpg.connect(server.url)
        async with connection.transaction():
            await connection.execute("LOCK TABLE jobs IN ACCESS EXCLUSIVE MODE")
            ids += await world.lives(30)
            await asyncio.sleep(2.5)
        await connection.close()
        await world.settled_down()
        await world.check(ids)


async def test_somebody_ends_our_sessions(redis_url: str, namespace: str, postgres_url: str) -> None:
    async with World(redis_url, postgres_url, namespace) as world:
        await world.admit()
        await world.start()
        ids = []
        connection = await asyncpg.connect(postgres_url)
        for _ in range(10):
            ids += await world.lives(60)
            await connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        await connection.close()
        await world.settled_down()
        await world.check(ids)


@pytest.fixture
def small_disk() -> Iterator[PostgresServer]:
    """PostgreSQL on a disk of 160 MB."""
    place = Path(f"/tmp/holdfast-small-disk-{os.getpid()}")
    place.mkdir(exist_ok=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160m,mode=0777", "tmpfs", place], check=False)
    if mounted.returncode:
        place.rmdir()
        pytest.skip("a small disk needs the right to mount one; run as root")
    server = PostgresServer(find_server(POSTGRES), {"max_wal_size": "32MB", "min_wal_size": "32MB"}, parent=place)
    try:
        yield server
    finally:
        server.remove()
        subprocess.run(["umount", place], check=True)
        place.rmdir()


async def test_a_full_disk(redis_url: str, namespace: str, small_disk: PostgresServer) -> None:
    from tests.conftest import migrate

    server = small_disk
    server.start()
    migrate(server.url)
    async with World(redis_url, server.url, namespace) as world:
        await world.admit()
        await world.start()
        ids = await world.lives(60)
        await world.settled_down()
        ballast = server.folder / "ballast"
        await asyncio.to_thread(_fill, ballast)
        for _ in range(10):
            ids += await world.submit(500)
            await world.work()
        await asyncio.sleep(1)
        assert not await _answers_caught_up(world)
        ballast.unlink()
        if not await _is_up(server):
            # Without room for its log PostgreSQL stops itself; an operator starts it again.
            await asyncio.to_thread(server.restart)
        await world.settled_down()
        told = await world.check(ids)
    assert sum(state is State.SUCCEEDED for state in told.values()) == 5_020


def _fill(ballast: Path) -> None:
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            try:
                while file.write(b"x" * size) == size:
                    continue
            except OSError:
                continue


async def _answers_caught_up(world: World) -> bool:
    try:
        return await world.caught_up()
    except Exception:  # noqa: BLE001 - down is not caught up
        return False


async def _is_up(server: PostgresServer) -> bool:
    try:
        connection = await asyncpg.connect(server.url, timeout=2)
    except (OSError, TimeoutError, asyncpg.PostgresError):
        return False
    await connection.close()
    return True


async def test_a_batch_of_every_shape_of_garbage_in_a_real_feed(world_pg: World) -> None:
    """Foreign messages with what no database takes: they are dead letters, and the rest goes on."""
    world = world_pg
    await world.admit()
    await world.start()
    ids = await world.lives(9)
    bad = [
        {"type": "add\x00", "task_id": "x\x00", "payload": "{}"},
        {"task_id": "a" * 100_000, "payload": "\x00"},
        {"z": "\x00"},
    ]
    await _foreign(world, bad)
    await world.claim()
    ids += await world.lives(9)
    # Dead letters move on once they are told: until then both sides are still at it.
    await world.settled_down()
    await world.check(ids, anomalies=None)


@pytest.fixture
async def world_pg(redis_url: str, postgres_url: str, namespace: str) -> AsyncIterator[World]:
    async with World(redis_url, postgres_url, namespace) as made:
        yield made


async def _foreign(world: World, messages: list[dict[str, str]]) -> None:
    import redis.asyncio

    async with redis.asyncio.from_url(world.settings.url) as client:
        keys = [key async for key in client.scan_iter(match=f"*{world.settings.namespace}*task*")]
        streams = [key for key in keys if await client.type(key) == b"stream"]
        assert streams, keys
        for message in messages:
            await client.xadd(streams[0], message)  # type: ignore[arg-type]
