"""Feed → a SQLite file of its own. One operation of the file's writer a batch, so one savepoint in one commit.

Here a look-up costs no round trip, so that every batch is folded on what the ledger knows. Rows go in and come out as
one JSON text a statement: every step of SQLite gives up the interpreter's lock and has to win it back.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from holdfast.clock import Clock
from holdfast.core.job import Event
from holdfast.core.states import State
from holdfast.engine.port import FeedEntry
from holdfast.engine.sqlite.transaction import Transaction
from holdfast.ledger.asking import answers_of, ask_row, closing_row, deed_row, told
from holdfast.ledger.folding import (
    UNKNOWN_TASK,
    Anomaly,
    Draft,
    Folded,
    Known,
    Misfit,
    Name,
    cleaned,
    fold,
    halves,
    to_json,
)
from holdfast.ledger.keys import JobKey
from holdfast.ledger.port import DeadLetter, Position, PositionMoved, Projected, Projection
from holdfast.ledger.presence import Presence, wait_moved
from holdfast.ledger.publishing import OUTBOX_NEWS, Publishing, published_rows
from holdfast.ledger.rows import (
    Row,
    alike,
    anomaly_rows,
    changes,
    event_rows,
    expedited_rows,
    job_row,
    letter_row,
)
from holdfast.ledger.sqlite import statements as sql
from holdfast.ledger.sqlite.store import SqliteStore
from holdfast.ledger.text import clean

_log: Final = logging.getLogger("holdfast.ledger")


class SqliteProjection(Projection):
    """The projector's writing end on a SQLite file."""

    def __init__(self, store: SqliteStore, clock: Clock, publishing: Publishing | None = None) -> None:
        self._store = store
        self._publishing = publishing
        self._clock = clock
        self._presence = Presence(self._look, store.news)

    # Who projects ----------------------------------------------------------------------------------

    async def take(self, queue: str, projector: str, lease_ms: int) -> Position | None:
        now_ms = self._clock.now_ms()
        values = {"queue": queue, "projector": projector, "until": now_ms + lease_ms, "now": now_ms}
        row = await self._store.write(lambda transaction: transaction.execute(sql.TAKE, values).fetchone())
        return Position(*row) if row else None

    async def taken(self, queues: Sequence[str], projector: str) -> set[str]:
        values = {"queues": to_json(list(queues)), "projector": projector, "now": self._clock.now_ms()}
        return set(await self._read(sql.TAKEN, values))

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
        old: Position,
        entries: Sequence[FeedEntry],
        prepared: Any = None,
    ) -> Projected:
        events = [cleaned(event) for event in told(entries, queue)]
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
        }
        spoken = [(entry.position, entry.nonce) for entry in entries if entry.position]

        def write(transaction: Transaction) -> tuple[int, int]:
            if not old.position:
                transaction.execute(sql.FIRST, (queue, now_ms))
            if transaction.execute(sql.MOVE, move).rowcount != 1:
                raise PositionMoved(queue)
            transaction.execute(sql.ENTRIES, {"queue": queue, "now": now_ms, "rows": to_json(spoken)})
            transaction.effects.recorded.add(queue)
            return _write_carefully(transaction, queue, events, self._publishing)

        anomalies, letters = await self._store.write(write)
        return Projected(Position(last.position, last.nonce), len(events), anomalies, letters)

    # Looking ---------------------------------------------------------------------------------------

    async def written(self, queue: str, entries: Sequence[FeedEntry]) -> set[str]:
        rows = to_json([(entry.position, entry.nonce) for entry in entries])
        return set(await self._read(sql.WRITTEN, {"queue": queue, "rows": rows}))

    async def unacked(self, queue: str, limit: int, after: DeadLetter | None = None) -> list[DeadLetter]:
        last = {"tenant_id": after.key.tenant_id if after else "", "dlq_id": after.dlq_id if after else ""}
        rows = await self._read(sql.UNACKED, {"queue": queue, "limit": limit} | last)
        return [DeadLetter(JobKey(tenant_id, queue, job_id), dlq_id) for tenant_id, job_id, dlq_id in rows]

    async def letters(self, keys: Sequence[JobKey]) -> list[DeadLetter]:
        names = to_json([(clean(key.tenant_id), clean(key.job_id), key.queue) for key in keys])
        return [DeadLetter(keys[place], dlq_id) for place, dlq_id in await self._read(sql.LETTERS, {"rows": names})]

    async def ack(self, letters: Sequence[DeadLetter]) -> None:
        rows = to_json([(letter.key.tenant_id, letter.dlq_id) for letter in letters])
        values = {"rows": rows, "now": self._clock.now_ms()}
        await self._store.write(lambda transaction: transaction.execute(sql.ACK, values).rowcount)

    async def position(self, queue: str) -> Position:
        row = await self._store.write(
            lambda transaction: transaction.execute(sql.POSITION, (queue,)).fetchone(), lazy=True
        )
        return Position(*row) if row else Position()

    async def wait_moved(self, queue: str, than: Position, wait_ms: int) -> Position:
        return await wait_moved(self, self._store.news, queue, than, wait_ms)

    async def wait_present(self, keys: Sequence[JobKey], wait_ms: int) -> set[JobKey]:
        return await self._presence.wait(keys, wait_ms)

    async def close(self) -> None:
        """Nobody waits any longer."""
        await self._presence.close()

    async def _look(self, queue: str, keys: Sequence[JobKey]) -> set[JobKey]:
        names = to_json([(clean(key.tenant_id), clean(key.job_id)) for key in keys])
        return {keys[place] for (place,) in await self._read(sql.PRESENT, {"queue": queue, "names": names})}

    async def _read(self, statement: str, values: dict[str, Any]) -> list[Any]:
        return await self._store.write(_rows, statement, values, lazy=True)


