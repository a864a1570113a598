"""The relay's outbox store in a SQLite file, the ledger's own or the engine's, with its SQL.

Each operation of the relay is one operation of the file's writer. The statements are those of PostgreSQL, with lists
passed as JSON texts and each answer returned as one JSON text. Events that wait behind a retried event of the same key
are skipped by an index and never read, because a key can have any number of events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final

import msgspec

from holdfast.clock import Clock
from holdfast.core.publishing import OUTBOX_CHANGED
from holdfast.ledger.port.messages import OutboxEvent, PublishResult
from holdfast.ledger.sqlite.store import SqliteLedgerStore
from holdfast.ledger.sqlite.transactions import SqliteTransactions
from holdfast.ledger.transactions.outbox import (
    BATCH_BYTES,
    STEPS,
    WINDOW,
    SqlOutboxStore,
    WalkCursors,
    WalkPosition,
    event_from_row,
    result_row,
    window_for,
)
from holdfast.ledger.waiters import CommitWaiter
from holdfast.sqlite.transaction import Transaction, json_list


def _is_blocked(event: str) -> str:
    """Whether an earlier event of the same key is retried, or dead where dead events block."""
    earlier = (
        f"SELECT 1 FROM outbox_events b"  # noqa: S608 - constants
        f" WHERE b.destination = {event}.destination AND b.topic = {event}.topic"
        f" AND b.key = {event}.key AND b.position < {event}.position AND b.status IN ('RETRYING', 'DEAD')"
    )
    return (
        f"(coalesce({event}.key, '') <> '' AND (EXISTS ({earlier} AND b.status = 'RETRYING')"
        f" OR (:dead_blocks AND EXISTS ({earlier} AND b.status = 'DEAD'))))"
    )


def _retries(lane: str) -> str:
    """Events of a lane whose retry is due, without an earlier unsent event of their key."""
    return f"""
        SELECT r.position FROM outbox_events r
         WHERE r.lane = {lane} AND r.status = 'RETRYING' AND r.next_retry_at <= :now
           AND r.destination IN (SELECT value FROM json_each(:destinations)) AND NOT {_is_blocked("r")}
           AND NOT (coalesce(r.key, '') <> '' AND EXISTS (
               SELECT 1 FROM outbox_events n INDEXED BY outbox_events_by_key
                WHERE n.status = 'NEW' AND n.lane = r.lane
                  AND n.destination = r.destination AND n.topic = r.topic AND coalesce(n.key, '') = coalesce(r.key, '')
                  AND n.position < r.position))
         ORDER BY r.next_retry_at"""  # noqa: S608 - constants


def _first(lane: str, destination: str, columns: str = "w.position") -> str:
    """The first new events of a lane and destination."""
    return f"""
        SELECT {columns} FROM outbox_events w
         WHERE w.status = 'NEW' AND w.lane = {lane} AND w.destination = {destination}
         ORDER BY w.position LIMIT :window"""  # noqa: S608 - constants


#: Lanes that are free or leased by this relay, longest free first: whether something is due, and whether the whole
#: window is blocked, so that there may be due events behind it.
FIND_LANES: Final = f"""
SELECT json_group_array(json_array(lane, ready, NOT ready AND crowded)) FROM (
    SELECT l.lane,
           EXISTS ({_retries("l.lane")}) OR EXISTS (
               SELECT 1 FROM json_each(:destinations) d CROSS JOIN outbox_events e
                ON e.position IN ({_first("l.lane", "d.value")}) AND NOT {_is_blocked("e")}) AS ready,
           EXISTS (SELECT 1 FROM json_each(:destinations) d
                    WHERE (SELECT count(*) FROM ({_first("l.lane", "d.value")})) = :window) AS crowded
      FROM outbox_lanes l WHERE l.relay = :relay OR l.lease_expires_at <= :now
     ORDER BY l.lease_expires_at, l.lane)
 WHERE ready OR crowded"""  # noqa: S608 - constants

#: Those of the lanes that are free or leased by this relay.
FREE: Final = """
SELECT json_group_array(lane) FROM outbox_lanes
 WHERE lane IN (SELECT value FROM json_each(:lanes)) AND (relay = :relay OR lease_expires_at <= :now)"""

LEASE_LANES: Final = """
UPDATE outbox_lanes SET relay = :relay, lease_expires_at = :until WHERE lane IN (SELECT value FROM json_each(:lanes))"""

#: Those of the lanes that are leased by this relay.
MINE: Final = """
SELECT json_group_array(lane) FROM outbox_lanes
 WHERE lane IN (SELECT value FROM json_each(:lanes)) AND relay = :relay AND lease_expires_at > :now"""

#: Lane, destination, position and whether it is blocked, of the first new events of each lane.
NEW_EVENTS: Final = f"""
SELECT json_group_array(json_array(e.lane, e.destination, e.position, {_is_blocked("e")}))
  FROM json_each(:lanes) l CROSS JOIN json_each(:destinations) d
 CROSS JOIN outbox_events e ON e.position IN ({_first("l.value", "d.value")})"""  # noqa: S608 - constants

AGAIN: Final = f"""
SELECT json_group_array(e.position)
  FROM json_each(:lanes) l CROSS JOIN outbox_events e
    ON e.position IN ({_retries("l.value")} LIMIT :limit)"""  # noqa: S608 - constants

#: The events at these positions, up to `:bytes` bytes.
EVENTS: Final = """
SELECT json_group_array(json_object(
    'tenant_id', tenant_id, 'id', id, 'destination', destination, 'topic', topic, 'key', key, 'payload', payload,
    'headers', headers, 'status', status, 'attempt_count', attempt_count, 'next_retry_at', next_retry_at,
    'last_error', last_error, 'created_at', created_at, 'sent_at', sent_at, 'position', position))
  FROM (SELECT * FROM outbox_events WHERE position IN (
            SELECT position FROM (
                SELECT position, sum(length(payload)) OVER (ORDER BY position) - length(payload) AS before
                  FROM outbox_events WHERE position IN (SELECT value FROM json_each(:positions)))
             WHERE before < :bytes)
         ORDER BY position)"""


def _next_key(lane: str, destination: str, topic: str, key: str) -> str:
    """The first event of the next key: of the same topic, else the next topic or destination.

    Not one comparison of all three columns, for which SQLite would read all events of the key.
    """
    conditions = (
        f"n.destination = {destination} AND n.topic = {topic} AND coalesce(n.key, '') > {key}",
        f"n.destination = {destination} AND n.topic > {topic}",
        f"n.destination > {destination}",
    )
    steps = (
        f"""(SELECT n.position FROM outbox_events n INDEXED BY outbox_events_by_key
              WHERE n.status = 'NEW' AND n.lane = {lane} AND {condition}
              ORDER BY n.destination, n.topic, coalesce(n.key, ''), n.position LIMIT 1)"""  # noqa: S608 - constants
        for condition in conditions
    )
    return f"coalesce({', '.join(steps)})"


def _obstacle(status: str) -> str:
    """The position of the first event that blocks its key."""
    return f"""
        coalesce((SELECT b.position FROM outbox_events b
                   WHERE b.destination = w.destination AND b.topic = w.topic AND b.key = w.key AND b.key <> ''
                     AND b.status IN ('RETRYING', 'DEAD') AND b.status = '{status}'
                   ORDER BY b.position LIMIT 1), {_FAR})"""  # noqa: S608 - constants


_FAR: Final = 2**63 - 1

#: From key to key, beginning in each lane after a given one: where to continue, if there is more, and lane and position
#: of due events.
WALK: Final = f"""
WITH RECURSIVE keys (position, step) AS (
    SELECT {_next_key("p.value ->> 0", "p.value ->> 1", "p.value ->> 2", "p.value ->> 3")}, 0 FROM json_each(:places) p
    UNION ALL
    SELECT {_next_key("e.lane", "e.destination", "e.topic", "coalesce(e.key, '')")}, step + 1
      FROM keys CROSS JOIN outbox_events e ON e.position = keys.position
     LIMIT :steps
), walked AS MATERIALIZED (
    SELECT e.lane, e.destination, e.topic, e.key, e.position, step
      FROM keys CROSS JOIN outbox_events e ON e.position = keys.position
), ready AS (
    SELECT w.*, min({_obstacle("RETRYING")}, CASE WHEN :dead_blocks THEN {_obstacle("DEAD")} ELSE {_FAR} END) AS before
      FROM walked w WHERE w.destination IN (SELECT value FROM json_each(:destinations))
)
SELECT json_array(
    -- The other columns are of the row that has the maximum.
    (SELECT json_group_array(json_array(lane, destination, topic, name)) FROM (
        SELECT lane, destination, topic, coalesce(key, '') AS name, max(step) FROM walked
         WHERE (SELECT count(*) FROM keys) >= :steps GROUP BY lane)),
    (SELECT json_group_array(json_array(e.lane, e.position)) FROM ready CROSS JOIN outbox_events e ON e.position IN (
        SELECT n.position FROM outbox_events n
         WHERE n.status = 'NEW' AND n.lane = ready.lane AND n.destination = ready.destination
           AND n.topic = ready.topic AND coalesce(n.key, '') = coalesce(ready.key, '') AND n.position < ready.before
         ORDER BY n.position LIMIT :limit)))"""  # noqa: S608 - constants

RENEW: Final = """
UPDATE outbox_lanes SET lease_expires_at = max(lease_expires_at, :until)
 WHERE lane IN (SELECT value FROM json_each(:lanes))"""

MARK: Final = """
UPDATE outbox_events
   SET status = m.value ->> 2, attempt_count = m.value ->> 3, next_retry_at = m.value ->> 4,
       last_error = m.value ->> 5, sent_at = CASE WHEN m.value ->> 2 = 'SENT' THEN :now END
  FROM json_each(:marks) m
 WHERE outbox_events.tenant_id = m.value ->> 0 AND outbox_events.id = m.value ->> 1 AND status <> 'SENT'"""

#: Changes with every event that any program writes.
NUMBER: Final = "SELECT seq FROM sqlite_sequence WHERE name = 'outbox_events'"


class SqliteOutboxStore(SqliteTransactions, SqlOutboxStore):
    """The outbox store of a ledger on SQLite. Times are the given clock's."""

    _store: SqliteLedgerStore

    def __init__(self, store: SqliteLedgerStore, clock: Clock) -> None:
        super().__init__(store, clock)
        self._waiting = ExitStack()
        self._waiter: CommitWaiter | None = None
        self._number: int | None = None
        self._cursors = WalkCursors()

    async def open(self) -> None:
        await self._store.open()
        await self._make_lanes()

    async def close(self) -> None:
        """Stop waiting for commits. The file belongs to the ledger and stays open."""
        self._waiter = None
        self._waiting.close()

    async def now_ms(self) -> int:
        return self._clock.now_ms()

    async def acquire_lanes(
        self, relay: str, destinations: Sequence[str], most: int, lease_ms: int, *, dead_blocks: bool = False
    ) -> list[int]:
        await self._make_lanes()
        # Before the query: later events must wake the relay.
        self._listen()
        self._lease_ms = lease_ms
        values = self._values(relay, destinations, dead_blocks, WINDOW) | {"limit": 1}
        # Lazy: most calls find nothing and need no write lock.
        work = (_lease_lanes, values, list(destinations), self._cursors, most, lease_ms)
        lanes: list[int] = await self._store.write(*work, lazy=True)
        return sorted(lanes)

    async def due_events(
        self, relay: str, lanes: Sequence[int], destinations: Sequence[str], limit: int, *, dead_blocks: bool
    ) -> list[OutboxEvent]:
        values = self._values(relay, destinations, dead_blocks, window_for(limit, len(lanes))) | {"limit": limit}
        text = await self._store.write(_due, list(lanes), values, list(destinations), self._cursors, lazy=True)
        return [event_from_row(row) for row in msgspec.json.decode(text)]

    def _values(self, relay: str, destinations: Sequence[str], dead_blocks: bool, window: int) -> dict[str, Any]:
        return {
            "relay": relay,
            "destinations": json_list(list(destinations)),
            "dead_blocks": dead_blocks,
            "window": window,
            "now": self._clock.now_ms(),
        }

    async def record_results(self, relay: str, lanes: Sequence[int], marks: Sequence[PublishResult]) -> bool:
        now_ms = self._clock.now_ms()
        rows = [result_row(mark) for mark in marks]
        return await self._store.write(_mark, relay, sorted(set(lanes)), now_ms, now_ms + self._lease_ms, rows)

    async def wait_for_events(self, timeout_s: float) -> None:
        waiter, loop = self._listen(), asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while (left := deadline - loop.time()) > 0:
            if not await waiter.wait(left) or await self._has_changed():
                return

    def _listen(self) -> CommitWaiter:
        if self._waiter is None:
            # Kept until `close`: an event that is written while no caller waits wakes the next one.
            self._waiter = self._waiting.enter_context(self._store.commits.listen(OUTBOX_CHANGED))
        return self._waiter

    async def _has_changed(self) -> bool:
        """Whether the commit changed the outbox: an engine's file has many other commits."""
        number, self._number = self._number, await self._store.write(_number, lazy=True)
        return number != self._number


