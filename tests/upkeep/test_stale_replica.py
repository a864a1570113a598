"""After a fail-over to a replica that was behind, and after a plain restart: what the ledger has is not taken twice.

No projector runs here after the fail-over: whoever submits has to find out alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis

from holdfast.client.submitter import BatchingSubmitter
from holdfast.clock import SystemClock
from holdfast.core.job import Envelope, new_job_ids
from holdfast.engine.port import Engine
from holdfast.engine.port.feed import SubmissionKey
from holdfast.engine.port.jobs import EngineOptions
from holdfast.engine.redis.engine import RedisEngine
from holdfast.engine.redis.keys import KeyNames
from holdfast.engine.sqlite.engine import SqliteEngine
from holdfast.errors import FeedDetached, LedgerUnavailable
from holdfast.ledger.intake_recovery import reopen_intake
from holdfast.ledger.port.ledger import Ledger
from holdfast.verification.chaos.servers import RedisServer
from tests.conftest import MakeServer
from tests.ledger.projection_rig import QUEUE
from tests.upkeep.projector_rig import World, until

#: A master that does not wait for a second replica before it begins with the first.
QUICK = {"repl_diskless_sync_delay": "0", "repl_ping_replica_period": "1"}

pytestmark = [pytest.mark.redis, pytest.mark.faults]


async def command(server: RedisServer, *words: str) -> None:
    client: Redis = Redis.from_url(server.url)
    await client.execute_command(*words)
    await client.aclose()


async def offset(server: RedisServer) -> int:
    client: Redis = Redis.from_url(server.url)
    info = await client.info("replication")
    await client.aclose()
    return int(info["master_repl_offset"])


async def follow(replica: RedisServer, master: RedisServer) -> None:
    """The replica has all that the master has."""
    await command(replica, "REPLICAOF", "127.0.0.1", str(master.port))

    async def in_step() -> bool:
        return await offset(replica) == await offset(master) > 0

    await until(in_step, "the replica has everything")


def keyed(key: str) -> Envelope:
    return Envelope(job_id=new_job_ids(1)[0], task="add", payload=b"{}", queue=QUEUE, idempotency_key=key)


class Watched:
    """An engine whose refills are counted."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.keys: list[str] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    async def restore_keys(self, queue: str, keys: Sequence[SubmissionKey]) -> None:
        self.keys += [key.key for key in keys]
        await self._engine.restore_keys(queue, keys)


@asynccontextmanager
async def submitting(
    world: World, engine: Engine | None = None, ledger: Ledger | None = None
) -> AsyncIterator[BatchingSubmitter]:
    submitter = BatchingSubmitter(engine or world.engine, ledger or world.ledger, durable_timeout_s=10.0)
    try:
        yield submitter
    finally:
        await submitter.close()


async def project(world: World) -> None:
    """The ledger has all of the feed, and nobody reads on."""
    await world.start()
    await world.settled_down()
    await world.stop()


async def test_a_key_that_a_stale_replica_has_forgotten_is_known_at_once(
    make_redis: MakeServer, postgres_url: str, namespace: str
) -> None:
    master, replica = make_redis(**QUICK), make_redis()
    async with World(master.url, postgres_url, namespace) as old, submitting(old) as before:
        await before.submit(keyed("early"))
        await project(old)
        await follow(replica, master)
        await command(replica, "REPLICAOF", "NO", "ONE")
        # From here on the replica knows nothing.
        first = await before.submit(keyed("order-7"))
        await project(old)
        master.kill()
    async with World(replica.url, postgres_url, namespace) as new, submitting(new) as after:
        again = await asyncio.gather(*(after.submit(keyed("order-7")) for _ in range(20)))
        assert {(receipt.job_id, receipt.duplicate) for receipt in again} == {(first.job_id, True)}
        assert (await after.submit(keyed("early"))).duplicate
        assert not (await after.submit(keyed("order-8"))).duplicate


async def test_a_replica_that_has_everything_opens_without_a_refill(
    make_redis: MakeServer, postgres_url: str, namespace: str
) -> None:
    master, replica = make_redis(**QUICK), make_redis()
    async with World(master.url, postgres_url, namespace) as old, submitting(old) as before:
        first = await before.submit(keyed("order-7"))
        await project(old)
        await follow(replica, master)
        master.kill()
        await command(replica, "REPLICAOF", "NO", "ONE")
    async with World(replica.url, postgres_url, namespace) as new:
        with pytest.raises(FeedDetached):
            await new.engine.submit([keyed("order-8")])
        watched = Watched(new.engine)
        async with submitting(new, watched) as after:  # type: ignore[arg-type]
            assert (await after.submit(keyed("order-7"))).job_id == first.job_id
        assert watched.keys == []


async def test_keys_that_were_put_back_are_missed_by_the_next_replica_too(
    make_redis: MakeServer, postgres_url: str, namespace: str
) -> None:
    """Two fail-overs in a row: the second replica has all that the first one had, but not the keys put back since."""
    master, second, third = make_redis(**QUICK), make_redis(**QUICK), make_redis()
    async with World(master.url, postgres_url, namespace) as one, submitting(one) as before:
        await before.submit(keyed("early"))
        await project(one)
        await follow(second, master)
        await command(second, "REPLICAOF", "NO", "ONE")
        first = await before.submit(keyed("order-7"))
        await project(one)
        master.kill()
    await follow(third, second)
    await command(third, "REPLICAOF", "NO", "ONE")
    async with World(second.url, postgres_url, namespace) as two:
        # Its projector sees the fork, puts the keys back, and goes on from the new feed.
        await project(two)
        second.kill()
    async with World(third.url, postgres_url, namespace) as three, submitting(three) as after:
        again = await after.submit(keyed("order-7"))
        assert (again.job_id, again.duplicate) == (first.job_id, True)


