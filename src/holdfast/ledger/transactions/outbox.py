"""`SqlOutboxStore`: the parts of `OutboxStore` for operators and upkeep, for every store.

The relay's statements are separate SQL for each store, because it runs them all the time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec
from sqlalchemy import ColumnElement, delete, exists, func, literal_column, select, update
from sqlalchemy.dialects.postgresql import insert

from holdfast.core.principal import AuditEntry
from holdfast.core.publishing import LANES
from holdfast.core.text import clean
from holdfast.ledger.port.messages import OutboxBacklog, OutboxEvent, OutboxStatus, OutboxStore, PublishResult
from holdfast.ledger.transactions.base import NOW, Row, SqlTransaction, TransactionRunner, chunks, insert_audit
from holdfast.schema import outbox_events, outbox_lanes
from holdfast.schema.columns import tenants_of

#: Events of a lane and destination that are read in order. If all of them are blocked by earlier events, the keys are
#: walked one by one.
WINDOW: Final = 64
#: Keys walked in one call; the next call continues from there.
STEPS: Final = 5_000
#: Payload bytes after which a batch gets no further event.
BATCH_BYTES: Final = 16 * 1024 * 1024
#: Ids listed in the audit entry of one retry.
_LISTED_IDS: Final = 100

_COLUMNS: Final = tuple(column for column in outbox_events.c if column.name != "lane")


def _is(*statuses: OutboxStatus) -> ColumnElement[bool]:
    """Compare with literals: SQLite uses a partial index only for literals, not for parameters."""
    literals: list[ColumnElement[str]] = [literal_column(f"'{status}'") for status in statuses]
    return outbox_events.c.status == literals[0] if len(literals) == 1 else outbox_events.c.status.in_(literals)


def window_for(limit: int, lanes: int) -> int:
    """Return how many events of one lane to read for `limit` in all."""
    return max(WINDOW, -(-2 * limit // max(1, lanes)))


#: Lane, destination, topic and key.
WalkPosition = tuple[int, str, str, str]


class WalkCursors:
    """Where walks over keys continue, per lane and set of destinations, so that no call walks all keys."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, tuple[str, ...]], tuple[str, str, str]] = {}

    def start(self, lanes: Sequence[int], destinations: Sequence[str]) -> list[WalkPosition]:
        """Return the position in each lane after which to start."""
        start = ("", "", "")
        return [(lane, *self._after.get((lane, tuple(destinations)), start)) for lane in lanes]

    def resume(
        self,
        walk: Sequence[WalkPosition],
        last: Sequence[WalkPosition],
        destinations: Sequence[str],
        but: Collection[int] = (),
    ) -> None:
        """Record a walk that ended at `last`; lanes missing there were walked to the end.

        Skips lanes in `but`.
        """
        for lane, *_ in walk:
            if lane not in but:
                self._after.pop((lane, tuple(destinations)), None)
        for lane, destination, topic, key in last:
            if lane not in but:
                self._after[lane, tuple(destinations)] = (destination, topic, key)


class SqlOutboxStore(TransactionRunner, OutboxStore):
    """The outbox store; subclasses add how transactions are run and the relay's operations.

    These lease lanes, read events and record results.
    """

    #: Lease time of the last `acquire_lanes`; `record_results` renews by the same time.
    _lease_ms: int = 0
    _has_lanes: bool = False

    async def _make_lanes(self) -> None:
        """Insert the rows of all lanes on first use."""
        if not self._has_lanes:
            await self._run(_make_lanes())
            self._has_lanes = True

    async def release_lanes(self, relay: str, lanes: Sequence[int] | None = None) -> None:
        await self._run(_release(relay, lanes))

    async def next_due_ms(self, destinations: Sequence[str], *, dead_blocks: bool = False) -> int | None:
        await self._make_lanes()
        return await self._read(_next_due(destinations, dead_blocks))

    async def destinations(self) -> list[str]:
        await self._make_lanes()
        return await self._read(_destinations())

    async def backlog(self) -> OutboxBacklog:
        return await self._read(_backlog())

    async def get(self, tenant_id: str, event_id: str) -> OutboxEvent | None:
        found = await self._read(_find([tenant_id], [outbox_events.c.id == clean(event_id)], 1))
        return found[0] if found else None

    async def find(
        self,
        tenants: Sequence[str] | None,
        *,
        status: OutboxStatus | None = None,
        destination: str = "",
        topic: str = "",
        key: str = "",
        after: int | None = None,
        limit: int = 100,
    ) -> list[OutboxEvent]:
        given = {"destination": destination, "topic": topic, "key": key}
        conditions = [outbox_events.c[name] == clean(value) for name, value in given.items() if value]
        if status is not None:
            conditions.append(outbox_events.c.status == str(status))
        if after is not None:
            conditions.append(outbox_events.c.position < after)
        return await self._read(_find(tenants, conditions, limit))

    async def retry_events(self, tenants: Sequence[str] | None, ids: Sequence[str], actor: str, reason: str) -> int:
        return await self._run(_retry(tenants, ids, actor, reason))

    async def prune(self, keep_ms: int, limit: int) -> int:
        return await self._run(_prune(keep_ms, limit))


