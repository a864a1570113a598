"""Feed → PostgreSQL. One transaction a batch: position, jobs, events, dead letters (rules 14, 16–18).

The fast path looks nothing up. New jobs and all events go in by COPY; older jobs by one UPDATE for each kind of end,
which holds each job against the state that its events begin with and numbers them (`last_seq + n`). If a row does not
fit, everything is rolled back and done again on the slow path: look up, fold on what is known, and halve a batch
that the database refuses until the one event is found that it cannot take.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache, partial
from typing import Any, Final

import asyncpg
import msgspec

from holdfast.core.job import Event
from holdfast.core.states import State
from holdfast.engine.port import FeedEntry
from holdfast.errors import HoldfastError, LedgerUnavailable
from holdfast.ledger.folding import (
    UNKNOWN_PAYLOAD,
    UNKNOWN_TASK,
    Anomaly,
    Draft,
    Folded,
    Known,
    Misfit,
    Name,
    assume,
    cleaned,
    fold,
    halves,
)
from holdfast.ledger.keys import JobKey
from holdfast.ledger.port import DeadLetter, Position, PositionMoved, Projected, Projection
from holdfast.ledger.postgres.copying import event_rows
from holdfast.ledger.postgres.news import CHANNEL, payload
from holdfast.ledger.postgres.store import Connection, PostgresStore
from holdfast.ledger.presence import Presence, wait_moved
from holdfast.ledger.rows import (
    ANOMALY_COLUMNS,
    EVENT_COLUMNS,
    JOB_COLUMNS,
    anomaly_rows,
    changed_row,
    job_row,
    letter_row,
    moved_row,
)
from holdfast.ledger.text import clean

_log: Final = logging.getLogger("holdfast.ledger")

#: So many events are enough for first statistics.
_ENOUGH_TO_ANALYSE: Final = 300

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_MS: Final = 253_402_300_799_000
_MILLISECOND: Final = timedelta(milliseconds=1)

#: Who stands by only looks: no lock, nothing written.
_TAKEN: Final = """
SELECT feed FROM feed_positions WHERE feed = ANY($1::text[]) AND projector <> $2 AND until >= clock_timestamp()"""

#: A row that is locked belongs to somebody who is at work.
_TAKE: Final = """
WITH free AS (
    SELECT feed FROM feed_positions
     WHERE feed = $1 AND (projector IS NULL OR projector = $2 OR until IS NULL OR until < clock_timestamp())
       FOR UPDATE SKIP LOCKED)
UPDATE feed_positions AS p SET projector = $2, until = clock_timestamp() + $3
  FROM free WHERE p.feed = free.feed
RETURNING p.position, p.nonce"""

#: Without the condition it would wait for whoever has the row locked.
_TAKE_FIRST: Final = """
INSERT INTO feed_positions (feed, position, nonce, projector, until, updated_at)
SELECT $1, '', '', $2, clock_timestamp() + $3, clock_timestamp()
 WHERE NOT EXISTS (SELECT FROM feed_positions WHERE feed = $1)
ON CONFLICT DO NOTHING
RETURNING position, nonce"""

_RELEASE: Final = "UPDATE feed_positions SET projector = NULL, until = NULL WHERE feed = $1 AND projector = $2"

_FIRST: Final = """
INSERT INTO feed_positions (feed, position, nonce, updated_at)
SELECT $1, '', '', clock_timestamp() WHERE NOT EXISTS (SELECT FROM feed_positions WHERE feed = $1)
ON CONFLICT DO NOTHING"""

_MOVE: Final = f"""
WITH free AS (
    SELECT feed FROM feed_positions WHERE feed = $1 AND position = $6 AND nonce = $7 FOR UPDATE SKIP LOCKED),
moved AS (
    UPDATE feed_positions AS p
       SET position = $2, nonce = $3, projector = $4, until = clock_timestamp() + $5, updated_at = clock_timestamp()
      FROM free WHERE p.feed = free.feed
 RETURNING p.feed),
