"""Retention: expired rows are pruned in small batches, and no other rows."""

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
from tests.ledger.histories import History, S, open_engine, write

NOW = datetime.now(UTC)
OLD, RECENT = NOW - timedelta(days=40), NOW - timedelta(days=20)
KEEP_MS = 30 * 86_400_000


@pytest.fixture
async def tables(ledger: Ledger, ledger_url: str) -> AsyncIterator[AsyncEngine]:
    async with open_engine(ledger_url) as engine:
        yield engine


async def test_finished_jobs_are_pruned_with_all_their_rows(ledger: Ledger, tables: AsyncEngine) -> None:
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


async def test_open_jobs_are_never_pruned(ledger: Ledger, tables: AsyncEngine) -> None:
    await write(
        tables,
        History(S.QUEUED, job_id="queued", at=OLD),
        History(S.QUEUED, S.RUNNING, S.SUSPENDED, job_id="suspended", at=OLD),
        History(S.QUEUED, S.RUNNING, S.DLQ_PENDING, job_id="pending", at=OLD),
    )
    assert await ledger.prune(KEEP_MS, 1_000) == 0
    assert await ids(tables, jobs) == {"queued", "suspended", "pending"}


@pytest.mark.parametrize(
    ("status", "kept"), [("open", True), ("discard_requested", True), ("discarded", False), ("replayed", False)]
)
async def test_open_dead_letters_are_kept_with_their_jobs(
    ledger: Ledger, tables: AsyncEngine, status: str, kept: bool
) -> None:
    await write(tables, History(S.QUEUED, S.RUNNING, S.DLQ_PENDING, S.DLQ_RECORDED, S.FAILED, job_id="dead", at=OLD))
    async with tables.begin() as connection:
        await connection.execute(dlq_items.update().values(status=status, acked_at=OLD))
    await ledger.prune(KEEP_MS, 1_000)
    for table in (jobs, job_events, dlq_items):
        assert await ids(tables, table) == ({"dead"} if kept else set())


async def test_a_dead_letter_is_kept_while_its_replay_is_pending(ledger: Ledger, tables: AsyncEngine) -> None:
    await write(tables, History(S.QUEUED, S.RUNNING, S.DLQ_PENDING, S.DLQ_RECORDED, S.FAILED, job_id="dead", at=OLD))
    replaying = {"status": "replayed", "acked_at": OLD, "replay_pending": 1}
    async with tables.begin() as connection:
        await connection.execute(dlq_items.update().values(replaying))
    assert await ledger.prune(KEEP_MS, 1_000) == 0
    async with tables.begin() as connection:
        await connection.execute(dlq_items.update().values(replay_pending=0))
    assert await ledger.prune(KEEP_MS, 1_000) > 0
    assert await ids(tables, dlq_items) == set()


async def test_audit_entries_are_pruned_by_age(ledger: Ledger, tables: AsyncEngine) -> None:
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


async def test_messages_are_pruned_by_age_unless_they_wait(ledger: Ledger, tables: AsyncEngine) -> None:
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
                pending = {"tenant_id": tenant, "id": status, "status": status, "next_retry_at": due_at}
                await connection.execute(insert(outbox_events).values(event | pending))
    assert await ledger.prune(KEEP_MS, 3) == 3
    assert await ledger.prune(KEEP_MS, 1_000) == 5
    async with tables.connect() as connection:
        assert list((await connection.execute(select(queue_executions.c.id))).scalars()) == ["m2", "m2"]
        remaining = list((await connection.execute(select(outbox_events.c.id))).scalars())
    assert sorted(remaining) == sorted(["m2", "NEW", "DEAD", "RETRYING"] * 2)


async def test_expired_keys_are_pruned_and_effects_in_doubt_keep_their_job(ledger: Ledger, tables: AsyncEngine) -> None:
    await write(tables, done("sure", OLD), done("doubtful", OLD), done("busy", OLD))
    past, future = NOW - timedelta(hours=1), NOW + timedelta(hours=1)
    await key(tables, "expired", "sure", "done", past)
    await key(tables, "not yet", "sure", "done", future)
    await key(tables, "never", "sure", "done", None)
    await key(tables, "doubt", "doubtful", "in_doubt", past)
    await key(tables, "reserved", "busy", "reserved", past)
    await ledger.prune(KEEP_MS, 1_000)
    async with tables.connect() as connection:
        remaining = set((await connection.execute(select(idempotency_keys.c.key))).scalars())
    assert remaining == {"not yet", "never", "doubt", "reserved"}
    assert await ids(tables, jobs) == {"doubtful", "busy"}