async def test_a_fail_over_in_the_middle_of_an_admission_opens_nothing(
    make_redis: MakeServer, postgres_url: str, namespace: str
) -> None:
    """What was looked at on one server is not said of another."""
    server = make_redis(appendonly="yes", appendfsync="always")
    async with World(server.url, postgres_url, namespace) as world:
        await world.admit()

        class Restarted(Watched):
            async def attach_reader(self, queue: str, epoch: str = "", *, keys_restored: bool = False) -> None:
                server.kill()
                server.start()
                await until(self._answers, "it is back")
                await self._engine.attach_reader(queue, epoch, keys_restored=keys_restored)

            async def _answers(self) -> bool:
                try:
                    return await self._engine.now_ms() > 0
                except Exception:  # noqa: BLE001 - not yet
                    return False

        await reopen_intake(Restarted(world.engine), world.ledger, QUEUE)  # type: ignore[arg-type]
        with pytest.raises(FeedDetached):
            await world.engine.submit([keyed("order-7")])
        async with submitting(world) as submitter:
            assert not (await submitter.submit(keyed("order-7"))).duplicate


async def test_after_a_plain_restart_intake_goes_on_after_one_look(
    make_redis: MakeServer, postgres_url: str, namespace: str
) -> None:
    server = make_redis(appendonly="yes", appendfsync="always")
    async with World(server.url, postgres_url, namespace) as world:
        watched = Watched(world.engine)
        async with submitting(world, watched) as submitter:  # type: ignore[arg-type]
            receipts = [await submitter.submit(keyed(f"order-{number}")) for number in range(50)]
            await project(world)
            refused = world.engine.counters.intake_refused
            server.kill()
            server.start()
            began = time.monotonic()
            again = await asyncio.gather(*(submitter.submit(keyed(f"order-{number}")) for number in range(50)))
            took_s = time.monotonic() - began
            assert [receipt.job_id for receipt in again] == [receipt.job_id for receipt in receipts]
            assert watched.keys == []
            # One batch, once; from then on as before.
            assert world.engine.counters.intake_refused - refused == 50
            assert not (await submitter.submit(keyed("order-50"))).duplicate
            assert world.engine.counters.intake_refused - refused == 50
            print(f"after a restart the first submission took {took_s * 1000:.1f} ms")


async def test_a_server_that_changes_its_name_keeps_its_callers(
    make_redis: MakeServer, postgres_url: str, namespace: str
) -> None:
    """Without replicas for long, a master takes a new replication id and keeps its connections: callers who know it
    under the old name and under the new one get along."""
    master, replica = make_redis(repl_backlog_ttl="1", **QUICK), make_redis()
    async with World(master.url, postgres_url, namespace) as world, submitting(world) as one:
        await one.submit(keyed("a"))
        name = await world.engine.epoch(QUEUE)
        await follow(replica, master)
        replica.kill()

        async def renamed() -> bool:
            return await world.engine.epoch(QUEUE) != name

        await until(renamed, "it has another name")
        sibling = world.engine.clone()
        await sibling.open()
        async with submitting(world, sibling) as other:
            for number in range(5):
                await other.submit(keyed(f"b{number}"))
                await one.submit(keyed(f"c{number}"))
            assert world.engine.counters.intake_refused <= 4
        await sibling.close()


class Deaf:
    """A ledger whose driver makes an error of a cancellation."""

    def __init__(self) -> None:
        self.projection = self.recovery = self
        self.asked = asyncio.Event()
        self.times = 0

    async def queues(self) -> list[str]:
        self.times += 1
        self.asked.set()
        try:
            await asyncio.sleep(5)
        except asyncio.CancelledError:
            raise LedgerUnavailable("TimeoutError") from None
        return []


async def test_an_admission_ends_when_it_is_told_to(tmp_path: Path) -> None:
    """It tries again what fails, but not that."""
    engine = SqliteEngine(tmp_path / "jobs.db", EngineOptions(), SystemClock())
    await engine.open()
    deaf = Deaf()
    admission = asyncio.create_task(reopen_intake(engine, deaf, QUEUE))  # type: ignore[arg-type]
    await deaf.asked.wait()
    admission.cancel()
    with pytest.raises(asyncio.CancelledError):
        await admission
    assert deaf.times == 1
    await engine.close()


async def test_without_a_ledger_nobody_asks(make_redis: MakeServer, namespace: str) -> None:
    server = make_redis(appendonly="yes", appendfsync="always")
    engine = RedisEngine(server.url, KeyNames(namespace=namespace), EngineOptions())
    await engine.open()
    (first,) = await engine.submit([keyed("order-7")])
    server.kill()
    server.start()
    (again,) = await engine.submit([keyed("order-7")])
    assert (again.job_id, again.duplicate) == (first.job_id, True)
    await engine.close()