entries AS (
    INSERT INTO feed_entries (feed, position, nonce, at)
    SELECT moved.feed, u.position, u.nonce, clock_timestamp()
      FROM moved, unnest($9::text[], $10::text[]) AS u (position, nonce)
    ON CONFLICT DO NOTHING)
SELECT pg_notify('{CHANNEL}', $8) FROM moved"""  # noqa: S608 - a name of our own


def _given(columns: Sequence[tuple[str, str]]) -> str:
    """Rows from arrays, with their place and the queue ($1) in each. `OFFSET 0` keeps the planner from seeing that the
    queue is the same in all: without statistics it would read every job of it, and look for each in the arrays."""
    arrays = ", ".join(f"${place}::{kind}[]" for place, (_, kind) in enumerate(columns, 2))
    names = ", ".join(name for name, _ in columns)
    return (
        f"(SELECT $1::text AS queue, given.* FROM unnest({arrays}) WITH ORDINALITY AS given ({names}, place) OFFSET 0)"  # noqa: S608
    )


_NAMES: Final = _given((("tenant_id", "text"), ("job_id", "text")))
_THE_JOB: Final = "j.tenant_id = u.tenant_id AND j.job_id = u.job_id AND j.queue = u.queue"


def _update(setting: str, columns: Sequence[tuple[str, str]], condition: str = " AND j.state = u.came_from") -> str:
    """An UPDATE of many jobs; gives each one's place in the arrays and its last number."""
    return f"""
UPDATE jobs AS j SET last_seq = j.last_seq + u.n, {setting}
  FROM {_given(columns)} AS u
 WHERE {_THE_JOB}{condition}
RETURNING u.place, j.last_seq"""  # noqa: S608 - names of our own


_KEY: Final = (("tenant_id", "text"), ("job_id", "text"), ("n", "int"))
_MOVED: Final = (*_KEY, ("came_from", "text"), ("attempt", "int"), ("retry_count", "int"), ("at", "timestamptz"))

_NOTE: Final = _update("updated_at = j.updated_at", _KEY, condition="")
_CLAIM: Final = _update(
    "state = 'running', attempt = u.attempt, retry_count = u.retry_count, updated_at = u.at, worker = u.worker,"
    " next_retry_at = NULL",
    (*_MOVED, ("worker", "text")),
)
_SUCCEED: Final = _update(
    "state = 'succeeded', attempt = u.attempt, retry_count = u.retry_count, updated_at = u.at, finished_at = u.at,"
    " result = u.result, worker = NULL, error_code = NULL, last_error = NULL, error_message = NULL,"
    " next_retry_at = NULL",
    (*_MOVED, ("result", "text")),
)
_CHANGE: Final = _update(
    "state = u.state, attempt = u.attempt, retry_count = u.retry_count, updated_at = u.at, finished_at = u.finished_at,"
    " worker = u.worker, result = u.result, next_retry_at = u.next_retry_at, run_at = coalesce(u.run_at, j.run_at),"
    " dlq_id = coalesce(u.dlq_id, j.dlq_id),"
    " error_code = CASE WHEN u.keeps_errors THEN j.error_code ELSE u.error_code END,"
    " last_error = CASE WHEN u.keeps_errors THEN j.last_error ELSE u.last_error END,"
    " error_message = CASE WHEN u.keeps_errors THEN j.error_message ELSE u.error_message END",
    (
        *_MOVED,
        ("state", "text"),
        ("finished_at", "timestamptz"),
        ("worker", "text"),
        ("result", "text"),
        ("next_retry_at", "timestamptz"),
        ("run_at", "timestamptz"),
        ("dlq_id", "text"),
        ("keeps_errors", "bool"),
        ("error_code", "text"),
        ("last_error", "text"),
        ("error_message", "text"),
    ),
)

_LOOK_UP: Final = f"""
SELECT u.place, j.state, j.last_seq FROM {_NAMES} AS u JOIN jobs AS j ON {_THE_JOB}"""  # noqa: S608

