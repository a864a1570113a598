"""Approval requests, audit entries and fair share in the tables of the embedded ledger."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.core.job import Approval, ApprovalRequest, Failure, Meta
from holdfast.core.states import State
from holdfast.core.text import error_fingerprint
from holdfast.core.verdict import DeadLetter, Hold, SettleResult, Succeed
from holdfast.engine.port.operators import QueueControl, TenantControl
from holdfast.engine.sqlite.engine import SqliteEngine
from holdfast.errors import ControlChanged, TransitionInvalid
from holdfast.ledger.sqlite.embedded import EmbeddedLedger
from holdfast.settings import Settings
from holdfast.sqlite.connection import DatabaseFile
from holdfast.sqlite.transaction import Transaction
from holdfast.testing.inline import ManualClock
from holdfast.upkeep.dispatch import ApprovalDelivery, ReplaySubmission, WebhookDispatcher
from tests.engine.sqlite.rig import QUEUE, envelope, open_engine, query_file, settle, start_one

NOW_MS = ManualClock().now_ms()
GUARD_REQUEST = ApprovalRequest(
    approval_id="approval-1",
    payload_hash="ab12",
    reason="more than 100",
    policies=("large-sums",),
    quorum=2,
    deadline_at_ms=NOW_MS + 60_000,
    requested_by="ada",
    details={"sum": 120},
)
TASK_REQUEST = ApprovalRequest("approval-2", "ab12", name="send it?")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "holdfast.db"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def approvals(path: Path, columns: str = "approval_id, status, decided_by, decision_reason") -> list[Any]:
    return query_file(path, f"SELECT {columns} FROM approvals ORDER BY approval_id")


def audit_log(path: Path) -> list[Any]:
    rows = query_file(
        path,
        "SELECT tenant_id, type, actor, target, target_id, queue, reason, before, after, at FROM operator_events"
        " ORDER BY at, id",
    )
    return [(*row[:7], *(msgspec.json.decode(text) for text in row[7:9]), row[9]) for row in rows]


# Approval requests ---------------------------------------------------------------------------------


async def test_a_held_submission_requests_approval_in_the_same_step(path: Path, clock: ManualClock) -> None:
    async with open_engine(path, clock) as engine:
        held = envelope(tenant_id="acme", hold=True, meta=Meta(approval_request=GUARD_REQUEST))
        await engine.submit([held, envelope(), envelope(hold=True)])
        # A repetition after a lost reply.
        await engine.submit([held])
    columns = "tenant_id, approval_id, job_id, queue, job_type, status, name, payload_hash, policies, reason, details"
    columns += ", quorum, deadline, requested_by, requested_at, decided_at, acked_at"
    assert approvals(path, columns) == [
        (
            "acme",
            "approval-1",
            held.job_id,
            QUEUE,
            "print",
            "requested",
            "",
            "ab12",
            '["large-sums"]',
            "more than 100",
            '{"sum":120}',
            2,
            NOW_MS + 60000,
            "ada",
            NOW_MS,
            None,
            None,
        )
    ]


async def test_a_refused_submission_requests_no_approval(path: Path) -> None:
    async with open_engine(path) as engine:
        await engine.set_control(QUEUE, QueueControl(intake_paused=True))
        with pytest.raises(Exception, match="paused"):
            await engine.submit([envelope(hold=True, meta=Meta(approval_request=GUARD_REQUEST))])
    assert approvals(path) == []


async def test_a_hold_verdict_requests_approval_in_the_same_step(path: Path, clock: ManualClock) -> None:
    async with open_engine(path, clock) as engine:
        claim = await start_one(engine)
        await settle(engine, claim, Hold("send it?", TASK_REQUEST))
        # A repeated settlement requests approval once.
        assert await settle(engine, claim, Hold("send it?", TASK_REQUEST)) is SettleResult.ALREADY
        stale = await start_one(engine)
        await engine.move(QUEUE, stale.job_id, State.CANCELLED, actor="ann", reason="no")
        assert await settle(engine, stale, Hold("send it?", GUARD_REQUEST)) is SettleResult.STALE
    assert approvals(path, "approval_id, job_id, name, status, deadline, requested_by") == [
        ("approval-2", claim.job_id, "send it?", "requested", None, "")
    ]


@pytest.mark.parametrize(
    ("to", "reason", "recorded"),
    [
        (State.CANCELLED, "typo", "typo"),
        (State.QUEUED, "", "the job continued without a decision"),
    ],
)
async def test_a_job_that_moves_without_a_decision_withdraws_its_request(
    path: Path, to: State, reason: str, recorded: str
) -> None:
    async with open_engine(path) as engine:
        one, other = (
            envelope(hold=True, meta=Meta(approval_request=GUARD_REQUEST)),
            envelope(hold=True, meta=Meta(approval_request=TASK_REQUEST)),
        )
        await engine.submit([one, other])
        await engine.move(QUEUE, one.job_id, to, actor="ann", reason=reason)
    assert approvals(path) == [("approval-1", "withdrawn", "ann", recorded), ("approval-2", "requested", None, None)]
    assert query_file(path, "SELECT count(*) FROM approvals WHERE acked_at IS NOT NULL") == [(1,)]


async def test_a_decided_request_is_not_changed(path: Path) -> None:
    async with open_engine(path) as engine:
        held = envelope(hold=True, meta=Meta(approval_request=GUARD_REQUEST))
        await engine.submit([held])
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("UPDATE approvals SET status = 'approved', decided_by = 'bob', decided_at = 1")
        approval = Approval("approval-1", ("bob", "cy"), 1)
        await engine.move(QUEUE, held.job_id, State.QUEUED, actor="bob", reason="fine", approval=approval)
    assert approvals(path) == [("approval-1", "approved", "bob", None)]


async def test_with_a_separate_ledger_only_the_feed_is_written(path: Path) -> None:
    async with open_engine(path, ledger=True) as engine:
        await engine.attach_reader(QUEUE)
        held = envelope(hold=True, meta=Meta(approval_request=GUARD_REQUEST))
        await engine.submit([held])
        await engine.move(QUEUE, held.job_id, State.CANCELLED, actor="ann", reason="no", audit="operator.cancel")
        recorded = [event.type for entry in await engine.read_feed(QUEUE, "", 10) for event in entry.events]
    assert recorded == ["approval.requested", "task.cancelled", "operator.cancel"]
    assert (approvals(path), audit_log(path)) == ([], [])


# The audit log -------------------------------------------------------------------------------------


async def test_every_audited_step_has_an_audit_entry(path: Path, clock: ManualClock) -> None:
    control = QueueControl(paused=True, tenants={"acme": TenantControl(weight=2)})
    async with open_engine(path, clock) as engine:
        job = envelope(tenant_id="acme", delay_ms=60_000)
        await engine.submit([job])
        clock.advance(1.0)
        await engine.set_control(QUEUE, control, actor="ann", reason="fire", audit="operator.pause")
        clock.advance(1.0)
        await engine.expedite(QUEUE, job.job_id, actor="bob", reason="urgent", audit="operator.retry")
        clock.advance(1.0)
        await engine.move(QUEUE, job.job_id, State.CANCELLED, actor="cy", reason="no", audit="operator.cancel")
    before = {"state": "queued", "next_attempt_at_ms": NOW_MS + 60_000}
    target = ("job", job.job_id, QUEUE)
    assert audit_log(path) == [
        (
            "default",
            "operator.pause",
            "ann",
            "queue",
            QUEUE,
            QUEUE,
            "fire",
            {},
            msgspec.to_builtins(control),
            NOW_MS + 1000,
        ),
        (
            "acme",
            "operator.retry",
            "bob",
            *target,
            "urgent",
            before,
            before | {"next_attempt_at_ms": NOW_MS + 2000},
            NOW_MS + 2000,
        ),
        ("acme", "operator.cancel", "cy", *target, "no", "queued", "cancelled", NOW_MS + 3_000),
    ]
    # Not in a job's history: that is numbered without gaps, and has the moves themselves.
    assert query_file(path, "SELECT seq, type FROM job_events ORDER BY id") == [
        (1, "task.created"),
        (2, "task.expedited"),
        (3, "task.cancelled"),
    ]
    assert query_file(path, "SELECT last_seq FROM jobs") == [(3,)]


async def test_a_refused_operation_has_no_audit_entry(path: Path) -> None:
    async with open_engine(path) as engine:
        job = envelope()
        await engine.submit([job])
        for to in (State.FAILED, State.RUNNING):
            with pytest.raises(TransitionInvalid):
                await engine.move(QUEUE, job.job_id, to, actor="ann", reason="no", audit="operator.cancel")
        with pytest.raises(TransitionInvalid):
            await engine.expedite(QUEUE, job.job_id, actor="ann", reason="no", audit="operator.retry")
        with pytest.raises(ControlChanged):
            await engine.set_control(QUEUE, QueueControl(), expected=QueueControl(paused=True), audit="operator.pause")
    assert audit_log(path) == []


async def test_the_audit_log_is_pruned_with_finished_jobs(path: Path, clock: ManualClock) -> None:
    async with open_engine(path, clock, finished_ttl_ms=60_000) as engine:
        job = envelope(hold=True, meta=Meta(approval_request=GUARD_REQUEST))
        await engine.submit([job])
        await engine.move(QUEUE, job.job_id, State.CANCELLED, actor="ann", reason="no", audit="operator.cancel")
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("INSERT INTO approval_votes VALUES ('default', 'approval-1', 'bob', 1, '', 1)")
            connection.execute("INSERT INTO approval_votes VALUES ('default', 'another', 'bob', 1, '', 1)")
        clock.advance(59.0)
        await engine.prune([QUEUE])
        assert len(audit_log(path)) == len(approvals(path)) == 1
        clock.advance(2.0)
        assert await engine.prune([QUEUE]) > 0
        assert (audit_log(path), approvals(path)) == ([], [])
        assert query_file(path, "SELECT approval_id FROM approval_votes") == [("another",)]
        assert query_file(path, "SELECT count(*) FROM events") == [(0,)]
        assert await engine.prune([QUEUE]) == 0


async def test_a_reader_that_is_behind_still_gets_audit_events(path: Path, clock: ManualClock) -> None:
    async with open_engine(path, clock, finished_ttl_ms=60_000) as engine:
        await engine.attach_reader(QUEUE)
        await engine.set_control(QUEUE, QueueControl(paused=True), actor="ann", reason="fire", audit="operator.pause")
        clock.advance(120.0)
        await engine.prune([QUEUE])
        (entry,) = await engine.read_feed(QUEUE, "", 10)
        assert [event.type for event in entry.events] == ["operator.pause"]


async def test_dead_letters_of_one_kind_have_one_fingerprint(path: Path) -> None:
    async with open_engine(path) as engine:
        for number in (17, 4711):
            claim = await start_one(engine)
            await settle(engine, claim, DeadLetter(Failure("TASK_ERROR", f"order {number} is odd", "OddError")))
        claim = await start_one(engine)
        await settle(engine, claim, DeadLetter(Failure("TASK_ERROR", "no luck", "OddError")))
    fingerprints = query_file(path, "SELECT fingerprint, count(*) FROM dlq_items GROUP BY 1 ORDER BY 2")
    assert fingerprints == [
        (error_fingerprint("print", Failure("TASK_ERROR", "no luck", "OddError")), 1),
        (error_fingerprint("print", Failure("TASK_ERROR", "order 1 is odd", "OddError")), 2),
    ]


async def test_a_dead_letter_that_is_being_replayed_is_not_pruned(path: Path, clock: ManualClock) -> None:
    async with open_engine(path, clock, finished_ttl_ms=60_000) as engine:
        await settle(engine, await start_one(engine), DeadLetter(Failure("TASK_ERROR", "no luck")))
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("UPDATE dlq_items SET status = 'replayed', replay_pending = 1")
        clock.advance(120.0)
        await engine.prune([QUEUE])
        assert query_file(path, "SELECT count(*) FROM dlq_items") == [(1,)]
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("UPDATE dlq_items SET replay_pending = 0")
        await engine.prune([QUEUE])
        assert query_file(path, "SELECT count(*) FROM dlq_items") == [(0,)]


# Fair share ----------------------------------------------------------------------------------------


async def test_a_single_tenant_has_no_fair_share_state(path: Path) -> None:
    async with open_engine(path) as engine:
        for _ in range(3):
            await drain(engine, 2)
    assert query_file(path, "SELECT fair_share FROM queues") == [(None,)]


async def test_fair_share_state_is_kept_in_the_file(path: Path) -> None:
    async with open_engine(path) as engine:
        await engine.submit([envelope(tenant_id=tenant) for tenant in ("acme", "zeta") for _ in range(6)])
        first = [await claim_tenant(engine) for _ in range(3)]
    async with open_engine(path) as engine:
        more = [await claim_tenant(engine) for _ in range(9)]
    assert [*first, *more] == ["acme", "zeta"] * 6


async def test_more_tenants_than_one_batch_all_get_their_fair_share(path: Path) -> None:
    async with open_engine(path) as engine:
        names = [f"t{number:03}" for number in range(150)]
        await engine.submit([envelope(tenant_id=name) for name in names for _ in range(2)])
        claimed = [claim.tenant_id for _ in range(30) for claim in await engine.claim("w1", [QUEUE], 10, 0)]
    assert sorted(claimed) == sorted(2 * names)
    assert len(set(claimed[:150])) > 120, "some tenants are served twice before others are served once"


async def drain(engine: SqliteEngine, count: int) -> None:
    await engine.submit([envelope() for _ in range(count)])
    for claim in await engine.claim("w1", [QUEUE], count, 0):
        await settle(engine, claim, Succeed(b"1"))


async def claim_tenant(engine: SqliteEngine) -> str:
    (claim,) = await engine.claim("w1", [QUEUE], 1, 0)
    return claim.tenant_id


# Upkeep --------------------------------------------------------------------------------------------


async def test_idle_upkeep_opens_no_write_transaction(
    path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    begins: list[int] = []
    begin = Transaction.begin
    async with open_engine(path, clock) as engine:
        # Requested, but neither overdue nor decided.
        await engine.submit([envelope(hold=True, meta=Meta(approval_request=GUARD_REQUEST))])
        ledger = EmbeddedLedger(DatabaseFile(str(path)), clock)
        approval_delivery, replays = ApprovalDelivery(engine, ledger), ReplaySubmission(engine, ledger)
        dispatcher = WebhookDispatcher(engine, ledger, Settings())

        def count_begin(transaction: Transaction) -> None:
            begins.append(1)
            begin(transaction)

        monkeypatch.setattr(Transaction, "begin", count_begin)
        for _ in range(3):
            await approval_delivery.run_once()
            await replays.run_once()
            await dispatcher.run_once()
        assert begins == []
        clock.advance(60)
        await approval_delivery.run_once()
        assert begins
        await ledger.close()
    assert approvals(path, "status") == [("expired",)]
