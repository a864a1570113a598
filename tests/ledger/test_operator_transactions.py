"""Operator writes on every kind of ledger: of several concurrent calls, exactly one wins."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import msgspec
import pytest

from holdfast import schema
from holdfast.core.job import Meta, ReplayOrigin
from holdfast.core.principal import AuditEntry, Role
from holdfast.errors import AlreadyReplayed, Conflict, Forbidden, HoldfastError, NotFound, ReplayKeyReused
from holdfast.ledger.port.effects import EffectOutcome, EffectState, Reservation
from holdfast.ledger.port.operators import ApprovalStatus, ReplayKey, TokenRow
from tests.ledger.conftest import AnyLedger
from tests.ledger.operator_rows import NOW, add_approval, add_dead_letter, list_audit_log, minutes, rows

AUDIT = AuditEntry(type="operator.token_create", actor="ann", tenant_id="default", target="token", target_id="t")


async def race(*calls: Awaitable[Any]) -> tuple[list[Any], list[HoldfastError]]:
    """Results of the calls that succeeded, and errors of the others."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, HoldfastError):
            raise result
    won = [result for result in results if not isinstance(result, HoldfastError)]
    return won, [result for result in results if isinstance(result, HoldfastError)]


# Tokens --------------------------------------------------------------------------------------------


def token(token_id: str = "t") -> TokenRow:
    return TokenRow(
        token_id=token_id,
        name="ci",
        role=Role.OPERATOR,
        tenants=("acme", "default"),
        secret_hash="abc",
        created_by="ann",
        created_at=NOW,
        expires_at=minutes(-60),
    )


async def test_tokens_are_created_listed_and_revoked(any_ledger: AnyLedger) -> None:
    operators = any_ledger.operators
    assert await operators.token("t") is None
    await operators.add_token(token(), AUDIT)
    await operators.add_token(token("u"), AUDIT)
    assert await operators.token("t") == token()
    assert await operators.tokens() == [token(), token("u")]
    await operators.revoke_token("t", msgspec.structs.replace(AUDIT, type="operator.token_revoke", actor="bob"))
    revoked = await operators.token("t")
    assert revoked is not None
    assert revoked.revoked_at is not None
    assert [entry[:2] for entry in await list_audit_log(any_ledger)] == [
        ("operator.token_create", "ann"),
        ("operator.token_create", "ann"),
        ("operator.token_revoke", "bob"),
    ]


async def test_a_token_is_created_and_revoked_once(any_ledger: AnyLedger) -> None:
    operators = any_ledger.operators
    await operators.add_token(token(), AUDIT)
    with pytest.raises(Conflict):
        await operators.add_token(token(), AUDIT)
    with pytest.raises(NotFound):
        await operators.revoke_token("no-such-id", AUDIT)
    won, lost = await race(*(operators.revoke_token("t", AUDIT) for _ in range(5)))
    assert (len(won), [type(error) for error in lost]) == (1, [Conflict] * 4)
    assert len(await list_audit_log(any_ledger)) == 2


# Approvals -----------------------------------------------------------------------------------------


async def test_one_vote_approves_and_is_audited(any_ledger: AnyLedger) -> None:
    await add_approval(any_ledger, "a", details='{"amount": 5}')
    row = await any_ledger.operators.vote(None, "a", actor="ann", approve=True, reason="looks right")
    assert row.status is ApprovalStatus.APPROVED
    assert (row.decided_by, row.decision_reason, row.policies, row.details) == (
        "ann",
        "looks right",
        ("big",),
        {"amount": 5},
    )
    assert [(vote.voter, vote.approve) for vote in row.votes] == [("ann", True)]
    assert await list_audit_log(any_ledger) == [("operator.approve", "ann", "a", "looks right")]
    (entry,) = await rows(any_ledger, schema.operator_events)
    assert msgspec.json.decode(entry["before"]) == {"status": "requested"}
    assert msgspec.json.decode(entry["after"])["status"] == "approved"


