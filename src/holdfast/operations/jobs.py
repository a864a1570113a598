"""Jobs and queues for operators: find, cancel, resume, suspend, discard, expedite; controls (H5, H6).

Every change is one atomic step of the engine that leaves an audit entry: who, when, why, before and after. It works
while the ledger is down, and without one. Jobs of a tenant that the principal may not see are reported as unknown.

Searches cover all queues, some of which may be on a server that does not answer (decision 0018). `info_from_row`
describes a job that the engine no longer has by its row in the ledger, for a history that is incomplete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.core.job import DEFAULT_QUEUE, Failure, JobInfo, Meta
from holdfast.core.principal import Permission, Principal
from holdfast.core.rebuild import IncompleteHistory, rebuild_job
from holdfast.core.states import OPERATOR_PREFIX, State
from holdfast.engine.port import Engine, PartialFailure
from holdfast.engine.port.operators import QueueControl, TenantControl
from holdfast.engine.port.reads import WorkerInfo
from holdfast.errors import (
    ControlChanged,
    EngineUnavailable,
    LedgerUnavailable,
    NoLedger,
    NotFound,
    TransitionInvalid,
    UnknownJob,
)
from holdfast.ledger.queries.records import JobDetail
from holdfast.operations.access import require_reason, visible_tenants
from holdfast.operations.queues import QueueInfo, full_info, tenant_info, visible_control

if TYPE_CHECKING:
    from holdfast.ledger.port.ledger import Ledger
    from holdfast.ledger.queries.jobs import Queries
    from holdfast.ledger.queries.operator_filters import AuditFilter, AuditPage


async def find_in_queues(engine: Engine, queues: Iterable[str], job_id: str, person: Principal) -> JobInfo | None:
    """The job, if one of these queues has it and the person may see it.

    Raises `EngineUnavailable` if it may be in one that does not answer.
    """
    found: JobInfo | None = None

    async def look(queue: str) -> None:
        nonlocal found
        if found is None:
            (view,) = await engine.get(queue, [job_id])
            found = view if view is not None and person.can_see(view.tenant_id) else None

    _, away = await engine.for_each_queue(queues, look)
    if found is None and away:
        raise unreachable_error(away)
    return found


def unreachable_error(away: Mapping[str, EngineUnavailable]) -> EngineUnavailable:
    """Which queues did not answer, and why the first of them did not."""
    return EngineUnavailable(f"no answer for {', '.join(sorted(away))}: {next(iter(away.values()))}")


#: Somebody else is faster so often only if a program fights us.
_TRIES: Final = 20
#: Names that are shown instead of an unknown one.
_NEAREST: Final = 3


class JobOperations:
    """Finds, cancels, resumes, suspends and hurries jobs; looks at queues and controls them."""

    def __init__(self, engine: Engine, ledger: Ledger | None) -> None:
        self._engine = engine
        self._ledger = ledger

    # One job ---------------------------------------------------------------------------------------

    async def find(self, person: Principal, job_id: str, queue: str | None = None) -> JobInfo:
        """The job as it is now, in the queue that was named or in any; an ended one as the ledger remembers it.

        Raises `UnknownJob`: there is none, or none that this person may see.
        """
        person.require(Permission.READ)
        live = await self._live(person, job_id, queue)
        if live is not None:
            return live
        row = await self._remembered(person, job_id, queue)
        if row is None:
            raise UnknownJob(job_id)
        (view,) = await self._engine.get(row.queue, [job_id])
        return view if view is not None and person.can_see(view.tenant_id) else await self._as_remembered(row)

    async def cancel(
        self, person: Principal, job_id: str, *, queue: str | None = None, reason: str, expected: State | None = None
    ) -> State:
        """A job that has not ended, cancelled; the state it came from. A running one is taken from its worker."""
        return await self._move(person, job_id, State.CANCELLED, "cancel", queue, reason, expected)

    async def resume(
        self, person: Principal, job_id: str, *, queue: str | None = None, reason: str, expected: State | None = None
    ) -> State:
        """A suspended job back to work: its retries start again, its history stays."""
        if expected not in (None, State.SUSPENDED):
            raise TransitionInvalid(job_id, expected, State.QUEUED)
        return await self._move(person, job_id, State.QUEUED, "resume", queue, reason, State.SUSPENDED)

    async def suspend(
        self, person: Principal, job_id: str, *, queue: str | None = None, reason: str, expected: State | None = None
    ) -> State:
        """A job put aside until somebody resumes it."""
        return await self._move(person, job_id, State.SUSPENDED, "suspend", queue, reason, expected)

    async def discard(self, person: Principal, job_id: str, *, queue: str | None = None, reason: str) -> State:
        """A suspended job given up: `cancelled`, by one operator with a reason (requirement D6)."""
        require_reason(reason)
        return await self._move(
            person, job_id, State.CANCELLED, "discard_suspended", queue, reason, State.SUSPENDED
        )  # fmt: skip

    async def expedite(
        self, person: Principal, job_id: str, *, queue: str | None = None, reason: str, expected: State | None = None
    ) -> State:
        """A job that waits for its time is due now; the state that it is in, and stays in until a worker has it."""
        view = await self._for_operator(person, job_id, queue)
        if expected is not None and view.state is not expected:
            raise TransitionInvalid(job_id, view.state, State.RUNNING)
        await self._engine.expedite(
            view.queue, job_id, actor=person.name, reason=reason, audit=f"{OPERATOR_PREFIX}retry"
        )  # fmt: skip
        return view.state

    # Queues ----------------------------------------------------------------------------------------

    async def require_queue(self, person: Principal, queue: str) -> None:
        """Raise `Unknown`, with the nearest names, for a queue that has no job, no worker and no control, and had none.

        What an unreachable part of the engine would have to say raises `EngineUnavailable`.
        """
        self._check_queues(person)
        stats = await self._engine.stats(queue)
        if queue == DEFAULT_QUEUE or stats.workers or any(stats.states.values()) or stats.control != QueueControl():
            return
        names = await self._engine.queues()
        if queue not in names:
            nearest = get_close_matches(queue, names, _NEAREST)
            advice = f"did you mean {' or '.join(map(repr, nearest))}? " if nearest else ""
            raise NotFound("queue", queue[:200], f"{advice}no job was ever submitted to it")

    async def update_control(
        self, person: Principal, queue: str, *, reason: str, verb: str, **changes: Any
    ) -> QueueControl:
        """The queue's controls with these changes; others' changes of the same moment are kept.

        Without a change nothing is written. Raises `Forbidden` unless the person is of every tenant.
        """
        self._check_queues(person)
        return await self._change(person, queue, reason, verb, lambda old: msgspec.structs.replace(old, **changes))

    async def update_tenant(
        self, person: Principal, queue: str, tenant_id: str, *, reason: str, **changes: Any
    ) -> QueueControl:
        """The controls of one tenant's part of the queue: `weight`, `concurrency`, `intake_limit`."""
        self._check_queues(person)

        def change(old: QueueControl) -> QueueControl:
            part = msgspec.structs.replace(old.tenants.get(tenant_id, TenantControl()), **changes)
            others = {name: control for name, control in old.tenants.items() if name != tenant_id}
            # As it would be anyway: it needs no place of its own.
            return msgspec.structs.replace(
                old, tenants=others if part == TenantControl() else {**others, tenant_id: part}
            )

        return await self._change(person, queue, reason, "tenant", change)

    async def queues(self, person: Principal, names: Sequence[str] = ()) -> list[QueueInfo]:
        """Every queue, or those named. Who is not of every tenant sees those with jobs of their own, and only these.

        Raises `PartlyDone`, with the others, if the engine does not answer for some.
        """
        person.require(Permission.READ)
        wanted = list(dict.fromkeys(names)) or await self._engine.queues()

        async def look(name: str) -> QueueInfo | None:
            if person.sees_all_tenants:
                return full_info(await self._engine.stats(name))
            return await self._own_part(person, name)

        found, away = await self._engine.for_each_queue(wanted, look)
        views = [view for view in found.values() if view is not None]
        if away:
            raise PartialFailure(unreachable_error(away), views)
        return views

    async def control(self, person: Principal, queue: str) -> QueueControl:
        """A queue's controls; of other tenants' parts only who is of every tenant sees any."""
        person.require(Permission.READ)
        return visible_control(person, await self._engine.get_control(queue))

    async def workers(self, person: Principal, queues: Sequence[str] = ()) -> list[WorkerInfo]:
        """Workers by name, and how many leases they hold; for who is of every tenant, since they serve all."""
        person.require(Permission.READ)
        person.require_all_tenants("the list of workers")
        # The engine lists queues that have had a job; a worker may be there first.
        return await self._engine.workers(list(queues) or sorted({DEFAULT_QUEUE, *await self._engine.queues()}))

    async def audit_log(
        self, person: Principal, wanted: AuditFilter | None = None, limit: int = 50, cursor: str | None = None
    ) -> AuditPage:
        """A page of the operators' log, newest first; what touches every tenant is for those who are of all of them."""
        person.require(Permission.READ)
        from holdfast.ledger.queries.operator_filters import AuditFilter

        chosen, mine = wanted or AuditFilter(), visible_tenants(person)
        if mine is None:
            return await self._queries("the operators' log").audit_log(chosen, limit, cursor)
        seen = mine if chosen.tenants is None else tuple(tenant for tenant in chosen.tenants if tenant in mine)
        narrowed_to = msgspec.structs.replace(chosen, tenants=seen)
        page = await self._queries("the operators' log").audit_log(narrowed_to, limit, cursor)
        return msgspec.structs.replace(page, entries=[line for line in page.entries if line.target != "queue"])

    # Inside ----------------------------------------------------------------------------------------

    async def _move(
        self,
        person: Principal,
        job_id: str,
        to: State,
        verb: str,
        queue: str | None,
        reason: str,
        expected: State | None,
    ) -> State:
        view = await self._for_operator(person, job_id, queue)
        return await self._engine.move(
            view.queue,
            job_id,
            to,
            actor=person.name,
            reason=reason,
            expected=expected,
            audit=f"{OPERATOR_PREFIX}{verb}",
        )

    async def _for_operator(self, person: Principal, job_id: str, queue: str | None) -> JobInfo:
        # Seen first: to whoever may not see it, a job is not forbidden but not there.
        view = await self.find(person, job_id, queue)
        person.require(Permission.OPERATE)
        return view

    async def _live(self, person: Principal, job_id: str, queue: str | None) -> JobInfo | None:
        names = [queue] if queue is not None else await self._likely(person, job_id)
        return await find_in_queues(self._engine, names, job_id, person)

    async def _likely(self, person: Principal, job_id: str) -> list[str]:
        """Queues to look in: the one that the ledger names, which spares a question to each of the others."""
        try:
            row = await self._remembered(person, job_id, None)
        except LedgerUnavailable:
            row = None
        first = [] if row is None else [row.queue]
        return [*first, *(name for name in await self._engine.queues() if name not in first)]

    async def _remembered(self, person: Principal, job_id: str, queue: str | None) -> JobDetail | None:
        if self._ledger is None:
            return None
        queries = self._ledger.queries
        for tenant in [None] if person.sees_all_tenants else sorted(person.tenants):
            try:
                return await queries.job(job_id, tenant, queue)
            except UnknownJob:
                continue
        return None

    async def _as_remembered(self, row: JobDetail) -> JobInfo:

        try:
            return rebuild_job(row.queue, [event.event() for event in await self._queries("its story").events(row.key)])
        except IncompleteHistory:
            return info_from_row(row)

    def _queries(self, what: str) -> Queries:
        if self._ledger is None:
            raise NoLedger(what)
        return self._ledger.queries

    def _check_queues(self, person: Principal) -> None:
        person.require(Permission.OPERATE)
        person.require_all_tenants("a queue's control")

    async def _change(
        self, person: Principal, queue: str, reason: str, verb: str, change: Callable[[QueueControl], QueueControl]
    ) -> QueueControl:
        for left in reversed(range(_TRIES)):
            old = await self._engine.get_control(queue)
            new = change(old)
            if new == old:
                return old
            try:
                await self._engine.set_control(
                    queue, new, expected=old, actor=person.name, reason=reason, audit=f"{OPERATOR_PREFIX}{verb}"
                )
            except ControlChanged:
                if not left:
                    raise
                continue
            return new
        raise AssertionError("the last try returns or raises")

    async def _own_part(self, person: Principal, queue: str) -> QueueInfo | None:
        queries = self._queries("a look at some tenants' jobs alone")
        states: dict[State, int] = dict.fromkeys(State, 0)
        for tenant in sorted(person.tenants):
            for state, count in (await queries.counts(tenant, queue)).states.items():
                states[state] += count
        if not any(states.values()):
            return None
        return tenant_info(person, queue, states, await self._engine.get_control(queue))


def info_from_row(row: JobDetail) -> JobInfo:
    """What the row says; less than the events would."""
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
