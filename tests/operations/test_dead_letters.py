"""Dead letters: lists, replays that submit one job, and discards by two operators (requirements D3–D5)."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from holdfast.core.principal import Role
from holdfast.core.states import State
from holdfast.engine.port.operators import QueueControl
from holdfast.errors import (
    Conflict,
    Denied,
    EngineUnavailable,
    Forbidden,
    IntakeRefused,
    InvalidOption,
    InvalidPayload,
    NotFound,
    PayloadTooLarge,
)
from holdfast.execution.backend import backend_of
from holdfast.guard import decisions
from holdfast.ledger.port.operators import DeadLetterStatus
from holdfast.ledger.queries.operator_filters import DeadLetterFilter
from holdfast.operations.dead_letters import PayloadChange
from holdfast.upkeep.dispatch import ReplaySubmission
from tests.operations.dead_letters import EVERY, FailingSubmitter, get_operations, get_status, list_job_ids
from tests.operations.deployment import ADA, APPROVER, BOB, LOCAL, OF_ACME, VIEWER, SampleDeployment

# Lists ---------------------------------------------------------------------------------------------


async def test_dead_letters_are_listed_grouped_and_shown_with_their_history(deployment: SampleDeployment) -> None:
    operations = get_operations(deployment)
    dlq_ids = await deployment.make_dead_letters(3)
    page = await operations.list(ADA, EVERY)
    assert {dead_letter.dlq_id for dead_letter in page.dead_letters} == set(dlq_ids)
    (group,) = await operations.groups(ADA, EVERY)
    # "card 10 refused", "card 11 refused" … have the same fingerprint.
    assert (group.count, group.job_type, group.error_code) == (3, "charge", page.dead_letters[0].error_code)
    assert await operations.count(ADA, DeadLetterFilter(fingerprint=group.fingerprint, text="CARD 11")) == 1
    dead_letter = await operations.show(VIEWER, dlq_ids[0])
    assert dead_letter.payload.value == {"amount": 10}
    assert "card 10 refused" in dead_letter.error
    assert [event.type for event in dead_letter.events][:2] == ["task.created", "task.claimed"]
    assert dead_letter.events[-1].to_state is State.FAILED


async def test_dead_letters_of_other_tenants_are_not_visible(deployment: SampleDeployment) -> None:
    operations = get_operations(deployment)
    (theirs,) = await deployment.make_dead_letters(1, tenant_id="globex")
    (ours,) = await deployment.make_dead_letters(1, tenant_id="acme")
    for filters in (EVERY, DeadLetterFilter(tenants=("globex", "acme"))):
        assert [dead_letter.dlq_id for dead_letter in (await operations.list(OF_ACME, filters)).dead_letters] == [ours]
        assert await operations.count(OF_ACME, filters) == 1
        assert [group.count for group in await operations.groups(OF_ACME, filters)] == [1]
        report = await operations.replay_many(OF_ACME, filters, reason="", dry_run=True)
        assert report.matched == 1
    only_theirs = DeadLetterFilter(tenants=("globex",))
    assert (await operations.list(OF_ACME, only_theirs)).dead_letters == []
    assert await operations.count(OF_ACME, only_theirs) == 0
    forbidden: list[Any] = [
        operations.show(OF_ACME, theirs),
        operations.diff(OF_ACME, theirs, b"{}"),
        operations.replay(OF_ACME, theirs, reason="r"),
        operations.discard(OF_ACME, theirs, "r"),
        operations.confirm(OF_ACME, theirs),
        operations.keep(OF_ACME, theirs),
    ]
    messages = set()
    for attempt in forbidden:
        with pytest.raises(NotFound) as refused:
            await attempt
        messages.add(str(refused.value))
    with pytest.raises(NotFound) as unknown:
        await operations.show(OF_ACME, "no-such-id")
    assert messages == {str(unknown.value).replace("no-such-id", theirs)}
    for bulk_operation in (operations.discard_many, operations.replay_many):
        assert (await bulk_operation(OF_ACME, only_theirs, reason="r")).results == []
    assert (await operations.confirm_many(OF_ACME, only_theirs)).results == []
    assert await get_status(deployment, theirs) is DeadLetterStatus.OPEN


async def test_changes_need_the_operator_role(deployment: SampleDeployment) -> None:
    operations = get_operations(deployment)
    (dlq_id,) = await deployment.make_dead_letters()
    for actor in (VIEWER, APPROVER):
        attempts: list[Any] = [
            operations.replay(actor, dlq_id, reason="r"),
            operations.replay_many(actor, EVERY, reason="r"),
            operations.replay_many(actor, EVERY, reason="r", dry_run=True),
            operations.discard(actor, dlq_id, "r"),
            operations.discard_many(actor, EVERY, reason="r"),
            operations.confirm(actor, dlq_id),
            operations.confirm_many(actor, EVERY),
            operations.keep(actor, dlq_id),
        ]
        for attempt in attempts:
            with pytest.raises(Forbidden):
                await attempt
    assert await get_status(deployment, dlq_id) is DeadLetterStatus.OPEN


# Replays -------------------------------------------------------------------------------------------


async def test_a_replay_is_a_new_job_with_a_reference_to_its_dead_letter(deployment: SampleDeployment) -> None:
    operations = get_operations(deployment)
    (dlq_id,) = await deployment.make_dead_letters(
        1, idempotency_key="order-1", context={"user": "u1"}, trace_id="t-1", priority="high"
    )
    first = await operations.show(ADA, dlq_id)
    deployment.broken = False
    done = await operations.replay(ADA, dlq_id, reason="the bank is back")
    await deployment.run()
    info = await deployment.info(done.job_id)
    assert info.state is State.SUCCEEDED
    assert info.idempotency_key == f"dlq:{dlq_id}:1"
    assert info.meta.replay is not None
    assert (info.meta.replay.dlq_id, info.meta.replay.job_id, info.meta.replay.key) == (dlq_id, first.job_id, "order-1")
    assert (info.trace_id, info.meta.context, info.meta.priority) == ("t-1", {"user": "u1"}, 0)
    # Effects keep the idempotency key of the first job.
    assert deployment.runs == [(10, "order-1"), (10, "order-1")]
    assert deployment.paid == ["order-1"]
    dead_letter = await operations.show(ADA, dlq_id)
    assert (dead_letter.status, dead_letter.replayed_as, dead_letter.replay_count) == (
        DeadLetterStatus.REPLAYED,
        done.job_id,
        1,
    )
    (entry,) = await deployment.audit_log("operator.dlq_replay")
    assert (entry.actor, entry.reason, entry.target_id, entry.before.value["status"]) == (
        "ada",
        "the bank is back",
        dlq_id,
        "open",
    )
    assert entry.after.value["replayed_as"] == done.job_id


async def test_a_replay_of_a_replay_keeps_the_first_key(deployment: SampleDeployment) -> None:
    operations = get_operations(deployment)
    (dlq_id,) = await deployment.make_dead_letters()
    first_job = (await operations.show(ADA, dlq_id)).job_id
    second = await operations.replay(ADA, dlq_id, reason="")
    await deployment.run()
    third = await operations.replay(ADA, (await deployment.info(second.job_id)).meta.dlq_id, reason="")
    deployment.broken = False
    await deployment.run()
    assert (await deployment.info(third.job_id)).state is State.SUCCEEDED
    assert [key for _, key in deployment.runs] == [first_job] * 3
    assert deployment.paid == [first_job]


async def test_a_replay_keeps_the_jobs_retry_policy(deployment: SampleDeployment) -> None:
    from holdfast import Retry

    (dlq_id,) = await deployment.make_dead_letters(1, retry=Retry(max_retries=7))
    done = await get_operations(deployment).replay(ADA, dlq_id, reason="")
    assert (await deployment.info(done.job_id)).meta.retry == Retry(max_retries=7)


async def test_an_edited_payload_is_diffed_validated_and_run(deployment: SampleDeployment) -> None:
    operations = get_operations(deployment)
    (dlq_id,) = await deployment.make_dead_letters()
    edited = b'{"amount": 99, "currency": "CHF"}'
    changes = await operations.diff(ADA, dlq_id, edited)
    assert [change.document for change in changes] == [
        {"path": "/amount", "before": 10, "after": 99},
        {"path": "/currency", "after": "CHF"},
    ]
    assert changes[0] == PayloadChange("/amount", 10, 99)
    deployment.broken = False
    done = await operations.replay(ADA, dlq_id, reason="wrong amount", payload=edited)
    await deployment.run()
    info = await deployment.info(done.job_id)
    assert info.result == b'"99 CHF"'
    # The dead letter keeps its payload.
    assert (await operations.show(ADA, dlq_id)).payload.value == {"amount": 10}
    (entry,) = await deployment.audit_log("operator.dlq_replay")
    assert entry.after.value["edited"] is True


async def test_an_invalid_payload_changes_nothing(deployment: SampleDeployment) -> None:
    operations = get_operations(deployment)
    (dlq_id,) = await deployment.make_dead_letters()
    large = b'{"amount": 1, "currency": "' + b"x" * (1024 * 1024) + b'"}'
    for payload in (b"not json", b"42", b'{"amount": "much"}', b'{"sum": 1}', b"\xff", large):
        error = PayloadTooLarge if payload is large else InvalidPayload
        with pytest.raises(error):
            await operations.diff(ADA, dlq_id, payload)
        with pytest.raises(error):
            await operations.replay(ADA, dlq_id, reason="", payload=payload)
    assert await get_status(deployment, dlq_id) is DeadLetterStatus.OPEN
    assert await deployment.audit_log("operator.dlq_replay") == []


async def test_one_of_a_concurrent_replay_and_confirmed_discard_wins(deployment: SampleDeployment) -> None:
    operations = get_operations(deployment)
    for dlq_id in await deployment.make_dead_letters(6):
        await operations.discard(ADA, dlq_id, "too old")
        # A replay needs an open dead letter; the first of the three calls decides.
        kept, discarded, replayed = await asyncio.gather(
            operations.keep(BOB, dlq_id, "wait"),
            operations.confirm(BOB, dlq_id),
            operations.replay(BOB, dlq_id, reason="again"),
            return_exceptions=True,
        )
        dead_letter = await operations.show(ADA, dlq_id)
        assert isinstance(discarded, Conflict) or isinstance(replayed, Conflict)
        if dead_letter.status is DeadLetterStatus.DISCARDED:
            assert discarded is None
            assert dead_letter.replayed_as is None
            assert isinstance(kept, Conflict)
            with pytest.raises(Conflict, match="discarded"):
                await operations.replay(ADA, dlq_id, reason="")
        elif dead_letter.status is DeadLetterStatus.REPLAYED:
            assert dead_letter.replayed_as == replayed.job_id  # type: ignore[union-attr]
            with pytest.raises(Conflict):
                await operations.discard(ADA, dlq_id, "too old")


async def test_one_of_a_concurrent_discard_request_and_replay_wins(deployment: SampleDeployment) -> None:
    operations = get_operations(deployment)
    for dlq_id in await deployment.make_dead_letters(6):
        requested, replayed = await asyncio.gather(
            operations.discard(ADA, dlq_id, "too old"),
            operations.replay(BOB, dlq_id, reason=""),
            return_exceptions=True,
        )
        assert [isinstance(requested, Conflict), isinstance(replayed, Conflict)].count(True) == 1
        won = await get_status(deployment, dlq_id)
        assert won is (DeadLetterStatus.REPLAYED if requested is not None else DeadLetterStatus.DISCARD_REQUESTED)


# Crashes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [False, True])
async def test_upkeep_finishes_a_replay_after_a_crash(deployment: SampleDeployment, after: bool) -> None:
    (dlq_id,) = await deployment.make_dead_letters()
    with pytest.raises(EngineUnavailable, match="upkeep submits it"):
        await get_operations(deployment, FailingSubmitter(deployment, after=after)).replay(
            ADA, dlq_id, reason="", payload=b'{"amount": 77}'
        )  # fmt: skip
    ledger = backend_of(deployment.app).ledger
    assert ledger is not None
    pending = await ledger.operators.unsubmitted_replays(10)
    assert [row.dlq_id for row in pending] == [dlq_id]
    deployment.broken = False
    # Two concurrent passes and a repeated one all submit the same job.
    replays = [ReplaySubmission(deployment.app.engine, ledger) for _ in range(2)]
    await asyncio.gather(*(each.run_once() for each in replays))
    await replays[0].run_once()
    assert await ledger.operators.unsubmitted_replays(10) == []
    await deployment.run()
    dead_letter = await get_operations(deployment).show(ADA, dlq_id)
    assert dead_letter.replayed_as is not None
    assert (await deployment.info(dead_letter.replayed_as)).result == b'"77 EUR"'
    assert len(await list_job_ids(deployment)) == 2
    assert len(deployment.runs) == 2


async def test_a_refused_replay_does_not_stop_the_others(
    deployment: SampleDeployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    dlq_ids = [(await deployment.make_dead_letters())[0] for _ in range(3)]
    for dlq_id in dlq_ids:
        with pytest.raises(EngineUnavailable):
            await get_operations(deployment, FailingSubmitter(deployment)).replay(ADA, dlq_id, reason="")
    deployment.broken = False
    ledger, engine = backend_of(deployment.app).ledger, deployment.app.engine
    assert ledger is not None
    refused, *others = await ledger.operators.unsubmitted_replays(10)
    submit_each = engine.submit_each

    async def refuse_one(envelopes: Any) -> Any:
        if envelopes[0].job_id == refused.new_job_id:
            raise IntakeRefused(refused.queue, "made to fail by the test")
        return await submit_each(envelopes)

    monkeypatch.setattr(engine, "submit_each", refuse_one)
    # A page with nothing but refused replays.
    assert await get_operations(deployment).submit_pending(1) == len(others)
    assert await ledger.operators.unsubmitted_replays(10) == [refused]


async def test_a_paused_intake_leaves_the_dead_letter_open(deployment: SampleDeployment) -> None:
    operations = get_operations(deployment)
    (dlq_id,) = await deployment.make_dead_letters()
    await deployment.app.engine.set_control("default", QueueControl(intake_paused=True))
    with pytest.raises(IntakeRefused):
        await operations.replay(ADA, dlq_id, reason="")
    assert await get_status(deployment, dlq_id) is DeadLetterStatus.OPEN
    (entry,) = await deployment.audit_log("operator.dlq_replay_refused")
    assert (entry.actor, entry.target_id) == ("ada", dlq_id)
    await deployment.app.engine.set_control("default", QueueControl())
    assert (await operations.replay(ADA, dlq_id, reason="")).number == 2


async def test_guards_review_a_replay_like_a_submission(deployment: SampleDeployment) -> None:
    (dlq_id,) = await deployment.make_dead_letters()
    requests: list[Any] = []

    @deployment.app.guard
    def refuse(request: decisions.GuardRequest) -> Any:
        requests.append(request)
        return decisions.Deny("not this one") if request.arguments["amount"] == 10 else None

    operations = get_operations(deployment)
    with pytest.raises(Denied, match="not this one"):
        await operations.replay(ADA, dlq_id, reason="")
    assert requests[0].task == "charge"
    assert await get_status(deployment, dlq_id) is DeadLetterStatus.OPEN
    assert len(await list_job_ids(deployment)) == 1
    await operations.replay(ADA, dlq_id, reason="", payload=b'{"amount": 11}')
    assert await get_status(deployment, dlq_id) is DeadLetterStatus.REPLAYED


# Discards ------------------------------------------------------------------------------------------


async def test_a_discard_needs_two_operators_and_a_reason(deployment: SampleDeployment) -> None:
    operations = get_operations(deployment)
    (dlq_id,) = await deployment.make_dead_letters()
    with pytest.raises(InvalidOption, match="reason"):
        await operations.discard(ADA, dlq_id, "  ")
    with pytest.raises(Conflict, match=r"no discard of .* was requested"):
        await operations.confirm(BOB, dlq_id)
    await operations.discard(ADA, dlq_id, "customer withdrew")
    with pytest.raises(Forbidden, match="another person"):
        await operations.confirm(ADA, dlq_id)
    # Operators are distinguished by name, not by role.
    with pytest.raises(Forbidden, match="another person"):
        await operations.confirm(msgspec.structs.replace(ADA, role=Role.ADMIN), dlq_id)
    await operations.confirm(BOB, dlq_id)
    dead_letter = await operations.show(ADA, dlq_id)
    assert (dead_letter.status, dead_letter.requested_by, dead_letter.confirmed_by, dead_letter.reason) == (
        DeadLetterStatus.DISCARDED,
        "ada",
        "bob",
        "customer withdrew",
    )
    (requested,) = await deployment.audit_log("operator.dlq_discard_request")
    (done,) = await deployment.audit_log("operator.dlq_discard")
    assert (requested.actor, requested.reason, done.actor) == ("ada", "customer withdrew", "bob")


async def test_a_discard_needs_a_verified_principal(deployment: SampleDeployment) -> None:
    operations = get_operations(deployment)
    (dlq_id,) = await deployment.make_dead_letters()
    with pytest.raises(Forbidden, match="HOLDFAST_TOKEN"):
        await operations.discard(LOCAL, dlq_id, "old")
    with pytest.raises(Forbidden, match="HOLDFAST_TOKEN"):
        await operations.discard_many(LOCAL, EVERY, reason="old")
    await operations.discard(ADA, dlq_id, "old")
    with pytest.raises(Forbidden, match="HOLDFAST_TOKEN"):
        await operations.confirm(LOCAL, dlq_id)
    with pytest.raises(Forbidden, match="HOLDFAST_TOKEN"):
        await operations.confirm_many(LOCAL, EVERY)
    # Actions that need one operator need no token.
    await operations.keep(LOCAL, dlq_id, "wait")
    assert await get_status(deployment, dlq_id) is DeadLetterStatus.OPEN
    await operations.replay(LOCAL, dlq_id, reason="")