async def test_a_quorum_needs_different_voters(any_ledger: AnyLedger) -> None:
    operators = any_ledger.operators
    await add_approval(any_ledger, "a", quorum=3)
    assert (await operators.vote(None, "a", actor="ann", approve=True, reason="")).status is ApprovalStatus.REQUESTED
    with pytest.raises(Conflict, match="ann has already voted"):
        await operators.vote(None, "a", actor="ann", approve=True, reason="again")
    assert (await operators.vote(None, "a", actor="bob", approve=True, reason="")).status is ApprovalStatus.REQUESTED
    row = await operators.vote(None, "a", actor="cid", approve=True, reason="")
    assert row.status is ApprovalStatus.APPROVED
    assert {vote.voter for vote in row.votes} == {"ann", "bob", "cid"}


async def test_one_rejection_decides(any_ledger: AnyLedger) -> None:
    operators = any_ledger.operators
    await add_approval(any_ledger, "a", quorum=2)
    await operators.vote(None, "a", actor="ann", approve=True, reason="")
    row = await operators.vote(None, "a", actor="bob", approve=False, reason="too much")
    assert (row.status, row.decided_by, row.decision_reason) == (ApprovalStatus.REJECTED, "bob", "too much")
    with pytest.raises(Conflict, match="rejected"):
        await operators.vote(None, "a", actor="cid", approve=True, reason="")


async def test_the_requester_may_not_vote(any_ledger: AnyLedger) -> None:
    await add_approval(any_ledger, "a", requested_by="ann")
    with pytest.raises(Forbidden):
        await any_ledger.operators.vote(None, "a", actor="ann", approve=True, reason="")
    assert await rows(any_ledger, schema.approval_votes) == []
    assert await list_audit_log(any_ledger) == []


async def test_one_of_many_concurrent_votes_decides(any_ledger: AnyLedger) -> None:
    await add_approval(any_ledger, "a")
    operators = any_ledger.operators
    won, lost = await race(
        *(operators.vote(None, "a", actor=f"p{number}", approve=number % 2 == 0, reason="") for number in range(8))
    )
    assert len(won) == 1
    assert [type(error) for error in lost] == [Conflict] * 7
    assert len(await rows(any_ledger, schema.approval_votes)) == 1
    assert len(await list_audit_log(any_ledger)) == 1
    (row,) = await operators.undelivered_approvals(10)
    assert row == won[0]


async def test_concurrent_votes_of_one_voter_count_once(any_ledger: AnyLedger) -> None:
    await add_approval(any_ledger, "a", quorum=2)
    operators = any_ledger.operators
    won, lost = await race(*(operators.vote(None, "a", actor="ann", approve=True, reason="") for _ in range(6)))
    assert (len(won), len(lost)) == (1, 5)
    assert won[0].status is ApprovalStatus.REQUESTED


async def test_a_vote_after_the_deadline_expires_the_request(any_ledger: AnyLedger) -> None:
    await add_approval(any_ledger, "a", deadline=minutes(1))
    with pytest.raises(Conflict, match="expired"):
        await any_ledger.operators.vote(None, "a", actor="ann", approve=True, reason="")
    (row,) = await any_ledger.operators.undelivered_approvals(10)
    assert (row.status, row.decided_by, row.votes) == (ApprovalStatus.EXPIRED, None, ())


async def test_overdue_requests_expire_for_every_tenant(any_ledger: AnyLedger) -> None:
    operators = any_ledger.operators
    await add_approval(any_ledger, "late", deadline=minutes(1))
    await add_approval(any_ledger, "later", deadline=minutes(2), tenant_id="acme")
    await add_approval(any_ledger, "in time", deadline=minutes(-60))
    await add_approval(any_ledger, "for ever")
    await add_approval(any_ledger, "decided", deadline=minutes(1), status="rejected", decided_at=minutes(3))
    assert len(await operators.expire_approvals(1)) == 1
    assert len(await operators.expire_approvals(10)) == 1
    assert await operators.expire_approvals(10) == []
    expired = [row for row in await operators.undelivered_approvals(10) if row.status is ApprovalStatus.EXPIRED]
    assert {row.approval_id for row in expired} == {"late", "later"}
    assert all(row.decided_at is not None for row in expired)


async def test_concurrent_expiry_expires_each_request_once(any_ledger: AnyLedger) -> None:
    for number in range(6):
        await add_approval(any_ledger, f"a{number}", deadline=minutes(1))
    batches = await asyncio.gather(*(any_ledger.operators.expire_approvals(10) for _ in range(4)))
    assert sorted(row.approval_id for batch in batches for row in batch) == [f"a{number}" for number in range(6)]


