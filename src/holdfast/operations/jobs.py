"""Jobs for operators: find, cancel, resume, suspend, discard, expedite (H5, H6).

Every change is one atomic step of the engine that leaves an audit entry: who, when, why, before and after. It works
while the ledger is down, and without one. Jobs of a tenant that the principal may not see are reported as unknown.

Searches cover all queues, some of which may be on a server that does not answer (decision 0018). A job that the engine
no longer has is rebuilt from its events in the ledger, or by `info_from_row` from its row if events are missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING

import msgspec

from holdfast.core.job import Failure, JobInfo, Meta
from holdfast.core.principal import Permission, Principal
from holdfast.core.rebuild import IncompleteHistory, rebuild_job
from holdfast.core.states import FINAL, OPERATOR_PREFIX, State
from holdfast.engine.port import OperationsPort
from holdfast.engine.port.reads import ReadPort
from holdfast.errors import (
    EngineUnavailable,
    LedgerUnavailable,
    TransitionInvalid,
    UnknownJob,
)
from holdfast.ledger.queries.records import JobDetail
from holdfast.operations.access import require_reason

if TYPE_CHECKING:
    from holdfast.ledger.port.ledger import LedgerReadPort


async def find_in_queues(engine: ReadPort, queues: Iterable[str], job_id: str, principal: Principal) -> JobInfo | None:
    """Return the job if one of these queues has it and the principal may see it.

    Raises `EngineUnavailable` if it may be in a queue that does not answer.
    """
    found: JobInfo | None = None

    async def read(queue: str) -> None:
        nonlocal found
        if found is None:
            (view,) = await engine.get(queue, [job_id])
            found = view if view is not None and principal.can_see(view.tenant_id) else None

    _, unreachable = await engine.for_each_queue(queues, read)
    if found is None and unreachable:
        raise unreachable_error(unreachable)
    return found


def unreachable_error(unreachable: Mapping[str, EngineUnavailable]) -> EngineUnavailable:
    """Return an error that names the queues that did not answer, with the cause of the first."""
    return EngineUnavailable(f"no answer for {', '.join(sorted(unreachable))}: {next(iter(unreachable.values()))}")


class JobOperations:
    """Operations on single jobs."""

    def __init__(self, engine: OperationsPort, ledger: LedgerReadPort | None) -> None:
        self._engine = engine
        self._ledger = ledger

    async def find(self, principal: Principal, job_id: str, queue: str | None = None) -> JobInfo:
        """Return the job as it is now, in the given queue or in any; an ended one as the ledger has it.

        Raises `UnknownJob` if there is none, or none that the principal may see.
        """
        principal.require(Permission.READ)
        live = await self._live(principal, job_id, queue)
        if live is not None:
            return await self.add_arguments(live)
        row = await self._find_in_ledger(principal, job_id, queue)
        if row is None or self._ledger is None:
            raise UnknownJob(job_id)
        (view,) = await self._engine.get(row.queue, [job_id])
        return view if view is not None and principal.can_see(view.tenant_id) else await _rebuild(self._ledger, row)

    async def add_arguments(self, view: JobInfo) -> JobInfo:
        """Return the job with its arguments, from the ledger if the engine no longer has them.

        Redis keeps no arguments of a job that succeeded. They stay missing if the ledger does not have the job or does
        not answer.
        """
        if view.payload or view.state not in FINAL or self._ledger is None:
            return view
        try:
            return with_arguments(view, await self._ledger.queries.job(view.job_id, view.tenant_id, view.queue))
        except (UnknownJob, LedgerUnavailable):
            return view

    async def cancel(
        self, principal: Principal, job_id: str, *, queue: str | None = None, reason: str, expected: State | None = None
    ) -> State:
        """Cancel a job that has not ended; return its previous state. A running job loses its lease."""
        return await self._move(principal, job_id, State.CANCELLED, "cancel", queue, reason, expected)

    async def resume(
        self, principal: Principal, job_id: str, *, queue: str | None = None, reason: str, expected: State | None = None
    ) -> State:
        """Resume a suspended job: its retries start again, its history stays."""
        if expected not in (None, State.SUSPENDED):
            raise TransitionInvalid(job_id, expected, State.QUEUED)
        return await self._move(principal, job_id, State.QUEUED, "resume", queue, reason, State.SUSPENDED)

    async def suspend(
        self, principal: Principal, job_id: str, *, queue: str | None = None, reason: str, expected: State | None = None
    ) -> State:
        """Suspend a job until an operator resumes it."""
        return await self._move(principal, job_id, State.SUSPENDED, "suspend", queue, reason, expected)

    async def discard(self, principal: Principal, job_id: str, *, queue: str | None = None, reason: str) -> State:
        """Discard a suspended job: it ends as `cancelled`, by one operator with a reason (requirement D6)."""
        require_reason(reason)
        return await self._move(
            principal, job_id, State.CANCELLED, "discard_suspended", queue, reason, State.SUSPENDED
        )  # fmt: skip

    async def expedite(
        self, principal: Principal, job_id: str, *, queue: str | None = None, reason: str, expected: State | None = None
    ) -> State:
        """Make a waiting job due now; return its state, which stays until a worker claims it."""
        view = await self._find_for_operator(principal, job_id, queue)
        if expected is not None and view.state is not expected:
            raise TransitionInvalid(job_id, view.state, State.RUNNING)
        await self._engine.expedite(
            view.queue, job_id, actor=principal.name, reason=reason, audit=f"{OPERATOR_PREFIX}retry"
        )  # fmt: skip
        return view.state

    # Internals -------------------------------------------------------------------------------------

    async def _move(
        self,
        principal: Principal,
        job_id: str,
        to: State,
        verb: str,
        queue: str | None,
        reason: str,
        expected: State | None,
    ) -> State:
        view = await self._find_for_operator(principal, job_id, queue)
        return await self._engine.move(
            view.queue,
            job_id,
            to,
            actor=principal.name,
            reason=reason,
            expected=expected,
            audit=f"{OPERATOR_PREFIX}{verb}",
        )

    async def _find_for_operator(self, principal: Principal, job_id: str, queue: str | None) -> JobInfo:
        # Find it first: a job that the principal may not see is absent, not forbidden.
        view = await self.find(principal, job_id, queue)
        principal.require(Permission.OPERATE)
        return view

    async def _live(self, principal: Principal, job_id: str, queue: str | None) -> JobInfo | None:
        names = [queue] if queue is not None else await self._candidate_queues(principal, job_id)
        return await find_in_queues(self._engine, names, job_id, principal)

    async def _candidate_queues(self, principal: Principal, job_id: str) -> list[str]:
        """Return the queues to search, the one that the ledger names first.

        If that queue has the job, the others are not searched.
        """
        try:
            row = await self._find_in_ledger(principal, job_id, None)
        except LedgerUnavailable:
            row = None
        first = [] if row is None else [row.queue]
        return [*first, *(name for name in await self._engine.queues() if name not in first)]

    async def _find_in_ledger(self, principal: Principal, job_id: str, queue: str | None) -> JobDetail | None:
        if self._ledger is None:
            return None
        queries = self._ledger.queries
        for tenant in [None] if principal.sees_all_tenants else sorted(principal.tenants):
            try:
                return await queries.job(job_id, tenant, queue)
            except UnknownJob:
                continue
        return None


async def read_from_ledger(
    ledger: LedgerReadPort, queue: str, job_id: str, *, until_final: bool = False
) -> JobInfo | None:
    """Return the job as the ledger has it; None if it has none of this id in this queue.

    With `until_final`, an open job comes without its attempts: callers that wait read it often.
    """
    try:
        row = await ledger.queries.job(job_id, queue=queue)
    except UnknownJob:
        return None
    if until_final and row.state not in FINAL:
        return info_from_row(row)
    return await _rebuild(ledger, row)


async def _rebuild(ledger: LedgerReadPort, row: JobDetail) -> JobInfo:
    """Build a job from its row, with the attempts from its events."""
    view, histories = info_from_row(row), await ledger.recovery.histories([row.key])
    try:
        rebuilt = rebuild_job(row.queue, histories[row.key])
    except IncompleteHistory:
        return view
    # It may have moved since the row was read, and only the row has the result.
    return msgspec.structs.replace(rebuilt, result=view.result) if rebuilt.state is view.state else view


def with_arguments(view: JobInfo, row: JobDetail) -> JobInfo:
    """The job with the arguments of its row, if the engine no longer has them."""
    return view if view.payload else msgspec.structs.replace(view, payload=row.payload.text.encode())


def info_from_row(row: JobDetail) -> JobInfo:
    """Build a job from its row in the ledger, which holds less than its events."""
    failed = row.error_code or row.last_error
    return JobInfo(
        job_id=row.job_id,
        task=row.job_type,
        queue=row.queue,
        tenant_id=row.tenant_id,
        state=row.state,
        attempt=row.attempt,
        payload=row.payload.text.encode(),
        idempotency_key=row.idempotency_key,
        trace_id=row.trace_id,
        meta=Meta(priority=row.priority, retry_count=row.retry_count, dlq_id=row.dlq_id or ""),
        created_at_ms=_ms(row.created_at),
        worker=row.worker or "",
        failure=Failure(row.error_code or "", row.last_error or "") if failed else None,
        result=None if row.result is None else row.result.text.encode(),
        next_attempt_at_ms=_ms(row.next_retry_at),
        finished_at_ms=_ms(row.finished_at),
    )


def _ms(at: datetime | None) -> int:
    return 0 if at is None else round(at.timestamp() * 1000)
