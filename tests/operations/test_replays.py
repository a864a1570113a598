"""Replays are idempotent: by key, and by the state of the latest replay (requirement D3)."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.core.states import State
from holdfast.engine.port.operators import QueueControl
from holdfast.errors import (
    AlreadyReplayed,
    Conflict,
    EngineUnavailable,
    IntakeRefused,
    InvalidOption,
    ReplayKeyReused,
)
from holdfast.execution.backend import backend_of
from holdfast.ledger.port.operators import DeadLetterStatus
from holdfast.ledger.queries.operator_filters import DeadLetterFilter
from holdfast.upkeep.dispatch import ReplaySubmission
from tests.operations.dead_letters import EVERY, FailingSubmitter, get_operations, get_status, list_job_ids
from tests.operations.deployment import ADA, BOB, OF_ACME, SampleDeployment, principal

# Without a key -------------------------------------------------------------------------------------


async def test_an_open_replay_is_not_repeated(deployment: SampleDeployment) -> None:
    operations = get_operations(deployment)
    (dlq_id,) = await deployment.make_dead_letters()
    first = await operations.replay(ADA, dlq_id, reason="")
    # Also before the ledger has the new job.
    with pytest.raises(AlreadyReplayed) as refused:
        await operations.replay(BOB, dlq_id, reason="")
    await deployment.wait_caught_up()
    with pytest.raises(AlreadyReplayed):
        await operations.replay(BOB, dlq_id, reason="")
    assert refused.value.job_id == first.job_id
    assert first.job_id in str(refused.value)
    assert len(await list_job_ids(deployment)) == 2
    assert len(await deployment.audit_log("operator.dlq_replay")) == 1


async def test_a_succeeded_replay_is_repeated_only_on_request(deployment: SampleDeployment) -> None:
    operations = get_operations(deployment)
    (dlq_id,) = await deployment.make_dead_letters()
    deployment.broken = False
    first = await operations.replay(ADA, dlq_id, reason="")
    await deployment.run()
    with pytest.raises(AlreadyReplayed, match="again"):
        await operations.replay(ADA, dlq_id, reason="")
    second = await operations.replay(ADA, dlq_id, reason="", again=True)
    assert (first.number, second.number) == (1, 2)
    assert (await deployment.info(second.job_id)).idempotency_key == f"dlq:{dlq_id}:2"


@pytest.mark.parametrize("end", [State.FAILED, State.CANCELLED])
async def test_a_replay_that_failed_can_be_repeated(deployment: SampleDeployment, end: State) -> None:
    operations = get_operations(deployment)
    (dlq_id,) = await deployment.make_dead_letters()
    first = await operations.replay(ADA, dlq_id, reason="")
    if end is State.CANCELLED:
        await deployment.operations.jobs.cancel(ADA, first.job_id, reason="")
        await deployment.wait_caught_up()
    else:
        await deployment.run()
        await deployment.app.engine.wait_final("default", first.job_id, 30_000)
        await deployment.wait_caught_up()
    assert (await deployment.info(first.job_id)).state is end
    assert (await operations.replay(ADA, dlq_id, reason="")).number == 2


async def test_fifty_concurrent_replays_submit_one_job(deployment: SampleDeployment) -> None:
    operations = [get_operations(deployment) for _ in range(50)]
    (dlq_id,) = await deployment.make_dead_letters()
    ended = await asyncio.gather(
        *(each.replay(principal(f"p{number}"), dlq_id, reason="") for number, each in enumerate(operations)),
        return_exceptions=True,
    )
    done = [result for result in ended if not isinstance(result, BaseException)]
    refused = [error for error in ended if isinstance(error, AlreadyReplayed)]
    assert (len(done), len(refused)) == (1, 49)
    assert {error.job_id for error in refused} == {done[0].job_id}
    assert len(await list_job_ids(deployment)) == 2
    assert len(await deployment.audit_log("operator.dlq_replay")) == 1


async def test_a_refused_repetition_leaves_the_replay_before_it(deployment: SampleDeployment) -> None:
    operations = get_operations(deployment)
    (dlq_id,) = await deployment.make_dead_letters()
    first = await operations.replay(ADA, dlq_id, reason="")
    await deployment.app.engine.set_control("default", QueueControl(intake_paused=True))
    with pytest.raises(IntakeRefused):
        await operations.replay(ADA, dlq_id, reason="", again=True)
    await deployment.app.engine.set_control("default", QueueControl())
    dead_letter = await operations.show(ADA, dlq_id)
    assert (dead_letter.status, dead_letter.replayed_as) == (DeadLetterStatus.REPLAYED, first.job_id)
    with pytest.raises(AlreadyReplayed):
        await operations.replay(ADA, dlq_id, reason="")


async def test_a_pending_replay_is_not_overtaken(deployment: SampleDeployment) -> None:
    (dlq_id,) = await deployment.make_dead_letters()
    with pytest.raises(EngineUnavailable):
        await get_operations(deployment, FailingSubmitter(deployment)).replay(ADA, dlq_id, reason="")
    for again in (False, True):
        with pytest.raises(AlreadyReplayed, match="being submitted"):
            await get_operations(deployment).replay(BOB, dlq_id, reason="", again=again)
    assert await get_operations(deployment).submit_pending() == 1
    assert len(await list_job_ids(deployment)) == 2


async def test_a_job_submitted_although_its_replay_was_cancelled_is_recorded(deployment: SampleDeployment) -> None:
    """Upkeep has read the reservation, the caller is refused and cancels it, then upkeep's submission is accepted."""
    ledger = backend_of(deployment.app).ledger
    assert ledger is not None
    (dlq_id,) = await deployment.make_dead_letters()
    reserved = await ledger.operators.reserve_replay(None, dlq_id, actor="ada", reason="", payload=None)
    await ledger.operators.cancel_replay(reserved, actor="ada", reason="intake is paused")
    assert await get_status(deployment, dlq_id) is DeadLetterStatus.OPEN
    await ledger.operators.mark_submitted([reserved])
    dead_letter = await get_operations(deployment).show(ADA, dlq_id)
    assert (dead_letter.status, dead_letter.replayed_as) == (DeadLetterStatus.REPLAYED, reserved.new_job_id)


