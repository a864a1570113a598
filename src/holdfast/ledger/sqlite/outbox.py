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
    Place,
    SqlOutboxStore,
    WalkCursors,
    event_from_row,
    result_row,
    window_for,
)
from holdfast.ledger.waiters import CommitWaiter
from holdfast.sqlite.transaction import Transaction, json_list


def _in_the_way(event: str) -> str:
    """Whether an earlier event of the same key is retried, or dead where that counts."""
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
    """Events of a lane whose next try is due, and nothing of their key before them."""
    return f"""
        SELECT r.position FROM outbox_events r
         WHERE r.lane = {lane} AND r.status = 'RETRYING' AND r.next_retry_at <= :now
           AND r.destination IN (SELECT value FROM json_each(:destinations)) AND NOT {_in_the_way("r")}
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


#: Lanes that are free or ours, longest free first: whether something is due, and whether others stand in the way of the
#: whole window, so that there may be something behind it.
LOOK: Final = f"""
SELECT json_group_array(json_array(lane, ready, NOT ready AND crowded)) FROM (
    SELECT l.lane,
           EXISTS ({_retries("l.lane")}) OR EXISTS (
               SELECT 1 FROM json_each(:destinations) d CROSS JOIN outbox_events e
                ON e.position IN ({_first("l.lane", "d.value")}) AND NOT {_in_the_way("e")}) AS ready,
           EXISTS (SELECT 1 FROM json_each(:destinations) d
                    WHERE (SELECT count(*) FROM ({_first("l.lane", "d.value")})) = :window) AS crowded
      FROM outbox_lanes l WHERE l.relay = :relay OR l.until <= :now
     ORDER BY l.until, l.lane)
 WHERE ready OR crowded"""  # noqa: S608 - constants

#: Those of the lanes that are free, or ours.
FREE: Final = """
SELECT json_group_array(lane) FROM outbox_lanes
 WHERE lane IN (SELECT value FROM json_each(:lanes)) AND (relay = :relay OR until <= :now)"""

TAKE: Final = """
UPDATE outbox_lanes SET relay = :relay, until = :until WHERE lane IN (SELECT value FROM json_each(:lanes))"""

#: Those of the lanes that are ours.
MINE: Final = """
SELECT json_group_array(lane) FROM outbox_lanes
 WHERE lane IN (SELECT value FROM json_each(:lanes)) AND relay = :relay AND until > :now"""

#: Lane, destination, position and whether something is in the way, of the first new events of each lane.
SEEN: Final = f"""
SELECT json_group_array(json_array(e.lane, e.destination, e.position, {_in_the_way("e")}))
  FROM json_each(:lanes) l CROSS JOIN json_each(:destinations) d
 CROSS JOIN outbox_events e ON e.position IN ({_first("l.value", "d.value")})"""  # noqa: S608 - constants

AGAIN: Final = f"""
SELECT json_group_array(e.position)
  FROM json_each(:lanes) l CROSS JOIN outbox_events e
    ON e.position IN ({_retries("l.value")} LIMIT :limit)"""  # noqa: S608 - constants

#: Of these positions, up to so many bytes.
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
    """The first event of the next key: of the same topic, else of the next topic, else of the next destination. Not as
    one comparison of all three, for which SQLite would go through the key's whole line."""
    same = (
        f"n.destination = {destination} AND n.topic = {topic} AND coalesce(n.key, '') > {key}",
        f"n.destination = {destination} AND n.topic > {topic}",
        f"n.destination > {destination}",
    )
    steps = (
        f"""(SELECT n.position FROM outbox_events n INDEXED BY outbox_events_by_key
              WHERE n.status = 'NEW' AND n.lane = {lane} AND {condition}
              ORDER BY n.destination, n.topic, coalesce(n.key, ''), n.position LIMIT 1)"""  # noqa: S608 - constants
        for condition in same
    )
    return f"coalesce({', '.join(steps)})"