# In the writer's thread ----------------------------------------------------------------------------


def _rows(transaction: Transaction, statement: str, values: dict[str, Any]) -> list[Any]:
    (text,) = transaction.execute(statement, values).fetchone()
    rows: list[Any] = msgspec.json.decode(text)
    return rows


def _write_carefully(
    transaction: Transaction, queue: str, events: list[Event], publishing: Publishing | None
) -> tuple[int, int]:
    """Anomalies and dead letters that were written. Always comes to an end: a batch that the file refuses is halved
    until the one event is found that it cannot take."""
    transaction.execute("SAVEPOINT part")
    try:
        folded = fold(events, _look_up(transaction, queue, events))
        done = _write(transaction, queue, folded)
        if publishing is not None:
            _publish(transaction, queue, folded, publishing)
    except Exception as exc:
        if not _is_refused(exc):
            raise
        _log.debug("a batch of %s is halved: %r", queue, exc)
        transaction.execute("ROLLBACK TO part")
        transaction.execute("RELEASE part")
        if len(events) == 1:
            return _give_up(transaction, queue, events[0], exc), 0
        parts = [_write_carefully(transaction, queue, half, publishing) for half in halves(events)]
        return sum(anomalies for anomalies, _ in parts), sum(letters for _, letters in parts)
    transaction.execute("RELEASE part")
    return done


def _give_up(transaction: Transaction, queue: str, event: Event, error: Exception) -> int:
    _log.error("an event of job %.100s in queue %s cannot be written: %s", event.job_id, queue, error)
    rows = anomaly_rows([Anomaly(event, f"the ledger refused it: {error}")], queue, _instant)
    try:
        transaction.execute(sql.INSERT_ANOMALIES, (to_json(rows),))
    except Exception as exc:
        if not _is_refused(exc):
            raise
        _log.error("nor can it be kept as an anomaly: %s", exc)
    return 1


def _look_up(transaction: Transaction, queue: str, events: Iterable[Event]) -> dict[Name, Known]:
    names = list(dict.fromkeys((event.tenant_id, event.job_id) for event in events))
    rows = _rows(transaction, sql.LOOK_UP, {"queue": queue, "names": to_json(names)})
    return {names[place]: Known(State(state), *counts) for place, state, *counts in rows}


def _write(transaction: Transaction, queue: str, folded: Folded) -> tuple[int, int]:
    drafts = folded.drafts
    new = [job_row(draft, queue, _instant) for draft in drafts if draft.creation is not None]
    old = [draft for draft in drafts if draft.creation is None]
    noted = [(draft.tenant_id, draft.job_id, len(draft.events)) for draft in old if draft.state is None]
    moved = [
        (draft.job_id, _instant(draft.at_ms), *alike(draft), *changes(draft, _instant))
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
    _write_answers(transaction, queue, drafts)
    if folded.deeds:
        rows = [deed_row(event, queue, _instant) for event in folded.deeds]
        transaction.execute(sql.DEEDS, (to_json(rows),))
    letters = [draft for draft in drafts if draft.letter is not None]
    if letters:
        _bury(transaction, queue, letters)
    if folded.anomalies:
        transaction.execute(sql.INSERT_ANOMALIES, (to_json(anomaly_rows(folded.anomalies, queue, _instant)),))
    return len(folded.anomalies), sum(draft.state is not State.FAILED for draft in letters)


def _publish(transaction: Transaction, queue: str, folded: Folded, publishing: Publishing) -> None:
    rows = published_rows(publishing, folded.drafts, queue, _instant)
    if rows:
        transaction.execute(sql.PUBLISH, (to_json(rows),))
        transaction.effects.recorded.add(OUTBOX_NEWS)


def _write_answers(transaction: Transaction, queue: str, drafts: Sequence[Draft]) -> None:
    """What jobs ask people, and questions that are void."""
    asked, closed = answers_of(drafts)
    if asked:
        transaction.execute(sql.ASK, {"queue": queue, "rows": to_json([ask_row(*one, _instant) for one in asked])})
    if closed:
        rows = [closing_row(closing, _instant) for closing in closed]
        transaction.execute(sql.CLOSE, {"queue": queue, "rows": to_json(rows)})


def _update(transaction: Transaction, statement: str, queue: str, rows: Sequence[Row]) -> None:
    if rows:
        changed = transaction.execute(statement, {"queue": queue, "rows": to_json(rows)}).rowcount
        if changed != len(rows):
            raise Misfit(f"{len(rows) - changed} of {len(rows)} jobs are elsewhere")


def _bury(transaction: Transaction, queue: str, drafts: Sequence[Draft]) -> None:
    names = to_json([(draft.tenant_id, draft.job_id) for draft in drafts])
    stories: list[list[Event]] = [[] for _ in drafts]
    types = [UNKNOWN_TASK] * len(drafts)
    for place, job_type, *row in _rows(transaction, sql.STORIES, {"queue": queue, "names": names}):
        stories[place].append(_event(drafts[place].job_id, *row))
        types[place] = job_type
    rows = [letter_row(*of_one, _instant) for of_one in zip(drafts, types, stories, strict=True)]
    transaction.execute(sql.BURY, {"queue": queue, "rows": to_json(rows)})


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
    """Whether the rows are at fault, and not the store: they break a rule, or hold what cannot be stored."""
    if isinstance(error, sqlite3.Error):
        return isinstance(error, sqlite3.IntegrityError | sqlite3.DataError) or "malformed JSON" in str(error)
    if isinstance(error, PositionMoved):
        return False
    return isinstance(error, Misfit | ValueError | TypeError | OverflowError | KeyError | AttributeError)