# With a key ----------------------------------------------------------------------------------------


async def test_the_same_key_is_the_same_replay(deployment: SampleDeployment) -> None:
    operations = get_operations(deployment)
    (dlq_id,) = await deployment.make_dead_letters()
    edited = b'{"amount": 12, "currency": "CHF"}'
    first = await operations.replay(ADA, dlq_id, reason="a", payload=edited, idempotency_key="k")
    # The order of names and the reason do not matter.
    same = b'{ "currency": "CHF", "amount": 12 }'
    second = await operations.replay(BOB, dlq_id, reason="b", payload=same, idempotency_key="k")
    assert (first.duplicate, second.duplicate) == (False, True)
    assert (second.job_id, second.number) == (first.job_id, 1)
    later = await operations.replay(ADA, dlq_id, reason="", idempotency_key="l", again=True)
    assert later.number == 2
    # Also after another replay.
    third = await operations.replay(ADA, dlq_id, reason="", payload=edited, idempotency_key="k")
    assert (third.job_id, third.number, third.duplicate) == (first.job_id, 1, True)
    assert len(await list_job_ids(deployment)) == 3


async def test_fifty_concurrent_replays_with_one_key_get_one_job(deployment: SampleDeployment) -> None:
    operations = [get_operations(deployment) for _ in range(50)]
    (dlq_id,) = await deployment.make_dead_letters()
    ended = await asyncio.gather(
        *(each.replay(ADA, dlq_id, reason="", idempotency_key="order-7") for each in operations)
    )
    assert len({result.job_id for result in ended}) == 1
    assert [result.duplicate for result in ended].count(False) == 1
    assert len(await list_job_ids(deployment)) == 2


async def test_a_key_belongs_to_one_dead_letter_and_its_options(deployment: SampleDeployment) -> None:
    operations = get_operations(deployment)
    one, two = await deployment.make_dead_letters(2)
    (elsewhere,) = await deployment.make_dead_letters(1, tenant_id="acme")
    await operations.replay(ADA, one, reason="", idempotency_key="k")
    for dlq_id, options in ((two, {}), (one, {"payload": b'{"amount": 1}'}), (one, {"again": True})):
        with pytest.raises(ReplayKeyReused):
            await operations.replay(ADA, dlq_id, reason="", idempotency_key="k", **options)
    assert await get_status(deployment, two) is DeadLetterStatus.OPEN
    # Tenants do not share keys.
    assert not (await operations.replay(OF_ACME, elsewhere, reason="", idempotency_key="k")).duplicate
    for key in ("", "x" * 10_000, "a\x00b"):
        with pytest.raises(InvalidOption):
            await operations.replay(ADA, two, reason="", idempotency_key=key)


