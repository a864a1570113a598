"""Submission keys after a fail-over to a stale replica and after a restart: jobs in the ledger stay duplicates.

No projector runs after the fail-over: the submitter restores the keys.
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
from holdfast.ledger.port.ledger import Ledger
from holdfast.ledger.reopen_intake import reopen_intake
from holdfast.verification.chaos.servers import RedisServer
from tests.conftest import MakeServer
from tests.ledger.projection_rig import QUEUE
from tests.upkeep.projector_rig import ProjectorRig, until

#: A master that starts to sync a replica at once.
QUICK_SYNC = {"repl_diskless_sync_delay": "0", "repl_ping_replica_period": "1"}

pytestmark = [pytest.mark.redis, pytest.mark.faults]


async def command(server: RedisServer, *arguments: str) -> None:
    client: Redis = Redis.from_url(server.url)
    await client.execute_command(*arguments)
    await client.aclose()


async def offset(server: RedisServer) -> int:
    client: Redis = Redis.from_url(server.url)
    info = await client.info("replication")
    await client.aclose()
    return int(info["master_repl_offset"])


async def follow(replica: RedisServer, master: RedisServer) -> None:
    """Wait until the replica has all data of the master."""
    await command(replica, "REPLICAOF", "127.0.0.1", str(master.port))

    async def in_sync() -> bool:
        return await offset(replica) == await offset(master) > 0

    await until(in_sync, "the replica has everything")


def envelope(key: str) -> Envelope:
    return Envelope(job_id=new_job_ids(1)[0], task="add", payload=b"{}", queue=QUEUE, idempotency_key=key)


class RecordingEngine:
    """An engine that records the keys restored to it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.keys: list[str] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    async def restore_keys(self, queue: str, keys: Sequence[SubmissionKey]) -> None:
        self.keys += [key.key for key in keys]
        await self._engine.restore_keys(queue, keys)


@asynccontextmanager
async def run_submitter(
    rig: ProjectorRig, engine: Engine | None = None, ledger: Ledger | None = None
) -> AsyncIterator[BatchingSubmitter]:
    submitter = BatchingSubmitter(engine or rig.engine, ledger or rig.ledger, durable_timeout_s=10.0)
    try:
        yield submitter
    finally:
        await submitter.close()


async def project(rig: ProjectorRig) -> None:
    """Project the whole feed, then stop the projector."""
    await rig.start()
    await rig.wait_settled()
    await rig.stop()


async def test_a_key_missing_on_a_stale_replica_is_restored_at_once(
    make_redis: MakeServer, postgres_url: str, namespace: str
) -> None:
    master, replica = make_redis(**QUICK_SYNC), make_redis()
    async with ProjectorRig(master.url, postgres_url, namespace) as old, run_submitter(old) as before:
        await before.submit(envelope("early"))
        await project(old)
        await follow(replica, master)
        await command(replica, "REPLICAOF", "NO", "ONE")
        # From here on the replica gets no writes.
        first = await before.submit(envelope("order-7"))
        await project(old)
        master.kill()
    async with ProjectorRig(replica.url, postgres_url, namespace) as new, run_submitter(new) as after:
        again = await asyncio.gather(*(after.submit(envelope("order-7")) for _ in range(20)))
        assert {(receipt.job_id, receipt.duplicate) for receipt in again} == {(first.job_id, True)}
        assert (await after.submit(envelope("early"))).duplicate
        assert not (await after.submit(envelope("order-8"))).duplicate


async def test_a_complete_replica_opens_without_restoring_keys(
    make_redis: MakeServer, postgres_url: str, namespace: str
) -> None:
    master, replica = make_redis(**QUICK_SYNC), make_redis()
    async with ProjectorRig(master.url, postgres_url, namespace) as old, run_submitter(old) as before:
        first = await before.submit(envelope("order-7"))
        await project(old)
        await follow(replica, master)
        master.kill()
        await command(replica, "REPLICAOF", "NO", "ONE")
    async with ProjectorRig(replica.url, postgres_url, namespace) as new:
        with pytest.raises(FeedDetached):
            await new.engine.submit([envelope("order-8")])
        recording = RecordingEngine(new.engine)
        async with run_submitter(new, recording) as after:  # type: ignore[arg-type]
            assert (await after.submit(envelope("order-7"))).job_id == first.job_id
        assert recording.keys == []


async def test_restored_keys_are_restored_again_on_the_next_replica(
    make_redis: MakeServer, postgres_url: str, namespace: str
) -> None:
    """Two fail-overs in a row: the second replica lacks the keys that were restored to the first."""
    master, second, third = make_redis(**QUICK_SYNC), make_redis(**QUICK_SYNC), make_redis()
    async with ProjectorRig(master.url, postgres_url, namespace) as one, run_submitter(one) as before:
        await before.submit(envelope("early"))
        await project(one)
        await follow(second, master)
        await command(second, "REPLICAOF", "NO", "ONE")
        first = await before.submit(envelope("order-7"))
        await project(one)
        master.kill()
    await follow(third, second)
    await command(third, "REPLICAOF", "NO", "ONE")
    async with ProjectorRig(second.url, postgres_url, namespace) as two:
        # Its projector detects the fork, restores the keys, and continues with the new feed.
        await project(two)
        second.kill()
    async with ProjectorRig(third.url, postgres_url, namespace) as three, run_submitter(three) as after:
        again = await after.submit(envelope("order-7"))
        assert (again.job_id, again.duplicate) == (first.job_id, True)


