"""Suspended jobs: list, resume or discard one or many (requirement D6).

Jobs are read from the ledger; without one from the engine, which has all of them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.clock import to_datetime
from holdfast.core.job import JobInfo
from holdfast.core.principal import Permission, Principal
from holdfast.core.states import State
from holdfast.engine.port import OperationsPort
from holdfast.errors import NoLedger, TransitionInvalid
from holdfast.operations.access import require_reason
from holdfast.operations.bulk import BulkReport, BulkResult, Progress, no_progress, run_bulk
from holdfast.operations.jobs import JobOperations

if TYPE_CHECKING:
    from datetime import datetime

    from holdfast.ledger.port.ledger import Ledger
    from holdfast.ledger.queries.records import JobRow


_PAGE: Final = 500
#: Default rate per second, which leaves capacity of a busy engine to other callers.
_RATE: Final = 500.0
#: Limit of jobs read from one queue of the engine.
_FOUND: Final = 100_000


class SuspendedFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Filter of suspended jobs: all given conditions must hold; without any, all match."""

    job_type: str | None = None
    queues: frozenset[str] = frozenset()
    tenant_id: str | None = None
    error_code: str | None = None
    #: Text in the error, case-insensitive.
    error: str | None = None
    #: Created at this instant or later, and before this one.
    since: datetime | None = None
    until: datetime | None = None


class SuspendedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A suspended job as shown in lists."""

    job_id: str
    task: str
    queue: str
    tenant_id: str
    attempt: int
    retry_count: int
    created_at: datetime
    error_code: str
    error: str


class SuspendedPage(msgspec.Struct, frozen=True):
    """Suspended jobs, newest first. A cursor means that there may be more."""

    jobs: Sequence[SuspendedJob]
    cursor: str | None


class _JobRef(msgspec.Struct, frozen=True):
    job_id: str
    #: None: unknown, all queues are searched.
    queue: str | None


class SuspendedOperations:
    """Operations on suspended jobs. Jobs of other tenants are not visible."""

    def __init__(self, engine: OperationsPort, ledger: Ledger | None) -> None:
        self._engine = engine
        self._ledger = ledger
        self._operating = JobOperations(engine, ledger)

    async def list(
        self, principal: Principal, filters: SuspendedFilter | None = None, limit: int = 50, cursor: str | None = None
    ) -> SuspendedPage:
        """Return a page of suspended jobs."""
        principal.require(Permission.READ)
        filters = filters or SuspendedFilter()
        if self._ledger is not None:
            return await self._page_from_ledger(principal, filters, limit, cursor)
        if cursor is not None:
            raise NoLedger("continuing a list at a cursor")
        return SuspendedPage((await self._find_in_engine(principal, filters))[:limit], None)

    async def resume(
        self,
        principal: Principal,
        selection: Sequence[str] | SuspendedFilter,
        *,
        reason: str,
        dry_run: bool = False,
        rate_per_s: float = _RATE,
        progress: Progress = no_progress,
    ) -> BulkReport:
        """Resume jobs by ids or filter: their retries start again, their history stays."""

        async def act(job: _JobRef) -> None:
            await self._operating.resume(principal, job.job_id, queue=job.queue, reason=reason)

        return await self._run_bulk(principal, selection, act, dry_run, rate_per_s, progress)

    async def discard(
        self,
        principal: Principal,
        selection: Sequence[str] | SuspendedFilter,
        *,
        reason: str,
        dry_run: bool = False,
        rate_per_s: float = _RATE,
        progress: Progress = no_progress,
    ) -> BulkReport:
        """Discard jobs by ids or filter: they end as `cancelled`, with the reason."""
        require_reason(reason)

        async def act(job: _JobRef) -> None:
            await self._operating.discard(principal, job.job_id, queue=job.queue, reason=reason)

        return await self._run_bulk(principal, selection, act, dry_run, rate_per_s, progress)

    async def _run_bulk(
        self,
        principal: Principal,
        selection: Sequence[str] | SuspendedFilter,
        act: Callable[[_JobRef], Awaitable[None]],
        dry_run: bool,
        rate_per_s: float,
        progress: Progress,
    ) -> BulkReport:
        principal.require(Permission.OPERATE)
        jobs = await self._select(principal, selection, check=dry_run)
        if dry_run:
            return BulkReport(matched=len(jobs), dry_run=True)

        async def do(job: _JobRef) -> BulkResult:
            await act(job)
            return BulkResult(id=job.job_id, done=True)

        return await run_bulk(
            _each(jobs),
            do,
            lambda job: job.job_id,
            lambda job: job.queue,
            matched=len(jobs),
            rate_per_s=rate_per_s,
            progress=progress,
        )

    async def _select(
        self, principal: Principal, selection: Sequence[str] | SuspendedFilter, *, check: bool
    ) -> Sequence[_JobRef]:
        if isinstance(selection, SuspendedFilter):
            # Read all jobs first, so that one that is suspended again during the call is not selected twice.
            return [_JobRef(job.job_id, job.queue) async for job in self._walk(principal, selection)]
        ids = list(dict.fromkeys(selection))
        if check:
            for job_id in ids:
                view = await self._operating.find(principal, job_id)
                if view.state is not State.SUSPENDED:
                    raise TransitionInvalid(job_id, view.state, State.QUEUED)
        return [_JobRef(job_id, None) for job_id in ids]

    async def _walk(self, principal: Principal, filters: SuspendedFilter) -> AsyncIterator[SuspendedJob]:
        cursor: str | None = None
        while True:
            if self._ledger is None:
                page = SuspendedPage(await self._find_in_engine(principal, filters), None)
            else:
                page = await self._page_from_ledger(principal, filters, _PAGE, cursor)
            for job in page.jobs:
                yield job
            cursor = page.cursor
            if cursor is None:
                return

    async def _page_from_ledger(
        self, principal: Principal, filters: SuspendedFilter, limit: int, cursor: str | None
    ) -> SuspendedPage:
        from holdfast.ledger.queries.job_list import JobFilter

        assert self._ledger is not None
        query = JobFilter(
            states=frozenset({State.SUSPENDED}),
            job_type=filters.job_type,
            tenant_id=filters.tenant_id,
            tenants=principal.visible_tenants,
            queues=filters.queues,
            since=filters.since,
            until=filters.until,
            error=filters.error,
        )
        page = await self._ledger.queries.jobs(query, limit, cursor)
        jobs = [_from_row(row) for row in page.jobs if filters.error_code in (None, row.error_code)]
        return SuspendedPage(jobs, page.cursor)

    async def _find_in_engine(self, principal: Principal, filters: SuspendedFilter) -> Sequence[SuspendedJob]:
        names = sorted(filters.queues) or await self._engine.queues()
        views = [view for name in names for view in await self._engine.find(name, {State.SUSPENDED}, _FOUND)]
        jobs = [_from_info(view) for view in views if principal.can_see(view.tenant_id)]
        return sorted((job for job in jobs if _matches(job, filters)), key=lambda job: job.created_at, reverse=True)


async def _each(jobs: Sequence[_JobRef]) -> AsyncIterator[_JobRef]:
    for job in jobs:
        yield job


def _from_row(row: JobRow) -> SuspendedJob:
    return SuspendedJob(
        job_id=row.job_id,
        task=row.job_type,
        queue=row.queue,
        tenant_id=row.tenant_id,
        attempt=row.attempt,
        retry_count=row.retry_count,
        created_at=row.created_at,
        error_code=row.error_code or "",
        error=row.last_error or "",
    )


def _from_info(view: JobInfo) -> SuspendedJob:
    failure = view.failure
    return SuspendedJob(
        job_id=view.job_id,
        task=view.task,
        queue=view.queue,
        tenant_id=view.tenant_id,
        attempt=view.attempt,
        retry_count=view.meta.retry_count,
        created_at=to_datetime(view.created_at_ms),
        error_code=failure.code if failure else "",
        error=failure.message if failure else "",
    )


def _matches(job: SuspendedJob, filters: SuspendedFilter) -> bool:
    return (
        filters.job_type in (None, job.task)
        and filters.tenant_id in (None, job.tenant_id)
        and filters.error_code in (None, job.error_code)
        and (filters.error is None or filters.error.lower() in job.error.lower())
        and (filters.since is None or job.created_at >= filters.since)
        and (filters.until is None or job.created_at < filters.until)
    )