async def test_concurrent_replays_of_several_dead_letters_cannot_share_a_key(deployment: SampleDeployment) -> None:
    operations = get_operations(deployment)
    dlq_ids = await deployment.make_dead_letters(6)
    ended = await asyncio.gather(
        *(operations.replay(ADA, dlq_id, reason="", idempotency_key="k") for dlq_id in dlq_ids), return_exceptions=True
    )
    done = [result for result in ended if not isinstance(result, BaseException)]
    assert len(done) == 1
    assert [type(error) for error in ended if isinstance(error, BaseException)] == [ReplayKeyReused] * 5
    assert len(await list_job_ids(deployment)) == 7


async def test_a_key_whose_replay_was_refused_can_be_used_again(deployment: SampleDeployment) -> None:
    operations = get_operations(deployment)
    (dlq_id,) = await deployment.make_dead_letters()
    await deployment.app.engine.set_control("default", QueueControl(intake_paused=True))
    with pytest.raises(IntakeRefused):
        await operations.replay(ADA, dlq_id, reason="", idempotency_key="k")
    await deployment.app.engine.set_control("default", QueueControl())
    done = await operations.replay(ADA, dlq_id, reason="", idempotency_key="k")
    assert (done.number, done.duplicate) == (2, False)


@pytest.mark.parametrize("after", [False, True])
async def test_a_key_finishes_its_interrupted_replay(deployment: SampleDeployment, after: bool) -> None:
    (dlq_id,) = await deployment.make_dead_letters()
    with pytest.raises(EngineUnavailable):
        await get_operations(deployment, FailingSubmitter(deployment, after=after)).replay(
            ADA, dlq_id, reason="", idempotency_key="k"
        )
    done = await get_operations(deployment).replay(ADA, dlq_id, reason="", idempotency_key="k")
    ledger = backend_of(deployment.app).ledger
    assert ledger is not None
    assert await ledger.operators.unsubmitted_replays(10) == []
    await ReplaySubmission(deployment.app.engine, ledger).run_once()
    assert (done.number, done.duplicate) == (1, True)
    assert len(await list_job_ids(deployment)) == 2


# Many ----------------------------------------------------------------------------------------------


async def test_a_bulk_replay_skips_and_counts_what_is_replayed(deployment: SampleDeployment) -> None:
    operations = get_operations(deployment)
    dlq_ids = await deployment.make_dead_letters(3)
    await deployment.make_dead_letters(1, queue="other")
    await operations.replay(ADA, dlq_ids[0], reason="")
    dry = await operations.replay_many(ADA, EVERY, reason="", dry_run=True)
    assert (dry.matched, dry.skipped) == (3, 1)
    here = DeadLetterFilter(queues=frozenset({"default"}))
    report = await operations.replay_many(ADA, here, reason="")
    assert (report.matched, report.done, report.failed, report.skipped) == (2, 2, 0, 1)
    again = await operations.replay_many(ADA, here, reason="")
    assert (again.matched, again.done, again.failed, again.skipped) == (0, 0, 0, 3)


async def test_concurrent_bulk_replays_submit_each_dead_letter_once(deployment: SampleDeployment) -> None:
    await deployment.make_dead_letters(12)
    reports = await asyncio.gather(
        *(get_operations(deployment).replay_many(ADA, EVERY, reason="", rate_per_s=500) for _ in range(4))
    )
    assert sum(report.done for report in reports) == 12
    assert {report.failed for report in reports} == {0}
    assert len(await list_job_ids(deployment)) == 24


async def test_a_discarded_dead_letter_is_still_a_plain_conflict(deployment: SampleDeployment) -> None:
    operations = get_operations(deployment)
    (dlq_id,) = await deployment.make_dead_letters()
    await operations.discard(ADA, dlq_id, "old")
    with pytest.raises(Conflict) as refused:
        await operations.replay(ADA, dlq_id, reason="", again=True, idempotency_key="k")
    assert not isinstance(refused.value, AlreadyReplayed)
