"""`verify_ledger`: sound ledgers pass, and every kind of damage is found, on both stores."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import insert, text
from sqlalchemy.ext.asyncio import AsyncEngine

from holdfast.ledger.queries.jobs import Queries
from holdfast.ledger.verify import KEPT_FAULTS, LedgerReport, verify_ledger
from holdfast.schema import approvals
from tests.ledger.histories import START, History, S, open_engine, write

FORKED: dict[str, Any] = {"type": "ledger.forked"}

#: Open and ended jobs, a restored one, one with a fork, one with heartbeats.
SOUND = (
    History(S.QUEUED, job_id="queued"),
    History(S.QUEUED, S.RUNNING, S.SUCCEEDED, job_id="succeeded"),
    History(S.QUEUED, S.RUNNING, S.RETRYING, S.RUNNING, S.DLQ_PENDING, S.DLQ_RECORDED, S.FAILED, job_id="failed"),
    History(S.QUEUED, S.RUNNING, S.RETRYING, job_id="retrying"),
    History(S.QUEUED, S.CANCELLED, job_id="cancelled"),
    History(S.QUEUED, S.RUNNING, "task.heartbeat", "task.heartbeat", S.SUCCEEDED, "task.duplicate", job_id="long"),
    History(S.QUEUED, S.RUNNING, (S.QUEUED, {"type": "task.restored"}), S.RUNNING, S.SUCCEEDED, job_id="restored"),
    History(
        *(S.QUEUED, S.RUNNING, S.RETRYING, (S.QUEUED, {**FORKED, "attempt": 0, "retry_count": 0})),
        *(S.RUNNING, S.SUCCEEDED),
        job_id="forked",
    ),
    # The same id in another queue, and in another tenant, is another job.
    History(S.QUEUED, S.RUNNING, job_id="succeeded", queue="mail"),
    History(S.QUEUED, job_id="succeeded", tenant_id="acme"),
    History(S.QUEUED, S.RUNNING, S.SUCCEEDED, job_id="ünïcode", tenant_id="Zürich", queue="Äpfel"),
)


@pytest.fixture
async def ledger(ledger_url: str) -> AsyncIterator[AsyncEngine]:
    async with open_engine(ledger_url) as engine:
        await write(engine, *SOUND)
        yield engine


async def test_a_sound_ledger_passes_and_is_counted(ledger: AsyncEngine) -> None:
    report = await verify_ledger(Queries(ledger))
    report.assert_valid()
    assert (report.jobs, report.open_jobs) == (len(SOUND), 4)
    assert report.events == sum(len(history.events) for history in SOUND)
    assert (report.forks, report.restores, report.dead_letters, report.anomalies) == (1, 1, 1, 0)
    with pytest.raises(AssertionError, match="4 of 11 jobs in the ledger have no final event"):
        report.assert_valid(ended=True)


async def test_an_empty_ledger_is_sound(ledger_url: str) -> None:
    async with open_engine(ledger_url) as engine:
        assert (await verify_ledger(Queries(engine))) == LedgerReport()


OF = "job_id = '{}' AND tenant_id = 'default' AND queue = 'default'"
COPY = (
    "INSERT INTO job_events SELECT tenant_id, job_id, queue, 4, {}, worker, message, data, at FROM job_events WHERE {}"
)
DONE, FAILED = OF.format("succeeded"), OF.format("failed")

DAMAGE: dict[str, tuple[list[str], str]] = {
    "an event is missing": ([f"DELETE FROM job_events WHERE {DONE} AND seq = 2"], "has number 3 after 1"),
    "the first event is missing": ([f"DELETE FROM job_events WHERE {DONE} AND seq = 1"], "has number 2 after 0"),
    "the last event is missing": ([f"DELETE FROM job_events WHERE {DONE} AND seq = 3"], "its row says last event 3"),
    "all events are missing": ([f"DELETE FROM job_events WHERE {DONE}"], "has no creation event"),
    "an event twice": (
        [
            COPY.format("type, from_state, to_state, attempt, retry_count", f"{DONE} AND seq = 3"),
            f"UPDATE jobs SET last_seq = 4 WHERE {DONE}",
        ],
        "after it ended as succeeded",
    ),
    "an illegal move": (
        [f"UPDATE job_events SET to_state = 'suspended', type = 'task.suspended' WHERE {DONE} AND seq = 3"],
        "its row says state succeeded, its events say suspended",
    ),
    "a move that is not in the table": (
        [f"UPDATE job_events SET from_state = 'queued' WHERE {DONE} AND seq = 3"],
        "queued → succeeded is not in the table",
    ),
    "an event with a wrong type": (
        [f"UPDATE job_events SET type = 'task.claimed' WHERE {DONE} AND seq = 3"],
        "running → succeeded is called task.claimed",
    ),
    "a fork out of an end": (
        [COPY.format("'ledger.forked', 'succeeded', 'queued', 0, 0", f"{DONE} AND seq = 3")],
        "succeeded → queued is not a fork",
    ),
    "another state": ([f"UPDATE jobs SET state = 'cancelled' WHERE {DONE}"], "its row says state cancelled"),
    "another attempt": ([f"UPDATE jobs SET attempt = 7 WHERE {DONE}"], "its row says attempt 7, its events say 1"),
    "another retry count": ([f"UPDATE jobs SET retry_count = 7 WHERE {FAILED}"], "its row says retry count 7"),
    "another number of events": ([f"UPDATE jobs SET last_seq = 7 WHERE {DONE}"], "its row says last event 7"),
    "another end": ([f"UPDATE jobs SET finished_at = created_at WHERE {DONE}"], "its row says end"),
    "no dead letter": (["DELETE FROM dlq_items"], "is failed, but dead letter dlq-failed is missing"),
    "another's dead letter": ([f"UPDATE jobs SET dlq_id = 'x' WHERE {FAILED}"], "dead letter x is missing"),
    "events without a job": ([f"DELETE FROM jobs WHERE {DONE}"], "has 3 events and no row"),
    "a dead letter without its job": (
        [f"DELETE FROM jobs WHERE {FAILED}", f"DELETE FROM job_events WHERE {FAILED}"],
        "has dead letter dlq-failed and no row",
    ),
}


@pytest.mark.parametrize(("statements", "message"), DAMAGE.values(), ids=DAMAGE.keys())
async def test_damage_is_found(ledger: AsyncEngine, statements: list[str], message: str) -> None:
    async with ledger.begin() as connection:
        for statement in statements:
            assert (await connection.execute(text(statement))).rowcount > 0
    report = await verify_ledger(Queries(ledger))
    assert not report.ok
    assert message in "\n".join(str(fault) for fault in report.faults)
    assert {fault.key.job_id for fault in report.faults} <= {"succeeded", "failed"}
    with pytest.raises(AssertionError, match="the ledger is not sound"):
        report.assert_valid()
    later_report = await verify_ledger(Queries(ledger), since=START + timedelta(hours=1))
    assert later_report.ok


async def test_a_decided_dead_letter_outlives_its_job(ledger: AsyncEngine) -> None:
    async with ledger.begin() as connection:
        for table in ("jobs", "job_events"):
            await connection.execute(text(f"DELETE FROM {table} WHERE {FAILED}"))
        await connection.execute(
            text("UPDATE dlq_items SET status = 'discarded', requested_by = 'a', confirmed_by = 'b'")
        )
    (await verify_ledger(Queries(ledger))).assert_valid()


async def test_only_new_jobs_are_read_with_since(ledger: AsyncEngine) -> None:
    await write(ledger, History(S.QUEUED, S.RUNNING, job_id="new", at=START + timedelta(days=1)))
    report = await verify_ledger(Queries(ledger), since=START + timedelta(hours=1))
    assert (report.jobs, report.events) == (1, 2)


async def test_many_faults_are_counted_and_some_kept(ledger: AsyncEngine) -> None:
    await write(ledger, *(History(S.QUEUED, S.RUNNING, job_id=f"bad-{n}", attempt=9) for n in range(KEPT_FAULTS + 20)))
    progress: list[int] = []
    report = await verify_ledger(Queries(ledger), progress=lambda so_far: progress.append(so_far.events))
    assert report.fault_count == KEPT_FAULTS + 20
    assert len(report.faults) == KEPT_FAULTS


# Approvals and dead letters ------------------------------------------------------------------------

W, Q = S.WAITING_APPROVAL, S.QUEUED
REJECTED: dict[str, Any] = {"type": "approval.rejected"}


def approval(job_id: str, status: str = "approved", **row: Any) -> dict[str, Any]:
    decided = None if status == "requested" else START
    return {
        "tenant_id": "default",
        "approval_id": f"a-{job_id}",
        "job_id": job_id,
        "queue": "default",
        "job_type": "task",
        "payload_hash": "h",
        "requested_by": "",
        "requested_at": START,
        "status": status,
        "decided_at": decided,
        "acked_at": decided,
        **row,
    }


DECIDED = (
    History(W, job_id="waits"),
    History(W, Q, S.RUNNING, S.SUCCEEDED, job_id="approved"),
    History(W, (S.CANCELLED, REJECTED), job_id="rejected"),
    History(W, (S.CANCELLED, {"type": "approval.expired"}), job_id="expired"),
    History(W, (Q, {"type": "approval.withdrawn"}), job_id="withdrawn"),
    # Cancelled after it was approved and before the decision was delivered.
    History(W, S.CANCELLED, job_id="overtaken"),
    History(W, job_id="undelivered"),
)
APPROVALS = (
    approval("waits", "requested"),
    approval("approved"),
    approval("rejected", "rejected"),
    approval("expired", "expired"),
    approval("withdrawn", "withdrawn"),
    approval("overtaken"),
    approval("undelivered", acked_at=None),
)


@pytest.fixture
async def decided(ledger: AsyncEngine) -> AsyncEngine:
    await write(ledger, *DECIDED)
    async with ledger.begin() as connection:
        await connection.execute(insert(approvals), list(APPROVALS))
    return ledger


async def test_delivered_decisions_are_sound(decided: AsyncEngine) -> None:
    report = await verify_ledger(Queries(decided))
    report.assert_valid()
    assert report.approvals == len(APPROVALS)


DISAGREEMENTS: dict[str, tuple[str, str]] = {
    "open, and the job has continued": (
        "UPDATE approvals SET status = 'requested', decided_at = NULL WHERE job_id = 'approved'",
        "approved (default, tenant default): approval a-approved is open, but it is succeeded",
    ),
    "open, and there is no job": (
        "UPDATE approvals SET job_id = 'unknown' WHERE job_id = 'waits'",
        "approval a-waits is open, but it is not in the ledger",
    ),
    "delivered, and the job waits": (
        "UPDATE approvals SET acked_at = decided_at WHERE job_id = 'undelivered'",
        "approval a-undelivered is approved and delivered, but it still waits",
    ),
    "approved, and the job was rejected": (
        "UPDATE approvals SET status = 'approved' WHERE job_id = 'rejected'",
        "approval a-rejected is approved, but its events say approval.rejected",
    ),
    "rejected, and the job ran": (
        "UPDATE approvals SET status = 'rejected' WHERE job_id = 'approved'",
        "approval a-approved is rejected, but its events say approval.approved",
    ),
    "discarded by one": (
        "UPDATE dlq_items SET status = 'discarded', requested_by = 'ann'",
        "dead letter dlq-failed is discarded, but not by two operators",
    ),
    "discarded by the same one": (
        "UPDATE dlq_items SET status = 'discarded', requested_by = 'ann', confirmed_by = 'ann'",
        "dead letter dlq-failed is discarded by ann alone",
    ),
    "a discard without a request": (
        "UPDATE dlq_items SET status = 'discard_requested'",
        "dead letter dlq-failed is to be discarded, but not by one operator",
    ),
    "replayed as nothing": (
        "UPDATE dlq_items SET status = 'replayed', replay_count = 1",
        "dead letter dlq-failed is replayed, but has no new job",
    ),
    "a replay that was not started": (
        "UPDATE dlq_items SET replay_pending = 1",
        "dead letter dlq-failed is to be replayed, but is open",
    ),
}


@pytest.mark.parametrize(("statement", "message"), DISAGREEMENTS.values(), ids=DISAGREEMENTS.keys())
async def test_disagreements_are_found(decided: AsyncEngine, statement: str, message: str) -> None:
    async with decided.begin() as connection:
        assert (await connection.execute(text(statement))).rowcount == 1
    report = await verify_ledger(Queries(decided))
    assert report.fault_count == 1
    assert message in str(report.faults[0])
    assert (await verify_ledger(Queries(decided), since=START + timedelta(hours=1))).ok
