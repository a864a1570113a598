"""Queries on jobs in the ledger: lists, one job with its history, counts. Read-only.

One implementation in SQLAlchemy Core serves PostgreSQL, a SQLite ledger file, and the embedded engine's file. It is
given an SQLAlchemy engine and opens a connection for each query; all methods raise `LedgerUnavailable` when the store
does not answer. A page of a list takes bounded time (see `ledger.queries.job_list`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import msgspec
from sqlalchemy import ColumnElement, Select, Table, and_, func, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from holdfast import schema
from holdfast.core.job import JobKey
from holdfast.core.states import State
from holdfast.core.text import clean
from holdfast.errors import LedgerUnavailable, UnknownJob
from holdfast.ledger.queries.job_list import (
    JobCursor,
    JobFilter,
    JobSearch,
    cursor_of,
    from_cursor,
    searches,
    to_cursor,
)
from holdfast.ledger.queries.operators import OperatorQueries
from holdfast.ledger.queries.paging import all_tenants, check_limit
from holdfast.ledger.queries.prefixes import KINDS, Candidate, candidates, matching_ids
from holdfast.ledger.queries.records import (
    EffectRow,
    EventRow,
    JobDeadLetter,
    JobDetail,
    JobPage,
    JobRow,
    JsonText,
    StateCounts,
    StepRow,
)
from holdfast.schema.columns import tenants_of

#: Counts up to this are exact: counting this many takes a few milliseconds.
COUNTED: Final = 100_000
#: Rows fetched at a time when whole tables are read.
CHUNK: Final = 5_000

_JSON: Final = frozenset({"payload", "context", "result", "meta", "data", "history", "value"})

_STATES: Final = frozenset({"state", "from_state", "to_state"})

R = TypeVar("R", bound=msgspec.Struct)


class Queries(OperatorQueries):
    """Read-only queries on jobs, and on what operators decide (`OperatorQueries`)."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine

    # Lists -----------------------------------------------------------------------------------------

    async def jobs(self, filters: JobFilter | None = None, limit: int = 50, cursor: str | None = None) -> JobPage:
        """Return a page of jobs, newest first. Raises `UsageError` for an invalid cursor."""
        check_limit(limit)
        filters = filters or JobFilter()
        after = from_cursor(cursor) if cursor else None
        async with self._connection() as connection:
            tenants = filters.chosen_tenants()
            if tenants is None:
                tenants = await self._tenants(connection)
            rows: list[Any] = []
            #: Position that every search has reached; the page ends where the first search stopped.
            horizon: JobCursor | None = None
            for search in searches(filters, tenants, after):
                found, end = await self._search(connection, search, limit + 1)
                rows += found
                horizon = max((position for position in (horizon, end) if position is not None), default=None)
        return _page(rows, horizon, limit)

    async def latest(self, limit: int = 50, tenant_id: str | None = None) -> list[JobRow]:
        """Return the newest jobs."""
        return (await self.jobs(JobFilter(tenant_id=tenant_id), limit)).jobs

    async def tenants(self) -> list[str]:
        """Return all tenants that have a job."""
        async with self._connection() as connection:
            return await self._tenants(connection)

    # One job ---------------------------------------------------------------------------------------

    async def job(self, job_id: str, tenant_id: str | None = None, queue: str | None = None) -> JobDetail:
        """Return the job with this id; the newest if tenants or queues share it. Raises `UnknownJob`."""
        table, found = schema.jobs, []
        async with self._connection() as connection:
            tenants = [tenant_id] if tenant_id is not None else await self._tenants(connection)
            for tenant in tenants:
                where = and_(table.c.tenant_id == clean(tenant), table.c.job_id == clean(job_id))
                if queue is not None:
                    where = and_(where, table.c.queue == clean(queue))
                found += (await connection.execute(_columns(JobDetail, table).where(where))).all()
        if not found:
            raise UnknownJob(job_id)
        return _struct(JobDetail, max(found, key=cursor_of))

    async def find_by_prefix(
        self, noun: str, prefix: str, tenants: Sequence[str] | None, queue: str | None, limit: int
    ) -> list[Candidate]:
        """Return ids with the prefix, in order, at most `limit`.

        Of an id that queues or tenants share, the newest row. `tenants` None means all.
        """
        kind, found = KINDS[noun], list[Candidate]()
        async with self._connection() as connection:
            for tenant in await all_tenants(connection, kind.table) if tenants is None else tenants:
                matching = matching_ids(kind, tenant, prefix, queue, self.engine.dialect).limit(limit)
                ids = list((await connection.execute(matching)).scalars())
                if ids:
                    rows = await connection.execute(candidates(kind, tenant, ids, queue))
                    found += [Candidate(*row) for row in rows]
        newest = {one.id: one for one in sorted(found, key=lambda one: one.at)}
        return [newest[name] for name in sorted(newest)][:limit]

    async def events(self, key: JobKey) -> list[EventRow]:
        """Return all events of a job, in order."""
        return await self._find_of_job(EventRow, schema.job_events, key, schema.job_events.c.seq)

    async def dead_letter_of(self, key: JobKey) -> JobDeadLetter | None:
        """Return the latest dead letter of a job, or None."""
        dead_letters = await self._find_of_job(JobDeadLetter, schema.dlq_items, key, schema.dlq_items.c.failed_at)
        return dead_letters[-1] if dead_letters else None

    async def steps(self, key: JobKey) -> list[StepRow]:
        """Return the checkpoints of a job, in order."""
        return await self._find_of_job(StepRow, schema.job_steps, key, schema.job_steps.c.position)

    async def effects(self, key: JobKey) -> list[EffectRow]:
        """Return effects whose key the job holds or has recorded."""
        table = schema.idempotency_keys
        return await self._find_of_job(EffectRow, table, key, table.c.created_at)

    # Counts ----------------------------------------------------------------------------------------

    async def counts(
        self, tenant_id: str | None = None, queue: str | None = None, *, exact: bool = False
    ) -> StateCounts:
        """Count jobs by state.

        All states except `succeeded` are counted in a small index and exact. On PostgreSQL, `succeeded` is estimated
        from statistics above `COUNTED` jobs; with `exact` it is counted.
        """
        conditions = [column == clean(value) for column, value in self._narrow(tenant_id, queue)]
        async with self._connection() as connection:
            estimate = None if exact or self._is_sqlite else await self._estimate(connection, conditions)
            if estimate is None or estimate <= COUNTED:
                return StateCounts(await self._count_by_state(connection, conditions))
            ordinary = schema.jobs.c.state != State.SUCCEEDED.value
            states = await self._count_by_state(connection, [*conditions, ordinary])
        return StateCounts({**states, State.SUCCEEDED: estimate}, frozenset({State.SUCCEEDED}))

    async def counts_by_queue(
        self, tenants: Collection[str], queues: Sequence[str] = ()
    ) -> dict[str, dict[State, int]]:
        """Count the jobs of some tenants by queue and state, by name. No `queues`: all that have one of their jobs."""
        queue, state = schema.jobs.c.queue, schema.jobs.c.state
        conditions = [schema.jobs.c.tenant_id.in_(list(map(clean, tenants)))]
        if queues:
            conditions.append(queue.in_(list(map(clean, queues))))
        statement = select(queue, state, func.count()).where(*conditions).group_by(queue, state)
        found: dict[str, dict[State, int]] = {}
        async with self._connection() as connection:
            for name, state_name, count in await connection.execute(statement):
                found.setdefault(name, dict.fromkeys(State, 0))[State(state_name)] = count
        return dict(sorted(found.items()))

    # Whole tables, for verification ----------------------------------------------------------------

    @asynccontextmanager
    async def snapshot(self) -> AsyncIterator[Snapshot]:
        """Open a snapshot of the whole ledger, to be read row by row in constant memory."""
        async with self._connection() as connection:
            begin = "BEGIN" if self._is_sqlite else "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"
            await connection.exec_driver_sql(begin)
            yield Snapshot(connection)

    # Internals -------------------------------------------------------------------------------------

    @property
    def _is_sqlite(self) -> bool:
        return self.engine.dialect.name == "sqlite"

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[AsyncConnection]:
        try:
            async with self.engine.connect() as connection:
                yield connection
        except (DBAPIError, PoolTimeout, OSError, TimeoutError) as exc:
            cause = getattr(exc, "orig", None) or exc
            raise LedgerUnavailable(f"the ledger does not answer: {cause}; check that it is up, then retry") from exc

    async def _tenants(self, connection: AsyncConnection) -> list[str]:
        return list((await connection.execute(tenants_of(schema.jobs))).scalars())

    async def _search(
        self, connection: AsyncConnection, search: JobSearch, limit: int
    ) -> tuple[list[Any], JobCursor | None]:
        dialect = self.engine.dialect
        rows = list((await connection.execute(search.page(dialect, limit))).all())
        if len(rows) == limit:
            return rows, cursor_of(rows[-1])
        statement = search.end(dialect)
        last = None if statement is None else (await connection.execute(statement)).first()
        return rows, None if last is None else cursor_of(last)

    async def _find_of_job(self, kind: type[R], table: Table, key: JobKey, order: ColumnElement[Any]) -> list[R]:
        statement = _columns(kind, table).where(
            table.c.tenant_id == clean(key.tenant_id),
            table.c.job_id == clean(key.job_id),
            table.c.queue == clean(key.queue),
        )
        async with self._connection() as connection:
            return [_struct(kind, row) for row in await connection.execute(statement.order_by(order))]

    @staticmethod
    def _narrow(tenant_id: str | None, queue: str | None) -> list[tuple[Any, str]]:
        pairs = ((schema.jobs.c.tenant_id, tenant_id), (schema.jobs.c.queue, queue))
        return [(column, value) for column, value in pairs if value is not None]

    async def _count_by_state(self, connection: AsyncConnection, conditions: list[Any]) -> dict[State, int]:
        state = schema.jobs.c.state
        rows = await connection.execute(select(state, func.count()).where(*conditions).group_by(state))
        counted = {State(name): count for name, count in rows}
        return {state: counted.get(state, 0) for state in State}

    async def _estimate(self, connection: AsyncConnection, conditions: list[Any]) -> int:
        """Return how many `succeeded` jobs the planner expects."""
        counted = select(schema.jobs.c.state).where(*conditions, schema.jobs.c.state == State.SUCCEEDED.value)
        sql = counted.compile(dialect=self.engine.dialect)
        values = tuple(sql.params[name] for name in sql.positiontup or ())
        plan = (await connection.exec_driver_sql(f"EXPLAIN (FORMAT JSON) {sql}", values)).scalar_one()
        document = msgspec.json.decode(plan) if isinstance(plan, str) else plan
        return int(document[0]["Plan"]["Plan Rows"])