async def test_decisions_are_pending_until_delivered(any_ledger: AnyLedger) -> None:
    operators = any_ledger.operators
    for number in range(5):
        await add_approval(any_ledger, f"a{number}", tenant_id="acme" if number % 2 else "default")
        await operators.vote(None, f"a{number}", actor="ann", approve=True, reason="")
    await add_approval(any_ledger, "open")
    pending = await operators.undelivered_approvals(10)
    assert [row.approval_id for row in pending] == ["a1", "a3", "a0", "a2", "a4"]
    assert [row.votes[0].voter for row in pending] == ["ann"] * 5
    paged: list[Any] = []
    while page := await operators.undelivered_approvals(2, paged[-1] if paged else None):
        paged += page
    assert paged == pending
    await operators.mark_delivered(pending[:3])
    await operators.mark_delivered(pending[:3])
    assert await operators.undelivered_approvals(10) == pending[3:]
    await operators.mark_delivered([])


async def test_a_withdrawal_does_not_change_a_decision(any_ledger: AnyLedger) -> None:
    operators = any_ledger.operators
    await add_approval(any_ledger, "a")
    await add_approval(any_ledger, "b")
    await operators.vote(None, "b", actor="ann", approve=True, reason="")
    for name in ("a", "b", "nothing"):
        await operators.withdraw_approval("default", name, "another payload")
    found = {row.approval_id: row for row in await operators.undelivered_approvals(10)}
    assert (found["a"].status, found["a"].decision_reason) == (ApprovalStatus.WITHDRAWN, "another payload")
    assert found["b"].status is ApprovalStatus.APPROVED
    with pytest.raises(Conflict, match="withdrawn"):
        await operators.vote(None, "a", actor="ann", approve=True, reason="")


async def test_rows_of_other_tenants_are_not_visible(any_ledger: AnyLedger) -> None:
    operators = any_ledger.operators
    await add_approval(any_ledger, "a", tenant_id="acme")
    await add_dead_letter(any_ledger, "d", tenant_id="acme")
    for tenants in (["default"], [], ["default", "other"]):
        with pytest.raises(NotFound):
            await operators.vote(tenants, "a", actor="ann", approve=True, reason="")
        with pytest.raises(NotFound):
            await operators.request_discard(tenants, "d", actor="ann", reason="")
        with pytest.raises(NotFound):
            await operators.confirm_discard(tenants, "d", actor="ann")
        with pytest.raises(NotFound):
            await operators.keep(tenants, "d", actor="ann", reason="")
        with pytest.raises(NotFound):
            await operators.reserve_replay(tenants, "d", actor="ann", reason="", payload=None)
    assert await list_audit_log(any_ledger) == []
    assert (await operators.vote(["acme", "x"], "a", actor="ann", approve=True, reason="")).tenant_id == "acme"


async def test_unstorable_text_is_accepted(any_ledger: AnyLedger) -> None:
    await add_approval(any_ledger, "a", quorum=2)
    await any_ledger.operators.vote(None, "a", actor="a\0nn", approve=True, reason="\ud800 \0")
    with pytest.raises(Conflict, match="has already voted"):
        await any_ledger.operators.vote(None, "a", actor="a\0nn", approve=True, reason="")


# Dead letters --------------------------------------------------------------------------------------


async def status(ledger: AnyLedger, dlq_id: str = "d") -> Any:
    (row,) = await rows(ledger, schema.dlq_items, dlq_id=dlq_id)
    return row["status"]


