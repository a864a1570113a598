"""Retention: what is over goes in small batches, and nothing else does."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import insert, select, update
from sqlalchemy.ext.asyncio import AsyncEngine

from holdfast.errors import LedgerUnavailable
from holdfast.ledger.port.ledger import Ledger, PruneCursors
from holdfast.schema import (
    anomalies,
    approval_votes,
    approvals,
    dlq_items,
    feed_entries,
    feed_positions,
    idempotency_keys,
    job_events,
    job_steps,
    jobs,
    operator_events,
    outbox_events,
    queue_executions,
)
from holdfast.settings import Settings
from holdfast.upkeep.ledger_tasks import BATCH, LedgerPruner
from tests.ledger.histories import S, Told, opened, write
from tests.ledger.projection_rig import open_ledger

NOW = datetime.now(UTC)
OLD, RECENT = NOW - timedelta(days=40), NOW - timedelta(days=20)
KEEP_MS = 30 * 86_400_000


@pytest.fixture
async def ledger(ledger_url: str) -> AsyncIterator[Ledger]:
    ledger = open_ledger(ledger_url)
    await ledger.open()
    yield ledger
    await ledger.close()


@pytest.fixture
async def tables(ledger: Ledger, ledger_url: str) -> AsyncIterator[AsyncEngine]:
    async with opened(ledger_url) as engine:
        yield engine


async def test_finished_jobs_go_with_all_that_is_theirs(ledger: Ledger, tables: AsyncEngine) -> None:
    await write(tables, done("old", OLD), done("recent", RECENT), done("theirs", OLD, tenant_id="acme"))
    for job_id in ("old", "recent"):
        await add(tables, job_steps, job_id=job_id, position=1, name="s", result="1", attempt=1, at=OLD)
        await add(tables, anomalies, id=job_id, job_id=job_id, reason="odd", event="{}", at=OLD)
        await add(
            tables,
            approvals,
            approval_id=job_id,
            job_id=job_id,
            job_type="pay",
            payload_hash="",
            requested_by="me",
            requested_at=OLD,
        )
        async with tables.begin() as connection:
            vote = {"tenant_id": "default", "approval_id": job_id, "voter": "ann", "approve": 1, "at": OLD}
            await connection.execute(insert(approval_votes).values(vote))
    assert await ledger.prune(KEEP_MS, 1_000) == 2 * 4 + 4
    for table in (jobs, job_events, job_steps, anomalies, approvals):
        assert await ids(tables, table) == {"recent"}, table.name
    async with tables.connect() as connection:
        assert list((await connection.execute(select(approval_votes.c.approval_id))).scalars()) == ["recent"]
    assert await ledger.prune(KEEP_MS, 1_000) == 0


async def test_open_jobs_stay_for_ever(ledger: Ledger, tables: AsyncEngine) -> None:
    await write(
        tables,
        Told(S.QUEUED, job_id="queued", at=OLD),
        Told(S.QUEUED, S.RUNNING, S.SUSPENDED, job_id="suspended", at=OLD),
        Told(S.QUEUED, S.RUNNING, S.DLQ_PENDING, job_id="pending", at=OLD),
    )
    assert await ledger.prune(KEEP_MS, 1_000) == 0
    assert await ids(tables, jobs) == {"queued", "suspended", "pending"}


@pytest.mark.parametrize(
    ("status", "stays"), [("open", True), ("discard_requested", True), ("discarded", False), ("replayed", False)]
)
async def test_open_dead_letters_stay_with_their_jobs(
    ledger: Ledger, tables: AsyncEngine, status: str, stays: bool
) -> None:
    await write(tables, Told(S.QUEUED, S.RUNNING, S.DLQ_PENDING, S.DLQ_RECORDED, S.FAILED, job_id="dead", at=OLD))
    async with tables.begin() as connection:
        await connection.execute(dlq_items.update().values(status=status, acked_at=OLD))
    await ledger.prune(KEEP_MS, 1_000)
    for table in (jobs, job_events, dlq_items):
        assert await ids(tables, table) == ({"dead"} if stays else set())


async def test_a_letter_stays_while_its_replay_is_on_its_way(ledger: Ledger, tables: AsyncEngine) -> None:
    await write(tables, Told(S.QUEUED, S.RUNNING, S.DLQ_PENDING, S.DLQ_RECORDED, S.FAILED, job_id="dead", at=OLD))
    replaying = {"status": "replayed", "acked_at": OLD, "replay_pending": 1}
    async with tables.begin() as connection:
        await connection.execute(dlq_items.update().values(replaying))
    assert await ledger.prune(KEEP_MS, 1_000) == 0
    async with tables.begin() as connection:
        await connection.execute(dlq_items.update().values(replay_pending=0))
    assert await ledger.prune(KEEP_MS, 1_000) > 0
    assert await ids(tables, dlq_items) == set()


async def test_the_operators_log_goes_by_age(ledger: Ledger, tables: AsyncEngine) -> None:
    line = {"type": "operator.pause", "actor": "ann", "target": "queue", "target_id": "q"}
    async with tables.begin() as connection:
        for tenant in ("acme", "default"):
            for number, at in enumerate((OLD, OLD, RECENT)):
                row = {**line, "tenant_id": tenant, "id": f"e{number}", "at": at}
                await connection.execute(insert(operator_events).values(row))
    assert await ledger.prune(KEEP_MS, 3) == 3
    assert await ledger.prune(KEEP_MS, 1_000) == 1
    async with tables.connect() as connection:
        assert list((await connection.execute(select(operator_events.c.id))).scalars()) == ["e2", "e2"]


async def test_messages_go_by_age_unless_they_wait(ledger: Ledger, tables: AsyncEngine) -> None:
    event = {"destination": "d", "topic": "t", "lane": 0, "payload": "{}", "created_at": OLD}
    execution = {"message_id": "m", "queue_name": "q", "status": "success"}
    async with tables.begin() as connection:
        for tenant in ("acme", "default"):
            for number, at in enumerate((OLD, OLD, RECENT)):
                names = {"tenant_id": tenant, "id": f"m{number}"}
                sent = {"status": "SENT", "sent_at": at}
                await connection.execute(insert(outbox_events).values(names | event | sent))
                await connection.execute(insert(queue_executions).values(names | execution | {"started_at": at}))
            for status, due_at in (("NEW", None), ("DEAD", None), ("RETRYING", OLD)):
                waits = {"tenant_id": tenant, "id": status, "status": status, "next_retry_at": due_at}
                await connection.execute(insert(outbox_events).values(event | waits))
    assert await ledger.prune(KEEP_MS, 3) == 3
    assert await ledger.prune(KEEP_MS, 1_000) == 5
    async with tables.connect() as connection:
        assert list((await connection.execute(select(queue_executions.c.id))).scalars()) == ["m2", "m2"]
        left = list((await connection.execute(select(outbox_events.c.id))).scalars())
    assert sorted(left) == sorted(["m2", "NEW", "DEAD", "RETRYING"] * 2)


async def test_keys_go_when_they_expire_and_doubt_keeps_its_job(ledger: Ledger, tables: AsyncEngine) -> None:
    await write(tables, done("sure", OLD), done("doubtful", OLD), done("busy", OLD))
    past, future = NOW - timedelta(hours=1), NOW + timedelta(hours=1)
    await key(tables, "expired", "sure", "done", past)
    await key(tables, "not yet", "sure", "done", future)
    await key(tables, "never", "sure", "done", None)
    await key(tables, "doubt", "doubtful", "in_doubt", past)
    await key(tables, "reserved", "busy", "reserved", past)
    await ledger.prune(KEEP_MS, 1_000)
    async with tables.connect() as connection:
        left = set((await connection.execute(select(idempotency_keys.c.key))).scalars())
    assert left == {"not yet", "never", "doubt", "reserved"}
    assert await ids(tables, jobs) == {"doubtful", "busy"}


async def test_the_entry_at_the_position_stays(ledger: Ledger, tables: AsyncEngine) -> None:
    async with tables.begin() as connection:
        await connection.execute(
            insert(feed_positions).values(feed="mail", position="2", nonce="n2", updated_at=OLD),
        )
        await connection.execute(
            insert(feed_entries),
            [
                {"feed": "mail", "position": "1", "nonce": "n1", "at": OLD},
                {"feed": "mail", "position": "2", "nonce": "n2", "at": OLD},
                {"feed": "mail", "position": "3", "nonce": "n3", "at": NOW - timedelta(days=6)},
            ],
        )
    # However short the retention: entries outlive any lag.
    await ledger.prune(1, 1_000)
    async with tables.connect() as connection:
        left = set((await connection.execute(select(feed_entries.c.position))).scalars())
    assert left == {"2", "3"}


async def test_a_batch_is_bounded_by_rows(ledger: Ledger, tables: AsyncEngine) -> None:
    await write(tables, *(done(f"j{number:03}", OLD + timedelta(seconds=number)) for number in range(50)))
    rounds = []
    while gone := await ledger.prune(KEEP_MS, 40):
        rounds.append(gone)
    # Four rows a job: the tenth batch's last job is taken whole.
    assert sum(rounds) == 50 * 4
    assert max(rounds) <= 40 + 16
    assert len(rounds) >= 3


async def test_a_batch_however_small_takes_a_job(ledger: Ledger, tables: AsyncEngine) -> None:
    await write(tables, done("old", OLD))
    assert await ledger.prune(KEEP_MS, 1) == 4
    assert await ids(tables, jobs) == set()


async def test_tenants_take_turns(ledger: Ledger, tables: AsyncEngine) -> None:
    """One that always has more to drop does not keep the others waiting."""
    times = [OLD + timedelta(minutes=number) for number in range(12)]
    stories = [done(f"j{at:%H%M}", at, tenant_id=tenant) for at in times for tenant in ("acme", "zeta")]
    await write(tables, *stories)
    marks: PruneCursors = {}
    for _ in range(4):
        await ledger.prune(KEEP_MS, 8, marks)
    async with tables.connect() as connection:
        left = Counter((await connection.execute(select(jobs.c.tenant_id))).scalars())
    assert left["acme"] < 12
    assert left["zeta"] < 12


async def test_several_at_once_share_the_work(ledger: Ledger, ledger_url: str, tables: AsyncEngine) -> None:
    await write(tables, *(done(f"j{number:03}", OLD) for number in range(60)), done("recent", RECENT))
    others = [ledger, ledger.clone(), ledger.clone()]
    while sum(await asyncio.gather(*(other.prune(KEEP_MS, 20) for other in others))):
        pass
    assert await ids(tables, jobs) == await ids(tables, job_events) == {"recent"}
    for other in others[1:]:
        await other.close()


async def test_the_archivist_hurries_while_there_is_more(caplog: pytest.LogCaptureFixture) -> None:
    class Full:
        left = 3

        async def prune(self, keep_ms: int, limit: int, marks: PruneCursors) -> int:
            assert (keep_ms, limit) == (7 * 86_400_000, BATCH)
            if self.left == 0:
                raise LedgerUnavailable("down")
            self.left -= 1
            return limit if self.left else 0

    archivist = LedgerPruner(Full(), Settings.load(retention_days=7))  # type: ignore[arg-type]
    pauses = [await archivist.run_once() for _ in range(4)]
    assert max(pauses[:2]) < 1
    assert min(pauses[2:]) > 60
    assert ["pruning is delayed" in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize(
    ("gone", "took_s", "least", "most"),
    [(BATCH, 0.0, 0.01, 0.1), (BATCH, 0.5, 1.0, 1.0), (BATCH, 10.0, 20.0, 20.0), (5, 0.1, 20, 60), (0, 0.1, 200, 400)],
)
async def test_the_archivist_leaves_room_for_others(gone: int, took_s: float, least: float, most: float) -> None:
    now = 100.0

    class Busy:
        async def prune(self, keep_ms: int, limit: int, marks: PruneCursors) -> int:
            nonlocal now
            now += took_s
            return gone

    archivist = LedgerPruner(Busy(), Settings.load(), monotonic=lambda: now)  # type: ignore[arg-type]
    assert least <= await archivist.run_once() <= most
    if gone < BATCH:
        # Who keeps little looks often.
        brief = Settings.load(retention_days=100 / 86_400, idempotency_window_s=50)
        archivist = LedgerPruner(Busy(), brief)  # type: ignore[arg-type]
        assert 8 <= await archivist.run_once() <= 12


async def test_the_archivist_looks_at_what_it_kept_again_after_some_hours() -> None:
    seen: list[PruneCursors] = []
    now = 0.0

    class Keeping:
        async def prune(self, keep_ms: int, limit: int, marks: PruneCursors) -> int:
            seen.append(dict(marks))
            marks["default"] = (len(seen), "j")
            return 0

    archivist = LedgerPruner(Keeping(), Settings.load(), monotonic=lambda: now)  # type: ignore[arg-type]
    for now in (0.0, 300.0, 7 * 3_600.0):  # noqa: B007 - the clock
        await archivist.run_once()
    assert seen == [{}, {"default": (1, "j")}, {}]


async def test_what_is_kept_is_looked_at_once(ledger: Ledger, tables: AsyncEngine) -> None:
    marks: PruneCursors = {}
    await write(tables, *(dead(f"dead{number}", OLD) for number in range(5)), done("old", OLD + timedelta(days=1)))
    assert await ledger.prune(KEEP_MS, 1_000, marks) == 4
    assert list(marks) == ["default"]
    async with tables.begin() as connection:
        await connection.execute(update(dlq_items).values(status="discarded"))
    assert await ledger.prune(KEEP_MS, 1_000, marks) == 0
    # Who starts afresh finds them.
    assert await ledger.prune(KEEP_MS, 1_000, {}) > 5 * 4
    assert await ids(tables, jobs) == set()


async def test_what_is_kept_does_not_hide_what_is_not(ledger: Ledger, tables: AsyncEngine) -> None:
    """More of them, older, than a batch looks at."""
    await write(tables, *(dead(f"dead{number:02}", OLD) for number in range(30)), done("old", OLD + timedelta(days=1)))
    assert await ledger.prune(KEEP_MS, 20, {}) == 4
    assert "old" not in await ids(tables, jobs)


async def test_long_stories_do_not_go_in_one_batch_and_none_is_passed_over(ledger: Ledger, tables: AsyncEngine) -> None:
    marks: PruneCursors = {}
    long = [S.QUEUED, *[S.RUNNING, S.RETRYING] * 20, S.RUNNING, S.SUCCEEDED]
    stories = [Told(*long, job_id=f"j{number}", at=OLD + timedelta(seconds=number)) for number in range(6)]
    await write(tables, *stories, dead("dead", OLD + timedelta(seconds=3)))
    rounds = []
    while gone := await ledger.prune(KEEP_MS, 40, marks):
        rounds.append(gone)
    assert max(rounds) < 2 * 44
    assert await ids(tables, jobs) == {"dead"}


async def test_marks_lose_nothing_between_batches(ledger: Ledger, tables: AsyncEngine) -> None:
    await write(tables, *(done(f"j{number:03}", OLD) for number in range(50)), done("recent", RECENT))
    marks: PruneCursors = {}
    while await ledger.prune(KEEP_MS, 40, marks):
        pass
    assert await ids(tables, jobs) == {"recent"}


async def test_anomalies_of_jobs_that_nobody_has_go_by_their_own_age(ledger: Ledger, tables: AsyncEngine) -> None:
    await write(tables, Told(S.QUEUED, job_id="open", at=OLD))
    for name, job_id, at in (("a", "nobody", OLD), ("b", "nobody", RECENT), ("c", "open", OLD)):
        await add(tables, anomalies, id=name, job_id=job_id, reason="odd", event="{}", at=at)
    assert await ledger.prune(KEEP_MS, 1_000) == 1
    async with tables.connect() as connection:
        assert set((await connection.execute(select(anomalies.c.id))).scalars()) == {"b", "c"}


def dead(job_id: str, at: datetime) -> Told:
    return Told(S.QUEUED, S.RUNNING, S.DLQ_PENDING, S.DLQ_RECORDED, S.FAILED, job_id=job_id, at=at)


def done(job_id: str, at: datetime, **names: Any) -> Told:
    return Told(S.QUEUED, S.RUNNING, S.SUCCEEDED, job_id=job_id, at=at, **names)


async def add(tables: AsyncEngine, table: Any, **values: Any) -> None:
    async with tables.begin() as connection:
        await connection.execute(insert(table).values(queue="default", **values))


async def key(tables: AsyncEngine, name: str, job_id: str, state: str, expires_at: datetime | None) -> None:
    value = "1" if state == "done" else None
    await add(
        tables,
        idempotency_keys,
        key=name,
        job_id=job_id,
        state=state,
        value=value,
        created_at=OLD,
        expires_at=expires_at,
        function="f",
        fingerprint="",
        token=name,
        attempt=1,
        worker="w",
        updated_at=OLD,
    )


async def ids(tables: AsyncEngine, table: Any) -> set[str]:
    async with tables.connect() as connection:
        return set((await connection.execute(select(table.c.job_id))).scalars())
