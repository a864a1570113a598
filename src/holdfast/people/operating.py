"""An operator's hand on jobs and queues (requirements H5, H6).

Every change is one atomic step of the engine that leaves its line in the operators' log: who, when, why, before and
after. It works while the ledger is down, and without one. What is of another tenant is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.core.job import DEFAULT_QUEUE, JobView
from holdfast.core.person import Person, Right
from holdfast.core.states import OPERATOR_PREFIX, State
from holdfast.core.story import BrokenStory, fold
from holdfast.engine.port import Control, Engine, PartlyDone, TenantControl, WorkerView
from holdfast.errors import ControlChanged, LedgerUnavailable, NoLedger, TransitionInvalid, Unknown, UnknownJob
from holdfast.people.reaching import find_among, unreached
from holdfast.people.scope import check_reason, scope
from holdfast.people.views import QueueView, narrowed, own_control, whole

if TYPE_CHECKING:
    # Queries load SQLAlchemy, which an engine alone does not need.
    from holdfast.ledger.deeds import LogFilter, LogPage
    from holdfast.ledger.port import Ledger
    from holdfast.ledger.queries import Queries
    from holdfast.ledger.records import JobDetail

#: Somebody else is faster so often only if a program fights us.
_TRIES: Final = 20
#: Names that are shown instead of an unknown one.
_NEAREST: Final = 3


class Operating:
    """Finds, cancels, resumes, suspends and hurries jobs; looks at queues and controls them."""

    def __init__(self, engine: Engine, ledger: Ledger | None) -> None:
        self._engine = engine
        self._ledger = ledger

    # One job ---------------------------------------------------------------------------------------

    async def locate(self, person: Person, job_id: str, queue: str | None = None) -> JobView:
        """The job as it is now, in the queue that was named or in any; an ended one as the ledger remembers it.

        Raises `UnknownJob`: there is none, or none that this person may see.
        """
        person.check(Right.READ)
        live = await self._live(person, job_id, queue)
        if live is not None:
            return live
        row = await self._remembered(person, job_id, queue)
        if row is None:
            raise UnknownJob(job_id)
        (view,) = await self._engine.get(row.queue, [job_id])
        return view if view is not None and person.sees(view.tenant_id) else await self._as_remembered(row)

    async def cancel(
        self, person: Person, job_id: str, *, queue: str | None = None, reason: str, expected: State | None = None
    ) -> State:
        """A job that has not ended, cancelled; the state it came from. A running one is taken from its worker."""
        return await self._move(person, job_id, State.CANCELLED, "cancel", queue, reason, expected)

    async def resume(
        self, person: Person, job_id: str, *, queue: str | None = None, reason: str, expected: State | None = None
    ) -> State:
        """A suspended job back to work: its retries start again, its history stays."""
        if expected not in (None, State.SUSPENDED):
            raise TransitionInvalid(job_id, expected, State.QUEUED)
        return await self._move(person, job_id, State.QUEUED, "resume", queue, reason, State.SUSPENDED)

    async def suspend(
        self, person: Person, job_id: str, *, queue: str | None = None, reason: str, expected: State | None = None
    ) -> State:
        """A job put aside until somebody resumes it."""
        return await self._move(person, job_id, State.SUSPENDED, "suspend", queue, reason, expected)

    async def discard(self, person: Person, job_id: str, *, queue: str | None = None, reason: str) -> State:
        """A suspended job given up: `cancelled`, by one operator with a reason (requirement D6)."""
        check_reason(reason)
        return await self._move(
            person, job_id, State.CANCELLED, "discard_suspended", queue, reason, State.SUSPENDED
        )  # fmt: skip

    async def retry_now(
        self, person: Person, job_id: str, *, queue: str | None = None, reason: str, expected: State | None = None
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

    async def require_queue(self, person: Person, queue: str) -> None:
        """Raise `Unknown`, with the nearest names, for a queue that has no job, no worker and no control, and had none.

        What an unreachable part of the engine would have to say raises `EngineUnavailable`.
        """
        self._check_queues(person)
        stats = await self._engine.stats(queue)
        if queue == DEFAULT_QUEUE or stats.workers or any(stats.states.values()) or stats.control != Control():
            return
        names = await self._engine.queues()
        if queue not in names:
            nearest = get_close_matches(queue, names, _NEAREST)
            advice = f"did you mean {' or '.join(map(repr, nearest))}? " if nearest else ""
            raise Unknown("queue", queue[:200], f"{advice}no job was ever submitted to it")

    async def change_control(self, person: Person, queue: str, *, reason: str, verb: str, **changes: Any) -> Control:
        """The queue's controls with these changes; others' changes of the same moment are kept.

        Without a change nothing is written. Raises `Forbidden` unless the person is of every tenant.
        """
        self._check_queues(person)
        return await self._change(person, queue, reason, verb, lambda old: msgspec.structs.replace(old, **changes))

    async def change_tenant(
        self, person: Person, queue: str, tenant_id: str, *, reason: str, **changes: Any
    ) -> Control:
        """The controls of one tenant's part of the queue: `weight`, `concurrency`, `intake_limit`."""
        self._check_queues(person)

        def change(old: Control) -> Control:
            part = msgspec.structs.replace(old.tenants.get(tenant_id, TenantControl()), **changes)
            others = {name: control for name, control in old.tenants.items() if name != tenant_id}
            # As it would be anyway: it needs no place of its own.
            return msgspec.structs.replace(
                old, tenants=others if part == TenantControl() else {**others, tenant_id: part}
            )

        return await self._change(person, queue, reason, "tenant", change)

    async def queues(self, person: Person, names: Sequence[str] = ()) -> list[QueueView]:
        """Every queue, or those named. Who is not of every tenant sees those with jobs of their own, and only these.

        Raises `PartlyDone`, with the others, if the engine does not answer for some.
        """
        person.check(Right.READ)
        wanted = list(dict.fromkeys(names)) or await self._engine.queues()

        async def look(name: str) -> QueueView | None:
            if person.sees_all:
                return whole(await self._engine.stats(name))
            return await self._own_part(person, name)

        found, away = await self._engine.reach(wanted, look)
        views = [view for view in found.values() if view is not None]
        if away:
            raise PartlyDone(unreached(away), views)
        return views

    async def control(self, person: Person, queue: str) -> Control:
        """A queue's controls; of other tenants' parts only who is of every tenant sees any."""
        person.check(Right.READ)
        return own_control(person, await self._engine.control(queue))

    async def workers(self, person: Person, queues: Sequence[str] = ()) -> list[WorkerView]:
        """Workers by name, and how many leases they hold; for who is of every tenant, since they serve all."""
        person.check(Right.READ)
        person.check_all_tenants("the list of workers")
        # The engine lists queues that have had a job; a worker may be there first.
        return await self._engine.workers(list(queues) or sorted({DEFAULT_QUEUE, *await self._engine.queues()}))

    async def log(
        self, person: Person, wanted: LogFilter | None = None, limit: int = 50, cursor: str | None = None
    ) -> LogPage:
        """A page of the operators' log, newest first; what touches every tenant is for those who are of all of them."""
        person.check(Right.READ)
        from holdfast.ledger.deeds import LogFilter

        chosen, mine = wanted or LogFilter(), scope(person)
        if mine is None:
            return await self._queries("the operators' log").operator_log(chosen, limit, cursor)
        seen = mine if chosen.tenants is None else tuple(tenant for tenant in chosen.tenants if tenant in mine)
        narrowed_to = msgspec.structs.replace(chosen, tenants=seen)
        page = await self._queries("the operators' log").operator_log(narrowed_to, limit, cursor)
        return msgspec.structs.replace(page, lines=[line for line in page.lines if line.target != "queue"])

    # Inside ----------------------------------------------------------------------------------------

    async def _move(
        self,
        person: Person,
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

    async def _for_operator(self, person: Person, job_id: str, queue: str | None) -> JobView:
        # Seen first: to whoever may not see it, a job is not forbidden but not there.
        view = await self.locate(person, job_id, queue)
        person.check(Right.OPERATE)
        return view

    async def _live(self, person: Person, job_id: str, queue: str | None) -> JobView | None:
        names = [queue] if queue is not None else await self._likely(person, job_id)
        return await find_among(self._engine, names, job_id, person)

    async def _likely(self, person: Person, job_id: str) -> list[str]:
        """Queues to look in: the one that the ledger names, which spares a question to each of the others."""
        try:
            row = await self._remembered(person, job_id, None)
        except LedgerUnavailable:
            row = None
        first = [] if row is None else [row.queue]
        return [*first, *(name for name in await self._engine.queues() if name not in first)]

    async def _remembered(self, person: Person, job_id: str, queue: str | None) -> JobDetail | None:
        if self._ledger is None:
            return None
        queries = self._ledger.queries
        for tenant in [None] if person.sees_all else sorted(person.tenants):
            try:
                return await queries.job(job_id, tenant, queue)
            except UnknownJob:
                continue
        return None

    async def _as_remembered(self, row: JobDetail) -> JobView:
        from holdfast.people.remembered import as_view

        try:
            return fold(row.queue, [event.event() for event in await self._queries("its story").story(row.key)])
        except BrokenStory:
            return as_view(row)

    def _queries(self, what: str) -> Queries:
        if self._ledger is None:
            raise NoLedger(what)
        return self._ledger.queries

    def _check_queues(self, person: Person) -> None:
        person.check(Right.OPERATE)
        person.check_all_tenants("a queue's control")

    async def _change(
        self, person: Person, queue: str, reason: str, verb: str, change: Callable[[Control], Control]
    ) -> Control:
        for left in reversed(range(_TRIES)):
            old = await self._engine.control(queue)
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

    async def _own_part(self, person: Person, queue: str) -> QueueView | None:
        queries = self._queries("a look at some tenants' jobs alone")
        states: dict[State, int] = dict.fromkeys(State, 0)
        for tenant in sorted(person.tenants):
            for state, count in (await queries.counts(tenant, queue)).states.items():
                states[state] += count
        if not any(states.values()):
            return None
        return narrowed(person, queue, states, await self._engine.control(queue))