async def test_a_discard_needs_two_operators(any_ledger: AnyLedger) -> None:
    operators = any_ledger.operators
    await add_dead_letter(any_ledger)
    with pytest.raises(Conflict, match="no discard of dead letter d was requested"):
        await operators.confirm_discard(None, "d", actor="bob")
    await operators.request_discard(None, "d", actor="ann", reason="of no use")
    with pytest.raises(Forbidden):
        await operators.confirm_discard(None, "d", actor="ann")
    with pytest.raises(Conflict, match="ann has requested"):
        await operators.request_discard(None, "d", actor="bob", reason="")
    assert await status(any_ledger) == "discard_requested"
    await operators.confirm_discard(None, "d", actor="bob")
    (row,) = await rows(any_ledger, schema.dlq_items)
    assert (row["status"], row["requested_by"], row["confirmed_by"]) == ("discarded", "ann", "bob")
    assert await list_audit_log(any_ledger) == [
        ("operator.dlq_discard_request", "ann", "d", "of no use"),
        ("operator.dlq_discard", "bob", "d", "of no use"),
    ]
    with pytest.raises(Conflict, match="discarded"):
        await operators.reserve_replay(None, "d", actor="ann", reason="", payload=None)


async def test_one_of_many_concurrent_confirmations_wins(any_ledger: AnyLedger) -> None:
    operators = any_ledger.operators
    await add_dead_letter(any_ledger)
    await operators.request_discard(None, "d", actor="ann", reason="")
    won, lost = await race(*(operators.confirm_discard(None, "d", actor=f"p{number}") for number in range(6)))
    assert (len(won), [type(error) for error in lost]) == (1, [Conflict] * 5)
    assert len(await list_audit_log(any_ledger)) == 2


async def test_a_discard_request_can_be_undone(any_ledger: AnyLedger) -> None:
    operators = any_ledger.operators
    await add_dead_letter(any_ledger)
    await operators.request_discard(None, "d", actor="ann", reason="x")
    with pytest.raises(Conflict, match="keep"):
        await operators.reserve_replay(None, "d", actor="bob", reason="", payload=None)
    await operators.keep(None, "d", actor="bob", reason="needed")
    assert await status(any_ledger) == "open"
    with pytest.raises(Conflict):
        await operators.keep(None, "d", actor="bob", reason="")
    with pytest.raises(Conflict):
        await operators.confirm_discard(None, "d", actor="bob")


JOB = {"idempotency_key": "order-7", "priority": 0, "meta": '{"context":{"user":"u"}}'}


def _job_row(ledger: AnyLedger) -> dict[str, Any]:
    """The embedded engine keeps the context in the meta."""
    from holdfast.ledger.sqlite.embedded import EmbeddedLedger

    return JOB if isinstance(ledger, EmbeddedLedger) else JOB | {"context": '{"user":"u"}'}


async def test_a_replay_has_all_fields_of_its_job(any_ledger: AnyLedger) -> None:
    operators = any_ledger.operators
    await add_dead_letter(any_ledger, job=_job_row(any_ledger))
    replay = await operators.reserve_replay(None, "d", actor="ann", reason="fixed", payload=None)
    assert (replay.tenant_id, replay.queue, replay.job_type, replay.job_id) == ("default", "default", "pay", "job-d")
    assert (replay.trace_id, replay.idempotency_key, replay.priority) == ("trace", "order-7", 0)
    assert (replay.payload, replay.context) == (b'{"amount": 1}', {"user": "u"})
    assert (replay.number, replay.actor) == (1, "ann")
    assert await status(any_ledger) == "replayed"
    assert await operators.unsubmitted_replays(10) == [replay]
    assert await list_audit_log(any_ledger) == [("operator.dlq_replay", "ann", "d", "fixed")]
    await operators.mark_submitted([replay])
    assert await operators.unsubmitted_replays(10) == []


async def test_a_dead_letter_whose_job_was_pruned_can_be_replayed(any_ledger: AnyLedger) -> None:
    await add_dead_letter(any_ledger)
    replay = await any_ledger.operators.reserve_replay(None, "d", actor="ann", reason="", payload=b'{"amount": 2}')
    assert (replay.idempotency_key, replay.priority, replay.context) == ("job-d", 1, None)
    assert replay.payload == b'{"amount": 2}'


async def test_a_replay_of_a_replay_keeps_the_first_key(any_ledger: AnyLedger) -> None:
    meta = msgspec.json.encode(Meta(replay=ReplayOrigin("first", "job-first", "order-7"))).decode()
    await add_dead_letter(any_ledger, job={"meta": meta, "idempotency_key": "dlq:first:1"})
    replay = await any_ledger.operators.reserve_replay(None, "d", actor="ann", reason="", payload=None)
    assert replay.idempotency_key == "order-7"


