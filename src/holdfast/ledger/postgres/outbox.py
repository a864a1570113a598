"""The relay's outbox store on PostgreSQL, with its SQL.

Each operation of the relay is a single statement, so no transaction stays open; `now()` is the time it starts.
Events that wait behind a retried event of the same key are skipped by an index and never read, because a key can have
any number of events.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, Final

import asyncpg
import msgspec

from holdfast.ledger.port.messages import OutboxEvent, PublishResult
from holdfast.ledger.postgres.notifications import NotifyListener
from holdfast.ledger.postgres.store import PostgresStore
from holdfast.ledger.postgres.transactions import PostgresTransactions
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


def _is_blocked(event: str, dead: str) -> str:
    """Whether an earlier event of the same key is retried, or dead where dead events block."""
    earlier = (
        f"SELECT 1 FROM outbox_events b"  # noqa: S608 - constants
        f" WHERE b.destination = {event}.destination AND b.topic = {event}.topic"
        f" AND b.key = {event}.key AND b.position < {event}.position"
    )
    return (
        f"({event}.key <> '' AND (EXISTS ({earlier} AND b.status = 'RETRYING')"
        f" OR ({dead} AND EXISTS ({earlier} AND b.status = 'DEAD'))))"
    )


def _retries(lane: str, destinations: str, dead: str) -> str:
    """Events of a lane whose retry is due, without an earlier unsent event of their key."""
    return f"""
        SELECT r.position FROM outbox_events r
         WHERE r.lane = {lane} AND r.status = 'RETRYING' AND r.next_retry_at <= now()
           AND r.destination = ANY({destinations}) AND {_is_blocked("r", dead)} IS NOT TRUE
           AND NOT (coalesce(r.key, '') <> '' AND EXISTS (
               SELECT 1 FROM outbox_events n WHERE n.status = 'NEW' AND n.lane = r.lane
                  AND n.destination = r.destination AND n.topic = r.topic AND coalesce(n.key, '') = r.key
                  AND n.position < r.position))
         ORDER BY r.next_retry_at"""  # noqa: S608 - constants


def _first(lane: str, destination: str, limit: str) -> str:
    """The first new events of a lane and destination."""
    return f"""
        SELECT w.lane, w.destination, w.topic, w.key, w.position FROM outbox_events w
         WHERE w.status = 'NEW' AND w.lane = {lane} AND w.destination = {destination}
         ORDER BY w.position LIMIT {limit}"""  # noqa: S608 - constants


#: $1 relay  $2 destinations  $3 lease  $4 dead blocks  $5 window  $6 most  $7 lanes that are known to be ready.
#: Returns the lanes that were leased, and (not `leased`) those whose whole window is blocked: there may be due events
#: behind it.
LEASE_LANES: Final = f"""
WITH checked AS MATERIALIZED (
    SELECT l.lane,
           l.lane = ANY($7::smallint[]) OR EXISTS ({_retries("l.lane", "$2::text[]", "$4")}) OR EXISTS (
               SELECT 1 FROM unnest($2::text[]) d (name)
                CROSS JOIN LATERAL ({_first("l.lane", "d.name", "$5")}) e
                WHERE {_is_blocked("e", "$4")} IS NOT TRUE) AS ready
      FROM outbox_lanes l WHERE l.relay = $1 OR l.lease_expires_at <= now()
), free AS MATERIALIZED (
    SELECT l.lane FROM outbox_lanes l JOIN checked ON checked.lane = l.lane
     WHERE checked.ready AND (l.relay = $1 OR l.lease_expires_at <= now())
     ORDER BY l.lease_expires_at, l.lane LIMIT $6 FOR UPDATE OF l SKIP LOCKED
), leased AS (
    UPDATE outbox_lanes l SET relay = $1, lease_expires_at = now() + $3::interval FROM free WHERE l.lane = free.lane
    RETURNING l.lane
)
SELECT lane, true AS leased FROM leased
UNION ALL
SELECT lane, false FROM checked WHERE NOT ready AND EXISTS (
    SELECT 1 FROM unnest($2::text[]) d (name)
     CROSS JOIN LATERAL ({_first("checked.lane", "d.name", "1 OFFSET $5 - 1")}) e)"""  # noqa: S608 - constants

_MINE: Final = """
mine AS MATERIALIZED (
    SELECT lane FROM outbox_lanes WHERE lane = ANY($2::smallint[]) AND relay = $1 AND lease_expires_at > now()
)"""

_EVENT: Final = """
    e.tenant_id, e.id, e.destination, e.topic, e.key, e.payload, e.headers, e.status, e.attempt_count,
    (extract(epoch FROM e.next_retry_at) * 1000)::bigint AS next_retry_at, e.last_error,
    -- A row may contain 'infinity', which is not a number.
    (extract(epoch FROM greatest('epoch', least(e.created_at, '9999-12-31'))) * 1000)::bigint AS created_at,
    (extract(epoch FROM e.sent_at) * 1000)::bigint AS sent_at, e.position"""


def _events(most_bytes: str) -> str:
    """The chosen events by position, up to that many bytes."""
    return f"""
    SELECT * FROM (
        SELECT o.*, sum(octet_length(o.payload)) OVER (ORDER BY o.position) - octet_length(o.payload) AS bytes_before
          FROM chosen CROSS JOIN LATERAL (SELECT * FROM outbox_events x WHERE x.position = chosen.position) o) sized
     WHERE bytes_before < {most_bytes}"""  # noqa: S608 - constants


#: $1 relay  $2 lanes  $3 destinations  $4 limit  $5 dead blocks  $6 window  $7 bytes. Always returns a row;
#: `crowded` are lanes whose window is full and partly blocked: there may be more due events behind it.
DUE: Final = f"""
WITH {_MINE}, seen AS MATERIALIZED (
    SELECT e.lane, e.destination, e.position, {_is_blocked("e", "$5")} IS TRUE AS blocked
      FROM mine CROSS JOIN unnest($3::text[]) d (name)
     CROSS JOIN LATERAL ({_first("mine.lane", "d.name", "$6")}) e
), chosen AS MATERIALIZED (
    SELECT position FROM (
        SELECT position FROM seen WHERE NOT blocked
        UNION ALL
        SELECT e.position FROM mine CROSS JOIN LATERAL ({_retries("mine.lane", "$3::text[]", "$5")} LIMIT $4) e
    ) ready ORDER BY position LIMIT $4
), crowd AS (
    SELECT array_agg(DISTINCT lane) AS crowded FROM (
        SELECT lane FROM seen GROUP BY lane, destination HAVING count(*) = $6 AND bool_or(blocked)) full_ones
)
SELECT crowd.crowded, {_EVENT}
  FROM crowd LEFT JOIN ({_events("$7")}) e ON true
 ORDER BY e.position"""  # noqa: S608 - constants

_NEXT_KEY: Final = """
    SELECT n.lane, n.destination, n.topic, coalesce(n.key, '') AS name FROM outbox_events n
     WHERE n.status = 'NEW' AND n.lane = before.lane
       AND (n.destination, n.topic, coalesce(n.key, '')) > (before.destination, before.topic, before.name)
     ORDER BY n.destination, n.topic, coalesce(n.key, '') LIMIT 1"""


def _obstacle(status: str) -> str:
    """The position of the first event that blocks its key."""
    return f"""
        (SELECT b.position FROM outbox_events b
          WHERE b.destination = walked.destination AND b.topic = walked.topic AND b.key = walked.name
            AND b.key <> '' AND b.status = '{status}' ORDER BY b.position LIMIT 1)"""  # noqa: S608 - constants


_WALK: Final = f"""
WITH RECURSIVE keys AS (
    SELECT next.*
      FROM unnest($1::smallint[], $2::text[], $3::text[], $4::text[]) before (lane, destination, topic, name)
     CROSS JOIN LATERAL ({_NEXT_KEY}) next
    UNION ALL
    SELECT next.* FROM keys before CROSS JOIN LATERAL ({_NEXT_KEY}) next
), walked AS MATERIALIZED (
    SELECT * FROM keys LIMIT $5
), chosen AS MATERIALIZED (
    SELECT walked.lane, e.position
      FROM walked
     CROSS JOIN LATERAL (
        SELECT least({_obstacle("RETRYING")}, CASE WHEN $7 THEN {_obstacle("DEAD")} END) AS position) obstacle
     CROSS JOIN LATERAL (
        SELECT n.position FROM outbox_events n
         WHERE n.status = 'NEW' AND n.lane = walked.lane AND n.destination = walked.destination
           AND n.topic = walked.topic AND coalesce(n.key, '') = walked.name
           AND n.position < coalesce(obstacle.position, 9223372036854775807)
         ORDER BY n.position LIMIT $8) e
     WHERE walked.destination = ANY($6::text[])
     ORDER BY e.position LIMIT $9
), place AS (
    SELECT CASE WHEN (SELECT count(*) FROM walked) >= $5 THEN (
        SELECT json_agg(json_build_array(lane, destination, topic, name)) FROM (
            SELECT DISTINCT ON (lane) * FROM walked ORDER BY lane, destination DESC, topic DESC, name DESC) ends
    )::text END AS last
)"""  # noqa: S608 - constants

#: From key to key, beginning in each lane after a given one. $1 lanes  $2 $3 $4 their destinations, topics and keys
#: $5 steps  $6 destinations  $7 dead blocks  $8 limit per key  $9 limit in all  $10 bytes. Returns due events, and
#: always a row; `last` is where to continue, if there is more.
WALK: Final = f"""{_WALK}
SELECT place.last, {_EVENT}
  FROM place LEFT JOIN ({_events("$10")}) e ON true
 ORDER BY e.position"""  # noqa: S608 - constants
#: The same without the bytes: returns the lanes that have due events.
WALK_LANES: Final = f"""{_WALK}
SELECT place.last, ready.lanes FROM place CROSS JOIN (SELECT array_agg(DISTINCT lane) AS lanes FROM chosen) ready"""  # noqa: S608

#: $1 relay  $2 lanes, each once  $3 lease  $4… results of the events
MARK: Final = """
WITH held AS MATERIALIZED (
    SELECT lane FROM outbox_lanes WHERE lane = ANY($2::smallint[]) AND relay = $1 AND lease_expires_at > now()
     ORDER BY lane FOR UPDATE
), whole AS MATERIALIZED (
    SELECT count(*) = cardinality($2::smallint[]) AS ours FROM held
), renewed AS (
    UPDATE outbox_lanes SET lease_expires_at = greatest(lease_expires_at, now() + $3::interval)
     WHERE lane IN (SELECT lane FROM held) AND (SELECT ours FROM whole)
), marked AS (
    UPDATE outbox_events e
       SET status = m.status, attempt_count = m.attempt_count, last_error = m.last_error,
           next_retry_at = to_timestamp(m.next_retry_at / 1000.0),
           sent_at = CASE WHEN m.status = 'SENT' THEN now() END
      FROM unnest($4::text[], $5::text[], $6::text[], $7::int[], $8::bigint[], $9::text[])
           AS m (tenant_id, id, status, attempt_count, next_retry_at, last_error)
     WHERE e.tenant_id = m.tenant_id AND e.id = m.id AND e.status <> 'SENT' AND (SELECT ours FROM whole)
)
SELECT ours FROM whole"""


#: Notified by a trigger on the table, for writes of any program.
CHANNEL: Final = "holdfast_outbox"
#: Longest wait without a check, because LISTEN does not work through every pooler.
_POLL_S: Final = 5.0


class PostgresOutboxStore(PostgresTransactions, SqlOutboxStore):
    """The outbox store of a ledger on PostgreSQL. Times are the server's."""

    def __init__(self, store: PostgresStore) -> None:
        super().__init__(store)
        self._listener = NotifyListener(store.connect, store.name, CHANNEL)
        self._waiting = ExitStack()
        self._waiter: CommitWaiter | None = None
        self._cursors = WalkCursors()

    async def open(self) -> None:
        await self._store.open()
        await self._make_lanes()

    async def close(self) -> None:
        """Stop listening. The connections belong to the ledger and stay open."""
        self._waiter = None
        self._waiting.close()
        await self._listener.close()

    async def now_ms(self) -> int:
        (row,) = await self._store.fetch("SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint AS ms")
        return int(row["ms"])

    async def acquire_lanes(
        self, relay: str, destinations: Sequence[str], most: int, lease_ms: int, *, dead_blocks: bool = False
    ) -> list[int]:
        await self._make_lanes()
        # Before the query: later events must wake the relay.
        self._listen()
        self._lease_ms = lease_ms
        arguments = (relay, list(destinations), timedelta(milliseconds=lease_ms), dead_blocks, WINDOW)
        rows = await self._store.fetch(LEASE_LANES, *arguments, most, [])
        leased, crowded = ([row["lane"] for row in rows if row["leased"] is is_leased] for is_leased in (True, False))
        if crowded and len(leased) < most:
            begin = self._cursors.start(crowded, destinations)
            walk = (*_columns(begin), STEPS, list(destinations), dead_blocks)
            (row,) = await self._store.fetch(WALK_LANES, *walk, 1, STEPS)
            ready = row["lanes"] or []
            # Where something was found, `due_events` must begin at the same cursor.
            self._cursors.resume(begin, _decode_cursors(row["last"]), destinations, but=ready)
            if ready:
                rows = await self._store.fetch(LEASE_LANES, *arguments, most - len(leased), ready)
                leased += [row["lane"] for row in rows if row["leased"]]
        return sorted(set(leased))

    async def due_events(
        self, relay: str, lanes: Sequence[int], destinations: Sequence[str], limit: int, *, dead_blocks: bool
    ) -> list[OutboxEvent]:
        arguments = (relay, list(lanes), list(destinations), limit, dead_blocks)
        rows = await self._store.fetch(DUE, *arguments, window_for(limit, len(lanes)), BATCH_BYTES)
        found = _group_by_position(rows)
        if len(found) < limit and (crowded := rows[0]["crowded"]):
            begin = self._cursors.start(crowded, destinations)
            walk = (*_columns(begin), STEPS, list(destinations), dead_blocks)
            rows = await self._store.fetch(WALK, *walk, limit, limit, BATCH_BYTES)
            self._cursors.resume(begin, _decode_cursors(rows[0]["last"]), destinations)
            found |= _group_by_position(rows)
        # These are the first events of each key, so a prefix by position keeps the order within a key.
        return [event_from_row(found[position]) for position in sorted(found)[:limit]]

    async def record_results(self, relay: str, lanes: Sequence[int], marks: Sequence[PublishResult]) -> bool:
        lease = timedelta(milliseconds=self._lease_ms)
        (row,) = await self._store.fetch(
            MARK, relay, sorted(set(lanes)), lease, *_columns([result_row(mark) for mark in marks], 6)
        )
        return bool(row["ours"])

    async def retry_events(self, tenants: Sequence[str] | None, ids: Sequence[str], actor: str, reason: str) -> int:
        revived = await super().retry_events(tenants, ids, actor, reason)
        if revived:
            await self._store.execute(f"NOTIFY {CHANNEL}")
        return revived

    async def wait_for_events(self, timeout_s: float) -> None:
        await self._listen().wait(min(timeout_s, _POLL_S))

    def _listen(self) -> CommitWaiter:
        if self._waiter is None:
            # Kept until `close`: an event that is written while no caller waits wakes the next one.
            self._waiter = self._waiting.enter_context(self._listener.listen(""))
        return self._waiter


def _group_by_position(rows: Sequence[asyncpg.Record]) -> dict[int, asyncpg.Record]:
    return {row["position"]: row for row in rows if row["position"] is not None}


def _decode_cursors(last: str | None) -> list[WalkPosition]:
    return msgspec.json.decode(last, type=list[WalkPosition]) if last else []


def _columns(rows: Sequence[Sequence[Any]], width: int = 4) -> list[list[Any]]:
    return [[row[index] for row in rows] for index in range(width)]