def _make_lanes() -> SqlTransaction[None]:
    now = yield NOW
    rows = [{"lane": lane, "relay": "", "lease_expires_at": now} for lane in range(LANES)]
    yield insert(outbox_lanes).values(rows).on_conflict_do_nothing()
    return None


def _release(relay: str, lanes: Sequence[int] | None) -> SqlTransaction[None]:
    now = yield NOW
    # Not the epoch: lanes unleased for longest come first.
    freed = update(outbox_lanes).where(outbox_lanes.c.relay == relay).values(relay="", lease_expires_at=now)
    yield freed if lanes is None else freed.where(outbox_lanes.c.lane.in_(lanes))
    return None


def _next_due(destinations: Sequence[str], dead_blocks: bool) -> SqlTransaction[int | None]:
    other, event = outbox_events.alias("other"), outbox_events
    dead = f" OR other.status = '{OutboxStatus.DEAD}'" if dead_blocks else ""
    blocked = exists().where(
        other.c.destination == event.c.destination,
        other.c.topic == event.c.topic,
        other.c.key == event.c.key,
        other.c.key != "",
        other.c.position < event.c.position,
        literal_column(f"other.status IN ('{OutboxStatus.RETRYING}', '{OutboxStatus.DEAD}')"),
        literal_column(f"(other.status = '{OutboxStatus.RETRYING}'{dead})"),
    )
    first = (
        select(event.c.next_retry_at)
        .where(
            event.c.lane == outbox_lanes.c.lane,
            _is(OutboxStatus.RETRYING),
            event.c.destination.in_(destinations),
            ~blocked,
        )
        .order_by(event.c.next_retry_at)
        .limit(1)
        .correlate(outbox_lanes)
        .scalar_subquery()
    )
    rows = yield select(first.label("next_retry_at")).select_from(outbox_lanes)
    times = [row["next_retry_at"] for row in rows if row["next_retry_at"] is not None]
    return min(map(_ms, times), default=None)


def _destinations() -> SqlTransaction[list[str]]:
    rows = yield select(outbox_events.c.destination).where(_is(OutboxStatus.RETRYING)).distinct()
    found, last = {row["destination"] for row in rows}, ""
    while True:
        # Skip from one to the next in every lane's index: there may be many events, but few destinations.
        after = (
            select(func.min(outbox_events.c.destination))
            .where(
                _is(OutboxStatus.NEW), outbox_events.c.lane == outbox_lanes.c.lane, outbox_events.c.destination > last
            )
            .correlate(outbox_lanes)
            .scalar_subquery()
        )
        (row,) = yield select(func.min(after).label("destination")).select_from(outbox_lanes)
        if row["destination"] is None:
            return sorted(found)
        last = row["destination"]
        found.add(last)


def _backlog() -> SqlTransaction[OutboxBacklog]:
    counts = []
    for status in (OutboxStatus.NEW, OutboxStatus.RETRYING, OutboxStatus.DEAD):
        # One by one: each status has its own index.
        (row,) = yield select(func.count().label("n"), func.min(outbox_events.c.created_at).label("oldest")).where(
            _is(status)
        )
        counts.append(row)
    new, retrying, dead = counts
    oldest = [row["oldest"] for row in (new, retrying) if row["oldest"] is not None]
    return OutboxBacklog(new["n"] + retrying["n"], dead["n"], min(map(_ms, oldest), default=None))


