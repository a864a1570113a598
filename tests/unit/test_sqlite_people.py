"""What people are asked and what they do, in the tables of the embedded ledger; and whose turn it is."""

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
from tests.unit.sqlite_rig import QUEUE, envelope, look, opened, settle, start_one

NOW_MS = ManualClock().now_ms()
ASK = ApprovalRequest(
    approval_id="approval-1",
    payload_hash="ab12",
    reason="more than 100",
    policies=("large-sums",),
    quorum=2,
    deadline_at_ms=NOW_MS + 60_000,
    requested_by="ada",
    details={"sum": 120},
)
OWN = ApprovalRequest("approval-2", "ab12", name="send it?")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "holdfast.db"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def approvals(path: Path, columns: str = "approval_id, status, decided_by, decision_reason") -> list[Any]:
    return look(path, f"SELECT {columns} FROM approvals ORDER BY approval_id")


def log(path: Path) -> list[Any]:
    rows = look(
        path,
        "SELECT tenant_id, type, actor, target, target_id, queue, reason, before, after, at FROM operator_events"
        " ORDER BY at, id",
    )
    return [(*row[:7], *(msgspec.json.decode(text) for text in row[7:9]), row[9]) for row in rows]


# Questions -----------------------------------------------------------------------------------------


async def test_a_held_submission_is_asked_in_the_same_step(path: Path, clock: ManualClock) -> None:
    async with opened(path, clock) as engine:
        held = envelope(tenant_id="acme", hold=True, meta=Meta(approval_request=ASK))
        await engine.submit([held, envelope(), envelope(hold=True)])
        # Again: the reply was lost.
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


async def test_a_refused_submission_asks_nobody(path: Path) -> None:
    async with opened(path) as engine:
        await engine.set_control(QUEUE, QueueControl(intake_paused=True))
        with pytest.raises(Exception, match="paused"):
            await engine.submit([envelope(hold=True, meta=Meta(approval_request=ASK))])
    assert approvals(path) == []


async def test_a_question_in_the_middle_of_a_run_is_asked_in_the_same_step(path: Path, clock: ManualClock) -> None:
    async with opened(path, clock) as engine:
        claim = await start_one(engine)
        await settle(engine, claim, Hold("send it?", OWN))
        # A settlement that comes twice asks once.
        assert await settle(engine, claim, Hold("send it?", OWN)) is SettleResult.ALREADY
        stale = await start_one(engine)
        await engine.move(QUEUE, stale.job_id, State.CANCELLED, actor="ann", reason="no")
        assert await settle(engine, stale, Hold("send it?", ASK)) is SettleResult.STALE
    assert approvals(path, "approval_id, job_id, name, status, deadline, requested_by") == [
        ("approval-2", claim.job_id, "send it?", "requested", None, "")
    ]


@pytest.mark.parametrize(
    ("to", "reason", "told"),
    [
        (State.CANCELLED, "typo", "typo"),
        (State.QUEUED, "", "the job continued without a decision"),
    ],
)
async def test_a_job_that_goes_on_without_an_answer_withdraws_its_question(
    path: Path, to: State, reason: str, told: str
) -> None:
    async with opened(path) as engine:
        one, other = (
            envelope(hold=True, meta=Meta(approval_request=ASK)),
            envelope(hold=True, meta=Meta(approval_request=OWN)),
        )
        await engine.submit([one, other])
        await engine.move(QUEUE, one.job_id, to, actor="ann", reason=reason)
    assert approvals(path) == [("approval-1", "withdrawn", "ann", told), ("approval-2", "requested", None, None)]
    assert look(path, "SELECT count(*) FROM approvals WHERE acked_at IS NOT NULL") == [(1,)]


async def test_what_people_have_decided_stays(path: Path) -> None:
    async with opened(path) as engine:
        held = envelope(hold=True, meta=Meta(approval_request=ASK))
        await engine.submit([held])
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("UPDATE approvals SET status = 'approved', decided_by = 'bob', decided_at = 1")
        consent = Approval("approval-1", ("bob", "cy"), 1)
        await engine.move(QUEUE, held.job_id, State.QUEUED, actor="bob", reason="fine", approval=consent)
    assert approvals(path) == [("approval-1", "approved", "bob", None)]