class Snapshot:
    """Reads whole tables as of one moment."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def rows(self, statement: Select[Any]) -> AsyncIterator[Any]:
        """Iterate over the rows of a statement, with one chunk in memory at a time."""
        result = await self._connection.stream(statement.execution_options(yield_per=CHUNK))
        async for row in result:
            yield row

    async def scalar(self, statement: Select[Any]) -> Any:
        """Return the only value of a statement."""
        return (await self._connection.execute(statement)).scalar_one()


def _page(rows: list[Any], horizon: JobCursor | None, limit: int) -> JobPage:
    ordered = sorted(rows, key=cursor_of, reverse=True)
    whole = [row for row in ordered if horizon is None or cursor_of(row) >= horizon]
    shown = [_struct(JobRow, row) for row in whole[:limit]]
    if len(whole) > limit:
        return JobPage(shown, to_cursor(cursor_of(shown[-1])))
    return JobPage(shown, None if horizon is None else to_cursor(horizon))


def _columns(kind: type[msgspec.Struct], table: Table) -> Select[Any]:
    return select(*(table.c[name] for name in kind.__struct_fields__))


def _struct(kind: type[R], row: Any) -> R:
    fields: Mapping[str, Any] = row._mapping
    states = _STATES if kind is not EffectRow else frozenset()
    return kind(**{name: _value(name, value, states) for name, value in fields.items()})


def _value(name: str, value: Any, states: frozenset[str]) -> Any:
    if value is None:
        return None
    if name in _JSON:
        return JsonText(value)
    return State(value) if name in states else value