# In the writer's thread ----------------------------------------------------------------------------


def _lease_lanes(
    transaction: Transaction,
    values: dict[str, Any],
    destinations: list[str],
    cursors: WalkCursors,
    most: int,
    lease_ms: int,
) -> list[int]:
    lanes = _ready(transaction, values, destinations, cursors, most)
    if lanes:
        transaction.begin()
        # Checked again: from here on no other process writes.
        lanes = _json(transaction, FREE, values | {"lanes": json_list(lanes)})
        until = values["now"] + lease_ms
        transaction.execute(LEASE_LANES, {"relay": values["relay"], "until": until, "lanes": json_list(lanes)})
    return lanes


def _ready(
    transaction: Transaction, values: dict[str, Any], destinations: list[str], cursors: WalkCursors, most: int
) -> list[int]:
    lanes = _json(transaction, FIND_LANES, values)
    ready = {lane for lane, is_ready, _ in lanes if is_ready}
    crowded = [lane for lane, _, is_crowded in lanes if is_crowded]
    if crowded and len(ready) < most:
        walk = cursors.start(crowded, destinations)
        last, found = _walk(transaction, walk, values)
        # Where something was found, `due_events` must begin at the same cursor.
        cursors.resume(walk, last, destinations, but=found)
        ready |= found.keys()
    return [lane for lane, *_ in lanes if lane in ready][:most]


