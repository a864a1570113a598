"""Queues as a principal may see them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from holdfast.core.principal import Principal
from holdfast.core.states import FINAL, State
from holdfast.engine.port.operators import QueueControl
from holdfast.engine.port.reads import QueueStats

#: Ready or running: what intake limits and backlog alerts count.
_BACKLOG: Final = (State.QUEUED, State.RUNNING)


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