_STORIES: Final = f"""
SELECT u.place, e.type, e.from_state, e.to_state, e.attempt, e.worker, e.message, e.data, e.at
  FROM {_NAMES} AS u
  JOIN job_events AS e ON e.tenant_id = u.tenant_id AND e.job_id = u.job_id AND e.queue = u.queue
 ORDER BY u.place, e.seq"""  # noqa: S608

#: A job that dies twice (after a fork) has one item, of its last death.
_BURIED: Final = (
    ("tenant_id", "text"),
    ("job_id", "text"),
    ("dlq_id", "text"),
    ("error_code", "text"),
    ("error", "text"),
    ("stack", "text"),
    ("retry_count", "int"),
    ("history", "text"),
    ("failed_at", "timestamptz"),
    ("acked_at", "timestamptz"),
)
_BURY: Final = f"""
INSERT INTO dlq_items AS d (
    tenant_id, dlq_id, job_id, queue, job_type, trace_id, payload, error_code, error, stack, retry_count, history,
    failed_at, acked_at)
SELECT j.tenant_id, u.dlq_id, j.job_id, j.queue, j.job_type, j.trace_id, j.payload, u.error_code, u.error, u.stack,
       u.retry_count, u.history, u.failed_at, u.acked_at
  FROM {_given(_BURIED)} AS u JOIN jobs AS j ON {_THE_JOB}
ON CONFLICT (tenant_id, job_id, queue) DO UPDATE
   SET dlq_id = excluded.dlq_id, error_code = excluded.error_code, error = excluded.error, stack = excluded.stack,
       retry_count = excluded.retry_count, history = excluded.history, failed_at = excluded.failed_at,
       acked_at = excluded.acked_at, status = 'open'"""  # noqa: S608

_WRITTEN: Final = f"""
SELECT e.position FROM {_given((("position", "text"), ("nonce", "text")))} AS u
  JOIN feed_entries AS e ON e.feed = u.queue AND e.position = u.position AND e.nonce = u.nonce"""  # noqa: S608

_UNACKED: Final = """
SELECT tenant_id, job_id, dlq_id FROM dlq_items
 WHERE acked_at IS NULL AND queue = $1 AND (tenant_id, dlq_id) > ($3, $4)
 ORDER BY tenant_id, dlq_id LIMIT $2"""

_LETTERS: Final = f"""
SELECT u.place, j.dlq_id FROM {_NAMES} AS u JOIN dlq_items AS j ON {_THE_JOB}"""  # noqa: S608

_ACK: Final = """
UPDATE dlq_items AS d SET acked_at = clock_timestamp()
  FROM unnest($1::text[], $2::text[]) AS u (tenant_id, dlq_id)
 WHERE d.tenant_id = u.tenant_id AND d.dlq_id = u.dlq_id AND d.acked_at IS NULL"""

_POSITION: Final = "SELECT position, nonce FROM feed_positions WHERE feed = $1"

#: A job whose creation nobody told us, or that could not be written, cannot be restored: it is not there.
_PRESENT: Final = f"""
SELECT u.place FROM {_NAMES} AS u JOIN jobs AS j ON {_THE_JOB}
 WHERE NOT (j.job_type = '{UNKNOWN_TASK}' AND j.payload = '{UNKNOWN_PAYLOAD}')"""  # noqa: S608


