"""Queues for operators: lists, controls and workers (H5), as far as a principal may see them.

A change of controls is one atomic step of the engine that leaves an audit entry. Changes of a queue need all tenants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.core.job import DEFAULT_QUEUE
from holdfast.core.principal import Permission, Principal
from holdfast.core.states import FINAL, OPERATOR_PREFIX, State
from holdfast.engine.port import OperationsPort, PartialFailure
from holdfast.engine.port.operators import QueueControl, TenantControl
from holdfast.engine.port.reads import QueueStats, WorkerInfo
from holdfast.errors import ControlChanged, NoLedger, NotFound
from holdfast.operations.jobs import unreachable_error

if TYPE_CHECKING:
    from holdfast.ledger.port.ledger import LedgerReadPort


#: Ready or running: what intake limits and backlog alerts count.
_BACKLOG: Final = (State.QUEUED, State.RUNNING)
#: Queues that are read at a time.
TOGETHER: Final = 64
#: Attempts to change a control; more are needed only if another program changes it continuously.
_MAX_TRIES: Final = 20
#: Similar names suggested for an unknown queue.
_NEAREST: Final = 3


class QueueInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Counts and controls of a queue. None: a total over all tenants that this principal may not see."""

    queue: str
    #: Open jobs.
    states: dict[State, int]
    backlog: int
    control: QueueControl
    delayed: int | None = None
    workers: int | None = None
    pending: int | None = None
    dead_letters: int | None = None
    feed_entries: int | None = None
    #: Backlog by tenant.
    tenants: dict[str, int] | None = None