async def test_a_restart_while_intake_is_reopened_opens_nothing(
    make_redis: MakeServer, postgres_url: str, namespace: str
) -> None:
    """A check made in one epoch does not open intake in another."""
    server = make_redis(appendonly="yes", appendfsync="always")
    async with ProjectorRig(server.url, postgres_url, namespace) as rig:
        await rig.reopen_intake()

        class Restarted(RecordingEngine):
            async def attach_reader(self, queue: str, epoch: str = "", *, keys_restored: bool = False) -> None:
                server.kill()
                server.start()
                await until(self._answers, "the server answers")
                await self._engine.attach_reader(queue, epoch, keys_restored=keys_restored)

            async def _answers(self) -> bool:
                try:
                    return await self._engine.now_ms() > 0
                except Exception:  # noqa: BLE001 - not yet
                    return False

        await reopen_intake(Restarted(rig.engine), rig.ledger, QUEUE)  # type: ignore[arg-type]
        with pytest.raises(FeedDetached):
            await rig.engine.submit([envelope("order-7")])
        async with run_submitter(rig) as submitter:
            assert not (await submitter.submit(envelope("order-7"))).duplicate


async def test_after_a_restart_intake_reopens_after_one_check(
    make_redis: MakeServer, postgres_url: str, namespace: str
) -> None:
    server = make_redis(appendonly="yes", appendfsync="always")
    async with ProjectorRig(server.url, postgres_url, namespace) as rig:
        recording = RecordingEngine(rig.engine)
        async with run_submitter(rig, recording) as submitter:  # type: ignore[arg-type]
            receipts = [await submitter.submit(envelope(f"order-{number}")) for number in range(50)]
            await project(rig)
            refused = rig.engine.counters.intake_refused
            server.kill()
            server.start()
            began = time.monotonic()
            again = await asyncio.gather(*(submitter.submit(envelope(f"order-{number}")) for number in range(50)))
            took_s = time.monotonic() - began
            assert [receipt.job_id for receipt in again] == [receipt.job_id for receipt in receipts]
            assert recording.keys == []
            # One batch is refused once.
            assert rig.engine.counters.intake_refused - refused == 50
            assert not (await submitter.submit(envelope("order-50"))).duplicate
            assert rig.engine.counters.intake_refused - refused == 50
            print(f"after a restart the first submission took {took_s * 1000:.1f} ms")


async def test_a_new_replication_id_does_not_refuse_submitters(
    make_redis: MakeServer, postgres_url: str, namespace: str
) -> None:
    """A master that was long without replicas takes a new replication id and keeps its connections: callers that know
    the old id and callers that know the new one can both submit."""
    master, replica = make_redis(repl_backlog_ttl="1", **QUICK_SYNC), make_redis()
    async with ProjectorRig(master.url, postgres_url, namespace) as rig, run_submitter(rig) as first_submitter:
        await first_submitter.submit(envelope("a"))
        epoch = await rig.engine.epoch(QUEUE)
        await follow(replica, master)
        replica.kill()

        async def changed() -> bool:
            return await rig.engine.epoch(QUEUE) != epoch

        await until(changed, "it has another replication id")
        other_engine = rig.engine.clone()
        await other_engine.open()
        async with run_submitter(rig, other_engine) as second_submitter:
            for number in range(5):
                await second_submitter.submit(envelope(f"b{number}"))
                await first_submitter.submit(envelope(f"c{number}"))
            assert rig.engine.counters.intake_refused <= 4
        await other_engine.close()


class UncancellableLedger:
    """A ledger whose driver turns a cancellation into an error."""

    def __init__(self) -> None:
        self.projection = self.recovery = self
        self.called = asyncio.Event()
        self.calls = 0

    async def queues(self) -> list[str]:
        self.calls += 1
        self.called.set()
        try:
            await asyncio.sleep(5)
        except asyncio.CancelledError:
            raise LedgerUnavailable("TimeoutError") from None
        return []


async def test_reopening_intake_can_be_cancelled(tmp_path: Path) -> None:
    """Errors are retried, a cancellation is not."""
    engine = SqliteEngine(tmp_path / "jobs.db", EngineOptions(), SystemClock())
    await engine.open()
    ledger = UncancellableLedger()
    reopening = asyncio.create_task(reopen_intake(engine, ledger, QUEUE))  # type: ignore[arg-type]
    await ledger.called.wait()
    reopening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reopening
    assert ledger.calls == 1
    await engine.close()


async def test_without_a_ledger_a_restart_does_not_close_intake(make_redis: MakeServer, namespace: str) -> None:
    server = make_redis(appendonly="yes", appendfsync="always")
    engine = RedisEngine(server.url, KeyNames(namespace=namespace), EngineOptions())
    await engine.open()
    (first,) = await engine.submit([envelope("order-7")])
    server.kill()
    server.start()
    (again,) = await engine.submit([envelope("order-7")])
    assert (again.job_id, again.duplicate) == (first.job_id, True)
    await engine.close()
