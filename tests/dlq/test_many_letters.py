"""Many dead letters at once: at a pace, each with its result, and none that hinders others (requirement D4)."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest

from holdfast import Holdfast
from holdfast.core.job import Envelope, Receipt
from holdfast.core.states import State
from holdfast.engine.port.operators import QueueControl
from holdfast.errors import EngineUnavailable, InvalidOption, LedgerUnavailable
from holdfast.ledger.port.operators import DeadLetterStatus
from holdfast.ledger.queries.operator_filters import DeadLetterFilter
from holdfast.operations.bulk import BulkResult
from holdfast.operations.dead_letters import DeadLetterOperations
from tests.dlq.support import EVERY, Broken, jobs_of, office
from tests.people.world import ADA, BOB, OF_GLOBEX, World


async def test_a_filter_is_counted_first_and_replayed_at_a_pace(world: World) -> None:
    letters = office(world)
    await world.dead(5)
    await world.dead(2, tenant_id="acme")
    wanted = DeadLetterFilter(tenants=("default",))
    dry = await letters.replay_many(ADA, wanted, reason="", dry_run=True)
    assert (dry.matched, dry.dry_run, dry.results) == (5, True, [])
    assert len(await jobs_of(world)) == 7
    world.broken = False
    told: list[BulkResult] = []
    began = asyncio.get_running_loop().time()
    report = await letters.replay_many(ADA, wanted, reason="outage", rate_per_s=20, progress=told.append)
    # Five at twenty a second: the first at once, the fifth after 0.2 s.
    assert asyncio.get_running_loop().time() - began >= 0.19
    assert (report.matched, report.done, report.failed, report.stopped) == (5, 5, 0, "")
    assert told == report.results
    await world.run()
    assert {(await world.view(result.job_id)).state for result in report.results} == {State.SUCCEEDED}
    again = await letters.replay_many(ADA, EVERY, reason="outage")
    assert again.matched == 2
    assert (await letters.replay_many(ADA, EVERY, reason="")).matched == 0


async def test_one_that_cannot_be_replayed_hinders_no_other(world: World) -> None:
    letters = office(world)
    good = await world.dead(2)
    view = await world.app.submit_raw("charge", b'{"amount": 5}')
    await world.run()
    stranger = Holdfast(settings=world.app.settings)

    @stranger.task(name="charge")
    async def other(amount: str) -> None: ...

    # Whoever knows the task knows that 5 is no text; of the others too.
    ledger = world.app.ledger_backend
    assert ledger is not None
    picky = DeadLetterOperations(world.app.engine, ledger, specs=stranger.specs)
    report = await picky.replay_many(ADA, EVERY, reason="")
    assert (report.matched, report.done, report.failed) == (3, 0, 3)
    assert {result.code for result in report.results} == {"INVALID_PAYLOAD"}
    assert (await letters.replay_many(ADA, EVERY, reason="")).done == 3
    assert len(good) == 2
    assert view.id


async def test_a_call_that_was_broken_off_is_just_repeated(world: World) -> None:
    letters = office(world)
    await world.dead(6)

    def stop(_: BulkResult) -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await letters.replay_many(ADA, EVERY, reason="", rate_per_s=20, progress=stop)
    report = await letters.replay_many(ADA, EVERY, reason="")
    assert report.matched == report.done == 5
    assert len(await jobs_of(world)) == 12


async def test_a_queue_that_takes_nothing_does_not_stop_the_others(world: World) -> None:
    letters = office(world)
    shut = await world.dead(3, queue="shut")
    await world.dead(3)
    await world.app.engine.set_control("shut", QueueControl(intake_paused=True))
    report = await letters.replay_many(ADA, EVERY, reason="", rate_per_s=20)
    assert (report.matched, report.done, report.failed) == (6, 3, 1)
    assert "shut" in report.stopped
    assert {result.id for result in report.results if not result.done} <= set(shut)


async def test_a_queue_that_does_not_answer_does_not_stop_the_others(world: World) -> None:
    class PartlyBroken(Broken):
        async def submit(self, envelope: Envelope) -> Receipt:
            if envelope.queue == "away":
                raise EngineUnavailable("one node is dead")
            return (await world.app.engine.submit([envelope]))[0]

    away = await world.dead(3, queue="away")
    await world.dead(3)
    report = await office(world, PartlyBroken(world)).replay_many(ADA, EVERY, reason="", rate_per_s=20)
    assert (report.matched, report.done, report.failed) == (6, 3, 1)
    assert "one node is dead" in report.stopped
    assert {result.id for result in report.results if not result.done} <= set(away)


async def test_a_ledger_that_does_not_answer_stops_all(world: World) -> None:
    letters = office(world)
    await world.dead(3)
    begun = 0

    async def begin_replay(*_: Any, **__: Any) -> Any:
        nonlocal begun
        begun += 1
        raise LedgerUnavailable("the ledger is down")

    letters._operators = Mock(wraps=letters._operators, reserve_replay=begin_replay)
    report = await letters.replay_many(ADA, EVERY, reason="", rate_per_s=20)
    assert (report.done, report.failed, report.stopped, begun) == (0, 1, "the ledger is down", 1)


async def test_a_refusal_stops_the_rest(world: World) -> None:
    letters = office(world)
    await world.dead(4)
    await world.app.engine.set_control("default", QueueControl(intake_paused=True))
    report = await letters.replay_many(ADA, EVERY, reason="", rate_per_s=20)
    assert (report.matched, report.done, report.failed) == (4, 0, 1)
    assert "paused" in report.stopped
    await world.app.engine.set_control("default", QueueControl())
    assert (await letters.replay_many(ADA, EVERY, reason="")).done == 4


async def test_a_rate_must_be_one(world: World) -> None:
    with pytest.raises(InvalidOption):
        await office(world).replay_many(ADA, EVERY, reason="", rate_per_s=0)


async def test_many_are_thrown_away_by_two_people(world: World) -> None:
    letters = office(world)
    await world.dead(3)
    await world.dead(1, tenant_id="globex")
    wanted = DeadLetterFilter(tenants=("default",))
    assert (await letters.discard_many(ADA, wanted, reason="old", dry_run=True)).matched == 3
    assert (await letters.discard_many(ADA, wanted, reason="old")).done == 3
    same = await letters.confirm_many(ADA, EVERY)
    assert (same.done, same.failed) == (0, 3)
    assert {result.code for result in same.results} == {"FORBIDDEN"}
    assert (await letters.confirm_many(OF_GLOBEX, EVERY)).matched == 0
    assert (await letters.confirm_many(BOB, EVERY, dry_run=True)).matched == 3
    assert (await letters.confirm_many(BOB, EVERY)).done == 3
    assert await letters.count(ADA, DeadLetterFilter(statuses=frozenset({DeadLetterStatus.DISCARDED}))) == 3
    assert await letters.count(ADA, DeadLetterFilter(statuses=frozenset({DeadLetterStatus.OPEN}))) == 1