async def test_with_a_ledger_elsewhere_the_feed_alone_tells(path: Path) -> None:
    async with opened(path, ledger=True) as engine:
        await engine.attach_reader(QUEUE)
        held = envelope(hold=True, meta=Meta(approval_request=ASK))
        await engine.submit([held])
        await engine.move(QUEUE, held.job_id, State.CANCELLED, actor="ann", reason="no", audit="operator.cancel")
        told = [event.type for entry in await engine.read_feed(QUEUE, "", 10) for event in entry.events]
    assert told == ["approval.requested", "task.cancelled", "operator.cancel"]
    assert (approvals(path), log(path)) == ([], [])


# The operators' log --------------------------------------------------------------------------------


async def test_every_audited_step_has_its_line(path: Path, clock: ManualClock) -> None:
    control = QueueControl(paused=True, tenants={"acme": TenantControl(weight=2)})
    async with opened(path, clock) as engine:
        job = envelope(tenant_id="acme", delay_ms=60_000)
        await engine.submit([job])
        clock.advance(1.0)
        await engine.set_control(QUEUE, control, actor="ann", reason="fire", audit="operator.pause")
        clock.advance(1.0)
        await engine.expedite(QUEUE, job.job_id, actor="bob", reason="hurry", audit="operator.retry")
        clock.advance(1.0)
        await engine.move(QUEUE, job.job_id, State.CANCELLED, actor="cy", reason="no", audit="operator.cancel")
    waits = {"state": "queued", "next_attempt_at_ms": NOW_MS + 60_000}
    about = ("job", job.job_id, QUEUE)
    assert log(path) == [
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
            *about,
            "hurry",
            waits,
            waits | {"next_attempt_at_ms": NOW_MS + 2000},
            NOW_MS + 2000,
        ),
        ("acme", "operator.cancel", "cy", *about, "no", "queued", "cancelled", NOW_MS + 3_000),
    ]
    # In no job's story: that is numbered without gaps, and tells the move and the hurry itself.
    assert look(path, "SELECT seq, type FROM job_events ORDER BY id") == [
        (1, "task.created"),
        (2, "task.expedited"),
        (3, "task.cancelled"),
    ]
    assert look(path, "SELECT last_seq FROM jobs") == [(3,)]


async def test_what_was_refused_has_no_line(path: Path) -> None:
    async with opened(path) as engine:
        job = envelope()
        await engine.submit([job])
        for to in (State.FAILED, State.RUNNING):
            with pytest.raises(TransitionInvalid):
                await engine.move(QUEUE, job.job_id, to, actor="ann", reason="no", audit="operator.cancel")
        with pytest.raises(TransitionInvalid):
            await engine.expedite(QUEUE, job.job_id, actor="ann", reason="no", audit="operator.retry")
        with pytest.raises(ControlChanged):
            await engine.set_control(QUEUE, QueueControl(), expected=QueueControl(paused=True), audit="operator.pause")
    assert log(path) == []


async def test_the_log_goes_when_finished_jobs_do(path: Path, clock: ManualClock) -> None:
    async with opened(path, clock, finished_ttl_ms=60_000) as engine:
        job = envelope(hold=True, meta=Meta(approval_request=ASK))
        await engine.submit([job])
        await engine.move(QUEUE, job.job_id, State.CANCELLED, actor="ann", reason="no", audit="operator.cancel")
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("INSERT INTO approval_votes VALUES ('default', 'approval-1', 'bob', 1, '', 1)")
            connection.execute("INSERT INTO approval_votes VALUES ('default', 'another', 'bob', 1, '', 1)")
        clock.advance(59.0)
        await engine.prune([QUEUE])
        assert len(log(path)) == len(approvals(path)) == 1
        clock.advance(2.0)
        assert await engine.prune([QUEUE]) > 0
        assert (log(path), approvals(path)) == ([], [])
        assert look(path, "SELECT approval_id FROM approval_votes") == [("another",)]
        assert look(path, "SELECT count(*) FROM events") == [(0,)]
        assert await engine.prune([QUEUE]) == 0


async def test_a_reader_that_is_behind_still_gets_what_operators_did(path: Path, clock: ManualClock) -> None:
    async with opened(path, clock, finished_ttl_ms=60_000) as engine:
        await engine.attach_reader(QUEUE)
        await engine.set_control(QUEUE, QueueControl(paused=True), actor="ann", reason="fire", audit="operator.pause")
        clock.advance(120.0)
        await engine.prune([QUEUE])
        (entry,) = await engine.read_feed(QUEUE, "", 10)
        assert [event.type for event in entry.events] == ["operator.pause"]


