"""What the reconciler and intake recovery read from the ledger, in SQL common to all stores.

Open jobs are found in the partial index `jobs_by_state`, tenant by tenant (a loose index scan) and state by state, so
that the millions of finished jobs are never read. The state is a literal in the statements, and so is
`state <> 'succeeded'`: neither store can prove that a parameter satisfies the predicate of a partial index.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec
from sqlalchemy import ColumnElement, Row, Select, and_, literal, literal_column, select, text, tuple_, union_all
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine

from holdfast.core.job import Event, JobKey, decode_meta
from holdfast.core.states import FINAL, State
from holdfast.engine.port.feed import SubmissionKey
from holdfast.errors import LedgerUnavailable
from holdfast.ledger.port.ledger import OpenJob, RecordedState, Recovery
from holdfast.schema import feed_positions, job_events, jobs

#: Jobs read by key in one statement.
_KEYS: Final = 500

_OPEN: Final = tuple(state for state in State if state not in FINAL)
_NOT_ORDINARY: Final = text("state <> 'succeeded'")
#: Errors of a store that is down, unless its own handler has already translated them.
_DOWN: Final = (InterfaceError, OperationalError, PoolTimeout)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)

#: Where a page of a tenant ended: the state's index in `_OPEN`, creation, id.
_Mark = tuple[int, datetime, str]


class SqlRecovery(Recovery):
    """The recovery role on one store's tables."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def queues(self) -> list[str]:
        # A row without a position only has the lease of a projector, or the epoch of a verification.
        query = select(feed_positions.c.feed).where(feed_positions.c.position != "").order_by(feed_positions.c.feed)
        return [row.feed for row in await self._rows(query)]

    async def open_jobs(self, queue: str, limit: int) -> AsyncIterator[list[OpenJob]]:
        page: list[OpenJob] = []
        async for rows in self._open_rows(queue, limit, None):
            page += [_open_job(row) for row in rows]
            # Tenants with few open jobs share a page.
            while len(page) >= limit:
                yield page[:limit]
                page = page[limit:]
        if page:
            yield page

    async def recorded(self, keys: Sequence[JobKey]) -> dict[JobKey, RecordedState]:
        key = (jobs.c.tenant_id, jobs.c.queue, jobs.c.job_id)
        columns = (*key, jobs.c.state, jobs.c.attempt, jobs.c.retry_count, jobs.c.result)
        found: dict[JobKey, RecordedState] = {}
        for condition in _key_conditions(jobs.c, keys):
            for row in await self._rows(select(*columns).where(condition)):
                found[_key(row)] = RecordedState(State(row.state), row.attempt, row.retry_count, row.result)
        return found

    async def still_open(self, keys: Sequence[JobKey]) -> list[OpenJob]:
        found: list[OpenJob] = []
        columns = (jobs.c.tenant_id, jobs.c.queue, jobs.c.job_id, jobs.c.state, jobs.c.last_seq, jobs.c.created_at)
        for condition in _key_conditions(jobs.c, keys):
            query = select(*columns).where(condition, jobs.c.state.not_in([state.value for state in FINAL]))
            found += [_open_job(row) for row in await self._rows(query)]
        return found

    async def histories(self, keys: Sequence[JobKey]) -> dict[JobKey, list[Event]]:
        envelopes: dict[JobKey, dict[str, Any]] = {}
        for condition in _key_conditions(jobs.c, keys):
            for row in await self._rows(select(jobs).where(condition)):
                envelopes[_key(row)] = _envelope(row)
        histories: dict[JobKey, list[Event]] = {key: [] for key in keys}
        for condition in _key_conditions(job_events.c, keys):
            query = select(job_events).where(condition).order_by(job_events.c.job_id, job_events.c.seq)
            for row in await self._rows(query):
                key = _key(row)
                # Events without a row: the job was pruned meanwhile.
                if key in envelopes:
                    histories[key].append(_event(row, envelopes[key]))
        return histories

    async def submission_keys(self, queue: str, window_ms: int, limit: int) -> AsyncIterator[list[SubmissionKey]]:
        now = datetime.now(UTC)
        window = timedelta(milliseconds=window_ms)
        async for rows in self._recent_keys(queue, now - window, limit):
            yield [_known_key(row, now, window) for row in rows]
        # Older keys are kept as long as their jobs are open.
        async for rows in self._open_rows(queue, limit, now - window):
            keyed = [row for row in rows if row.idempotency_key != row.job_id]
            if keyed:
                yield [_known_key(row, now, window) for row in keyed]

    # Pages -----------------------------------------------------------------------------------------

    async def _open_rows(self, queue: str, limit: int, before: datetime | None) -> AsyncIterator[Sequence[Row[Any]]]:
        tenant = await self._next_tenant("", _NOT_ORDINARY)
        while tenant is not None:
            mark: _Mark | None = None
            while True:
                rows = await self._rows(_open_page(tenant, queue, mark, before, limit))
                if rows:
                    yield rows
                if len(rows) < limit:
                    break
                mark = (rows[-1].place, rows[-1].created_at, rows[-1].job_id)
            tenant = await self._next_tenant(tenant, _NOT_ORDINARY)

    async def _recent_keys(self, queue: str, since: datetime, limit: int) -> AsyncIterator[Sequence[Row[Any]]]:
        tenant = await self._next_tenant("")
        while tenant is not None:
            after: tuple[datetime, str] = (since, "")
            while True:
                rows = await self._rows(_recent_page(tenant, queue, after, limit))
                if rows:
                    yield rows
                if len(rows) < limit:
                    break
                after = (rows[-1].created_at, rows[-1].job_id)
            tenant = await self._next_tenant(tenant)

    async def _next_tenant(self, after: str, *conditions: Any) -> str | None:
        column = jobs.c.tenant_id
        rows = await self._rows(select(column).where(column > after, *conditions).order_by(column).limit(1))
        return rows[0].tenant_id if rows else None

    async def _rows(self, query: Select[Any] | Any) -> Sequence[Row[Any]]:
        try:
            async with self._engine.connect() as connection:
                return (await connection.execute(query)).all()
        except (*_DOWN, OSError, TimeoutError) as exc:
            raise LedgerUnavailable(f"the ledger does not answer: {_cause(exc)}") from exc