def _obstacle(status: str) -> str:
    """Where the first event of a key is that stands in the way."""
    return f"""
        coalesce((SELECT b.position FROM outbox_events b
                   WHERE b.destination = w.destination AND b.topic = w.topic AND b.key = w.key AND b.key <> ''
                     AND b.status IN ('RETRYING', 'DEAD') AND b.status = '{status}'
                   ORDER BY b.position LIMIT 1), {_FAR})"""  # noqa: S608 - constants


_FAR: Final = 2**63 - 1

#: From key to key, beginning in each lane after a given one: where to go on, if there is more, and lane and position of
#: what is due.
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
UPDATE outbox_lanes SET until = max(until, :until) WHERE lane IN (SELECT value FROM json_each(:lanes))"""

MARK: Final = """
UPDATE outbox_events
   SET status = m.value ->> 2, attempt_count = m.value ->> 3, next_retry_at = m.value ->> 4,
       last_error = m.value ->> 5, sent_at = CASE WHEN m.value ->> 2 = 'SENT' THEN :now END
  FROM json_each(:marks) m
 WHERE outbox_events.tenant_id = m.value ->> 0 AND outbox_events.id = m.value ->> 1 AND status <> 'SENT'"""

#: Changes with every event that is written, whoever writes it.
NUMBER: Final = "SELECT seq FROM sqlite_sequence WHERE name = 'outbox_events'"


class SqliteOutboxStore(SqliteTransactions, SqlOutboxStore):
    """Times are the given clock's."""

    _store: SqliteLedgerStore

    def __init__(self, store: SqliteLedgerStore, clock: Clock) -> None:
        super().__init__(store, clock)
        self._waiting = ExitStack()
        self._turn: CommitWaiter | None = None
        self._number: int | None = None
        self._places = WalkCursors()

    async def open(self) -> None:
        await self._store.open()
        await self._make_lanes()

    async def close(self) -> None:
        """Nobody waits any longer. The file is the ledger's."""
        self._turn = None
        self._waiting.close()

    async def now_ms(self) -> int:
        return self._clock.now_ms()

    async def acquire_lanes(
        self, relay: str, destinations: Sequence[str], most: int, lease_ms: int, *, dead_blocks: bool = False
    ) -> list[int]:
        await self._make_lanes()
        # Before the look: what comes after it is news.
        self._listen()
        self._lease_ms = lease_ms
        asked = self._asked(relay, destinations, dead_blocks, WINDOW) | {"limit": 1}
        # Lazy: most looks find nothing, and need not keep others from writing.
        work = (_take, asked, list(destinations), self._places, most, lease_ms)
        lanes: list[int] = await self._store.write(*work, lazy=True)
        return sorted(lanes)

    async def due_events(
        self, relay: str, lanes: Sequence[int], destinations: Sequence[str], limit: int, *, dead_blocks: bool
    ) -> list[OutboxEvent]:
        asked = self._asked(relay, destinations, dead_blocks, window_for(limit, len(lanes))) | {"limit": limit}
        text = await self._store.write(_due, list(lanes), asked, list(destinations), self._places, lazy=True)
        return [event_from_row(row) for row in msgspec.json.decode(text)]

    def _asked(self, relay: str, destinations: Sequence[str], dead_blocks: bool, window: int) -> dict[str, Any]:
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
        turn, loop = self._listen(), asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while (left := deadline - loop.time()) > 0:
            if not await turn.wait(left) or await self._has_news():
                return

    def _listen(self) -> CommitWaiter:
        if self._turn is None:
            # Kept until the end: what is written while nobody waits is news for the next one who does.
            self._turn = self._waiting.enter_context(self._store.news.of(OUTBOX_CHANGED))
        return self._turn

    async def _has_news(self) -> bool:
        """Whether it was about the outbox: others write all the time into an engine's file."""
        number, self._number = self._number, await self._store.write(_number, lazy=True)
        return number != self._number