async def test_one_of_concurrent_replays_wins(any_ledger: AnyLedger) -> None:
    operators = any_ledger.operators
    await add_dead_letter(any_ledger)
    won, lost = await race(
        *(operators.reserve_replay(None, "d", actor=f"p{number}", reason="", payload=None) for number in range(6))
    )
    assert (len(won), [type(error) for error in lost]) == (1, [AlreadyReplayed] * 5)
    assert {error.job_id for error in lost if isinstance(error, AlreadyReplayed)} == {won[0].new_job_id}
    assert len(await list_audit_log(any_ledger)) == 1
    await operators.mark_submitted([won[0]])
    with pytest.raises(AlreadyReplayed):
        await operators.reserve_replay(None, "d", actor="late", reason="", payload=None)
    second = await operators.reserve_replay(None, "d", actor="ann", reason="", payload=None, again=True)
    assert (second.number, second.previous) == (2, won[0].new_job_id)
    assert second.new_job_id != won[0].new_job_id
    # Marking the first replay again does not mark the second.
    await operators.mark_submitted([won[0]])
    (unsubmitted,) = await operators.unsubmitted_replays(10)
    assert msgspec.structs.replace(unsubmitted, previous=second.previous) == second


async def test_concurrent_replays_with_one_key_are_one_replay(any_ledger: AnyLedger) -> None:
    operators, key = any_ledger.operators, ReplayKey("k", "ab", 60_000)
    for dlq_id in ("d", "e"):
        await add_dead_letter(any_ledger, dlq_id)
    won, lost = await race(
        *(operators.reserve_replay(None, "d", actor="ann", reason="", payload=None, key=key) for _ in range(6))
    )
    assert not lost
    assert len({(replay.new_job_id, replay.number, replay.pending) for replay in won}) == 1
    assert [replay.duplicate for replay in won].count(False) == 1
    await operators.mark_submitted([won[0]])
    known = await operators.reserve_replay(None, "d", actor="bob", reason="", payload=None, key=key)
    assert (known.new_job_id, known.pending, known.duplicate) == (won[0].new_job_id, False, True)
    other = msgspec.structs.replace(key, fingerprint="cd")
    with pytest.raises(ReplayKeyReused):
        await operators.reserve_replay(None, "e", actor="ann", reason="", payload=None, key=other)
    assert len(await list_audit_log(any_ledger)) == 1


async def test_an_expired_key_is_free(any_ledger: AnyLedger) -> None:
    operators, expired = any_ledger.operators, ReplayKey("k", "ab", 0)
    for dlq_id in ("d", "e"):
        await add_dead_letter(any_ledger, dlq_id)
    await operators.reserve_replay(None, "d", actor="ann", reason="", payload=None, key=expired)
    other = ReplayKey("k", "cd", 60_000)
    replay = await operators.reserve_replay(None, "e", actor="ann", reason="", payload=None, key=other)
    assert (replay.dlq_id, replay.duplicate) == ("e", False)
    known = await operators.reserve_replay(None, "e", actor="ann", reason="", payload=None, key=other)
    assert known.duplicate


async def test_a_cancelled_replay_leaves_the_dead_letter_open(any_ledger: AnyLedger) -> None:
    operators = any_ledger.operators
    await add_dead_letter(any_ledger)
    first = await operators.reserve_replay(None, "d", actor="ann", reason="", payload=b"{}")
    await operators.cancel_replay(first, actor="ann", reason="intake is paused")
    assert await status(any_ledger) == "open"
    second = await operators.reserve_replay(None, "d", actor="ann", reason="", payload=None)
    assert (second.number, second.payload) == (2, b'{"amount": 1}')
    await operators.mark_submitted([second])
    await operators.cancel_replay(second, actor="ann", reason="too late")
    assert await status(any_ledger) == "replayed"


async def test_unsubmitted_replays_are_listed_in_pages(any_ledger: AnyLedger) -> None:
    operators = any_ledger.operators
    for number in range(5):
        await add_dead_letter(any_ledger, f"d{number}", tenant_id="acme" if number % 2 else "default")
        await operators.reserve_replay(None, f"d{number}", actor="ann", reason="", payload=None)
    paged: list[Any] = []
    while page := await operators.unsubmitted_replays(2, paged[-1] if paged else None):
        paged += page
    assert [replay.dlq_id for replay in paged] == ["d1", "d3", "d0", "d2", "d4"]


