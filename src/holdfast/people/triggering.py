"""A look at triggers, and a person's hand on them (requirements T4, H5, H6).

A trigger is what its processes say of it, together: one name may run in many. Pausing is written into the ledger, with
its line in the operators' log; every process of the trigger hears of it within seconds, those that start later too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from holdfast.clock import Clock, SystemClock
from holdfast.core.person import ALL_TENANTS, Person, Right
from holdfast.core.states import OPERATOR_PREFIX
from holdfast.errors import Unknown
from holdfast.ledger.people import Action
from holdfast.ledger.trigger_book import Execution, Pause, Presence, Status
from holdfast.people.scope import scope

if TYPE_CHECKING:
    # Loads SQLAlchemy, which many programs never need.
    from holdfast.ledger.port import Ledger

#: A process that has said nothing for so long is taken for gone; it says something every two seconds.
GONE_AFTER_MS: Final = 10_000

#: `unhealthy`: at least one process is, paused or not; `gone`: nobody has been heard of for a while.
TriggerStatus = Literal["healthy", "unhealthy", "paused", "gone"]


class TriggerView(msgspec.Struct, frozen=True, kw_only=True):
    """A trigger in all of its processes."""

    name: str
    queue_name: str
    #: The broker's type.
    adapter: str
    status: TriggerStatus
    processes: tuple[Presence, ...] = ()
    pause: Pause | None = None

    @property
    def active_workers(self) -> int:
        return sum(_number(each.health, "active_workers") for each in self.processes)


class Triggering:
    """What people see of triggers, and what they do with them."""

    def __init__(self, ledger: Ledger, clock: Clock | None = None) -> None:
        self._book = ledger.triggers
        self._people = ledger.people
        self._clock = clock or SystemClock()

    async def list(self, person: Person) -> Sequence[TriggerView]:
        """Triggers by name, for who is of every tenant: they take everybody's messages."""
        person.check(Right.READ)
        person.check_all_tenants("the list of triggers")
        return await self._views()

    async def executions(
        self,
        person: Person,
        *,
        queue_name: str = "",
        message_id: str = "",
        statuses: Collection[Status] = (),
        limit: int = 100,
    ) -> Sequence[Execution]:
        """What became of messages of one's tenants, the newest first."""
        person.check(Right.READ)
        return await self._book.executions(
            scope(person), queue_name=queue_name, message_id=message_id, statuses=statuses, limit=limit
        )

    async def pause(self, person: Person, name: str, *, reason: str = "") -> TriggerView:
        """No process of it takes messages until somebody resumes it; what is in hand is finished."""
        return await self._set(person, name, paused=True, reason=reason)

    async def resume(self, person: Person, name: str, *, reason: str = "") -> TriggerView:
        """It takes messages again."""
        return await self._set(person, name, paused=False, reason=reason)

    async def record_replay(self, person: Person, name: str, *, reason: str, what: Mapping[str, Any]) -> None:
        """Write an audit entry of a replay of dead letters. Raises `Forbidden`."""
        check_replay(person)
        action = Action(
            type=f"{OPERATOR_PREFIX}trigger_replay",
            actor=person.name,
            tenant_id=ALL_TENANTS,
            target="trigger",
            target_id=name,
            reason=reason,
            after=dict(what),
        )
        await self._people.record([action])

    async def _set(self, person: Person, name: str, *, paused: bool, reason: str) -> TriggerView:
        person.check(Right.OPERATE)
        person.check_all_tenants("a trigger")
        await self._view(name)
        action = Action(
            type=f"{OPERATOR_PREFIX}trigger_{'pause' if paused else 'resume'}",
            actor=person.name,
            tenant_id=ALL_TENANTS,
            target="trigger",
            target_id=name,
            reason=reason,
            before={"paused": not paused},
            after={"paused": paused},
        )
        await self._book.set_paused(name, paused, action)
        return await self._view(name)

    async def _view(self, name: str) -> TriggerView:
        for view in await self._views():
            if view.name == name:
                return view
        raise Unknown("trigger", name[:200])

    async def _views(self) -> Sequence[TriggerView]:
        presences, pauses = await self._book.present(), {pause.name: pause for pause in await self._book.pauses()}
        by_name: dict[str, list[Presence]] = {name: [] for name in pauses}
        for presence in presences:
            by_name.setdefault(presence.name, []).append(presence)
        now_ms = self._clock.now_ms()
        return [_merged(name, said, pauses.get(name), now_ms) for name, said in sorted(by_name.items())]


def check_replay(person: Person) -> None:
    """`Forbidden`, unless this principal may replay dead letters of a trigger: they may be of any tenant."""
    person.check(Right.OPERATE)
    person.check_all_tenants("a trigger")


def _merged(name: str, said: Sequence[Presence], pause: Pause | None, now_ms: int) -> TriggerView:
    here = tuple(each for each in said if now_ms - each.seen_at_ms < GONE_AFTER_MS)
    last = max(said, key=lambda each: each.seen_at_ms, default=None)
    return TriggerView(
        name=name,
        queue_name="" if last is None else last.queue_name,
        adapter="" if last is None else last.adapter,
        status=_status(here, pause),
        processes=here,
        pause=pause,
    )


def _status(here: Sequence[Presence], pause: Pause | None) -> TriggerStatus:
    if not here:
        return "gone"
    said = {each.health.get("status") for each in here}
    if not said <= {"healthy", "paused"}:
        return "unhealthy"
    # A process may have been paused by its own code, or not have heard yet what people want.
    return "paused" if pause is not None or "paused" in said else "healthy"


def _number(health: Mapping[str, Any], name: str) -> int:
    value = health.get(name)
    return value if isinstance(value, int) else 0