class PostgresProjection(Projection):
    """The projector's writing end on PostgreSQL."""

    def __init__(self, store: PostgresStore) -> None:
        self._store = store
        self._presence = Presence(self._look, store.news)
        #: Events written while the tables may be without statistics; None: they have some.
        self._unplanned: int | None = 0

    # Who projects ----------------------------------------------------------------------------------

    async def take(self, queue: str, projector: str, lease_ms: int) -> Position | None:
        wish = (queue, projector, lease_ms * _MILLISECOND)
        rows = await self._store.fetch(_TAKE, *wish) or await self._store.fetch(_TAKE_FIRST, *wish)
        return Position(*rows[0]) if rows else None

    async def taken(self, queues: Sequence[str], projector: str) -> set[str]:
        return {feed for (feed,) in await self._store.fetch(_TAKEN, queues, projector)}

    async def release(self, queue: str, projector: str) -> None:
        await self._store.execute(_RELEASE, queue, projector)

    # Writing ---------------------------------------------------------------------------------------

    def prepare(self, queue: str, entries: Sequence[FeedEntry]) -> Any:
        try:
            return _Ready(assume(event for entry in entries for event in entry.events), queue)
        except Exception as exc:
            if not _is_refused(exc):
                raise
            # `project` will find out the same, and knows what to do.
            return None

    async def project(
        self,
        queue: str,
        projector: str,
        lease_ms: int,
        old: Position,
        entries: Sequence[FeedEntry],
        prepared: Any = None,
    ) -> Projected:
        if not old.position:
            await self._store.execute(_FIRST, queue)
        at = Position(entries[-1].position, entries[-1].nonce)
        told = [entry for entry in entries if entry.events]
        move = (
            queue,
            at.position,
            at.nonce,
            projector,
            lease_ms * _MILLISECOND,
            old.position,
            old.nonce,
            payload(queue, at.position),
            [entry.position for entry in told],
            [entry.nonce for entry in told],
        )
        events = [event for entry in entries for event in entry.events]
        looked_up = False

        async def write(how: Callable[[Connection], Any], connection: Connection) -> tuple[int, int]:
            if await connection.fetchrow(_MOVE, *move) is None:
                raise PositionMoved(queue)
            done: tuple[int, int] = await how(connection)
            return done

        try:
            ready = _Ready(assume(events), queue) if prepared is None else prepared
            anomalies, letters = await self._store.transact(partial(write, _Batch(queue).writer(ready)))
        except Exception as exc:
            if not _is_refused(exc):
                raise
            _log.debug("a batch of %s is looked up: %r", queue, exc)
            looked_up, careful = True, [cleaned(event) for event in events]
            anomalies, letters = await self._store.transact(partial(write, _Batch(queue).careful_writer(careful)))
        if self._unplanned is not None:
            await self._see_to_statistics(len(events))
        return Projected(at, len(events), anomalies, letters, looked_up)

    async def _see_to_statistics(self, events: int) -> None:
        """New tables have none until autovacuum comes by, a minute later; till then look-ups take the wrong index."""
        assert self._unplanned is not None
        self._unplanned += events
        if self._unplanned < _ENOUGH_TO_ANALYSE:
            return
        self._unplanned = None
        try:
            if await self._store.fetch("SELECT 1 FROM pg_class WHERE oid = 'jobs'::regclass AND reltuples < 0"):
                await self._store.execute("ANALYZE jobs, job_events, feed_entries")
        except LedgerUnavailable as exc:
            # What was to be written is written.
            _log.info("new tables could not be analysed: %s", exc)

    # Looking ---------------------------------------------------------------------------------------

    async def written(self, queue: str, entries: Sequence[FeedEntry]) -> set[str]:
        rows = await self._store.fetch(
            _WRITTEN, queue, [entry.position for entry in entries], [entry.nonce for entry in entries]
        )
        return {row[0] for row in rows}

    async def unacked(self, queue: str, limit: int, after: DeadLetter | None = None) -> list[DeadLetter]:
        last = (after.key.tenant_id, after.dlq_id) if after else ("", "")
        rows = await self._store.fetch(_UNACKED, queue, limit, *last)
        return [DeadLetter(JobKey(tenant_id, queue, job_id), dlq_id) for tenant_id, job_id, dlq_id in rows]

    async def letters(self, keys: Sequence[JobKey]) -> list[DeadLetter]:
        found: list[DeadLetter] = []
        for queue in {key.queue for key in keys}:
            some = [key for key in keys if key.queue == queue]
            tenants, ids = [clean(key.tenant_id) for key in some], [clean(key.job_id) for key in some]
            rows = await self._store.fetch(_LETTERS, queue, tenants, ids)
            found += [DeadLetter(some[place - 1], dlq_id) for place, dlq_id in rows]
        return found

    async def ack(self, letters: Sequence[DeadLetter]) -> None:
        tenants = [letter.key.tenant_id for letter in letters]
        await self._store.execute(_ACK, tenants, [letter.dlq_id for letter in letters])

    async def position(self, queue: str) -> Position:
        rows = await self._store.fetch(_POSITION, queue)
        return Position(*rows[0]) if rows else Position()

    async def wait_moved(self, queue: str, than: Position, wait_ms: int) -> Position:
        return await wait_moved(self, self._store.news, queue, than, wait_ms)

    async def wait_present(self, keys: Sequence[JobKey], wait_ms: int) -> set[JobKey]:
        return await self._presence.wait(keys, wait_ms)

    async def close(self) -> None:
        """Nobody waits any longer."""
        await self._presence.close()

    async def _look(self, queue: str, keys: Sequence[JobKey]) -> set[JobKey]:
        tenants, ids = [clean(key.tenant_id) for key in keys], [clean(key.job_id) for key in keys]
        return {keys[place - 1] for (place,) in await self._store.fetch(_PRESENT, queue, tenants, ids)}


