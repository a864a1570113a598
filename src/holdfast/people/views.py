"""Queues as a person may see them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from holdfast.core.person import Person
from holdfast.core.states import FINAL, State
from holdfast.engine.port import Control, QueueStats

#: In line or running: what intake limits and backlog alerts are about.
_BACKLOG: Final = (State.QUEUED, State.RUNNING)


class QueueView(msgspec.Struct, frozen=True, kw_only=True):
    """How full a queue is, and its controls. None: of all tenants together, and not for this person to see."""

    queue: str
    #: Open jobs.
    states: dict[State, int]
    backlog: int
    control: Control
    delayed: int | None = None
    workers: int | None = None
    pending: int | None = None
    dead_letters: int | None = None
    feed_entries: int | None = None
    #: Backlog by tenant.
    tenants: dict[str, int] | None = None


def whole(stats: QueueStats) -> QueueView:
    """All of it, for those who are of every tenant."""
    return QueueView(
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


def narrowed(person: Person, queue: str, states: Mapping[State, int], control: Control) -> QueueView:
    """The part of some tenants, by the ledger's counts of their jobs."""
    backlog = sum(states[state] for state in _BACKLOG)
    return QueueView(queue=queue, states=_open(states), backlog=backlog, control=own_control(person, control))


def own_control(person: Person, control: Control) -> Control:
    """Without the parts of tenants that the person does not see."""
    mine = {name: part for name, part in control.tenants.items() if person.sees(name)}
    return msgspec.structs.replace(control, tenants=mine)


def _open(states: Mapping[State, int]) -> dict[State, int]:
    return {state: states.get(state, 0) for state in State if state not in FINAL}
