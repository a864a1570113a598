"""Suspended jobs: look at them, send them back to work, or give them up; one or many (requirement D6).

From the ledger; without one, those that the engine has, which is all of them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.clock import to_datetime
from holdfast.core.job import JobInfo
from holdfast.core.principal import Permission, Principal
from holdfast.core.states import State
from holdfast.engine.port import Engine
from holdfast.errors import NoLedger, TransitionInvalid
from holdfast.operations.access import require_reason, visible_tenants
from holdfast.operations.bulk import BulkReport, BulkResult, Progress, no_progress, run_bulk
from holdfast.operations.jobs import JobOperations

if TYPE_CHECKING:
    from datetime import datetime

    from holdfast.ledger.port.ledger import Ledger
    from holdfast.ledger.queries.records import JobRow


_PAGE: Final = 500
#: A busy engine stays free for others.
_RATE: Final = 500.0
#: What an engine gives out at a time.
_FOUND: Final = 100_000


class SuspendedFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which of them; nothing given is all of them."""

    job_type: str | None = None
    queues: frozenset[str] = frozenset()
    tenant_id: str | None = None
    error_code: str | None = None
    #: Text in the error, in any case.
    error: str | None = None
    #: Created at this instant or later, and before this one.
    since: datetime | None = None
    until: datetime | None = None


class SuspendedJob(msgspec.Struct, frozen=True, kw_only=True):
    """One of them, as lists show it."""

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
    """Newest first. While there is a cursor there may be more."""

    jobs: Sequence[SuspendedJob]
    cursor: str | None


class _JobRef(msgspec.Struct, frozen=True):
    job_id: str
    #: None: where it is has to be found out.
    queue: str | None


class SuspendedOperations:
    """What people do with suspended jobs. Nobody sees those of other tenants."""

    def __init__(self, engine: Engine, ledger: Ledger | None) -> None:
        self._engine = engine
        self._ledger = ledger
        self._operating = JobOperations(engine, ledger)

    async def list(
        self, person: Principal, wanted: SuspendedFilter | None = None, limit: int = 50, cursor: str | None = None
    ) -> SuspendedPage:
        """A page of them."""
        person.require(Permission.READ)
        chosen = wanted or SuspendedFilter()
        if self._ledger is not None:
            return await self._remembered(person, chosen, limit, cursor)
        if cursor is not None:
            raise NoLedger("a list that goes on where another ended")
        return SuspendedPage((await self._found(person, chosen))[:limit], None)

    async def resume(
        self,
        person: Principal,
        chosen: Sequence[str] | SuspendedFilter,
        *,
        reason: str,
        dry_run: bool = False,
        rate_per_s: float = _RATE,
        progress: Progress = no_progress,
    ) -> BulkReport:
        """Back to work, those of these ids or of the filter: their retries start again, their history stays."""

        async def act(job: _JobRef) -> None:
            await self._operating.resume(person, job.job_id, queue=job.queue, reason=reason)

        return await self._many(person, chosen, act, dry_run, rate_per_s, progress)

    async def discard(
        self,
        person: Principal,
        chosen: Sequence[str] | SuspendedFilter,
        *,
        reason: str,
        dry_run: bool = False,
        rate_per_s: float = _RATE,
        progress: Progress = no_progress,
    ) -> BulkReport:
        """Given up, those of these ids or of the filter: `cancelled`, with the reason."""
        require_reason(reason)

        async def act(job: _JobRef) -> None:
            await self._operating.discard(person, job.job_id, queue=job.queue, reason=reason)

        return await self._many(person, chosen, act, dry_run, rate_per_s, progress)

    async def _many(
        self,
        person: Principal,
        chosen: Sequence[str] | SuspendedFilter,
        act: Callable[[_JobRef], Awaitable[None]],
        dry_run: bool,
        rate_per_s: float,
        progress: Progress,
    ) -> BulkReport:
        person.require(Permission.OPERATE)
        jobs = await self._chosen(person, chosen, look=dry_run)
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

    async def _chosen(
        self, person: Principal, chosen: Sequence[str] | SuspendedFilter, *, look: bool
    ) -> Sequence[_JobRef]:
        if isinstance(chosen, SuspendedFilter):
            # All of them first: while they are resumed, some come back suspended, and are not meant.
            return [_JobRef(job.job_id, job.queue) async for job in self._walk(person, chosen)]
        ids = list(dict.fromkeys(chosen))
        if look:
            for job_id in ids:
                view = await self._operating.find(person, job_id)
                if view.state is not State.SUSPENDED:
                    raise TransitionInvalid(job_id, view.state, State.QUEUED)
        return [_JobRef(job_id, None) for job_id in ids]

    async def _walk(self, person: Principal, wanted: SuspendedFilter) -> AsyncIterator[SuspendedJob]:
        cursor: str | None = None
        while True:
            if self._ledger is None:
                page = SuspendedPage(await self._found(person, wanted), None)
            else:
                page = await self._remembered(person, wanted, _PAGE, cursor)
            for job in page.jobs:
                yield job
            cursor = page.cursor
            if cursor is None:
                return

    async def _remembered(
        self, person: Principal, wanted: SuspendedFilter, limit: int, cursor: str | None
    ) -> SuspendedPage:
        from holdfast.ledger.queries.job_list import JobFilter

        assert self._ledger is not None
        query = JobFilter(
            states=frozenset({State.SUSPENDED}),
            job_type=wanted.job_type,
            tenant_id=wanted.tenant_id,
            tenants=visible_tenants(person),
            queues=wanted.queues,
            since=wanted.since,
            until=wanted.until,
            error=wanted.error,
        )
        page = await self._ledger.queries.jobs(query, limit, cursor)
        jobs = [_of_row(row) for row in page.jobs if wanted.error_code in (None, row.error_code)]
        return SuspendedPage(jobs, page.cursor)

    async def _found(self, person: Principal, wanted: SuspendedFilter) -> Sequence[SuspendedJob]:
        names = sorted(wanted.queues) or await self._engine.queues()
        views = [view for name in names for view in await self._engine.find(name, {State.SUSPENDED}, _FOUND)]
        jobs = [_of_view(view) for view in views if person.can_see(view.tenant_id)]
        return sorted((job for job in jobs if _matches(job, wanted)), key=lambda job: job.created_at, reverse=True)


async def _each(jobs: Sequence[_JobRef]) -> AsyncIterator[_JobRef]:
    for job in jobs:
        yield job


def _of_row(row: JobRow) -> SuspendedJob:
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


def _of_view(view: JobInfo) -> SuspendedJob:
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


def _matches(job: SuspendedJob, wanted: SuspendedFilter) -> bool:
    return (
        wanted.job_type in (None, job.task)
        and wanted.tenant_id in (None, job.tenant_id)
        and wanted.error_code in (None, job.error_code)
        and (wanted.error is None or wanted.error.lower() in job.error.lower())
        and (wanted.since is None or job.created_at >= wanted.since)
        and (wanted.until is None or job.created_at < wanted.until)
    )
