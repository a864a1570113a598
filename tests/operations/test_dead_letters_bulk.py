"""Bulk replays and discards: rate limit, one result per dead letter, and isolation of failures (requirement D4)."""

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
from holdfast.execution.backend import backend_of
from holdfast.ledger.port.operators import DeadLetterStatus
from holdfast.ledger.queries.operator_filters import DeadLetterFilter
from holdfast.operations.bulk import BulkResult
from holdfast.operations.dead_letters import DeadLetterOperations
from tests.operations.dead_letters import EVERY, FailingSubmitter, get_operations, list_job_ids
from tests.operations.deployment import ADA, BOB, OF_GLOBEX, SampleDeployment


async def test_a_bulk_replay_has_a_dry_run_and_a_rate_limit(deployment: SampleDeployment) -> None:
    operations = get_operations(deployment)
    await deployment.make_dead_letters(5)
    await deployment.make_dead_letters(2, tenant_id="acme")
    filters = DeadLetterFilter(tenants=("default",))
    dry = await operations.replay_many(ADA, filters, reason="", dry_run=True)
    assert (dry.matched, dry.dry_run, dry.results) == (5, True, [])
    assert len(await list_job_ids(deployment)) == 7
    deployment.broken = False
    reported: list[BulkResult] = []
    began = asyncio.get_running_loop().time()
    report = await operations.replay_many(ADA, filters, reason="outage", rate_per_s=20, progress=reported.append)
    # Five at 20/s: the first at once, the fifth after 0.2 s.
    assert asyncio.get_running_loop().time() - began >= 0.19
    assert (report.matched, report.done, report.failed, report.stopped) == (5, 5, 0, "")
    assert reported == report.results
    await deployment.run()
    assert {(await deployment.info(result.job_id)).state for result in report.results} == {State.SUCCEEDED}
    again = await operations.replay_many(ADA, EVERY, reason="outage")
    assert again.matched == 2
    assert (await operations.replay_many(ADA, EVERY, reason="")).matched == 0


async def test_an_invalid_payload_fails_only_its_own_dead_letter(deployment: SampleDeployment) -> None:
    operations = get_operations(deployment)
    good = await deployment.make_dead_letters(2)
    job = await deployment.app.submit_raw("charge", b'{"amount": 5}')
    await deployment.run()
    other_app = Holdfast(settings=deployment.app.settings)

    @other_app.task(name="charge")
    async def other(amount: str) -> None: ...

    # This app's signature of the task expects text, so no payload is valid.
    ledger = backend_of(deployment.app).ledger
    assert ledger is not None
    strict = DeadLetterOperations(deployment.app.engine, ledger, specs=backend_of(other_app).specs)
    report = await strict.replay_many(ADA, EVERY, reason="")
    assert (report.matched, report.done, report.failed) == (3, 0, 3)
    assert {result.code for result in report.results} == {"INVALID_PAYLOAD"}
    assert (await operations.replay_many(ADA, EVERY, reason="")).done == 3
    assert len(good) == 2
    assert job.id


async def test_an_interrupted_bulk_replay_can_be_repeated(deployment: SampleDeployment) -> None:
    operations = get_operations(deployment)
    await deployment.make_dead_letters(6)

    def stop(_: BulkResult) -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await operations.replay_many(ADA, EVERY, reason="", rate_per_s=20, progress=stop)
    report = await operations.replay_many(ADA, EVERY, reason="")
    assert report.matched == report.done == 5
    assert len(await list_job_ids(deployment)) == 12


async def test_a_paused_queue_does_not_stop_the_others(deployment: SampleDeployment) -> None:
    operations = get_operations(deployment)
    closed = await deployment.make_dead_letters(3, queue="closed")
    await deployment.make_dead_letters(3)
    await deployment.app.engine.set_control("closed", QueueControl(intake_paused=True))
    report = await operations.replay_many(ADA, EVERY, reason="", rate_per_s=20)
    assert (report.matched, report.done, report.failed) == (6, 3, 1)
    assert "closed" in report.stopped
    assert {result.id for result in report.results if not result.done} <= set(closed)


async def test_an_unreachable_queue_does_not_stop_the_others(deployment: SampleDeployment) -> None:
    class PartlyFailing(FailingSubmitter):
        async def submit(self, envelope: Envelope) -> Receipt:
            if envelope.queue == "unreachable":
                raise EngineUnavailable("one node is dead")
            return (await deployment.app.engine.submit([envelope]))[0]

    unreachable = await deployment.make_dead_letters(3, queue="unreachable")
    await deployment.make_dead_letters(3)
    report = await get_operations(deployment, PartlyFailing(deployment)).replay_many(
        ADA, EVERY, reason="", rate_per_s=20
    )
    assert (report.matched, report.done, report.failed) == (6, 3, 1)
    assert "one node is dead" in report.stopped
    assert {result.id for result in report.results if not result.done} <= set(unreachable)


async def test_an_unreachable_ledger_stops_the_bulk_replay(deployment: SampleDeployment) -> None:
    operations = get_operations(deployment)
    await deployment.make_dead_letters(3)
    calls = 0

    async def refuse(*_: Any, **__: Any) -> Any:
        nonlocal calls
        calls += 1
        raise LedgerUnavailable("the ledger is down")

    operations._operators = Mock(wraps=operations._operators, reserve_replay=refuse)
    report = await operations.replay_many(ADA, EVERY, reason="", rate_per_s=20)
    assert (report.done, report.failed, report.stopped, calls) == (0, 1, "the ledger is down", 1)


async def test_a_paused_intake_stops_the_rest_of_its_queue(deployment: SampleDeployment) -> None:
    operations = get_operations(deployment)
    await deployment.make_dead_letters(4)
    await deployment.app.engine.set_control("default", QueueControl(intake_paused=True))
    report = await operations.replay_many(ADA, EVERY, reason="", rate_per_s=20)
    assert (report.matched, report.done, report.failed) == (4, 0, 1)
    assert "paused" in report.stopped
    await deployment.app.engine.set_control("default", QueueControl())
    assert (await operations.replay_many(ADA, EVERY, reason="")).done == 4


async def test_a_rate_of_zero_is_refused(deployment: SampleDeployment) -> None:
    with pytest.raises(InvalidOption):
        await get_operations(deployment).replay_many(ADA, EVERY, reason="", rate_per_s=0)


async def test_a_bulk_discard_needs_two_operators(deployment: SampleDeployment) -> None:
    operations = get_operations(deployment)
    await deployment.make_dead_letters(3)
    await deployment.make_dead_letters(1, tenant_id="globex")
    filters = DeadLetterFilter(tenants=("default",))
    assert (await operations.discard_many(ADA, filters, reason="old", dry_run=True)).matched == 3
    assert (await operations.discard_many(ADA, filters, reason="old")).done == 3
    same = await operations.confirm_many(ADA, EVERY)
    assert (same.done, same.failed) == (0, 3)
    assert {result.code for result in same.results} == {"FORBIDDEN"}
    assert (await operations.confirm_many(OF_GLOBEX, EVERY)).matched == 0
    assert (await operations.confirm_many(BOB, EVERY, dry_run=True)).matched == 3
    assert (await operations.confirm_many(BOB, EVERY)).done == 3
    assert await operations.count(ADA, DeadLetterFilter(statuses=frozenset({DeadLetterStatus.DISCARDED}))) == 3
    assert await operations.count(ADA, DeadLetterFilter(statuses=frozenset({DeadLetterStatus.OPEN}))) == 1
