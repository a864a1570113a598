"""The ledger's checker: sound ledgers pass, and every kind of damage is found, on both stores."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from holdfast.ledger.queries import Queries
from holdfast.ledger.verify import KEPT_FAULTS, Report, verify_ledger
from tests.ledger.stories import START, S, Told, opened, write

FORKED: dict[str, Any] = {"type": "ledger.forked"}

#: One of each: some open, some ended, one that was put back, one whose engine forgot something, one with heartbeats.
SOUND = (
    Told(S.QUEUED, job_id="queued"),
    Told(S.QUEUED, S.RUNNING, S.SUCCEEDED, job_id="succeeded"),
    Told(S.QUEUED, S.RUNNING, S.RETRYING, S.RUNNING, S.DLQ_PENDING, S.DLQ_RECORDED, S.FAILED, job_id="failed"),
    Told(S.QUEUED, S.RUNNING, S.RETRYING, job_id="retrying"),
    Told(S.QUEUED, S.CANCELLED, job_id="cancelled"),
    Told(S.QUEUED, S.RUNNING, "task.heartbeat", "task.heartbeat", S.SUCCEEDED, "task.duplicate", job_id="long"),
    Told(S.QUEUED, S.RUNNING, (S.QUEUED, {"type": "task.restored"}), S.RUNNING, S.SUCCEEDED, job_id="restored"),
    Told(
        *(S.QUEUED, S.RUNNING, S.RETRYING, (S.QUEUED, {**FORKED, "attempt": 0, "retry_count": 0})),
        *(S.RUNNING, S.SUCCEEDED),
        job_id="forked",
    ),
    # The same id in another queue, and in another tenant, is another job.
    Told(S.QUEUED, S.RUNNING, job_id="succeeded", queue="mail"),
    Told(S.QUEUED, job_id="succeeded", tenant_id="acme"),
    Told(S.QUEUED, S.RUNNING, S.SUCCEEDED, job_id="ünïcode", tenant_id="Zürich", queue="Äpfel"),
)


@pytest.fixture
async def ledger(ledger_url: str) -> AsyncIterator[AsyncEngine]:
    async with opened(ledger_url) as engine:
        await write(engine, *SOUND)
        yield engine


async def test_a_sound_ledger_passes_and_is_counted(ledger: AsyncEngine) -> None:
    report = await verify_ledger(Queries(ledger))
    report.assert_sound()
    assert (report.jobs, report.open_jobs) == (len(SOUND), 4)
    assert report.events == sum(len(told.events) for told in SOUND)
    assert (report.forks, report.restores, report.dead_letters, report.anomalies) == (1, 1, 1, 0)
    with pytest.raises(AssertionError, match="4 of 11 jobs in the ledger have no final event"):
        report.assert_sound(ended=True)


async def test_an_empty_ledger_is_sound(ledger_url: str) -> None:
    async with opened(ledger_url) as engine:
        assert (await verify_ledger(Queries(engine))) == Report()


OF = "job_id = '{}' AND tenant_id = 'default' AND queue = 'default'"
COPY = (
    "INSERT INTO job_events SELECT tenant_id, job_id, queue, 4, {}, worker, message, data, at FROM job_events WHERE {}"
)
DONE, FAILED = OF.format("succeeded"), OF.format("failed")

DAMAGE: dict[str, tuple[list[str], str]] = {
    "an event is missing": ([f"DELETE FROM job_events WHERE {DONE} AND seq = 2"], "has number 3 after 1"),
    "the first event is missing": ([f"DELETE FROM job_events WHERE {DONE} AND seq = 1"], "has number 2 after 0"),
    "the last event is missing": ([f"DELETE FROM job_events WHERE {DONE} AND seq = 3"], "its row says last event 3"),
    "all events are missing": ([f"DELETE FROM job_events WHERE {DONE}"], "no event that tells of its creation"),
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
    "an event under a wrong name": (
        [f"UPDATE job_events SET type = 'task.claimed' WHERE {DONE} AND seq = 3"],
        "running → succeeded is called task.claimed",
    ),
    "a fork out of an end": (
        [COPY.format("'ledger.forked', 'succeeded', 'queued', 0, 0", f"{DONE} AND seq = 3")],
        "succeeded → queued is no fork",
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


@pytest.mark.parametrize(("statements", "complaint"), DAMAGE.values(), ids=DAMAGE.keys())
async def test_damage_is_found(ledger: AsyncEngine, statements: list[str], complaint: str) -> None:
    async with ledger.begin() as connection:
        for statement in statements:
            assert (await connection.execute(text(statement))).rowcount > 0
    report = await verify_ledger(Queries(ledger))
    assert not report.ok
    assert complaint in "\n".join(str(fault) for fault in report.faults)
    assert {fault.key.job_id for fault in report.faults} <= {"succeeded", "failed"}
    with pytest.raises(AssertionError, match="the ledger is not sound"):
        report.assert_sound()
    since_later = await verify_ledger(Queries(ledger), since=START + timedelta(hours=1))
    assert since_later.ok


async def test_a_decided_dead_letter_outlives_its_job(ledger: AsyncEngine) -> None:
    async with ledger.begin() as connection:
        for table in ("jobs", "job_events"):
            await connection.execute(text(f"DELETE FROM {table} WHERE {FAILED}"))
        await connection.execute(text("UPDATE dlq_items SET status = 'discarded'"))
    (await verify_ledger(Queries(ledger))).assert_sound()


async def test_only_new_jobs_are_read_when_asked(ledger: AsyncEngine) -> None:
    await write(ledger, Told(S.QUEUED, S.RUNNING, job_id="new", at=START + timedelta(days=1)))
    report = await verify_ledger(Queries(ledger), since=START + timedelta(hours=1))
    assert (report.jobs, report.events) == (1, 2)


async def test_many_faults_are_counted_and_some_kept(ledger: AsyncEngine) -> None:
    await write(ledger, *(Told(S.QUEUED, S.RUNNING, job_id=f"bad-{n}", attempt=9) for n in range(KEPT_FAULTS + 20)))
    seen: list[int] = []
    report = await verify_ledger(Queries(ledger), progress=lambda so_far: seen.append(so_far.events))
    assert report.fault_count == KEPT_FAULTS + 20
    assert len(report.faults) == KEPT_FAULTS
