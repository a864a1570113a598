"""Jobs that wait in the engine for the ledger's word on their dead letter, while the ledger has nothing more to say.

An engine that wakes up as it was some time ago (a replica that was behind has taken over, a file was cut) has forgotten
what it was told, and the ledger has not. Each of these heals within moments of the projector's next look.
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
from tests.ledger.projection_rig import QUEUE, job, rows, story
from tests.upkeep.projector_rig import FAILURE, World, state_of, until

pytestmark = pytest.mark.redis

#: Sooner than a look would come that is not called for.
_SOON_S = 20.0


@pytest.fixture(autouse=True)
def again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_cursor, "ORPHAN_RECHECK_S", 0.1)


@pytest.fixture
async def world(redis_url: str, tmp_path: Path, namespace: str) -> AsyncIterator[World]:
    async with World(redis_url, f"sqlite:///{tmp_path}/ledger.db", namespace) as made:
        await made.admit()
        yield made


async def remembered(world: World) -> dict[bytes, bytes]:
    """All that the engine knows now."""
    async with Redis.from_url(world.settings.url) as redis:
        return {
            key: await redis.dump(key) or b"" async for key in redis.scan_iter(match=f"{world.settings.namespace}:*")
        }


async def go_back(world: World, memory: Mapping[bytes, bytes]) -> None:
    """The engine has only ever known this."""
    async with Redis.from_url(world.settings.url) as redis:
        now = [key async for key in redis.scan_iter(match=f"{world.settings.namespace}:*")]
        async with redis.pipeline(transaction=True) as step:
            step.delete(*now)
            for key, value in memory.items():
                step.restore(key, 0, value)
            await step.execute()


async def die(world: World) -> str:
    """A job that waits for the ledger, which has its letter and has told nobody."""
    (dead,) = await world.submit(1)
    await world.work(DeadLetter(FAILURE))
    await read(world)
    return dead


async def read(world: World) -> FeedPosition:
    """The ledger has all of the feed, and tells nothing."""
    projection = world.ledger.projection
    assert projection is not None
    at = await projection.acquire(QUEUE, "another", 1)
    assert at is not None
    fresh = [entry for entry in await world.engine.read_feed(QUEUE, at.position, 100) if entry.position != at.position]
    return (await projection.project(QUEUE, "another", 1, at, fresh)).at


async def ends(world: World, job_id: str) -> None:
    async def has_ended() -> bool:
        return await state_of(world, job_id) is State.FAILED

    await until(has_ended, "it is moved on", _SOON_S)
    await world.settled_down()


async def test_an_older_engine_takes_over_after_the_job_has_ended(world: World) -> None:
    """Under the eyes of the projector, which sees a fork."""
    dead = await die(world)
    before = await remembered(world)
    projector = await world.start()
    await world.settled_down()
    assert (await job(world.ledger, dead))["state"] == "failed"

    async def looks_later() -> bool:
        return projector._cursors[QUEUE].orphan_check_at > time.monotonic() + _SOON_S

    await until(looks_later, "nothing waits any more")
    await go_back(world, before)
    assert await state_of(world, dead) is State.DLQ_PENDING
    await ends(world, dead)
    assert projector.counts.forks == 1
    names = ["task.created", "task.claimed", "task.dlq_pending", "task.dlq", "task.failed"]
    assert await story(world.ledger, dead) == names
    assert len(await rows(world.ledger, "SELECT * FROM dlq_items")) == 1


@pytest.mark.parametrize("state", [State.DLQ_PENDING, State.DLQ_RECORDED])
async def test_an_older_engine_takes_over_at_a_place_that_the_ledger_has_read(world: World, state: State) -> None:
    """The letter was acknowledged, the ledger had not read on: no fork. Nothing but the job itself tells of it."""
    dead = await die(world)
    if state is State.DLQ_RECORDED:
        await world.engine.move(QUEUE, dead, state, actor="ledger", reason="the dead letter is recorded")
    before = await remembered(world)
    assert await DeadLetterConfirmer(world.engine, world.ledger).confirm_all(QUEUE) == 0
    await go_back(world, before)
    assert await state_of(world, dead) is state
    projector = await world.start()
    await ends(world, dead)
    assert projector.counts.forks == 0
    await world.check([dead])


async def test_an_older_engine_runs_a_job_again_that_has_ended_and_it_dies(world: World) -> None:
    """The ledger keeps the first end, and writes no letter of the second."""
    (twice,) = await world.submit(1)
    claims = await world.claim()
    await read(world)
    before = await remembered(world)
    await world.settle(claims)
    await read(world)
    await go_back(world, before)
    await world.settle(claims, DeadLetter(FAILURE))
    assert await state_of(world, twice) is State.DLQ_PENDING
    await world.start()
    await ends(world, twice)
    assert (await job(world.ledger, twice))["state"] == "succeeded"
    assert await rows(world.ledger, "SELECT * FROM dlq_items") == []


async def test_a_stray_that_cannot_be_told_hinders_no_other(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [await die(world) for _ in range(3)]
    projection = world.ledger.projection
    assert projection is not None
    await projection.ack_dead_letters(await projection.unacked_dead_letters(QUEUE, 10))
    move = world.engine.move

    async def break_down(queue: str, job_id: str, *arguments: Any, **options: Any) -> State:
        if job_id == ids[1]:
            raise RuntimeError("what is this?")
        return await move(queue, job_id, *arguments, **options)

    monkeypatch.setattr(world.engine, "move", break_down)
    letters, at = DeadLetterConfirmer(world.engine, world.ledger), await projection.position(QUEUE)
    for _ in range(2):
        assert await letters.find_orphans(QUEUE, at) == []
    assert [await state_of(world, job_id) for job_id in ids] == [State.FAILED, State.DLQ_PENDING, State.FAILED]


class Forgetful:
    """A ledger that answers, but cannot say which keys it knows, until it is `well`."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.well = False
        self.asked = 0

    @property
    def recovery(self) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        real = self._real
        return getattr(real if hasattr(real, name) else real.recovery, name)

    async def submission_keys(self, *arguments: Any) -> AsyncIterator[Any]:
        self.asked += 1
        if not self.well:
            raise LedgerUnavailable("the query took too long")
        async for keys in self._real.recovery.submission_keys(*arguments):
            yield keys


async def test_a_projector_opens_no_queue_without_its_keys(world: World) -> None:
    """A fork whose keys cannot be put back is not passed: whoever submits would take the queue for whole."""
    await world.submit(1, idempotency_key="order-7")
    at = await read(world)
    await go_back(world, {})
    projector = world.projector()
    projector._ledger = forgetful = Forgetful(projector._ledger)

    async def has_given_up() -> bool:
        return forgetful.asked > 6

    await world.start(projector)
    await until(has_given_up, "it has tried in vain, twice")
    with pytest.raises(FeedDetached):
        await world.submit(1, idempotency_key="order-7")
    assert world.ledger.projection is not None
    assert await world.ledger.projection.position(QUEUE) == at
    forgetful.well = True

    async def is_open() -> bool:
        try:
            await world.submit(1)
        except FeedDetached:
            return False
        return True

    await until(is_open, "it takes jobs again")
    await world.submit(1, idempotency_key="order-7")
    assert world.engine.counters.duplicates == 1
    assert projector.counts.forks == 1