def _find(
    tenants: Sequence[str] | None, conditions: Sequence[ColumnElement[bool]], limit: int
) -> SqlTransaction[list[OutboxEvent]]:
    query = select(*_COLUMNS).where(*conditions)
    if tenants is not None:
        query = query.where(outbox_events.c.tenant_id.in_([clean(tenant) for tenant in tenants]))
    rows = yield query.order_by(outbox_events.c.position.desc()).limit(limit)
    return [_event(row) for row in rows]


def _retry(tenants: Sequence[str] | None, ids: Sequence[str], actor: str, reason: str) -> SqlTransaction[int]:
    if tenants is None:
        tenants = [row["tenant_id"] for row in (yield tenants_of(outbox_events))]
    mine = outbox_events.c.tenant_id.in_([clean(tenant) for tenant in tenants])
    retried: dict[str, list[str]] = {}
    for chunk in chunks(sorted(set(ids))):
        rows = yield (
            update(outbox_events)
            .where(
                outbox_events.c.id.in_([clean(one) for one in chunk]),
                _is(OutboxStatus.RETRYING, OutboxStatus.DEAD),
                mine,
            )
            .values(status=str(OutboxStatus.NEW), attempt_count=0, next_retry_at=None)
            .returning(outbox_events.c.tenant_id, outbox_events.c.id)
        )
        for row in rows:
            retried.setdefault(row["tenant_id"], []).append(row["id"])
    if retried:
        now = yield NOW
        yield insert_audit(
            [_audit_entry(tenant, found, actor, reason) for tenant, found in sorted(retried.items())], now
        )
    return sum(map(len, retried.values()))


def _audit_entry(tenant_id: str, ids: list[str], actor: str, reason: str) -> AuditEntry:
    return AuditEntry(
        type="operator.outbox_retry",
        actor=actor,
        tenant_id=tenant_id,
        target="outbox",
        target_id=ids[0] if len(ids) == 1 else "",
        reason=reason,
        after={"events": len(ids), "ids": sorted(ids)[:_LISTED_IDS]},
    )


def _prune(keep_ms: int, limit: int) -> SqlTransaction[int]:
    now: datetime = yield NOW
    old = (
        select(outbox_events.c.position)
        .where(_is(OutboxStatus.SENT), outbox_events.c.sent_at < now - timedelta(milliseconds=keep_ms))
        .order_by(outbox_events.c.sent_at)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    rows = yield delete(outbox_events).where(outbox_events.c.position.in_(old)).returning(outbox_events.c.position)
    return len(rows)


def event_from_row(row: Any) -> OutboxEvent:
    """Convert a row that has times in milliseconds."""
    return OutboxEvent(
        tenant_id=row["tenant_id"],
        id=row["id"],
        destination=row["destination"],
        topic=row["topic"],
        key=row["key"] or "",
        payload=row["payload"],
        headers=headers_of(row["headers"]),
        status=OutboxStatus(row["status"]),
        attempt_count=row["attempt_count"],
        next_retry_at_ms=row["next_retry_at"],
        last_error=row["last_error"] or "",
        created_at_ms=row["created_at"],
        sent_at_ms=row["sent_at"],
        position=row["position"],
    )


def result_row(result: PublishResult) -> tuple[Any, ...]:
    """Return the values that statements take."""
    return (
        clean(result.tenant_id),
        clean(result.id),
        str(result.status),
        result.attempt_count,
        result.next_retry_at_ms,
        clean(result.last_error) or None,
    )


def headers_of(text: str | None) -> dict[str, str]:
    """Decode headers; none unless they are a JSON object. Values become text.

    Other programs may write rows.
    """
    if not text:
        return {}
    try:
        headers = msgspec.json.decode(text)
        if isinstance(headers, dict):
            return {
                name: value if isinstance(value, str) else msgspec.json.encode(value).decode()
                for name, value in headers.items()
            }
    except (ValueError, RecursionError):
        pass
    return {}


def _event(row: Row) -> OutboxEvent:
    times = {name: None if row[name] is None else _ms(row[name]) for name in ("next_retry_at", "created_at", "sent_at")}
    return event_from_row({**dict(row), **times})


def _ms(at: datetime) -> int:
    return round(at.timestamp() * 1000)