async def test_the_entry_at_the_position_is_kept(ledger: Ledger, tables: AsyncEngine) -> None:
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
    # Entries are kept longer than any lag, however short the retention.
    await ledger.prune(1, 1_000)
    async with tables.connect() as connection:
        remaining = set((await connection.execute(select(feed_entries.c.position))).scalars())
    assert remaining == {"2", "3"}


async def test_a_batch_is_bounded_by_rows(ledger: Ledger, tables: AsyncEngine) -> None:
    await write(tables, *(done(f"j{number:03}", OLD + timedelta(seconds=number)) for number in range(50)))
    rounds = []
    while pruned := await ledger.prune(KEEP_MS, 40):
        rounds.append(pruned)
    # Four rows a job: the last job of a batch is pruned whole.
    assert sum(rounds) == 50 * 4
    assert max(rounds) <= 40 + 16
    assert len(rounds) >= 3


async def test_the_smallest_batch_prunes_one_job(ledger: Ledger, tables: AsyncEngine) -> None:
    await write(tables, done("old", OLD))
    assert await ledger.prune(KEEP_MS, 1) == 4
    assert await ids(tables, jobs) == set()


async def test_tenants_are_pruned_in_rotation(ledger: Ledger, tables: AsyncEngine) -> None:
    """A tenant with many expired jobs does not delay the others."""
    times = [OLD + timedelta(minutes=number) for number in range(12)]
    histories = [done(f"j{at:%H%M}", at, tenant_id=tenant) for at in times for tenant in ("acme", "zeta")]
    await write(tables, *histories)
    cursors: PruneCursors = {}
    for _ in range(4):
        await ledger.prune(KEEP_MS, 8, cursors)
    async with tables.connect() as connection:
        remaining = Counter((await connection.execute(select(jobs.c.tenant_id))).scalars())
    assert remaining["acme"] < 12
    assert remaining["zeta"] < 12


async def test_concurrent_pruners_share_the_work(ledger: Ledger, ledger_url: str, tables: AsyncEngine) -> None:
    await write(tables, *(done(f"j{number:03}", OLD) for number in range(60)), done("recent", RECENT))
    others = [ledger, ledger.clone(), ledger.clone()]
    while sum(await asyncio.gather(*(other.prune(KEEP_MS, 20) for other in others))):
        pass
    assert await ids(tables, jobs) == await ids(tables, job_events) == {"recent"}
    for other in others[1:]:
        await other.close()


