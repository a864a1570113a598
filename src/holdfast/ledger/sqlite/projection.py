"""Project a feed into a ledger's own SQLite file; a batch is one operation of the writer.

A look-up costs no round trip here, so every batch is folded onto what the ledger has. Rows are passed and returned as
one JSON text per statement, because every step of SQLite releases the GIL and has to acquire it again.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from holdfast.clock import Clock
from holdfast.core.codec import to_json
from holdfast.core.job import Event, JobKey
from holdfast.core.publishing import OUTBOX_CHANGED, EventPublishing
from holdfast.core.states import State
from holdfast.core.text import clean
from holdfast.engine.port.feed import FeedEntry
from holdfast.ledger.fold import (
    INVALID_ROWS,
    Anomaly,
    BatchMismatch,
    FoldedBatch,
    JobDraft,
    Name,
    RecordedJob,
    fold_known,
    split_batch,
)
from holdfast.ledger.fold_events import (
    UNKNOWN_TASK,
    Row,
    approval_changes,
    approval_closing_row,
    approval_request_row,
    audit_row,
    feed_events,
    sanitize_event,
)
from holdfast.ledger.fold_rows import (
    anomaly_rows,
    dead_letter_row,
    event_rows,
    expedited_rows,
    job_row,
    own_values,
    published_rows,
    shared_values,
)
from holdfast.ledger.port.ledger import FeedPosition, PositionMoved, Projection, ProjectionResult, RecordedDeadLetter
from holdfast.ledger.sqlite import projection_sql as sql
from holdfast.ledger.sqlite.store import SqliteLedgerStore
from holdfast.ledger.waiters import RecordedWaiter, wait_position_change
from holdfast.sqlite.transaction import Transaction

_log: Final = logging.getLogger("holdfast.ledger")


class SqliteProjection(Projection):
    """The projection of a ledger in its own SQLite file."""

    def __init__(self, store: SqliteLedgerStore, clock: Clock, publishing: EventPublishing | None = None) -> None:
        self._store = store
        self._publishing = publishing
        self._clock = clock
        self._presence = RecordedWaiter(self._find_recorded, store.commits)

    # Lease on the feed -----------------------------------------------------------------------------

    async def acquire(self, queue: str, projector: str, lease_ms: int) -> FeedPosition | None:
        now_ms = self._clock.now_ms()
        values = {"queue": queue, "projector": projector, "until": now_ms + lease_ms, "now": now_ms}
        row = await self._store.write(lambda transaction: transaction.execute(sql.LEASE_FEED, values).fetchone())
        return FeedPosition(*row) if row else None

    async def renew(self, queues: Sequence[str], projector: str, lease_ms: int) -> dict[str, FeedPosition]:
        values = {"queues": to_json(list(queues)), "projector": projector, "until": self._clock.now_ms() + lease_ms}
        rows = await self._store.write(lambda transaction: transaction.execute(sql.RENEW_LEASES, values).fetchall())
        return {feed: FeedPosition(position, nonce) for feed, position, nonce in rows}

    async def held_by_others(self, queues: Sequence[str], projector: str) -> set[str]:
        values = {"queues": to_json(list(queues)), "projector": projector, "now": self._clock.now_ms()}
        return set(await self._read(sql.LEASED_FEEDS, values))

    async def release(self, queue: str, projector: str) -> None:
        await self._store.write(lambda transaction: transaction.execute(sql.RELEASE, (queue, projector)).rowcount)

    # Writing ---------------------------------------------------------------------------------------

    def prepare(self, queue: str, entries: Sequence[FeedEntry]) -> Any:
        return None

    async def project(
        self,
        queue: str,
        projector: str,
        lease_ms: int,
        old: FeedPosition,
        entries: Sequence[FeedEntry],
        prepared: Any = None,
        *,
        epoch: str = "",
    ) -> ProjectionResult:
        events = [sanitize_event(event) for event in feed_events(entries, queue)]
        now_ms, last = self._clock.now_ms(), entries[-1]
        move = {
            "queue": queue,
            "position": last.position,
            "nonce": last.nonce,
            "projector": projector,
            "until": now_ms + lease_ms,
            "now": now_ms,
            "old_position": old.position,
            "old_nonce": old.nonce,
            "epoch": epoch,
        }
        positioned = [(entry.position, entry.nonce) for entry in entries if entry.position]

        def write(transaction: Transaction) -> tuple[int, int]:
            if not old.position:
                transaction.execute(sql.FIRST, (queue, now_ms))
            if transaction.execute(sql.MOVE, move).rowcount != 1:
                raise PositionMoved(queue)
            transaction.execute(sql.ENTRIES, {"queue": queue, "now": now_ms, "rows": to_json(positioned)})
            transaction.effects.recorded.add(queue)
            return _write_carefully(transaction, queue, events, self._publishing)

        anomalies, dead_letters = await self._store.write(write)
        return ProjectionResult(FeedPosition(last.position, last.nonce), len(events), anomalies, dead_letters)

    # Epoch of the engine ---------------------------------------------------------------------------

    async def engine_epoch(self, queue: str) -> str:
        row = await self._store.write(
            lambda transaction: transaction.execute(sql.ENGINE_EPOCH, (queue,)).fetchone(), lazy=True
        )
        return row[0] if row else ""

    async def begin_epoch(self, queue: str, epoch: str, expected: str) -> FeedPosition | None:
        values, now_ms = {"queue": queue, "epoch": epoch, "expected": expected}, self._clock.now_ms()

        def write(transaction: Transaction) -> Any:
            transaction.execute(sql.FIRST, (queue, now_ms))
            return transaction.execute(sql.BEGIN_EPOCH, values).fetchone()

        row = await self._store.write(write)
        return FeedPosition(*row) if row else None

    # Reading ---------------------------------------------------------------------------------------

    async def already_written(self, queue: str, entries: Sequence[FeedEntry]) -> set[str]:
        rows = to_json([(entry.position, entry.nonce) for entry in entries])
        return set(await self._read(sql.WRITTEN, {"queue": queue, "rows": rows}))

    async def unacked_dead_letters(
        self, queue: str, limit: int, after: RecordedDeadLetter | None = None
    ) -> list[RecordedDeadLetter]:
        last = {"tenant_id": after.key.tenant_id if after else "", "dlq_id": after.dlq_id if after else ""}
        rows = await self._read(sql.UNACKED, {"queue": queue, "limit": limit} | last)
        return [RecordedDeadLetter(JobKey(tenant_id, queue, job_id), dlq_id) for tenant_id, job_id, dlq_id in rows]

    async def dead_letters(self, keys: Sequence[JobKey]) -> list[RecordedDeadLetter]:
        names = to_json([(clean(key.tenant_id), clean(key.job_id), key.queue) for key in keys])
        rows = await self._read(sql.DEAD_LETTERS, {"rows": names})
        return [RecordedDeadLetter(keys[index], dlq_id) for index, dlq_id in rows]

    async def ack_dead_letters(self, dead_letters: Sequence[RecordedDeadLetter]) -> None:
        rows = to_json([(one.key.tenant_id, one.dlq_id) for one in dead_letters])
        values = {"rows": rows, "now": self._clock.now_ms()}
        await self._store.write(lambda transaction: transaction.execute(sql.ACK, values).rowcount)

    async def position(self, queue: str) -> FeedPosition:
        row = await self._store.write(
            lambda transaction: transaction.execute(sql.POSITION, (queue,)).fetchone(), lazy=True
        )
        return FeedPosition(*row) if row else FeedPosition()

    async def wait_position_change(self, queue: str, than: FeedPosition, wait_ms: int) -> FeedPosition:
        return await wait_position_change(self, self._store.commits, queue, than, wait_ms)

    async def wait_recorded(self, keys: Sequence[JobKey], wait_ms: int) -> set[JobKey]:
        return await self._presence.wait(keys, wait_ms)

    async def close(self) -> None:
        """Cancel all waiting callers."""
        await self._presence.close()

    async def _find_recorded(self, queue: str, keys: Sequence[JobKey]) -> set[JobKey]:
        names = to_json([(clean(key.tenant_id), clean(key.job_id)) for key in keys])
        return {keys[index] for (index,) in await self._read(sql.PRESENT, {"queue": queue, "names": names})}

    async def _read(self, statement: str, values: dict[str, Any]) -> list[Any]:
        return await self._store.write(_rows, statement, values, lazy=True)


# In the writer's thread ----------------------------------------------------------------------------


def _rows(transaction: Transaction, statement: str, values: dict[str, Any]) -> list[Any]:
    (text,) = transaction.execute(statement, values).fetchone()
    rows: list[Any] = msgspec.json.decode(text)
    return rows


def _write_carefully(
    transaction: Transaction, queue: str, events: list[Event], publishing: EventPublishing | None
) -> tuple[int, int]:
    """Write events; return the numbers of anomalies and dead letters that were written.

    Always ends: a batch that the file refuses is halved until the refused event is isolated.
    """
    transaction.execute("SAVEPOINT part")
    try:
        folded = fold_known(events, _read_jobs(transaction, queue, events))
        done = _write(transaction, queue, folded)
        if publishing is not None:
            _publish(transaction, queue, folded, publishing)
    except Exception as exc:
        if not _is_refused(exc):
            raise
        _log.debug("batch of queue %s refused, halving it: %r", queue, exc)
        transaction.execute("ROLLBACK TO part")
        transaction.execute("RELEASE part")
        if len(events) == 1:
            return _record_refused(transaction, queue, events[0], exc), 0
        parts = [_write_carefully(transaction, queue, half, publishing) for half in split_batch(events)]
        return sum(anomalies for anomalies, _ in parts), sum(dead_letters for _, dead_letters in parts)
    transaction.execute("RELEASE part")
    return done


def _record_refused(transaction: Transaction, queue: str, event: Event, error: Exception) -> int:
    _log.error("cannot write an event of job %.100s in queue %s: %s", event.job_id, queue, error)
    rows = anomaly_rows([Anomaly(event, f"the ledger refused it: {error}")], queue, _instant)
    try:
        transaction.execute(sql.INSERT_ANOMALIES, (to_json(rows),))
    except Exception as exc:
        if not _is_refused(exc):
            raise
        _log.error("cannot record the event as an anomaly: %s", exc)
    return 1


def _read_jobs(transaction: Transaction, queue: str, events: Iterable[Event]) -> dict[Name, RecordedJob]:
    names = list(dict.fromkeys((event.tenant_id, event.job_id) for event in events))
    rows = _rows(transaction, sql.READ_JOBS, {"queue": queue, "names": to_json(names)})
    return {names[index]: RecordedJob(State(state), *counts) for index, state, *counts in rows}


def _write(transaction: Transaction, queue: str, folded: FoldedBatch) -> tuple[int, int]:
    drafts = folded.drafts
    new = [job_row(draft, queue, _instant) for draft in drafts if draft.creation is not None]
    old = [draft for draft in drafts if draft.creation is None]
    noted = [(draft.tenant_id, draft.job_id, len(draft.events)) for draft in old if draft.state is None]
    moved = [
        (draft.job_id, _instant(draft.at_ms), *shared_values(draft), *own_values(draft, _instant))
        for draft in old
        if draft.state is not None
    ]
    if new:
        transaction.execute(sql.INSERT_JOBS, (to_json(new),))
    if expedited := expedited_rows(old, _instant):
        transaction.execute(sql.EXPEDITE, {"queue": queue, "rows": to_json(expedited)})
    _update(transaction, sql.NOTE, queue, noted)
    _update(transaction, sql.CHANGE, queue, moved)
    transaction.execute(sql.INSERT_EVENTS, (to_json(event_rows(drafts, queue, _instant)),))
    _write_approvals(transaction, queue, drafts)
    if folded.audit_events:
        rows = [audit_row(event, queue, _instant) for event in folded.audit_events]
        transaction.execute(sql.INSERT_AUDIT, (to_json(rows),))
    dead = [draft for draft in drafts if draft.dead_letter is not None]
    if dead:
        _insert_dead_letters(transaction, queue, dead)
    if folded.anomalies:
        transaction.execute(sql.INSERT_ANOMALIES, (to_json(anomaly_rows(folded.anomalies, queue, _instant)),))
    return len(folded.anomalies), sum(draft.state is not State.FAILED for draft in dead)


def _publish(transaction: Transaction, queue: str, folded: FoldedBatch, publishing: EventPublishing) -> None:
    rows = published_rows(publishing, folded.drafts, queue, _instant)
    if rows:
        transaction.execute(sql.PUBLISH, (to_json(rows),))
        transaction.effects.recorded.add(OUTBOX_CHANGED)


def _write_approvals(transaction: Transaction, queue: str, drafts: Sequence[JobDraft]) -> None:
    """Insert new approval requests, and close those that are superseded."""
    requested, closed = approval_changes(drafts)
    if requested:
        rows = [approval_request_row(*one, _instant) for one in requested]
        transaction.execute(sql.INSERT_APPROVALS, {"queue": queue, "rows": to_json(rows)})
    if closed:
        rows = [approval_closing_row(closing, _instant) for closing in closed]
        transaction.execute(sql.CLOSE_APPROVALS, {"queue": queue, "rows": to_json(rows)})


def _update(transaction: Transaction, statement: str, queue: str, rows: Sequence[Row]) -> None:
    if rows:
        changed = transaction.execute(statement, {"queue": queue, "rows": to_json(rows)}).rowcount
        if changed != len(rows):
            raise BatchMismatch(f"{len(rows) - changed} of {len(rows)} jobs do not match")


def _insert_dead_letters(transaction: Transaction, queue: str, drafts: Sequence[JobDraft]) -> None:
    names = to_json([(draft.tenant_id, draft.job_id) for draft in drafts])
    histories: list[list[Event]] = [[] for _ in drafts]
    types = [UNKNOWN_TASK] * len(drafts)
    for index, job_type, *row in _rows(transaction, sql.HISTORIES, {"queue": queue, "names": names}):
        histories[index].append(_event(drafts[index].job_id, *row))
        types[index] = job_type
    rows = [dead_letter_row(*job, _instant) for job in zip(drafts, types, histories, strict=True)]
    transaction.execute(sql.INSERT_DEAD_LETTERS, {"queue": queue, "rows": to_json(rows)})


def _event(job_id: str, kind: str, from_state: Any, to_state: Any, attempt: int, *rest: Any) -> Event:
    worker, message, data, at_ms = rest
    return Event(
        type=kind,
        job_id=job_id,
        at_ms=at_ms,
        from_state=State(from_state) if from_state else None,
        to_state=State(to_state) if to_state else None,
        attempt=attempt,
        worker=worker or "",
        message=message or "",
        data=msgspec.json.decode(data) if data else None,
    )


def _instant(ms: int) -> int | None:
    """0 is "never"."""
    return ms if ms > 0 else None


def _is_refused(error: Exception) -> bool:
    """Whether the rows are at fault, not the store: they violate a constraint, or cannot be stored."""
    if isinstance(error, sqlite3.Error):
        return isinstance(error, sqlite3.IntegrityError | sqlite3.DataError) or "malformed JSON" in str(error)
    if isinstance(error, PositionMoved):
        return False
    return isinstance(error, INVALID_ROWS)
