"""What people do, on every kind of ledger: of two who race for the same thing exactly one wins."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import msgspec
import pytest

from holdfast import schema
from holdfast.core.job import Meta, ReplayOrigin
from holdfast.core.principal import AuditEntry, Role
from holdfast.errors import Conflict, Forbidden, HoldfastError, NotFound
from holdfast.ledger.port.effects import EffectOutcome, EffectState, Reservation
from holdfast.ledger.port.operators import ApprovalStatus, TokenRow
from tests.ledger.conftest import AnyLedger
from tests.ledger.operator_rows import NOW, ask, bury, log, minutes, rows

DID = AuditEntry(type="operator.token_create", actor="ann", tenant_id="default", target="token", target_id="t")


async def race(*calls: Awaitable[Any]) -> tuple[list[Any], list[HoldfastError]]:
    """Who won, and what the others were told."""
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


async def test_tokens_are_made_listed_and_revoked(any_ledger: AnyLedger) -> None:
    people = any_ledger.operators
    assert await people.token("t") is None
    await people.add_token(token(), DID)
    await people.add_token(token("u"), DID)
    assert await people.token("t") == token()
    assert await people.tokens() == [token(), token("u")]
    await people.revoke_token("t", msgspec.structs.replace(DID, type="operator.token_revoke", actor="bob"))
    revoked = await people.token("t")
    assert revoked is not None
    assert revoked.revoked_at is not None
    assert [line[:2] for line in await log(any_ledger)] == [
        ("operator.token_create", "ann"),
        ("operator.token_create", "ann"),
        ("operator.token_revoke", "bob"),
    ]


async def test_a_token_is_not_made_or_revoked_twice(any_ledger: AnyLedger) -> None:
    people = any_ledger.operators
    await people.add_token(token(), DID)
    with pytest.raises(Conflict):
        await people.add_token(token(), DID)
    with pytest.raises(NotFound):
        await people.revoke_token("nobody's", DID)
    won, lost = await race(*(people.revoke_token("t", DID) for _ in range(5)))
    assert (len(won), [type(error) for error in lost]) == (1, [Conflict] * 4)
    assert len(await log(any_ledger)) == 2


# Approvals -----------------------------------------------------------------------------------------


async def test_one_yes_approves_and_is_in_the_log(any_ledger: AnyLedger) -> None:
    await ask(any_ledger, "a", details='{"amount": 5}')
    row = await any_ledger.operators.vote(None, "a", actor="ann", approve=True, reason="looks right")
    assert row.status is ApprovalStatus.APPROVED
    assert (row.decided_by, row.decision_reason, row.policies, row.details) == (
        "ann",
        "looks right",
        ("big",),
        {"amount": 5},
    )
    assert [(vote.voter, vote.approve) for vote in row.votes] == [("ann", True)]
    assert await log(any_ledger) == [("operator.approve", "ann", "a", "looks right")]
    (line,) = await rows(any_ledger, schema.operator_events)
    assert msgspec.json.decode(line["before"]) == {"status": "requested"}
    assert msgspec.json.decode(line["after"])["status"] == "approved"


async def test_a_quorum_is_different_people(any_ledger: AnyLedger) -> None:
    people = any_ledger.operators
    await ask(any_ledger, "a", quorum=3)
    assert (await people.vote(None, "a", actor="ann", approve=True, reason="")).status is ApprovalStatus.REQUESTED
    with pytest.raises(Conflict, match="ann has already voted"):
        await people.vote(None, "a", actor="ann", approve=True, reason="again")
    assert (await people.vote(None, "a", actor="bob", approve=True, reason="")).status is ApprovalStatus.REQUESTED
    row = await people.vote(None, "a", actor="cid", approve=True, reason="")
    assert row.status is ApprovalStatus.APPROVED
    assert {vote.voter for vote in row.votes} == {"ann", "bob", "cid"}


async def test_one_no_rejects(any_ledger: AnyLedger) -> None:
    people = any_ledger.operators
    await ask(any_ledger, "a", quorum=2)
    await people.vote(None, "a", actor="ann", approve=True, reason="")
    row = await people.vote(None, "a", actor="bob", approve=False, reason="too much")
    assert (row.status, row.decided_by, row.decision_reason) == (ApprovalStatus.REJECTED, "bob", "too much")
    with pytest.raises(Conflict, match="rejected"):
        await people.vote(None, "a", actor="cid", approve=True, reason="")


async def test_who_asked_may_not_answer(any_ledger: AnyLedger) -> None:
    await ask(any_ledger, "a", requested_by="ann")
    with pytest.raises(Forbidden):
        await any_ledger.operators.vote(None, "a", actor="ann", approve=True, reason="")
    assert await rows(any_ledger, schema.approval_votes) == []
    assert await log(any_ledger) == []


async def test_of_many_votes_at_once_one_decides(any_ledger: AnyLedger) -> None:
    await ask(any_ledger, "a")
    people = any_ledger.operators
    won, lost = await race(
        *(people.vote(None, "a", actor=f"p{number}", approve=number % 2 == 0, reason="") for number in range(8))
    )
    assert len(won) == 1
    assert [type(error) for error in lost] == [Conflict] * 7
    assert len(await rows(any_ledger, schema.approval_votes)) == 1
    assert len(await log(any_ledger)) == 1
    (row,) = await people.undelivered_approvals(10)
    assert row == won[0]


async def test_a_person_who_votes_twice_at_once_has_one_vote(any_ledger: AnyLedger) -> None:
    await ask(any_ledger, "a", quorum=2)
    people = any_ledger.operators
    won, lost = await race(*(people.vote(None, "a", actor="ann", approve=True, reason="") for _ in range(6)))
    assert (len(won), len(lost)) == (1, 5)
    assert won[0].status is ApprovalStatus.REQUESTED


async def test_a_vote_after_the_deadline_expires_it(any_ledger: AnyLedger) -> None:
    await ask(any_ledger, "a", deadline=minutes(1))
    with pytest.raises(Conflict, match="expired"):
        await any_ledger.operators.vote(None, "a", actor="ann", approve=True, reason="")
    (row,) = await any_ledger.operators.undelivered_approvals(10)
    assert (row.status, row.decided_by, row.votes) == (ApprovalStatus.EXPIRED, None, ())


async def test_overdue_ones_expire_for_every_tenant(any_ledger: AnyLedger) -> None:
    people = any_ledger.operators
    await ask(any_ledger, "late", deadline=minutes(1))
    await ask(any_ledger, "later", deadline=minutes(2), tenant_id="acme")
    await ask(any_ledger, "in time", deadline=minutes(-60))
    await ask(any_ledger, "for ever")
    await ask(any_ledger, "decided", deadline=minutes(1), status="rejected", decided_at=minutes(3))
    assert len(await people.expire_approvals(1)) == 1
    assert len(await people.expire_approvals(10)) == 1
    assert await people.expire_approvals(10) == []
    expired = [row for row in await people.undelivered_approvals(10) if row.status is ApprovalStatus.EXPIRED]
    assert {row.approval_id for row in expired} == {"late", "later"}
    assert all(row.decided_at is not None for row in expired)


async def test_two_who_expire_at_once_expire_each_once(any_ledger: AnyLedger) -> None:
    for number in range(6):
        await ask(any_ledger, f"a{number}", deadline=minutes(1))
    batches = await asyncio.gather(*(any_ledger.operators.expire_approvals(10) for _ in range(4)))
    assert sorted(row.approval_id for batch in batches for row in batch) == [f"a{number}" for number in range(6)]


async def test_decided_ones_are_told_until_delivered(any_ledger: AnyLedger) -> None:
    people = any_ledger.operators
    for number in range(5):
        await ask(any_ledger, f"a{number}", tenant_id="acme" if number % 2 else "default")
        await people.vote(None, f"a{number}", actor="ann", approve=True, reason="")
    await ask(any_ledger, "open")
    everything = await people.undelivered_approvals(10)
    assert [row.approval_id for row in everything] == ["a1", "a3", "a0", "a2", "a4"]
    assert [row.votes[0].voter for row in everything] == ["ann"] * 5
    paged: list[Any] = []
    while page := await people.undelivered_approvals(2, paged[-1] if paged else None):
        paged += page
    assert paged == everything
    await people.mark_delivered(everything[:3])
    await people.mark_delivered(everything[:3])
    assert await people.undelivered_approvals(10) == everything[3:]
    await people.mark_delivered([])


async def test_withdrawing_changes_nothing_that_is_decided(any_ledger: AnyLedger) -> None:
    people = any_ledger.operators
    await ask(any_ledger, "a")
    await ask(any_ledger, "b")
    await people.vote(None, "b", actor="ann", approve=True, reason="")
    for name in ("a", "b", "nothing"):
        await people.withdraw_approval("default", name, "another payload")
    found = {row.approval_id: row for row in await people.undelivered_approvals(10)}
    assert (found["a"].status, found["a"].decision_reason) == (ApprovalStatus.WITHDRAWN, "another payload")
    assert found["b"].status is ApprovalStatus.APPROVED
    with pytest.raises(Conflict, match="withdrawn"):
        await people.vote(None, "a", actor="ann", approve=True, reason="")


async def test_another_tenants_things_are_not_there(any_ledger: AnyLedger) -> None:
    people = any_ledger.operators
    await ask(any_ledger, "a", tenant_id="acme")
    await bury(any_ledger, "d", tenant_id="acme")
    for tenants in (["default"], [], ["default", "other"]):
        with pytest.raises(NotFound):
            await people.vote(tenants, "a", actor="ann", approve=True, reason="")
        with pytest.raises(NotFound):
            await people.request_discard(tenants, "d", actor="ann", reason="")
        with pytest.raises(NotFound):
            await people.confirm_discard(tenants, "d", actor="ann")
        with pytest.raises(NotFound):
            await people.keep(tenants, "d", actor="ann", reason="")
        with pytest.raises(NotFound):
            await people.reserve_replay(tenants, "d", actor="ann", reason="", payload=None)
    assert await log(any_ledger) == []
    assert (await people.vote(["acme", "x"], "a", actor="ann", approve=True, reason="")).tenant_id == "acme"


async def test_text_that_no_store_takes_is_no_trouble(any_ledger: AnyLedger) -> None:
    await ask(any_ledger, "a", quorum=2)
    await any_ledger.operators.vote(None, "a", actor="a\0nn", approve=True, reason="\ud800 \0")
    with pytest.raises(Conflict, match="has already voted"):
        await any_ledger.operators.vote(None, "a", actor="a\0nn", approve=True, reason="")


# Dead letters --------------------------------------------------------------------------------------


async def status(ledger: AnyLedger, dlq_id: str = "d") -> Any:
    (row,) = await rows(ledger, schema.dlq_items, dlq_id=dlq_id)
    return row["status"]


async def test_two_people_discard(any_ledger: AnyLedger) -> None:
    people = any_ledger.operators
    await bury(any_ledger)
    with pytest.raises(Conflict, match="no discard of dead letter d was requested"):
        await people.confirm_discard(None, "d", actor="bob")
    await people.request_discard(None, "d", actor="ann", reason="of no use")
    with pytest.raises(Forbidden):
        await people.confirm_discard(None, "d", actor="ann")
    with pytest.raises(Conflict, match="ann has requested"):
        await people.request_discard(None, "d", actor="bob", reason="")
    assert await status(any_ledger) == "discard_requested"
    await people.confirm_discard(None, "d", actor="bob")
    (row,) = await rows(any_ledger, schema.dlq_items)
    assert (row["status"], row["requested_by"], row["confirmed_by"]) == ("discarded", "ann", "bob")
    assert await log(any_ledger) == [
        ("operator.dlq_discard_request", "ann", "d", "of no use"),
        ("operator.dlq_discard", "bob", "d", "of no use"),
    ]
    with pytest.raises(Conflict, match="discarded"):
        await people.reserve_replay(None, "d", actor="ann", reason="", payload=None)


async def test_of_many_confirmations_one_wins(any_ledger: AnyLedger) -> None:
    people = any_ledger.operators
    await bury(any_ledger)
    await people.request_discard(None, "d", actor="ann", reason="")
    won, lost = await race(*(people.confirm_discard(None, "d", actor=f"p{number}") for number in range(6)))
    assert (len(won), [type(error) for error in lost]) == (1, [Conflict] * 5)
    assert len(await log(any_ledger)) == 2


async def test_a_discard_that_is_not_wanted_after_all(any_ledger: AnyLedger) -> None:
    people = any_ledger.operators
    await bury(any_ledger)
    await people.request_discard(None, "d", actor="ann", reason="x")
    with pytest.raises(Conflict, match="keep"):
        await people.reserve_replay(None, "d", actor="bob", reason="", payload=None)
    await people.keep(None, "d", actor="bob", reason="needed")
    assert await status(any_ledger) == "open"
    with pytest.raises(Conflict):
        await people.keep(None, "d", actor="bob", reason="")
    with pytest.raises(Conflict):
        await people.confirm_discard(None, "d", actor="bob")


JOB = {"idempotency_key": "order-7", "priority": 0, "meta": '{"context":{"user":"u"}}'}


def _job(ledger: AnyLedger) -> dict[str, Any]:
    """Embedded, the context is a part of the meta."""
    from holdfast.ledger.sqlite.embedded import EmbeddedLedger

    return JOB if isinstance(ledger, EmbeddedLedger) else JOB | {"context": '{"user":"u"}'}


async def test_a_replay_has_all_that_it_takes(any_ledger: AnyLedger) -> None:
    people = any_ledger.operators
    await bury(any_ledger, job=_job(any_ledger))
    replay = await people.reserve_replay(None, "d", actor="ann", reason="fixed", payload=None)
    assert (replay.tenant_id, replay.queue, replay.job_type, replay.job_id) == ("default", "default", "pay", "job-d")
    assert (replay.trace_id, replay.idempotency_key, replay.priority) == ("trace", "order-7", 0)
    assert (replay.payload, replay.context) == (b'{"amount": 1}', {"user": "u"})
    assert (replay.number, replay.actor) == (1, "ann")
    assert await status(any_ledger) == "replayed"
    assert await people.unsubmitted_replays(10) == [replay]
    assert await log(any_ledger) == [("operator.dlq_replay", "ann", "d", "fixed")]
    await people.mark_submitted([replay])
    assert await people.unsubmitted_replays(10) == []


async def test_a_letter_whose_job_is_gone_can_be_replayed(any_ledger: AnyLedger) -> None:
    await bury(any_ledger)
    replay = await any_ledger.operators.reserve_replay(None, "d", actor="ann", reason="", payload=b'{"amount": 2}')
    assert (replay.idempotency_key, replay.priority, replay.context) == ("job-d", 1, None)
    assert replay.payload == b'{"amount": 2}'


async def test_a_replay_of_a_replay_keeps_the_first_key(any_ledger: AnyLedger) -> None:
    meta = msgspec.json.encode(Meta(replay=ReplayOrigin("first", "job-first", "order-7"))).decode()
    await bury(any_ledger, job={"meta": meta, "idempotency_key": "dlq:first:1"})
    replay = await any_ledger.operators.reserve_replay(None, "d", actor="ann", reason="", payload=None)
    assert replay.idempotency_key == "order-7"


async def test_whoever_replays_at_once_gets_the_same_job(any_ledger: AnyLedger) -> None:
    people = any_ledger.operators
    await bury(any_ledger)
    won, lost = await race(
        *(
            people.reserve_replay(None, "d", actor=f"p{number}", reason="", payload=None, expected=0)
            for number in range(6)
        )
    )
    assert not lost
    assert len({(replay.new_job_id, replay.number, replay.actor) for replay in won}) == 1
    assert len(await log(any_ledger)) == 1
    await people.mark_submitted([won[0]])
    with pytest.raises(Conflict, match="meanwhile"):
        await people.reserve_replay(None, "d", actor="late", reason="", payload=None, expected=0)
    second = await people.reserve_replay(None, "d", actor="ann", reason="", payload=None, expected=1)
    assert second.number == 2
    assert second.new_job_id != won[0].new_job_id
    # Told twice of the first one: the second is still to be handed in.
    await people.mark_submitted([won[0]])
    assert await people.unsubmitted_replays(10) == [second]


async def test_an_abandoned_replay_leaves_the_letter_open(any_ledger: AnyLedger) -> None:
    people = any_ledger.operators
    await bury(any_ledger)
    first = await people.reserve_replay(None, "d", actor="ann", reason="", payload=b"{}")
    await people.cancel_replay(first, actor="ann", reason="the queue takes nothing")
    assert await status(any_ledger) == "open"
    # Whoever has seen it as it was, and was told nothing, is told what became of it.
    with pytest.raises(Conflict, match="meanwhile, and that was refused"):
        await people.reserve_replay(None, "d", actor="bob", reason="", payload=None, expected=0)
    second = await people.reserve_replay(None, "d", actor="ann", reason="", payload=None)
    assert (second.number, second.payload) == (2, b'{"amount": 1}')
    await people.mark_submitted([second])
    await people.cancel_replay(second, actor="ann", reason="too late")
    assert await status(any_ledger) == "replayed"


async def test_replays_are_told_in_pages(any_ledger: AnyLedger) -> None:
    people = any_ledger.operators
    for number in range(5):
        await bury(any_ledger, f"d{number}", tenant_id="acme" if number % 2 else "default")
        await people.reserve_replay(None, f"d{number}", actor="ann", reason="", payload=None)
    paged: list[Any] = []
    while page := await people.unsubmitted_replays(2, paged[-1] if paged else None):
        paged += page
    assert [replay.dlq_id for replay in paged] == ["d1", "d3", "d0", "d2", "d4"]


# The log and alerts --------------------------------------------------------------------------------


async def test_deeds_are_recorded(any_ledger: AnyLedger) -> None:
    await any_ledger.operators.record_audit([])
    deeds = [
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
    await any_ledger.operators.record_audit(deeds)
    found = await rows(any_ledger, schema.operator_events)
    assert {row["target_id"] for row in found} == {"a", "b"}
    assert {msgspec.json.decode(row["after"])["paused"] for row in found} == {True}


async def test_an_alert_is_raised_once_and_cleared_once(any_ledger: AnyLedger) -> None:
    people = any_ledger.operators
    action = AuditEntry(type="alert.backlog", actor="upkeep", tenant_id="default", target="queue", target_id="q")
    for _ in range(2):
        assert sorted(await asyncio.gather(*(people.raise_alert("backlog:q", action) for _ in range(5))))[-2:] == [
            False,
            True,
        ]
        assert not await people.clear_alert("backlog:other", action)
        assert sum(await asyncio.gather(*(people.clear_alert("backlog:q", action) for _ in range(5)))) == 1
    assert len(await log(any_ledger)) == 4


# Effects -------------------------------------------------------------------------------------------


async def test_one_word_on_an_effect_in_doubt_counts(any_ledger: AnyLedger) -> None:
    """The key and its line in the log, or neither; who comes second is told."""
    people, effects = any_ledger.operators, any_ledger.effects
    own: dict[str, Any] = {
        "function": "f",
        "fingerprint": "p",
        "queue": "q",
        "job_id": "j",
        "attempt": 1,
        "worker": "w",
    }
    wishes = [Reservation(tenant_id="default", key=key, token=f"of-{key}", **own) for key in ("done", "free")]
    await effects.reserve(wishes)
    said = msgspec.structs.replace(DID, type="operator.resolve_effect")
    done = EffectOutcome(tenant_id="default", key="done", token="of-done", state=EffectState.DONE, value=b"1")
    won, lost = await race(*(people.resolve_effect(done, said) for _ in range(3)))
    assert (len(won), {type(error) for error in lost}) == (1, {Conflict})
    with pytest.raises(Conflict):
        await people.resolve_effect(msgspec.structs.replace(done, key="free"), said)
    await people.resolve_effect(msgspec.structs.replace(done, key="free", token="of-free", state=None), said)
    with pytest.raises(NotFound):
        await people.resolve_effect(msgspec.structs.replace(done, key="never"), said)
    kept, freed = await effects.get([("default", "done"), ("default", "free")])
    assert kept is not None
    assert (kept.state, kept.value, freed) == (EffectState.DONE, b"1", None)
    assert [line[:2] for line in await log(any_ledger)] == [("operator.resolve_effect", "ann")] * 2