# Audit log and alerts ------------------------------------------------------------------------------


async def test_audit_entries_are_recorded(any_ledger: AnyLedger) -> None:
    await any_ledger.operators.record_audit([])
    entries = [
        AuditEntry(
            type="operator.pause",
            actor="ann",
            tenant_id="default",
            target="queue",
            target_id=name,
            queue=name,
            reason="why",
            before={"paused": False},
            after={"paused": True},
        )
        for name in ("a", "b")
    ]
    await any_ledger.operators.record_audit(entries)
    found = await rows(any_ledger, schema.operator_events)
    assert {row["target_id"] for row in found} == {"a", "b"}
    assert {msgspec.json.decode(row["after"])["paused"] for row in found} == {True}


async def test_an_alert_is_raised_once_and_cleared_once(any_ledger: AnyLedger) -> None:
    operators = any_ledger.operators
    audit = AuditEntry(type="alert.backlog", actor="upkeep", tenant_id="default", target="queue", target_id="q")
    for _ in range(2):
        assert sorted(await asyncio.gather(*(operators.raise_alert("backlog:q", audit) for _ in range(5))))[-2:] == [
            False,
            True,
        ]
        assert not await operators.clear_alert("backlog:other", audit)
        assert sum(await asyncio.gather(*(operators.clear_alert("backlog:q", audit) for _ in range(5)))) == 1
    assert len(await list_audit_log(any_ledger)) == 4


# Effects -------------------------------------------------------------------------------------------


async def test_an_effect_in_doubt_is_resolved_once(any_ledger: AnyLedger) -> None:
    """The key and its audit entry change together; a second resolution is refused."""
    operators, effects = any_ledger.operators, any_ledger.effects
    fields: dict[str, Any] = {
        "function": "f",
        "fingerprint": "p",
        "queue": "q",
        "job_id": "j",
        "attempt": 1,
        "worker": "w",
    }
    reservations = [Reservation(tenant_id="default", key=key, token=f"of-{key}", **fields) for key in ("done", "free")]
    await effects.reserve(reservations)
    audit = msgspec.structs.replace(AUDIT, type="operator.resolve_effect")
    done = EffectOutcome(tenant_id="default", key="done", token="of-done", state=EffectState.DONE, value=b"1")
    won, lost = await race(*(operators.resolve_effect(done, audit) for _ in range(3)))
    assert (len(won), {type(error) for error in lost}) == (1, {Conflict})
    with pytest.raises(Conflict):
        await operators.resolve_effect(msgspec.structs.replace(done, key="free"), audit)
    await operators.resolve_effect(msgspec.structs.replace(done, key="free", token="of-free", state=None), audit)
    with pytest.raises(NotFound):
        await operators.resolve_effect(msgspec.structs.replace(done, key="never"), audit)
    kept, freed = await effects.get([("default", "done"), ("default", "free")])
    assert kept is not None
    assert (kept.state, kept.value, freed) == (EffectState.DONE, b"1", None)
    assert [entry[:2] for entry in await list_audit_log(any_ledger)] == [("operator.resolve_effect", "ann")] * 2


@pytest.mark.parametrize("name", ["Ann", " ANN ", "\uff21nn"])
async def test_names_that_differ_only_in_case_or_form_are_one_principal(any_ledger: AnyLedger, name: str) -> None:
    await add_approval(any_ledger, "a", quorum=2, requested_by="Cyd")
    await any_ledger.operators.vote(None, "a", actor="ann", approve=True, reason="")
    with pytest.raises(Conflict):
        await any_ledger.operators.vote(None, "a", actor=name, approve=True, reason="")
    with pytest.raises(Forbidden):
        await any_ledger.operators.vote(None, "a", actor="cYD", approve=True, reason="")
    await add_dead_letter(any_ledger, "d")
    await any_ledger.operators.request_discard(None, "d", actor="ann", reason="r")
    with pytest.raises(Forbidden):
        await any_ledger.operators.confirm_discard(None, "d", actor=name)
    await any_ledger.operators.confirm_discard(None, "d", actor="bob")
