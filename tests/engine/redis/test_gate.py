"""The gate of a queue on Redis: jobs are claimed and moved only in an epoch in which the queue was verified."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from holdfast.core.states import State
from holdfast.core.verdict import RetryLater, SettleResult
from holdfast.engine.port.jobs import RetryVia
from holdfast.errors import EngineUnavailable, QueueUnverified
from holdfast.testing.contract.harness import FAILURE, LONG_WAIT_MS, QUEUE, Rig, both_modes, open_queue, soon
from tests.engine.harness import RedisHarness

pytestmark = pytest.mark.redis


@pytest.fixture
async def rig(redis_harness: RedisHarness, mode: RetryVia) -> Rig:
    return await Rig.on(redis_harness, ledger=True, retry_via={QUEUE: mode}, max_deliveries=9)


@pytest.fixture
def mode() -> RetryVia:
    return RetryVia.SCHEDULE


async def close_gate(harness: RedisHarness) -> None:
    """As if Redis had been restarted: the queue was verified in another epoch."""
    await harness.redis.hset(harness.keys(QUEUE).control, "cleared", "another")


async def records(harness: RedisHarness, rig: Rig) -> Any:
    redis, keys = harness.redis, harness.keys(QUEUE)
    return [await redis.dump(key) for key in sorted(await redis.keys("*")) if key != keys.control]


@both_modes
async def test_a_closed_gate_refuses_every_move(redis_harness: RedisHarness, rig: Rig, mode: RetryVia) -> None:
    running = await rig.start_one()
    waiting = await rig.start_one()
    await rig.settle(waiting, RetryLater(60_000, FAILURE))
    delayed = await rig.submit_one(delay_ms=1_000)
    ready = await rig.submit_one()
    await close_gate(redis_harness)
    await rig.harness.advance(rig.engine.options.visibility_timeout_ms + 1)
    before = await records(redis_harness, rig)

    refused: list[Callable[[], Awaitable[Any]]] = [
        lambda: rig.succeed(running),
        lambda: rig.move(ready, State.CANCELLED),
        lambda: rig.promote(),
        lambda: rig.reclaim(),
        lambda: rig.engine.recover_claims("w1", [QUEUE], []),
        lambda: rig.engine.claim_job("w3", QUEUE, delayed),
        lambda: rig.engine.expedite(QUEUE, waiting.job_id, actor="ann", reason="because"),
    ]
    for call in refused:
        # On a Cluster, a part of the call may have been carried out.
        with pytest.raises(EngineUnavailable, match="have been compared"):
            await call()
    assert await rig.claim() == []
    assert await records(redis_harness, rig) == before
    assert await rig.engine.renew([running.lease], [running.lease]) == []
    assert "task.heartbeat" not in await rig.event_types(running.job_id)

    asked: list[str] = []
    rig.engine.on_unverified(lambda queue: asked.append(queue))  # type: ignore[arg-type, return-value]
    assert await rig.claim() == []
    assert asked == [QUEUE]
    await open_queue(rig.engine, QUEUE)
    assert await rig.succeed(running) == [SettleResult.APPLIED]
    assert await rig.claim() != []


async def test_an_open_gate_wakes_a_waiting_claim(redis_harness: RedisHarness, rig: Rig) -> None:
    await close_gate(redis_harness)
    await rig.submit_one()
    assert await rig.claim() == []
    claiming = asyncio.create_task(rig.engine.claim("w1", [QUEUE], 1, LONG_WAIT_MS))
    await open_queue(rig.engine, QUEUE)
    assert len(await soon(claiming)) == 1


async def test_a_gate_opens_in_the_present_epoch_only(rig: Rig) -> None:
    assert not await rig.engine.open_gate(QUEUE, "another")
    gate = await rig.engine.gate(QUEUE)
    assert gate.is_open
    assert await rig.engine.open_gate(QUEUE, gate.epoch, verified=False)
    assert (await rig.engine.gate(QUEUE)).unverified_since_ms > 0
    assert await rig.engine.open_gate(QUEUE, gate.epoch)
    assert (await rig.engine.gate(QUEUE)).unverified_since_ms == 0


async def names(rig: Rig, limit: int) -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    cursor = ""
    while True:
        page, cursor = await rig.engine.job_names(QUEUE, cursor, limit)
        found.update((name.job_id, name.tenant_id) for name in page)
        if not cursor:
            return found


#: The last one stays ready only if no other job is started after it.
OPEN = (
    State.RUNNING,
    State.RETRYING,
    State.SUSPENDED,
    State.WAITING_APPROVAL,
    State.DLQ_PENDING,
    State.DLQ_RECORDED,
    State.QUEUED,
)


@both_modes
@pytest.mark.parametrize("limit", [1, 3, 100])
async def test_every_open_job_has_a_name(rig: Rig, limit: int, mode: RetryVia) -> None:
    await rig.put_in(State.SUCCEEDED)
    await rig.put_in(State.CANCELLED)
    expected = {((await rig.put_in(state, tenant_id="a"))[0], "a") for state in OPEN[:-1]}
    expected |= {((await rig.put_in(state))[0], "default") for state in OPEN[:-1]}
    expected |= {(await rig.submit_one(delay_ms=60_000), "default") for _ in range(7)}
    expected |= {(await rig.submit_one(tenant_id=tenant), tenant) for tenant in ("a", "b")}
    assert await names(rig, limit) == expected


ENDS = [
    *((state, State.SUCCEEDED, RetryVia.SCHEDULE) for state in OPEN),
    (State.RETRYING, State.SUCCEEDED, RetryVia.PENDING),
    (State.QUEUED, State.FAILED, RetryVia.SCHEDULE),
    (State.QUEUED, State.CANCELLED, RetryVia.SCHEDULE),
]


@pytest.mark.parametrize(("state", "end", "mode"), ENDS)
async def test_a_job_that_ended_in_the_ledger_ends(
    redis_harness: RedisHarness, rig: Rig, state: State, end: State, mode: RetryVia
) -> None:
    other, _ = await rig.put_in(end, tenant_id="a")
    job_id, claim = await rig.put_in(state, idempotency_key="k", tenant_id="a")
    ended = msgspec.structs.replace(await rig.view(other), job_id=job_id, idempotency_key="k")
    await close_gate(redis_harness)
    events = await rig.event_types(job_id)
    gate = await rig.engine.gate(QUEUE)
    assert await rig.engine.correct(QUEUE, gate.epoch, [ended]) == [True]
    assert await rig.engine.correct(QUEUE, gate.epoch, [ended]) == [False]
    assert await rig.view(job_id) == ended
    await open_queue(rig.engine, QUEUE)
    assert await rig.event_types(job_id) == events
    await rig.lose_leases()
    assert job_id not in {each.job_id for each in await rig.claim_due()}
    assert job_id not in {name for name, _ in await names(rig, 100)}
    if claim is not None:
        assert await rig.succeed(claim) != [SettleResult.APPLIED]
    assert (await rig.engine.submit([rig.envelope(idempotency_key="k", tenant_id="a")]))[0].job_id == job_id
    assert await rig.view(job_id) == ended


async def test_a_job_whose_record_cannot_be_read_keeps_its_end(redis_harness: RedisHarness, rig: Rig) -> None:
    """Another program has changed the record. Where its message is, is not known: the job may run again, in vain."""
    other, _ = await rig.put_in(State.SUCCEEDED)
    job_id = await rig.submit_one()
    await redis_harness.redis.set(redis_harness.keys(QUEUE).job(job_id), b"\xff garbage")
    ended = msgspec.structs.replace(await rig.view(other), job_id=job_id, idempotency_key=job_id)
    await close_gate(redis_harness)
    assert await rig.engine.correct(QUEUE, await rig.engine.epoch(QUEUE), [ended]) == [True]
    assert await rig.view(job_id) == ended
    await open_queue(rig.engine, QUEUE)
    for claim in await rig.claim():
        assert await rig.succeed(claim) != [SettleResult.APPLIED]
    assert await rig.view(job_id) == ended
    assert await rig.claim() == []


@pytest.mark.parametrize("state", [each for each in OPEN if each is not State.QUEUED])
async def test_a_job_is_corrected_once(redis_harness: RedisHarness, rig: Rig, state: State) -> None:
    """Several processes verify at a time; each has read the job before another one corrected it."""
    other, _ = await rig.put_in(state)
    job_id = await rig.submit_one()
    corrected = msgspec.structs.replace(await rig.view(other), job_id=job_id, idempotency_key=job_id)
    await close_gate(redis_harness)
    epoch = await rig.engine.epoch(QUEUE)
    assert await rig.engine.correct(QUEUE, epoch, [corrected]) == [True]
    assert await rig.engine.correct(QUEUE, epoch, [corrected]) == [False]
    assert await rig.event_types(job_id) == ["task.created", "task.restored"]
    assert await rig.state(job_id) is (State.QUEUED if state is State.RUNNING else state)


async def test_nothing_is_corrected_once_the_gate_is_open(rig: Rig) -> None:
    other, _ = await rig.put_in(State.SUCCEEDED)
    retrying, _ = await rig.put_in(State.RETRYING)
    job_id = await rig.submit_one()
    ended = msgspec.structs.replace(await rig.view(other), job_id=job_id)
    waits = msgspec.structs.replace(await rig.view(retrying), job_id=job_id)
    epoch = await rig.engine.epoch(QUEUE)
    assert await rig.engine.correct(QUEUE, epoch, [ended]) is None
    assert await rig.engine.correct(QUEUE, "another", [ended]) is None
    # Opened without the ledger: jobs have moved since, so the ledger is sure of ends only.
    await rig.engine.open_gate(QUEUE, epoch, verified=False)
    assert await rig.engine.correct(QUEUE, epoch, [waits]) == [False]
    assert await rig.state(job_id) is State.QUEUED
    assert await rig.engine.correct(QUEUE, epoch, [ended]) == [True]
    assert await rig.state(job_id) is State.SUCCEEDED


async def test_without_a_ledger_there_is_no_gate(redis_harness: RedisHarness) -> None:
    rig = await Rig.on(redis_harness)
    assert (await rig.engine.gate(QUEUE)).is_open
    assert await rig.succeed(await rig.start_one()) == [SettleResult.APPLIED]
    await close_gate(redis_harness)
    assert await rig.succeed(await rig.start_one()) == [SettleResult.APPLIED]


async def test_an_operators_move_waits_for_the_verification(redis_harness: RedisHarness, rig: Rig) -> None:
    job_id = await rig.submit_one()
    await close_gate(redis_harness)
    rig.engine.on_unverified(lambda queue: asyncio.create_task(open_queue(rig.engine, queue)))
    assert await rig.move(job_id, State.CANCELLED) is State.QUEUED


def test_the_error_is_an_unavailable_engine() -> None:
    assert issubclass(QueueUnverified, EngineUnavailable)
