"""The concurrency limit of a queue on Redis: foreign messages, waiting workers, and queues without a limit."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast.core.job import Claim, Priority
from holdfast.core.states import State
from holdfast.engine.port.operators import QueueControl
from holdfast.engine.redis import claims
from holdfast.engine.redis.intake import Adopter
from holdfast.testing.contract.harness import LONG_WAIT_MS, QUEUE, Rig, ids, soon
from tests.engine.harness import RedisHarness

pytestmark = pytest.mark.redis

MESSAGE = {"type": "print", "payload": '{"n":1}'}


@pytest.fixture
async def rig(redis_harness: RedisHarness, monkeypatch: pytest.MonkeyPatch) -> Rig:
    # A worker that was not woken must not pass because its wait ended.
    monkeypatch.setattr(claims, "_MAX_BLOCK_MS", LONG_WAIT_MS)
    rig = await Rig.on(redis_harness)
    await rig.engine.set_control(QUEUE, QueueControl(concurrency=1))
    return rig


@pytest.fixture
def replies(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """How each claim of this process was answered."""
    answers: list[bytes] = []
    real = claims.Claims._claims_from_reply

    def note(self: claims.Claims, worker: str, queue: str, limit: int, reply: list[Any]) -> Any:
        answers.append(reply[0])
        return real(self, worker, queue, limit, reply)

    monkeypatch.setattr(claims.Claims, "_claims_from_reply", note)
    return answers


async def write(harness: RedisHarness, **fields: str) -> None:
    await harness.redis.xadd(harness.keys(QUEUE).streams[Priority.NORMAL], fields)


async def start_waiting(rig: Rig) -> asyncio.Task[list[Claim]]:
    other = await rig.harness.make()

    async def wait() -> list[Claim]:
        while not (claims := await other.claim("w2", [QUEUE], 1, LONG_WAIT_MS)):
            pass
        return claims

    waiting = asyncio.create_task(wait())
    assert await rig.engine.claim("w0", [QUEUE], 1, 50) == []
    return waiting


async def test_foreign_messages_use_slots(redis_harness: RedisHarness, rig: Rig) -> None:
    for number in range(3):
        await write(redis_harness, task_id=f"j{number}", **MESSAGE)
    claim = await rig.claim_one("w1")
    assert await rig.claim("w2") == []
    assert (await rig.engine.stats(QUEUE)).states[State.RUNNING] == 1
    await rig.succeed(claim)
    assert ids(await rig.claim("w2")) == ["j1"]


@pytest.mark.parametrize("kind", ["malformed", "duplicate"])
async def test_a_foreign_message_that_is_not_run_frees_its_slot(
    redis_harness: RedisHarness, rig: Rig, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is leased until it is adopted; workers that met the limit meanwhile are woken."""
    ended = await rig.start_one()
    await rig.succeed(ended)
    await write(redis_harness, **({"task_id": ended.job_id, **MESSAGE} if kind == "duplicate" else {"type": "print"}))
    claimed, go = asyncio.Event(), asyncio.Event()
    real = Adopter.adopt

    async def adopt(self: Adopter, *arguments: Any) -> list[Claim]:
        claimed.set()
        await go.wait()
        return await real(self, *arguments)

    monkeypatch.setattr(Adopter, "adopt", adopt)
    adopting = asyncio.create_task((await redis_harness.make()).claim("w3", [QUEUE], 1, 0))
    await soon(claimed.wait())
    waiting = await start_waiting(rig)
    job_id = await rig.submit_one()
    go.set()
    assert await adopting == []
    assert ids(await soon(waiting)) == [job_id]


async def test_a_deleted_message_frees_its_slot_when_its_lease_is_reclaimed(
    redis_harness: RedisHarness, rig: Rig
) -> None:
    claim = await rig.start_one("dead")
    job_id = await rig.submit_one()
    index, _, message_id = claim.lease.position.partition(":")
    await redis_harness.redis.xdel(redis_harness.keys(QUEUE).streams[int(index)], message_id)
    waiting = await start_waiting(rig)
    upkeep = await redis_harness.make(visibility_timeout_ms=1)
    await asyncio.sleep(0.01)  # longer than that lease
    assert await upkeep.reclaim("w3", [QUEUE], 10) == []
    assert ids(await soon(waiting)) == [job_id]


async def test_new_jobs_do_not_wake_workers_while_the_limit_is_reached(rig: Rig, replies: list[bytes]) -> None:
    claim = await rig.start_one("w1")
    waiting = await start_waiting(rig)
    assert replies.pop() == b"limited"
    replies.clear()
    for _ in range(20):
        await rig.submit(2)
    assert (replies, waiting.done()) == ([], False)
    await rig.succeed(claim)
    assert len(await soon(waiting)) == 1
    assert replies == [b"limited"]


async def test_a_queue_without_a_limit_has_no_trace_of_it(redis_harness: RedisHarness, rig: Rig) -> None:
    control = redis_harness.keys(QUEUE).control
    assert await redis_harness.redis.hmget(control, "max_running", "limits") != [None, None]
    await rig.engine.set_control(QUEUE, QueueControl(worker_concurrency=3))
    # Scripts take their short path if `limits` is absent.
    assert await redis_harness.redis.hmget(control, "max_running", "limits") == [None, None]
