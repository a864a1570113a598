"""Orphans: jobs that wait in the engine for a confirmation of their dead letter that the ledger has already sent.

An engine with older data (a replica that was behind has taken over, a file was restored) has lost the confirmation,
and the ledger does not send it again. The projector's next check for orphans resolves each of these cases.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from holdfast.core.states import State
from holdfast.core.verdict import DeadLetter
from holdfast.errors import FeedDetached, LedgerUnavailable
from holdfast.ledger.port.ledger import FeedPosition
from holdfast.upkeep import feed_cursor
from holdfast.upkeep.dead_letters import DeadLetterConfirmer
from tests.ledger.projection_rig import QUEUE, event_types, job, rows
from tests.upkeep.projector_rig import FAILURE, ProjectorRig, state_of, until

pytestmark = pytest.mark.redis

#: Shorter than the interval between two regular checks for orphans.
_SOON_S = 20.0


@pytest.fixture(autouse=True)
def recheck_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_cursor, "ORPHAN_RECHECK_S", 0.1)


@pytest.fixture
async def rig(redis_url: str, tmp_path: Path, namespace: str) -> AsyncIterator[ProjectorRig]:
    async with ProjectorRig(redis_url, f"sqlite:///{tmp_path}/ledger.db", namespace) as rig:
        await rig.reopen_intake()
        yield rig


async def save_data(rig: ProjectorRig) -> dict[bytes, bytes]:
    """Save all data of the engine."""
    async with Redis.from_url(rig.settings.url) as redis:
        return {key: await redis.dump(key) or b"" async for key in redis.scan_iter(match=f"{rig.settings.namespace}:*")}


async def restore_data(rig: ProjectorRig, data: Mapping[bytes, bytes]) -> None:
    """Replace all data of the engine by the saved data."""
    async with Redis.from_url(rig.settings.url) as redis:
        now = [key async for key in redis.scan_iter(match=f"{rig.settings.namespace}:*")]
        async with redis.pipeline(transaction=True) as step:
            step.delete(*now)
            for key, value in data.items():
                step.restore(key, 0, value)
            await step.execute()


async def fail_job(rig: ProjectorRig) -> str:
    """Fail a job; the ledger has its dead letter and has not confirmed it."""
    (job_id,) = await rig.submit(1)
    await rig.work(DeadLetter(FAILURE))
    await project_all(rig)
    return job_id


async def project_all(rig: ProjectorRig) -> FeedPosition:
    """Project the whole feed without confirming dead letters."""
    projection = rig.ledger.projection
    assert projection is not None
    at = await projection.acquire(QUEUE, "another", 1)
    assert at is not None
    fresh = [entry for entry in await rig.engine.read_feed(QUEUE, at.position, 100) if entry.position != at.position]
    epoch = await projection.engine_epoch(QUEUE)
    return (await projection.project(QUEUE, "another", 1, at, fresh, epoch=epoch)).at


async def wait_failed(rig: ProjectorRig, job_id: str) -> None:
    async def has_ended() -> bool:
        return await state_of(rig, job_id) is State.FAILED

    await until(has_ended, "the job has failed", _SOON_S)
    await rig.wait_settled()


async def test_a_stale_engine_takes_over_after_the_job_has_ended(rig: ProjectorRig) -> None:
    """While a projector runs, which detects a fork."""
    job_id = await fail_job(rig)
    before = await save_data(rig)
    projector = await rig.start()
    await rig.wait_settled()
    assert (await job(rig.ledger, job_id))["state"] == "failed"

    async def no_check_soon() -> bool:
        return projector._cursors[QUEUE].orphan_check_at > time.monotonic() + _SOON_S

    await until(no_check_soon, "no orphan is left")
    await restore_data(rig, before)
    assert await state_of(rig, job_id) is State.DLQ_PENDING
    await wait_failed(rig, job_id)
    assert projector.counts.forks == 1
    names = ["task.created", "task.claimed", "task.dlq_pending", "task.dlq", "task.failed"]
    assert await event_types(rig.ledger, job_id) == names
    assert len(await rows(rig.ledger, "SELECT * FROM dlq_items")) == 1


@pytest.mark.parametrize("state", [State.DLQ_PENDING, State.DLQ_RECORDED])
async def test_a_stale_engine_takes_over_at_a_position_that_the_ledger_has_read(
    rig: ProjectorRig, state: State
) -> None:
    """The dead letter was confirmed and the ledger had not read further: no fork, only the job's state shows it."""
    job_id = await fail_job(rig)
    if state is State.DLQ_RECORDED:
        await rig.engine.move(QUEUE, job_id, state, actor="ledger", reason="the dead letter is recorded")
    before = await save_data(rig)
    assert await DeadLetterConfirmer(rig.engine, rig.ledger).confirm_all(QUEUE) == 0
    await restore_data(rig, before)
    assert await state_of(rig, job_id) is state
    projector = await rig.start()
    await wait_failed(rig, job_id)
    assert projector.counts.forks == 0
    await rig.check([job_id])