class QueueOperations:
    """Operations on queues and their controls."""

    def __init__(self, engine: OperationsPort, ledger: LedgerReadPort | None) -> None:
        self._engine = engine
        self._ledger = ledger

    async def require_queue(self, principal: Principal, queue: str) -> None:
        """Raise `NotFound`, with similar names, for an unknown queue.

        Known are the default queue, queues that ever had a job, and queues with a worker or a control.

        Raises `EngineUnavailable` if the part of the engine that would know it does not answer.
        """
        self._check_queues(principal)
        stats = await self._engine.stats(queue)
        if queue == DEFAULT_QUEUE or stats.workers or any(stats.states.values()) or stats.control != QueueControl():
            return
        names = await self._engine.queues()
        if queue not in names:
            nearest = get_close_matches(queue, names, _NEAREST)
            advice = f"did you mean {' or '.join(map(repr, nearest))}? " if nearest else ""
            raise NotFound("queue", queue[:200], f"{advice}no job was ever submitted to it")

    async def update_control(
        self, principal: Principal, queue: str, *, reason: str, verb: str, **changes: Any
    ) -> QueueControl:
        """Change controls of a queue and return them; concurrent changes by others are kept.

        Without a change nothing is written. Raises `Forbidden` unless the principal has all tenants.
        """
        self._check_queues(principal)
        return await self._change(principal, queue, reason, verb, lambda old: msgspec.structs.replace(old, **changes))

    async def update_tenant(
        self, principal: Principal, queue: str, tenant_id: str, *, reason: str, **changes: Any
    ) -> QueueControl:
        """Change controls of one tenant in a queue: `weight`, `concurrency`, `intake_limit`."""
        self._check_queues(principal)

        def change(old: QueueControl) -> QueueControl:
            part = msgspec.structs.replace(old.tenants.get(tenant_id, TenantControl()), **changes)
            others = {name: control for name, control in old.tenants.items() if name != tenant_id}
            # Defaults are not stored.
            return msgspec.structs.replace(
                old, tenants=others if part == TenantControl() else {**others, tenant_id: part}
            )

        return await self._change(principal, queue, reason, "tenant", change)

    async def find(
        self, principal: Principal, names: Sequence[str] = (), *, after: str = "", limit: int | None = None
    ) -> list[QueueInfo]:
        """Return all queues by name, or the named ones; with `limit` at most that many after `after`.

        A principal without all tenants sees only queues with jobs of its tenants, and counts only those jobs. Raises
        `PartialFailure`, with the other queues, if the engine does not answer for some.
        """
        principal.require(Permission.READ)
        parts: dict[str, dict[State, int]] = {}
        if principal.sees_all_tenants:
            selected = list(dict.fromkeys(names)) or await self._engine.queues()
        else:
            # Not one query per queue: others may have thousands.
            parts = await self._require_ledger().queries.counts_by_queue(principal.tenants, names)
            selected = list(parts)
        selected = [name for name in selected if name > after][:limit]

        async def read(name: str) -> QueueInfo:
            if principal.sees_all_tenants:
                return full_info(await self._engine.stats(name))
            return tenant_info(principal, name, parts[name], await self._engine.get_control(name))

        found, unreachable = await self._engine.for_each_queue(selected, read, together=TOGETHER)
        if unreachable:
            raise PartialFailure(unreachable_error(unreachable), list(found.values()))
        return list(found.values())

    async def control(self, principal: Principal, queue: str) -> QueueControl:
        """Return a queue's controls, without those of tenants that the principal may not see."""
        principal.require(Permission.READ)
        return visible_control(principal, await self._engine.get_control(queue))

    async def workers(self, principal: Principal, queues: Sequence[str] = ()) -> list[WorkerInfo]:
        """List workers by name, with their leases. Needs all tenants: workers serve every tenant."""
        principal.require(Permission.READ)
        principal.require_all_tenants("the list of workers")
        # The engine lists queues that have had a job; a worker may be registered before that.
        return await self._engine.workers(list(queues) or sorted({DEFAULT_QUEUE, *await self._engine.queues()}))

    def _check_queues(self, principal: Principal) -> None:
        principal.require(Permission.OPERATE)
        principal.require_all_tenants("a queue's control")

    async def _change(
        self, principal: Principal, queue: str, reason: str, verb: str, change: Callable[[QueueControl], QueueControl]
    ) -> QueueControl:
        for tries_left in reversed(range(_MAX_TRIES)):
            old = await self._engine.get_control(queue)
            new = change(old)
            if new == old:
                return old
            try:
                await self._engine.set_control(
                    queue, new, expected=old, actor=principal.name, reason=reason, audit=f"{OPERATOR_PREFIX}{verb}"
                )
            except ControlChanged:
                if not tries_left:
                    raise
                continue
            return new
        raise AssertionError("the last try returns or raises")

    def _require_ledger(self) -> LedgerReadPort:
        if self._ledger is None:
            raise NoLedger("a count of some tenants' jobs")
        return self._ledger


def full_info(stats: QueueStats) -> QueueInfo:
    """Return everything, for principals that see all tenants."""
    return QueueInfo(
        queue=stats.queue,
        states=_open(stats.states),
        backlog=stats.backlog,
        control=stats.control,
        delayed=stats.delayed,
        workers=stats.workers,
        pending=stats.pending,
        dead_letters=stats.dead_letters,
        feed_entries=stats.feed_entries,
        tenants=stats.tenants,
    )


def tenant_info(principal: Principal, queue: str, states: Mapping[State, int], control: QueueControl) -> QueueInfo:
    """Return the part of the principal's tenants, from the ledger's counts of their jobs."""
    backlog = sum(states[state] for state in _BACKLOG)
    return QueueInfo(queue=queue, states=_open(states), backlog=backlog, control=visible_control(principal, control))


def visible_control(principal: Principal, control: QueueControl) -> QueueControl:
    """Return the controls without those of tenants that the principal does not see."""
    visible = {name: part for name, part in control.tenants.items() if principal.can_see(name)}
    return msgspec.structs.replace(control, tenants=visible)


def _open(states: Mapping[State, int]) -> dict[State, int]:
    return {state: states.get(state, 0) for state in State if state not in FINAL}