def _open_page(tenant: str, queue: str, mark: _Mark | None, before: datetime | None, limit: int) -> Any:
    """The next open jobs of a tenant, state by state, oldest first within a state.

    With `before`, their `meta` as well, for their keys.
    """
    with_meta = before is not None
    first = mark[0] if mark else 0
    parts = []
    for index in range(first, len(_OPEN)):
        conditions: list[Any] = [
            jobs.c.tenant_id == tenant,
            jobs.c.state == literal_column(f"'{_OPEN[index]}'"),
            _NOT_ORDINARY,
            jobs.c.queue == queue,
        ]
        if mark and index == first:
            conditions.append(_is_after(jobs.c.created_at, jobs.c.job_id, mark[1], mark[2]))
        if before is not None:
            conditions.append(jobs.c.created_at <= before)
        part = (
            select(
                *([jobs.c.meta] if with_meta else []),
                literal_column(str(index)).label("place"),
                jobs.c.tenant_id,
                jobs.c.queue,
                jobs.c.job_id,
                jobs.c.state,
                jobs.c.last_seq,
                jobs.c.created_at,
                jobs.c.idempotency_key,
            )
            .where(and_(*conditions))
            .order_by(jobs.c.created_at, jobs.c.job_id)
            .limit(limit)
        )
        parts.append(select(part.subquery()))
    every = union_all(*parts).subquery()
    return select(every).order_by(every.c.place, every.c.created_at, every.c.job_id).limit(limit)