async def test_a_stale_engine_runs_an_ended_job_again_and_dead_letters_it(rig: ProjectorRig) -> None:
    """The ledger keeps the first final event and writes no dead letter for the second."""
    (job_id,) = await rig.submit(1)
    claims = await rig.claim()
    await project_all(rig)
    before = await save_data(rig)
    await rig.settle(claims)
    await project_all(rig)
    await restore_data(rig, before)
    await rig.settle(claims, DeadLetter(FAILURE))
    assert await state_of(rig, job_id) is State.DLQ_PENDING
    await rig.start()
    await wait_failed(rig, job_id)
    assert (await job(rig.ledger, job_id))["state"] == "succeeded"
    assert await rows(rig.ledger, "SELECT * FROM dlq_items") == []


async def test_an_orphan_that_cannot_be_confirmed_does_not_stop_the_others(
    rig: ProjectorRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [await fail_job(rig) for _ in range(3)]
    projection = rig.ledger.projection
    assert projection is not None
    await projection.ack_dead_letters(await projection.unacked_dead_letters(QUEUE, 10))
    move = rig.engine.move

    async def fail_one(queue: str, job_id: str, *arguments: Any, **options: Any) -> State:
        if job_id == ids[1]:
            raise RuntimeError("unexpected")
        return await move(queue, job_id, *arguments, **options)

    monkeypatch.setattr(rig.engine, "move", fail_one)
    confirmer, at = DeadLetterConfirmer(rig.engine, rig.ledger), await projection.position(QUEUE)
    for _ in range(2):
        assert await confirmer.find_orphans(QUEUE, at) == []
    assert [await state_of(rig, job_id) for job_id in ids] == [State.FAILED, State.DLQ_PENDING, State.FAILED]


class LedgerWithoutKeys:
    """A ledger whose query for submission keys fails until `available` is set."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.available = False
        self.calls = 0

    @property
    def recovery(self) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        real = self._real
        return getattr(real if hasattr(real, name) else real.recovery, name)

    async def submission_keys(self, *arguments: Any) -> AsyncIterator[Any]:
        self.calls += 1
        if not self.available:
            raise LedgerUnavailable("the query took too long")
        async for keys in self._real.recovery.submission_keys(*arguments):
            yield keys


async def test_a_projector_does_not_reopen_intake_without_the_submission_keys(rig: ProjectorRig) -> None:
    """The projector does not pass a fork before the keys are restored, because submitters would trust the queue."""
    await rig.submit(1, idempotency_key="order-7")
    at = await project_all(rig)
    await restore_data(rig, {})
    projector = rig.projector()
    projector._ledger = ledger = LedgerWithoutKeys(projector._ledger)

    async def has_failed_twice() -> bool:
        return ledger.calls > 6

    await rig.start(projector)
    await until(has_failed_twice, "it has failed twice")
    with pytest.raises(FeedDetached):
        await rig.submit(1, idempotency_key="order-7")
    assert rig.ledger.projection is not None
    assert await rig.ledger.projection.position(QUEUE) == at
    ledger.available = True

    async def is_open() -> bool:
        try:
            await rig.submit(1)
        except FeedDetached:
            return False
        return True

    await until(is_open, "intake is open")
    await rig.submit(1, idempotency_key="order-7")
    assert rig.engine.counters.duplicates == 1
    assert projector.counts.forks == 1
