"""Queues as a person may see them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from holdfast.core.principal import Principal
from holdfast.core.states import FINAL, State
from holdfast.engine.port.operators import QueueControl
from holdfast.engine.port.reads import QueueStats

#: In line or running: what intake limits and backlog alerts are about.
_BACKLOG: Final = (State.QUEUED, State.RUNNING)


class QueueInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How full a queue is, and its controls. None: of all tenants together, and not for this person to see."""

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
    """All of it, for those who are of every tenant."""
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


def tenant_info(person: Principal, queue: str, states: Mapping[State, int], control: QueueControl) -> QueueInfo:
    """The part of some tenants, by the ledger's counts of their jobs."""
    backlog = sum(states[state] for state in _BACKLOG)
    return QueueInfo(queue=queue, states=_open(states), backlog=backlog, control=visible_control(person, control))


def visible_control(person: Principal, control: QueueControl) -> QueueControl:
    """Without the parts of tenants that the person does not see."""
    mine = {name: part for name, part in control.tenants.items() if person.can_see(name)}
    return msgspec.structs.replace(control, tenants=mine)


def _open(states: Mapping[State, int]) -> dict[State, int]:
    return {state: states.get(state, 0) for state in State if state not in FINAL}