def _recent_page(tenant: str, queue: str, after: tuple[datetime, str], limit: int) -> Select[Any]:
    return (
        select(jobs.c.tenant_id, jobs.c.job_id, jobs.c.state, jobs.c.created_at, jobs.c.idempotency_key, jobs.c.meta)
        .where(
            jobs.c.tenant_id == tenant,
            _is_after(jobs.c.created_at, jobs.c.job_id, *after),
            jobs.c.queue == queue,
            jobs.c.idempotency_key != jobs.c.job_id,
        )
        .order_by(jobs.c.created_at, jobs.c.job_id)
        .limit(limit)
    )


def _is_after(created_at: Any, job_id: Any, mark_at: datetime, mark_id: str) -> ColumnElement[bool]:
    mark = tuple_(literal(mark_at, created_at.type), literal(mark_id))
    return tuple_(created_at, job_id) > mark


def _key_conditions(columns: Any, keys: Sequence[JobKey]) -> list[ColumnElement[bool]]:
    """Conditions that find these jobs by primary key, each for some jobs of one tenant and queue."""
    ids: dict[tuple[str, str], list[str]] = defaultdict(list)
    for key in keys:
        ids[key.tenant_id, key.queue].append(key.job_id)
    return [
        and_(columns.tenant_id == tenant, columns.queue == queue, columns.job_id.in_(job_ids[start : start + _KEYS]))
        for (tenant, queue), job_ids in ids.items()
        for start in range(0, len(job_ids), _KEYS)
    ]


# Rows ----------------------------------------------------------------------------------------------


def _key(row: Row[Any]) -> JobKey:
    return JobKey(row.tenant_id, row.queue, row.job_id)


def _open_job(row: Row[Any]) -> OpenJob:
    return OpenJob(_key(row), State(row.state), row.last_seq)


def _known_key(row: Row[Any], now: datetime, window: timedelta) -> SubmissionKey:
    # The engine shortens an open job's key to the rest of its window when the job ends.
    ends = row.created_at + (_own_window(row.meta) or window) if State(row.state) in FINAL else now + window
    return SubmissionKey(row.tenant_id, row.idempotency_key, row.job_id, _ms(ends), _fingerprint_of(row.meta))


def _fingerprint_of(meta: str | None) -> str:
    return decode_meta(meta).key_fingerprint if meta is not None and '"key_fingerprint"' in meta else ""


def _own_window(meta: str | None) -> timedelta | None:
    # Most jobs have the default window, and their `meta` is not decoded.
    if meta is None or '"key_window_ms"' not in meta:
        return None
    return timedelta(milliseconds=decode_meta(meta).key_window_ms)


def _envelope(row: Row[Any]) -> dict[str, Any]:
    """Data of a creation event, from the job's row: it is not copied into the event."""
    return {
        "task": row.job_type,
        "payload": row.payload,
        "queue": row.queue,
        "tenant_id": row.tenant_id,
        "idempotency_key": row.idempotency_key,
        "trace_id": row.trace_id,
        "priority": row.priority,
        "context": _json(row.context),
        "run_at_ms": _ms(row.run_at) if row.run_at is not None else 0,
        "meta": _json(row.meta),
    }


def _event(row: Row[Any], envelope: Mapping[str, Any]) -> Event:
    data = _json(row.data)
    if row.seq == 1:
        data = {**envelope, **(data or {})}
    return Event(
        type=row.type,
        job_id=row.job_id,
        at_ms=_ms(row.at),
        tenant_id=row.tenant_id,
        from_state=State(row.from_state) if row.from_state else None,
        to_state=State(row.to_state) if row.to_state else None,
        attempt=row.attempt,
        retry_count=row.retry_count,
        worker=row.worker or "",
        message=row.message or "",
        data=data,
    )


def _json(value: str | None) -> Any:
    return msgspec.json.decode(value) if value else None


def _ms(instant: datetime) -> int:
    return (instant - _EPOCH) // _MILLISECOND


def _cause(exc: BaseException) -> str:
    # SQLAlchemy's own text contains the whole statement, and with it user data.
    return str(getattr(exc, "orig", None) or type(exc).__name__)