async def test_dead_letters_of_one_kind_have_one_fingerprint(path: Path) -> None:
    async with opened(path) as engine:
        for number in (17, 4711):
            claim = await start_one(engine)
            await settle(engine, claim, DeadLetter(Failure("TASK_ERROR", f"order {number} is odd", "OddError")))
        claim = await start_one(engine)
        await settle(engine, claim, DeadLetter(Failure("TASK_ERROR", "no luck", "OddError")))
    kinds = look(path, "SELECT fingerprint, count(*) FROM dlq_items GROUP BY 1 ORDER BY 2")
    assert kinds == [
        (error_fingerprint("print", Failure("TASK_ERROR", "no luck", "OddError")), 1),
        (error_fingerprint("print", Failure("TASK_ERROR", "order 1 is odd", "OddError")), 2),
    ]


async def test_a_letter_that_is_being_replayed_is_kept(path: Path, clock: ManualClock) -> None:
    async with opened(path, clock, finished_ttl_ms=60_000) as engine:
        await settle(engine, await start_one(engine), DeadLetter(Failure("TASK_ERROR", "no luck")))
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("UPDATE dlq_items SET status = 'replayed', replay_pending = 1")
        clock.advance(120.0)
        await engine.prune([QUEUE])
        assert look(path, "SELECT count(*) FROM dlq_items") == [(1,)]
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("UPDATE dlq_items SET replay_pending = 0")
        await engine.prune([QUEUE])
        assert look(path, "SELECT count(*) FROM dlq_items") == [(0,)]


# Turns ---------------------------------------------------------------------------------------------


async def test_a_single_tenant_keeps_no_turns(path: Path) -> None:
    async with opened(path) as engine:
        for _ in range(3):
            await drain(engine, 2)
    assert look(path, "SELECT fair_share FROM queues") == [(None,)]


async def test_turns_are_kept_in_the_file(path: Path) -> None:
    async with opened(path) as engine:
        await engine.submit([envelope(tenant_id=tenant) for tenant in ("acme", "zeta") for _ in range(6)])
        first = [await one_claim(engine) for _ in range(3)]
    async with opened(path) as engine:
        more = [await one_claim(engine) for _ in range(9)]
    assert [*first, *more] == ["acme", "zeta"] * 6


async def test_more_tenants_than_one_look_takes_in_all_get_their_turn(path: Path) -> None:
    async with opened(path) as engine:
        names = [f"t{number:03}" for number in range(150)]
        await engine.submit([envelope(tenant_id=name) for name in names for _ in range(2)])
        claimed = [claim.tenant_id for _ in range(30) for claim in await engine.claim("w1", [QUEUE], 10, 0)]
    assert sorted(claimed) == sorted(2 * names)
    assert len(set(claimed[:150])) > 120, "some are served twice before others are served once"


async def drain(engine: SqliteEngine, count: int) -> None:
    await engine.submit([envelope() for _ in range(count)])
    for claim in await engine.claim("w1", [QUEUE], count, 0):
        await settle(engine, claim, Succeed(b"1"))


async def one_claim(engine: SqliteEngine) -> str:
    (claim,) = await engine.claim("w1", [QUEUE], 1, 0)
    return claim.tenant_id


# Upkeep --------------------------------------------------------------------------------------------


async def test_upkeep_that_finds_nothing_to_do_keeps_nobody_from_writing(
    path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    begin = Transaction.begin
    async with opened(path, clock) as engine:
        # Open, but neither overdue nor decided.
        await engine.submit([envelope(hold=True, meta=Meta(approval_request=ASK))])
        ledger = EmbeddedLedger(DatabaseFile(str(path)), clock)
        registrar, replays = ApprovalDelivery(engine, ledger), ReplaySubmission(engine, ledger)
        courier = WebhookDispatcher(engine, ledger, Settings())

        def counted(transaction: Transaction) -> None:
            begun.append(1)
            begin(transaction)

        monkeypatch.setattr(Transaction, "begin", counted)
        for _ in range(3):
            await registrar.run_once()
            await replays.run_once()
            await courier.run_once()
        assert begun == []
        clock.advance(60)
        await registrar.run_once()
        assert begun
        await ledger.close()
    assert approvals(path, "status") == [("expired",)]