class _Ready:
    """A folded batch as the database wants it: rows of new jobs; for each kind of update its jobs and their arrays."""

    def __init__(self, folded: Folded, queue: str) -> None:
        self.folded = folded
        self.new = [job_row(draft, queue, _instant) for draft in folded.drafts if draft.creation is not None]
        kinds: dict[str, list[Draft]] = {}
        for draft in folded.drafts:
            if draft.creation is None:
                kinds.setdefault(_kind(draft), []).append(draft)
        self.updates = {
            statement: (drafts, list(zip(*map(_ROWS[statement], drafts), strict=True)))
            for statement, drafts in kinds.items()
        }


class _Batch:
    """The rows of one batch of one queue, on a connection in a transaction."""

    def __init__(self, queue: str) -> None:
        self._queue = queue

    def writer(self, ready: _Ready) -> Callable[[Connection], Any]:
        """The fast way: raises `Misfit` if a row does not fit."""
        return lambda connection: self._write(connection, ready)

    def careful_writer(self, events: list[Event]) -> Callable[[Connection], Any]:
        """The slow way: always comes to an end."""
        return lambda connection: self._write_carefully(connection, events)

    async def _write_carefully(self, connection: Connection, events: list[Event]) -> tuple[int, int]:
        await connection.execute("SAVEPOINT part")
        try:
            folded = fold(events, await self._look_up(connection, events))
            done = await self._write(connection, _Ready(folded, self._queue))
        except Exception as exc:
            if not _is_refused(exc):
                raise
            await connection.execute("ROLLBACK TO SAVEPOINT part")
            if len(events) == 1:
                return await self._give_up(connection, events[0], exc), 0
            parts = [await self._write_carefully(connection, half) for half in halves(events)]
            return sum(anomalies for anomalies, _ in parts), sum(letters for _, letters in parts)
        await connection.execute("RELEASE SAVEPOINT part")
        return done

    async def _give_up(self, connection: Connection, event: Event, error: Exception) -> int:
        _log.error("an event of job %.100s in queue %s cannot be written: %s", event.job_id, self._queue, error)
        try:
            await self._note_anomalies(connection, [Anomaly(event, f"the ledger refused it: {error}")])
        except Exception as exc:
            if not _is_refused(exc):
                raise
            await connection.execute("ROLLBACK TO SAVEPOINT part")
            _log.error("nor can it be kept as an anomaly: %s", exc)
        return 1

    async def _look_up(self, connection: Connection, events: Iterable[Event]) -> dict[Name, Known]:
        names = list(dict.fromkeys((event.tenant_id, event.job_id) for event in events))
        rows = await connection.fetch(_LOOK_UP, self._queue, [name[0] for name in names], [name[1] for name in names])
        return {names[place - 1]: Known(State(state), last_seq) for place, state, last_seq in rows}

    async def _write(self, connection: Connection, ready: _Ready) -> tuple[int, int]:
        """Anomalies and dead letters that were written."""
        folded, drafts = ready.folded, ready.folded.drafts
        for statement, (some, arrays) in ready.updates.items():
            await self._update(connection, statement, some, arrays)
        if ready.new:
            await connection.copy_records_to_table("jobs", columns=JOB_COLUMNS, records=ready.new)
        events = event_rows(drafts, self._queue)
        await connection.copy_to_table("job_events", source=events, columns=EVENT_COLUMNS, format="binary")
        letters = [draft for draft in drafts if draft.letter is not None]
        if letters:
            await self._bury(connection, letters)
        if folded.anomalies:
            await self._note_anomalies(connection, folded.anomalies)
        return len(folded.anomalies), sum(draft.state is not State.FAILED for draft in letters)

    async def _update(
        self, connection: Connection, statement: str, drafts: Sequence[Draft], arrays: Sequence[Any]
    ) -> None:
        rows = await connection.fetch(statement, self._queue, *arrays)
        if len(rows) != len(drafts):
            raise Misfit(f"{len(drafts) - len(rows)} of {len(drafts)} jobs are elsewhere")
        for place, last_seq in rows:
            draft = drafts[place - 1]
            draft.seq = last_seq - len(draft.events)

    async def _bury(self, connection: Connection, drafts: Sequence[Draft]) -> None:
        tenants, ids = [draft.tenant_id for draft in drafts], [draft.job_id for draft in drafts]
        stories: list[list[Event]] = [[] for _ in drafts]
        for place, *row in await connection.fetch(_STORIES, self._queue, tenants, ids):
            stories[place - 1].append(_event(ids[place - 1], *row))
        rows = [letter_row(draft, story, _instant) for draft, story in zip(drafts, stories, strict=True)]
        await connection.execute(_BURY, self._queue, *zip(*rows, strict=True))

    async def _note_anomalies(self, connection: Connection, anomalies: Sequence[Anomaly]) -> None:
        rows = anomaly_rows(anomalies, self._queue, _instant)
        await connection.copy_records_to_table("anomalies", columns=ANOMALY_COLUMNS, records=rows)