def _due(
    transaction: Transaction, lanes: list[int], values: dict[str, Any], destinations: list[str], cursors: WalkCursors
) -> str:
    mine: list[int] = _json(transaction, MINE, values | {"lanes": json_list(lanes)})
    values |= {"lanes": json_list(mine)}
    positions: set[int] = set(_json(transaction, AGAIN, values))
    windows: dict[tuple[int, str], list[bool]] = {}
    for lane, destination, position, blocked in _json(transaction, NEW_EVENTS, values):
        windows.setdefault((lane, destination), []).append(bool(blocked))
        if not blocked:
            positions.add(position)
    crowded = {lane for (lane, _), blocked in windows.items() if any(blocked) and len(blocked) == values["window"]}
    if crowded and len(positions) < values["limit"]:
        walk = cursors.start(sorted(crowded), destinations)
        last, found = _walk(transaction, walk, values)
        cursors.resume(walk, last, destinations)
        positions.update(*found.values())
    # These are the first events of each key, so a prefix by position keeps the order within a key.
    chosen = json_list(sorted(positions)[: values["limit"]])
    (text,) = transaction.execute(EVENTS, {"positions": chosen, "bytes": BATCH_BYTES}).fetchone()
    return str(text)


def _walk(
    transaction: Transaction, walk: Sequence[WalkPosition], values: dict[str, Any]
) -> tuple[list[WalkPosition], dict[int, list[int]]]:
    """Where to continue, and what is due in lanes that are full of blocked events."""
    last, rows = _json(transaction, WALK, values | {"places": json_list(walk), "steps": STEPS})
    found: dict[int, list[int]] = {}
    for lane, position in rows:
        found.setdefault(lane, []).append(position)
    return last, found


def _mark(
    transaction: Transaction, relay: str, lanes: list[int], now_ms: int, until: int, marks: list[tuple[Any, ...]]
) -> bool:
    values = {"relay": relay, "lanes": json_list(lanes), "now": now_ms, "until": until, "marks": json_list(marks)}
    if len(_json(transaction, MINE, values)) != len(lanes):
        return False
    transaction.execute(RENEW, values)
    transaction.execute(MARK, values)
    return True


def _json(transaction: Transaction, statement: str, values: dict[str, Any]) -> Any:
    (text,) = transaction.execute(statement, values).fetchone()
    return msgspec.json.decode(text)


def _number(transaction: Transaction) -> int:
    row = transaction.execute(NUMBER).fetchone()
    return int(row[0]) if row else 0
