"""Questions of people to the ledger about what they decide on: approvals, dead letters, the operators' log.

A part of `ledger.queries.Queries`. `tenants` are those that the asker may see, None is all of them; what is of another
tenant is not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from sqlalchemy import Table, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from holdfast.errors import Unknown
from holdfast.ledger import deeds, letters, schema
from holdfast.ledger.acts.approvals import to_approval, to_vote
from holdfast.ledger.deeds import ApprovalFilter, ApprovalPage, LogFilter, LogPage
from holdfast.ledger.keys import JobKey
from holdfast.ledger.letters import LetterDetail, LetterFilter, LetterGroup, LetterPage
from holdfast.ledger.listing import TEXT_COST
from holdfast.ledger.paging import every_tenant, read_page
from holdfast.ledger.people import ApprovalRow, VoteRow
from holdfast.ledger.records import EventRow
from holdfast.ledger.text import clean


class Desk:
    """Lists in keyset pages, newest first. Raises `UsageError` for a cursor that is none."""

    def _connection(self) -> AbstractAsyncContextManager[AsyncConnection]:
        raise NotImplementedError

    async def story(self, key: JobKey) -> list[EventRow]:
        raise NotImplementedError

    # Approvals -------------------------------------------------------------------------------------

    async def approvals(
        self, wanted: ApprovalFilter | None = None, limit: int = 50, cursor: str | None = None
    ) -> ApprovalPage:
        """A page of approvals, with their votes."""
        wanted = wanted or ApprovalFilter()
        async with self._connection() as connection:
            rows, further = await read_page(
                connection,
                deeds.APPROVALS,
                list(schema.approvals.c),
                wanted.tenants,
                wanted.driving(),
                wanted.residual,
                limit,
                cursor,
            )
            return ApprovalPage(await _with_votes(connection, rows), further)

    async def approval(self, tenants: Sequence[str] | None, approval_id: str) -> ApprovalRow:
        """One, with its votes. Raises `Unknown`."""
        async with self._connection() as connection:
            row = await _one(connection, schema.approvals, "approval_id", "approval", approval_id, tenants)
            return (await _with_votes(connection, [row]))[0]

    # Dead letters ----------------------------------------------------------------------------------

    async def letters(
        self, wanted: LetterFilter | None = None, limit: int = 50, cursor: str | None = None
    ) -> LetterPage:
        """A page of dead letters."""
        wanted = wanted or LetterFilter()
        async with self._connection() as connection:
            rows, further = await read_page(
                connection,
                letters.REGISTER,
                letters.COLUMNS,
                wanted.tenants,
                [wanted.driving()],
                wanted.residual,
                limit,
                cursor,
                cost=TEXT_COST if wanted.text else 1,
            )
        return LetterPage([letters.to_letter(row) for row in rows], further)

    async def letter(self, tenants: Sequence[str] | None, dlq_id: str) -> LetterDetail:
        """One with all that is known of it, and its job's story. Raises `Unknown`."""
        async with self._connection() as connection:
            row = await _one(connection, schema.dlq_items, "dlq_id", "dead letter", dlq_id, tenants)
        return letters.to_detail(row, await self.story(JobKey(row.tenant_id, row.queue, row.job_id)))

    async def letter_groups(self, wanted: LetterFilter | None = None) -> list[LetterGroup]:
        """Letters by the kind of error that they died of, the most frequent first; of each tenant's newest letters."""
        wanted = wanted or LetterFilter()
        rows: list[Any] = []
        async with self._connection() as connection:
            for tenant in await _tenants(connection, schema.dlq_items, wanted.tenants):
                rows += (await connection.execute(letters.grouped(wanted, tenant))).all()
        return letters.merged(rows)

    async def letter_count(self, wanted: LetterFilter | None = None) -> int:
        """How many letters there are; counted one by one."""
        wanted, count = wanted or LetterFilter(), 0
        async with self._connection() as connection:
            for tenant in await _tenants(connection, schema.dlq_items, wanted.tenants):
                count += (await connection.execute(letters.counted(wanted, tenant))).scalar_one()
        return count

    # The operators' log ----------------------------------------------------------------------------

    async def operator_log(
        self, wanted: LogFilter | None = None, limit: int = 50, cursor: str | None = None
    ) -> LogPage:
        """A page of what people did, and of alerts."""
        wanted = wanted or LogFilter()
        async with self._connection() as connection:
            rows, further = await read_page(
                connection,
                deeds.LOG,
                deeds.LOG_COLUMNS,
                wanted.tenants,
                [wanted.driving()],
                wanted.residual,
                limit,
                cursor,
            )
        return LogPage([deeds.to_line(row) for row in rows], further)


async def _tenants(connection: AsyncConnection, table: Table, tenants: Sequence[str] | None) -> Sequence[str]:
    return await every_tenant(connection, table) if tenants is None else tenants


async def _one(
    connection: AsyncConnection, table: Table, column: str, what: str, name: str, tenants: Sequence[str] | None
) -> Any:
    for tenant in await _tenants(connection, table, tenants):
        where = (table.c.tenant_id == clean(tenant), table.c[column] == clean(name))
        columns = (
            select(table) if table is schema.approvals else select(*letters.COLUMNS, table.c.stack, table.c.history)
        )
        if (row := (await connection.execute(columns.where(*where))).first()) is not None:
            return row
    raise Unknown(what, name)


async def _with_votes(connection: AsyncConnection, rows: Sequence[Any]) -> list[ApprovalRow]:
    cast: dict[tuple[str, str], list[VoteRow]] = {}
    votes = schema.approval_votes.c
    if rows:
        names = [(row.tenant_id, row.approval_id) for row in rows]
        found = select(schema.approval_votes).where(tuple_(votes.tenant_id, votes.approval_id).in_(names))
        for row in await connection.execute(found.order_by(votes.at, votes.person)):
            cast.setdefault((row.tenant_id, row.approval_id), []).append(to_vote(dict(row._mapping)))
    return [to_approval(dict(row._mapping), tuple(cast.get((row.tenant_id, row.approval_id), ()))) for row in rows]