@lru_cache(maxsize=10_000)
def _instant(ms: int) -> datetime | None:
    """0 is "never"; what is beyond the calendar is at its end."""
    return _EPOCH + timedelta(milliseconds=min(ms, _LAST_MS)) if ms > 0 else None


# Rows of the updates -------------------------------------------------------------------------------


def _kind(draft: Draft) -> str:
    if draft.state is None:
        return _NOTE
    if draft.state is State.SUCCEEDED and not draft.run_at_ms and draft.dlq_id is None:
        return _SUCCEED
    if draft.state is State.RUNNING and draft.keeps_errors and not draft.run_at_ms:
        return _CLAIM
    return _CHANGE


_ROWS: Final[dict[str, Callable[[Draft], tuple[Any, ...]]]] = {
    _NOTE: lambda draft: (draft.tenant_id, draft.job_id, len(draft.events)),
    _CLAIM: lambda draft: (*moved_row(draft, _instant), draft.worker),
    _SUCCEED: lambda draft: (*moved_row(draft, _instant), draft.result),
    _CHANGE: lambda draft: changed_row(draft, _instant),
}


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
    """Whether the rows are at fault, and not the store: they break a rule, or hold what cannot be stored."""
    if isinstance(error, asyncpg.PostgresError):
        return (error.sqlstate or "").startswith(("22", "23", "54"))
    if isinstance(error, HoldfastError | PositionMoved):
        return False
    return isinstance(error, Misfit | ValueError | TypeError | OverflowError | KeyError | AttributeError)
