"""The relay's SQL on SQLite: the same as on PostgreSQL, with lists as JSON texts and answers as one JSON text.

Whatever is behind an event that is retried is passed over by an index, never read: a key may have any number of events.
"""

from __future__ import annotations

from typing import Final


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
