"""Project a feed into PostgreSQL, one transaction per batch (rules 14, 16–18).

A transaction writes the position, jobs, events and dead letters. The fast path looks nothing up. New jobs and all
events are written by COPY, known jobs by one UPDATE per kind of change, which compares each job with the state and
attempt its events begin with, and numbers the events (`last_seq + n`). If a row does not match, the batch is rolled
back and repeated on the slow path: look the jobs up, fold onto what the ledger has, and halve a batch that the database
refuses until the refused event is isolated.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache, partial
from typing import Any, Final

import asyncpg
import msgspec

from holdfast.core.job import Event, JobKey
from holdfast.core.publishing import EventPublishing
from holdfast.core.states import State
from holdfast.core.text import clean
from holdfast.engine.port.feed import FeedEntry
from holdfast.errors import HoldfastError, LedgerUnavailable
from holdfast.ledger.fold import (
    INVALID_ROWS,
    Anomaly,
    BatchMismatch,
    FoldedBatch,
    JobDraft,
    Name,
    RecordedJob,
    fold_known,
    fold_optimistic,
    split_batch,
)
from holdfast.ledger.fold_events import (
    UNKNOWN_TASK,
    approval_changes,
    approval_closing_row,
    approval_request_row,
    audit_row,
    feed_events,
    sanitize_event,
)
from holdfast.ledger.fold_rows import (
    ANOMALY_COLUMNS,
    EVENT_COLUMNS,
    JOB_COLUMNS,
    anomaly_rows,
    dead_letter_row,
    expedited_rows,
    own_values,
    published_rows,
    shared_values,
)
from holdfast.ledger.port.ledger import FeedPosition, PositionMoved, Projection, ProjectionResult, RecordedDeadLetter
from holdfast.ledger.postgres import projection_sql as sql
from holdfast.ledger.postgres.binary_copy import as_stream, event_rows, job_rows
from holdfast.ledger.postgres.notifications import payload
from holdfast.ledger.postgres.store import Connection, PostgresStore
from holdfast.ledger.waiters import RecordedWaiter, wait_position_change

_log: Final = logging.getLogger("holdfast.ledger")

#: Enough events for first statistics.
_ENOUGH_TO_ANALYSE: Final = 300

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_MS: Final = 253_402_300_799_000
_MILLISECOND: Final = timedelta(milliseconds=1)


class PostgresProjection(Projection):
    """The projection of a ledger on PostgreSQL."""

    def __init__(self, store: PostgresStore, publishing: EventPublishing | None = None) -> None:
        self._store = store
        self._publishing = publishing
        self._presence = RecordedWaiter(self._find_recorded, store.commits)
        #: Events written while the tables may be without statistics; None: they have some.
        self._unplanned: int | None = 0

    # Lease on the feed -----------------------------------------------------------------------------

    async def acquire(self, queue: str, projector: str, lease_ms: int) -> FeedPosition | None:
        values = (queue, projector, lease_ms * _MILLISECOND)
        rows = await self._store.fetch(sql.LEASE_FEED, *values) or await self._store.fetch(
            sql.INSERT_LEASED_FEED, *values
        )
        return FeedPosition(*rows[0]) if rows else None

    async def renew(self, queues: Sequence[str], projector: str, lease_ms: int) -> dict[str, FeedPosition]:
        rows = await self._store.fetch(sql.RENEW_LEASES, queues, projector, lease_ms * _MILLISECOND)
        return {feed: FeedPosition(position, nonce) for feed, position, nonce in rows}

    async def held_by_others(self, queues: Sequence[str], projector: str) -> set[str]:
        return {feed for (feed,) in await self._store.fetch(sql.LEASED_FEEDS, queues, projector)}

    async def release(self, queue: str, projector: str) -> None:
        await self._store.execute(sql.RELEASE, queue, projector)

    # Writing ---------------------------------------------------------------------------------------

    def prepare(self, queue: str, entries: Sequence[FeedEntry]) -> Any:
        try:
            return _PreparedBatch(fold_optimistic(feed_events(entries, queue)), queue)
        except Exception as exc:
            if not _is_refused(exc):
                raise
            # `project` gets the same error and handles it.
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
        if not old.position:
            await self._store.execute(sql.FIRST, queue)
        at = FeedPosition(entries[-1].position, entries[-1].nonce)
        positioned = [entry for entry in entries if entry.position]
        move = (
            queue,
            at.position,
            at.nonce,
            projector,
            lease_ms * _MILLISECOND,
            old.position,
            old.nonce,
            payload(queue, at.position),
            [entry.position for entry in positioned],
            [entry.nonce for entry in positioned],
            epoch,
        )
        events = list(feed_events(entries, queue))
        batch = _BatchWriter(queue, self._publishing)
        jobs_read = False

        async def write(how: Callable[[Connection], Any], connection: Connection) -> tuple[int, int]:
            if await connection.fetchrow(sql.MOVE, *move) is None:
                raise PositionMoved(queue)
            done: tuple[int, int] = await how(connection)
            return done

        try:
            ready = _PreparedBatch(fold_optimistic(events), queue) if prepared is None else prepared
            anomalies, dead_letters = await self._store.transact(partial(write, batch.writer(ready)))
        except Exception as exc:
            if not _is_refused(exc):
                raise
            _log.debug("batch of queue %s does not match the ledger, looking its jobs up: %r", queue, exc)
            jobs_read, careful = True, [sanitize_event(event) for event in events]
            anomalies, dead_letters = await self._store.transact(partial(write, batch.careful_writer(careful)))
        if self._unplanned is not None:
            await self._analyse_new_tables(len(events))
        return ProjectionResult(at, len(events), anomalies, dead_letters, jobs_read)

    async def _analyse_new_tables(self, events: int) -> None:
        """Analyse the new tables once they have some events.

        Autovacuum analyses them only a minute later; without statistics, look-ups use a bad index.
        """
        assert self._unplanned is not None
        self._unplanned += events
        if self._unplanned < _ENOUGH_TO_ANALYSE:
            return
        self._unplanned = None
        try:
            if await self._store.fetch("SELECT 1 FROM pg_class WHERE oid = 'jobs'::regclass AND reltuples < 0"):
                await self._store.execute("ANALYZE jobs, job_events, feed_entries")
        except LedgerUnavailable as exc:
            # The batch itself is committed.
            _log.info("could not analyse new tables: %s", exc)

    # Epoch of the engine ---------------------------------------------------------------------------

    async def engine_epoch(self, queue: str) -> str:
        rows = await self._store.fetch(sql.ENGINE_EPOCH, queue)
        return rows[0][0] if rows else ""

    async def begin_epoch(self, queue: str, epoch: str, expected: str) -> FeedPosition | None:
        rows = await self._store.fetch(sql.BEGIN_EPOCH, queue, epoch, expected)
        if not rows and not expected:
            # A new queue.
            await self._store.execute(sql.FIRST, queue)
            rows = await self._store.fetch(sql.BEGIN_EPOCH, queue, epoch, expected)
        return FeedPosition(*rows[0]) if rows else None

    # Reading ---------------------------------------------------------------------------------------

    async def already_written(self, queue: str, entries: Sequence[FeedEntry]) -> set[str]:
        rows = await self._store.fetch(
            sql.WRITTEN, queue, [entry.position for entry in entries], [entry.nonce for entry in entries]
        )
        return {row[0] for row in rows}

    async def unacked_dead_letters(
        self, queue: str, limit: int, after: RecordedDeadLetter | None = None
    ) -> list[RecordedDeadLetter]:
        last = (after.key.tenant_id, after.dlq_id) if after else ("", "")
        rows = await self._store.fetch(sql.UNACKED, queue, limit, *last)
        return [RecordedDeadLetter(JobKey(tenant_id, queue, job_id), dlq_id) for tenant_id, job_id, dlq_id in rows]

    async def dead_letters(self, keys: Sequence[JobKey]) -> list[RecordedDeadLetter]:
        found: list[RecordedDeadLetter] = []
        for queue in {key.queue for key in keys}:
            some = [key for key in keys if key.queue == queue]
            tenants, ids = [clean(key.tenant_id) for key in some], [clean(key.job_id) for key in some]
            rows = await self._store.fetch(sql.DEAD_LETTERS, queue, tenants, ids)
            found += [RecordedDeadLetter(some[number - 1], dlq_id) for number, dlq_id in rows]
        return found

    async def ack_dead_letters(self, dead_letters: Sequence[RecordedDeadLetter]) -> None:
        tenants = [one.key.tenant_id for one in dead_letters]
        await self._store.execute(sql.ACK, tenants, [one.dlq_id for one in dead_letters])

    async def position(self, queue: str) -> FeedPosition:
        rows = await self._store.fetch(sql.POSITION, queue)
        return FeedPosition(*rows[0]) if rows else FeedPosition()

    async def wait_position_change(self, queue: str, than: FeedPosition, wait_ms: int) -> FeedPosition:
        return await wait_position_change(self, self._store.commits, queue, than, wait_ms)

    async def wait_recorded(self, keys: Sequence[JobKey], wait_ms: int) -> set[JobKey]:
        return await self._presence.wait(keys, wait_ms)

    async def close(self) -> None:
        """Cancel all waiting callers."""
        await self._presence.close()

    async def _find_recorded(self, queue: str, keys: Sequence[JobKey]) -> set[JobKey]:
        tenants, ids = [clean(key.tenant_id) for key in keys], [clean(key.job_id) for key in keys]
        return {keys[number - 1] for (number,) in await self._store.fetch(sql.PRESENT, queue, tenants, ids)}


class _PreparedBatch:
    """A folded batch as arguments: rows of new jobs; for each kind of update its jobs and their arrays."""

    def __init__(self, folded: FoldedBatch, queue: str) -> None:
        self.folded = folded
        new = [draft for draft in folded.drafts if draft.creation is not None]
        self.new = job_rows(new, queue) if new else b""
        kinds: dict[str, list[JobDraft]] = {}
        for draft in folded.drafts:
            if draft.creation is None:
                kinds.setdefault(_kind(draft), []).append(draft)
        self.updates = {statement: (drafts, _arrays(statement, drafts)) for statement, drafts in kinds.items()}
        self.expedited = expedited_rows(folded.drafts, _instant)
        requested, closed = approval_changes(folded.drafts)
        self.requested = [approval_request_row(*one, _instant) for one in requested]
        self.closed = [approval_closing_row(closing, _instant) for closing in closed]
        self.audit = [audit_row(event, queue, _instant) for event in folded.audit_events]


class _BatchWriter:
    """The rows of one batch of one queue, on a connection in a transaction."""

    def __init__(self, queue: str, publishing: EventPublishing | None) -> None:
        self._queue = queue
        self._publishing = publishing

    def writer(self, ready: _PreparedBatch) -> Callable[[Connection], Any]:
        """The fast path: raises `BatchMismatch` if a row does not match."""
        return lambda connection: self._write(connection, ready)

    def careful_writer(self, events: list[Event]) -> Callable[[Connection], Any]:
        """The slow path: always ends, with refused events written as anomalies."""
        return lambda connection: self._write_carefully(connection, events)

    async def _write_carefully(self, connection: Connection, events: list[Event]) -> tuple[int, int]:
        await connection.execute("SAVEPOINT part")
        try:
            folded = fold_known(events, await self._read_jobs(connection, events))
            done = await self._write(connection, _PreparedBatch(folded, self._queue))
        except Exception as exc:
            if not _is_refused(exc):
                raise
            await connection.execute("ROLLBACK TO SAVEPOINT part")
            if len(events) == 1:
                return await self._record_refused(connection, events[0], exc), 0
            parts = [await self._write_carefully(connection, half) for half in split_batch(events)]
            return sum(anomalies for anomalies, _ in parts), sum(dead_letters for _, dead_letters in parts)
        await connection.execute("RELEASE SAVEPOINT part")
        return done

    async def _record_refused(self, connection: Connection, event: Event, error: Exception) -> int:
        _log.error("cannot write an event of job %.100s in queue %s: %s", event.job_id, self._queue, error)
        try:
            await self._note_anomalies(connection, [Anomaly(event, f"the ledger refused it: {error}")])
        except Exception as exc:
            if not _is_refused(exc):
                raise
            await connection.execute("ROLLBACK TO SAVEPOINT part")
            _log.error("cannot record the event as an anomaly: %s", exc)
        return 1

    async def _read_jobs(self, connection: Connection, events: Iterable[Event]) -> dict[Name, RecordedJob]:
        names = list(dict.fromkeys((event.tenant_id, event.job_id) for event in events))
        rows = await connection.fetch(
            sql.READ_JOBS, self._queue, [name[0] for name in names], [name[1] for name in names]
        )
        return {names[number - 1]: RecordedJob(State(state), *counts) for number, state, *counts in rows}

    async def _write(self, connection: Connection, ready: _PreparedBatch) -> tuple[int, int]:
        """Write a batch; return the numbers of anomalies and dead letters that were written."""
        folded, drafts = ready.folded, ready.folded.drafts
        if ready.expedited:
            await connection.execute(sql.EXPEDITE, self._queue, *zip(*ready.expedited, strict=True))
        for statement, (some, arrays) in ready.updates.items():
            await self._update(connection, statement, some, arrays)
        if ready.new:
            await connection.copy_to_table("jobs", source=as_stream(ready.new), columns=JOB_COLUMNS, format="binary")
        events = event_rows(drafts, self._queue)
        await connection.copy_to_table("job_events", source=events, columns=EVENT_COLUMNS, format="binary")
        if self._publishing is not None:
            await self._publish(connection, self._publishing, drafts)
        if ready.requested:
            await connection.execute(sql.INSERT_APPROVALS, self._queue, *zip(*ready.requested, strict=True))
        if ready.closed:
            await connection.execute(sql.CLOSE_APPROVALS, self._queue, *zip(*ready.closed, strict=True))
        if ready.audit:
            await connection.execute(sql.INSERT_AUDIT, *zip(*ready.audit, strict=True))
        dead = [draft for draft in drafts if draft.dead_letter is not None]
        if dead:
            await self._insert_dead_letters(connection, dead)
        if folded.anomalies:
            await self._note_anomalies(connection, folded.anomalies)
        return len(folded.anomalies), sum(draft.state is not State.FAILED for draft in dead)

    async def _publish(self, connection: Connection, publishing: EventPublishing, drafts: Sequence[JobDraft]) -> None:
        rows = published_rows(publishing, drafts, self._queue, _instant)
        if rows:
            await connection.execute(sql.PUBLISH, *zip(*rows, strict=True))

    async def _update(
        self, connection: Connection, statement: str, drafts: Sequence[JobDraft], arrays: Sequence[Any]
    ) -> None:
        rows = await connection.fetch(statement, self._queue, *arrays)
        if len(rows) != len(drafts):
            raise BatchMismatch(f"{len(drafts) - len(rows)} of {len(drafts)} jobs do not match")
        for number, last_seq in rows:
            draft = drafts[number - 1]
            draft.seq = last_seq - len(draft.events)

    async def _insert_dead_letters(self, connection: Connection, drafts: Sequence[JobDraft]) -> None:
        tenants, ids = [draft.tenant_id for draft in drafts], [draft.job_id for draft in drafts]
        histories: list[list[Event]] = [[] for _ in drafts]
        types = [UNKNOWN_TASK] * len(drafts)
        for number, job_type, *row in await connection.fetch(sql.HISTORIES, self._queue, tenants, ids):
            histories[number - 1].append(_event(ids[number - 1], *row))
            types[number - 1] = job_type
        rows = [dead_letter_row(*job, _instant) for job in zip(drafts, types, histories, strict=True)]
        await connection.execute(sql.INSERT_DEAD_LETTERS, self._queue, *zip(*rows, strict=True))

    async def _note_anomalies(self, connection: Connection, anomalies: Sequence[Anomaly]) -> None:
        rows = anomaly_rows(anomalies, self._queue, _instant)
        await connection.copy_records_to_table("anomalies", columns=ANOMALY_COLUMNS, records=rows)


@lru_cache(maxsize=10_000)
def _instant(ms: int) -> datetime | None:
    """0 is "never"; an instant beyond the calendar is its end."""
    return _EPOCH + timedelta(milliseconds=min(ms, _LAST_MS)) if ms > 0 else None


# Rows of the updates -------------------------------------------------------------------------------


def _kind(draft: JobDraft) -> str:
    if draft.state is None:
        return sql.NOTE
    if draft.state is State.SUCCEEDED and not draft.run_at_ms and draft.dlq_id is None:
        return sql.SUCCEED
    if draft.state is State.RUNNING and draft.keeps_errors and not draft.run_at_ms:
        return sql.CLAIM
    return sql.CHANGE


#: The values that each job has for itself.
_OWN: Final[dict[str, Callable[[JobDraft], tuple[Any, ...]]]] = {
    sql.NOTE: lambda draft: (draft.job_id,),
    sql.CLAIM: lambda draft: (draft.job_id, _instant(draft.at_ms), draft.worker),
    sql.SUCCEED: lambda draft: (draft.job_id, _instant(draft.at_ms), draft.result),
    sql.CHANGE: lambda draft: (draft.job_id, _instant(draft.at_ms), *own_values(draft, _instant)),
}


def _arrays(statement: str, drafts: Sequence[JobDraft]) -> list[Sequence[Any]]:
    """The statement's arguments.

    Each job's own values, the number of its combination of shared values, and the combinations.
    """
    combinations: dict[tuple[Any, ...], int] = {}
    which = [combinations.setdefault(shared_values(draft), len(combinations) + 1) for draft in drafts]
    own = zip(*map(_OWN[statement], drafts), strict=True)
    return [*own, which, *zip(*combinations, strict=True)]


def _event(job_id: str, kind: str, from_state: Any, to_state: Any, attempt: int, *rest: Any) -> Event:
    worker, message, data, at = rest
    return Event(
        type=kind,
        job_id=job_id,
        at_ms=(at - _EPOCH) // _MILLISECOND,
        from_state=State(from_state) if from_state else None,
        to_state=State(to_state) if to_state else None,
        attempt=attempt,
        worker=worker or "",
        message=message or "",
        data=msgspec.json.decode(data) if data else None,
    )


def _is_refused(error: Exception) -> bool:
    """Whether the rows are at fault, not the store: they violate a constraint, or cannot be stored."""
    if isinstance(error, asyncpg.PostgresError):
        return (error.sqlstate or "").startswith(("22", "23", "54"))
    if isinstance(error, HoldfastError | PositionMoved):
        return False
    return isinstance(error, INVALID_ROWS)