async def test_the_pruner_pauses_briefly_after_a_full_batch(caplog: pytest.LogCaptureFixture) -> None:
    class Full:
        passes = 3

        async def prune(self, keep_ms: int, limit: int, cursors: PruneCursors) -> int:
            assert (keep_ms, limit) == (7 * 86_400_000, BATCH)
            if self.passes == 0:
                raise LedgerUnavailable("down")
            self.passes -= 1
            return limit if self.passes else 0

    pruner = LedgerPruner(Full(), Settings.load(retention_days=7))  # type: ignore[arg-type]
    pauses = [await pruner.run_once() for _ in range(4)]
    assert max(pauses[:2]) < 1
    assert min(pauses[2:]) > 60
    assert ["pruning is delayed" in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize(
    ("pruned", "took_s", "least", "most"),
    [(BATCH, 0.0, 0.01, 0.1), (BATCH, 0.5, 1.0, 1.0), (BATCH, 10.0, 20.0, 20.0), (5, 0.1, 20, 60), (0, 0.1, 200, 400)],
)
async def test_the_pruner_pauses_in_proportion_to_its_work(
    pruned: int, took_s: float, least: float, most: float
) -> None:
    now = 100.0

    class Busy:
        async def prune(self, keep_ms: int, limit: int, cursors: PruneCursors) -> int:
            nonlocal now
            now += took_s
            return pruned

    pruner = LedgerPruner(Busy(), Settings.load(), monotonic=lambda: now)  # type: ignore[arg-type]
    assert least <= await pruner.run_once() <= most
    if pruned < BATCH:
        # With a short retention, passes are frequent.
        short_retention = Settings.load(retention_days=100 / 86_400, idempotency_window_s=50)
        pruner = LedgerPruner(Busy(), short_retention)  # type: ignore[arg-type]
        assert 8 <= await pruner.run_once() <= 12


async def test_the_pruner_resets_its_cursors_after_some_hours() -> None:
    cursors_per_pass: list[PruneCursors] = []
    now = 0.0

    class Keeping:
        async def prune(self, keep_ms: int, limit: int, cursors: PruneCursors) -> int:
            cursors_per_pass.append(dict(cursors))
            cursors["default"] = (len(cursors_per_pass), "j")
            return 0

    pruner = LedgerPruner(Keeping(), Settings.load(), monotonic=lambda: now)  # type: ignore[arg-type]
    for now in (0.0, 300.0, 7 * 3_600.0):  # noqa: B007 - the clock
        await pruner.run_once()
    assert cursors_per_pass == [{}, {"default": (1, "j")}, {}]


async def test_kept_jobs_are_read_once(ledger: Ledger, tables: AsyncEngine) -> None:
    cursors: PruneCursors = {}
    await write(tables, *(dead(f"dead{number}", OLD) for number in range(5)), done("old", OLD + timedelta(days=1)))
    assert await ledger.prune(KEEP_MS, 1_000, cursors) == 4
    assert list(cursors) == ["default"]
    async with tables.begin() as connection:
        await connection.execute(update(dlq_items).values(status="discarded"))
    assert await ledger.prune(KEEP_MS, 1_000, cursors) == 0
    # Without cursors they are found.
    assert await ledger.prune(KEEP_MS, 1_000, {}) > 5 * 4
    assert await ids(tables, jobs) == set()


async def test_kept_jobs_do_not_hide_expired_ones(ledger: Ledger, tables: AsyncEngine) -> None:
    """There are more of them, and older, than a batch reads."""
    await write(tables, *(dead(f"dead{number:02}", OLD) for number in range(30)), done("old", OLD + timedelta(days=1)))
    assert await ledger.prune(KEEP_MS, 20, {}) == 4
    assert "old" not in await ids(tables, jobs)


async def test_long_histories_are_split_into_batches_and_none_is_skipped(ledger: Ledger, tables: AsyncEngine) -> None:
    cursors: PruneCursors = {}
    long = [S.QUEUED, *[S.RUNNING, S.RETRYING] * 20, S.RUNNING, S.SUCCEEDED]
    histories = [History(*long, job_id=f"j{number}", at=OLD + timedelta(seconds=number)) for number in range(6)]
    await write(tables, *histories, dead("dead", OLD + timedelta(seconds=3)))
    rounds = []
    while pruned := await ledger.prune(KEEP_MS, 40, cursors):
        rounds.append(pruned)
    assert max(rounds) < 2 * 44
    assert await ids(tables, jobs) == {"dead"}


async def test_cursors_lose_nothing_between_batches(ledger: Ledger, tables: AsyncEngine) -> None:
    await write(tables, *(done(f"j{number:03}", OLD) for number in range(50)), done("recent", RECENT))
    cursors: PruneCursors = {}
    while await ledger.prune(KEEP_MS, 40, cursors):
        pass
    assert await ids(tables, jobs) == {"recent"}


async def test_anomalies_of_unknown_jobs_are_pruned_by_age(ledger: Ledger, tables: AsyncEngine) -> None:
    await write(tables, History(S.QUEUED, job_id="open", at=OLD))
    for name, job_id, at in (("a", "unknown", OLD), ("b", "unknown", RECENT), ("c", "open", OLD)):
        await add(tables, anomalies, id=name, job_id=job_id, reason="odd", event="{}", at=at)
    assert await ledger.prune(KEEP_MS, 1_000) == 1
    async with tables.connect() as connection:
        assert set((await connection.execute(select(anomalies.c.id))).scalars()) == {"b", "c"}


def dead(job_id: str, at: datetime) -> History:
    return History(S.QUEUED, S.RUNNING, S.DLQ_PENDING, S.DLQ_RECORDED, S.FAILED, job_id=job_id, at=at)


def done(job_id: str, at: datetime, **names: Any) -> History:
    return History(S.QUEUED, S.RUNNING, S.SUCCEEDED, job_id=job_id, at=at, **names)


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