# In the writer's thread ----------------------------------------------------------------------------


def _take(
    transaction: Transaction,
    asked: dict[str, Any],
    destinations: list[str],
    places: WalkCursors,
    most: int,
    lease_ms: int,
) -> list[int]:
    lanes = _ready(transaction, asked, destinations, places, most)
    if lanes:
        transaction.begin()
        # Looked at again: from here on nobody else writes.
        lanes = _json(transaction, FREE, asked | {"lanes": json_list(lanes)})
        until = asked["now"] + lease_ms
        transaction.execute(TAKE, {"relay": asked["relay"], "until": until, "lanes": json_list(lanes)})
    return lanes


def _ready(
    transaction: Transaction, asked: dict[str, Any], destinations: list[str], places: WalkCursors, most: int
) -> list[int]:
    looked = _json(transaction, LOOK, asked)
    ready = {lane for lane, is_ready, _ in looked if is_ready}
    crowded = [lane for lane, _, is_crowded in looked if is_crowded]
    if crowded and len(ready) < most:
        walk = places.start(crowded, destinations)
        last, found = _walk(transaction, walk, asked)
        # Where something was found `due` has to begin at the same place.
        places.resume(walk, last, destinations, but=found)
        ready |= found.keys()
    return [lane for lane, *_ in looked if lane in ready][:most]


def _due(
    transaction: Transaction, lanes: list[int], asked: dict[str, Any], destinations: list[str], places: WalkCursors
) -> str:
    mine: list[int] = _json(transaction, MINE, asked | {"lanes": json_list(lanes)})
    asked |= {"lanes": json_list(mine)}
    positions: set[int] = set(_json(transaction, AGAIN, asked))
    seen: dict[tuple[int, str], list[bool]] = {}
    for lane, destination, position, blocked in _json(transaction, SEEN, asked):
        seen.setdefault((lane, destination), []).append(bool(blocked))
        if not blocked:
            positions.add(position)
    crowded = {lane for (lane, _), blocked in seen.items() if any(blocked) and len(blocked) == asked["window"]}
    if crowded and len(positions) < asked["limit"]:
        walk = places.start(sorted(crowded), destinations)
        last, found = _walk(transaction, walk, asked)
        places.resume(walk, last, destinations)
        positions.update(*found.values())
    # Of each key these are the first, so that the first of all are, too.
    chosen = json_list(sorted(positions)[: asked["limit"]])
    (text,) = transaction.execute(EVENTS, {"positions": chosen, "bytes": BATCH_BYTES}).fetchone()
    return str(text)


def _walk(
    transaction: Transaction, walk: Sequence[Place], asked: dict[str, Any]
) -> tuple[list[Place], dict[int, list[int]]]:
    """Where to go on, and what is due in lanes that are full of events behind others."""
    last, rows = _json(transaction, WALK, asked | {"places": json_list(walk), "steps": STEPS})
    found: dict[int, list[int]] = {}
    for lane, position in rows:
        found.setdefault(lane, []).append(position)
    return last, found


def _mark(
    transaction: Transaction, relay: str, lanes: list[int], now_ms: int, until: int, marks: list[tuple[Any, ...]]
) -> bool:
    asked = {"relay": relay, "lanes": json_list(lanes), "now": now_ms, "until": until, "marks": json_list(marks)}
    if len(_json(transaction, MINE, asked)) != len(lanes):
        return False
    transaction.execute(RENEW, asked)
    transaction.execute(MARK, asked)
    return True


def _json(transaction: Transaction, statement: str, asked: dict[str, Any]) -> Any:
    (text,) = transaction.execute(statement, asked).fetchone()
    return msgspec.json.decode(text)


def _number(transaction: Transaction) -> int:
    row = transaction.execute(NUMBER).fetchone()
    return int(row[0]) if row else 0
