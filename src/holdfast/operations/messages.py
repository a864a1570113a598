"""Outbox and triggers for operators: status, pause, resume, retry (requirements T4, H5, H6).

Outbox events of a tenant that the principal may not see are neither listed nor retried. A retry leaves an audit entry.

A trigger's status combines the reports of all processes that run a trigger of that name. A pause is written to the
ledger with its audit entry; every process of the trigger applies it within seconds, as do those that start later.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from holdfast.clock import Clock, SystemClock
from holdfast.core.principal import ALL_TENANTS, AuditEntry, Permission, Principal
from holdfast.core.states import OPERATOR_PREFIX
from holdfast.errors import NotFound
from holdfast.ledger.port.messages import (
    Execution,
    ExecutionStatus,
    OutboxEvent,
    OutboxOpener,
    OutboxStatus,
    TriggerHeartbeat,
    TriggerPause,
)
from holdfast.operations.access import visible_tenants

if TYPE_CHECKING:
    from holdfast.ledger.port.ledger import Ledger


#: Events of one call of the store.
_PAGE: Final = 500


class OutboxOperations:
    """An app's outbox, for people."""

    def __init__(self, outbox: OutboxOpener) -> None:
        self._outbox = outbox

    async def list(
        self,
        person: Principal,
        *,
        status: OutboxStatus | None = None,
        destination: str = "",
        topic: str = "",
        key: str = "",
        after: int | None = None,
        limit: int = 50,
    ) -> list[OutboxEvent]:
        """The newest first, `after` a position."""
        person.require(Permission.READ)
        store = await self._outbox.open()
        return await store.find(
            visible_tenants(person),
            status=status,
            destination=destination,
            topic=topic,
            key=key,
            after=after,
            limit=limit,
        )

    async def retry(self, person: Principal, ids: Sequence[str], *, reason: str) -> int:
        """DEAD and RETRYING events are tried again now, with all their attempts; how many there were."""
        person.require(Permission.OPERATE)
        store = await self._outbox.open()
        return await store.retry_events(visible_tenants(person), list(dict.fromkeys(ids)), person.name, reason)

    async def retry_dead(self, person: Principal, *, destination: str = "", reason: str) -> int:
        """All DEAD events, of one destination if that is named; how many there were."""
        person.require(Permission.OPERATE)
        store = await self._outbox.open()
        revived, after = 0, None
        while True:
            page = await store.find(
                visible_tenants(person), status=OutboxStatus.DEAD, destination=destination, after=after, limit=_PAGE
            )
            if not page:
                return revived
            revived += await store.retry_events(
                visible_tenants(person), [event.id for event in page], person.name, reason
            )
            after = page[-1].position


#: A process that has said nothing for so long is taken for gone; it says something every two seconds.
GONE_AFTER_MS: Final = 10_000

#: `unhealthy`: at least one process is, paused or not; `gone`: nobody has been heard of for a while.
TriggerStatus = Literal["healthy", "unhealthy", "paused", "gone"]


class TriggerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A trigger in all of its processes."""

    name: str
    queue_name: str
    #: The broker's type.
    adapter: str
    status: TriggerStatus
    processes: tuple[TriggerHeartbeat, ...] = ()
    pause: TriggerPause | None = None

    @property
    def active_workers(self) -> int:
        return sum(_number(each.health, "active_workers") for each in self.processes)


class TriggerOperations:
    """What people see of triggers, and what they do with them."""

    def __init__(self, ledger: Ledger, clock: Clock | None = None) -> None:
        self._book = ledger.triggers
        self._people = ledger.operators
        self._clock = clock or SystemClock()

    async def list(self, person: Principal) -> Sequence[TriggerInfo]:
        """Triggers by name, for who is of every tenant: they take everybody's messages."""
        person.require(Permission.READ)
        person.require_all_tenants("the list of triggers")
        return await self._views()

    async def executions(
        self,
        person: Principal,
        *,
        queue_name: str = "",
        message_id: str = "",
        statuses: Collection[ExecutionStatus] = (),
        limit: int = 100,
    ) -> Sequence[Execution]:
        """What became of messages of one's tenants, the newest first."""
        person.require(Permission.READ)
        return await self._book.executions(
            visible_tenants(person), queue_name=queue_name, message_id=message_id, statuses=statuses, limit=limit
        )

    async def pause(self, person: Principal, name: str, *, reason: str = "") -> TriggerInfo:
        """No process of it takes messages until somebody resumes it; what is in hand is finished."""
        return await self._set(person, name, paused=True, reason=reason)

    async def resume(self, person: Principal, name: str, *, reason: str = "") -> TriggerInfo:
        """It takes messages again."""
        return await self._set(person, name, paused=False, reason=reason)

    async def record_replay(self, person: Principal, name: str, *, reason: str, what: Mapping[str, Any]) -> None:
        """Write an audit entry of a replay of dead letters. Raises `Forbidden`."""
        check_replay(person)
        action = AuditEntry(
            type=f"{OPERATOR_PREFIX}trigger_replay",
            actor=person.name,
            tenant_id=ALL_TENANTS,
            target="trigger",
            target_id=name,
            reason=reason,
            after=dict(what),
        )
        await self._people.record_audit([action])

    async def _set(self, person: Principal, name: str, *, paused: bool, reason: str) -> TriggerInfo:
        person.require(Permission.OPERATE)
        person.require_all_tenants("a trigger")
        await self._view(name)
        action = AuditEntry(
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

    async def _view(self, name: str) -> TriggerInfo:
        for view in await self._views():
            if view.name == name:
                return view
        raise NotFound("trigger", name[:200])

    async def _views(self) -> Sequence[TriggerInfo]:
        presences, pauses = await self._book.processes(), {pause.name: pause for pause in await self._book.pauses()}
        by_name: dict[str, list[TriggerHeartbeat]] = {name: [] for name in pauses}
        for presence in presences:
            by_name.setdefault(presence.name, []).append(presence)
        now_ms = self._clock.now_ms()
        return [_merged(name, said, pauses.get(name), now_ms) for name, said in sorted(by_name.items())]


def check_replay(person: Principal) -> None:
    """`Forbidden`, unless this principal may replay dead letters of a trigger: they may be of any tenant."""
    person.require(Permission.OPERATE)
    person.require_all_tenants("a trigger")


def _merged(name: str, said: Sequence[TriggerHeartbeat], pause: TriggerPause | None, now_ms: int) -> TriggerInfo:
    here = tuple(each for each in said if now_ms - each.seen_at_ms < GONE_AFTER_MS)
    last = max(said, key=lambda each: each.seen_at_ms, default=None)
    return TriggerInfo(
        name=name,
        queue_name="" if last is None else last.queue_name,
        adapter="" if last is None else last.adapter,
        status=_status(here, pause),
        processes=here,
        pause=pause,
    )


def _status(here: Sequence[TriggerHeartbeat], pause: TriggerPause | None) -> TriggerStatus:
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
