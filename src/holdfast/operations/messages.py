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

if TYPE_CHECKING:
    from holdfast.ledger.port.ledger import Ledger


#: Events read and retried per call of the store.
_PAGE: Final = 500


class OutboxOperations:
    """Operations on an app's outbox."""

    def __init__(self, outbox: OutboxOpener) -> None:
        self._outbox = outbox

    async def list(
        self,
        principal: Principal,
        *,
        status: OutboxStatus | None = None,
        destination: str = "",
        topic: str = "",
        key: str = "",
        after: int | None = None,
        limit: int = 50,
    ) -> list[OutboxEvent]:
        """List events, newest first, continuing `after` a position."""
        principal.require(Permission.READ)
        store = await self._outbox.open()
        return await store.find(
            principal.visible_tenants,
            status=status,
            destination=destination,
            topic=topic,
            key=key,
            after=after,
            limit=limit,
        )

    async def retry(self, principal: Principal, ids: Sequence[str], *, reason: str) -> int:
        """Make DEAD and RETRYING events due now, with a new set of attempts; return how many."""
        principal.require(Permission.OPERATE)
        store = await self._outbox.open()
        return await store.retry_events(principal.visible_tenants, list(dict.fromkeys(ids)), principal.name, reason)

    async def retry_dead(self, principal: Principal, *, destination: str = "", reason: str) -> int:
        """Retry all DEAD events, or those of one destination; return how many."""
        principal.require(Permission.OPERATE)
        store = await self._outbox.open()
        retried, after = 0, None
        while True:
            page = await store.find(
                principal.visible_tenants, status=OutboxStatus.DEAD, destination=destination, after=after, limit=_PAGE
            )
            if not page:
                return retried
            retried += await store.retry_events(
                principal.visible_tenants, [event.id for event in page], principal.name, reason
            )
            after = page[-1].position


#: A process without a heartbeat for this long counts as gone; heartbeats come every 2 s.
GONE_AFTER_MS: Final = 10_000

#: `unhealthy`: at least one process is, paused or not; `gone`: no process has sent a heartbeat recently.
TriggerStatus = Literal["healthy", "unhealthy", "paused", "gone"]


class TriggerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A trigger, combined from all of its processes."""

    name: str
    queue_name: str
    #: The broker's type.
    adapter: str
    status: TriggerStatus
    processes: tuple[TriggerHeartbeat, ...] = ()
    pause: TriggerPause | None = None

    @property
    def active_workers(self) -> int:
        return sum(_number(heartbeat.health, "active_workers") for heartbeat in self.processes)


class TriggerOperations:
    """Operations on triggers."""

    def __init__(self, ledger: Ledger, clock: Clock | None = None) -> None:
        self._triggers = ledger.triggers
        self._operators = ledger.operators
        self._clock = clock or SystemClock()

    async def list(self, principal: Principal) -> Sequence[TriggerInfo]:
        """List triggers by name. Needs all tenants: triggers handle messages of every tenant."""
        principal.require(Permission.READ)
        principal.require_all_tenants("the list of triggers")
        return await self._get_all()

    async def executions(
        self,
        principal: Principal,
        *,
        queue_name: str = "",
        message_id: str = "",
        statuses: Collection[ExecutionStatus] = (),
        limit: int = 100,
    ) -> Sequence[Execution]:
        """List executions of the principal's tenants, newest first."""
        principal.require(Permission.READ)
        return await self._triggers.executions(
            principal.visible_tenants, queue_name=queue_name, message_id=message_id, statuses=statuses, limit=limit
        )

    async def pause(self, principal: Principal, name: str, *, reason: str = "") -> TriggerInfo:
        """Pause a trigger: no process takes messages until it is resumed; messages in flight are finished."""
        return await self._set(principal, name, paused=True, reason=reason)

    async def resume(self, principal: Principal, name: str, *, reason: str = "") -> TriggerInfo:
        """Resume a trigger."""
        return await self._set(principal, name, paused=False, reason=reason)

    async def record_replay(self, principal: Principal, name: str, *, reason: str, what: Mapping[str, Any]) -> None:
        """Write an audit entry of a replay of dead letters. Raises `Forbidden`."""
        check_replay(principal)
        entry = AuditEntry(
            type=f"{OPERATOR_PREFIX}trigger_replay",
            actor=principal.name,
            tenant_id=ALL_TENANTS,
            target="trigger",
            target_id=name,
            reason=reason,
            after=dict(what),
        )
        await self._operators.record_audit([entry])

    async def _set(self, principal: Principal, name: str, *, paused: bool, reason: str) -> TriggerInfo:
        principal.require(Permission.OPERATE)
        principal.require_all_tenants("a trigger")
        await self._get(name)
        entry = AuditEntry(
            type=f"{OPERATOR_PREFIX}trigger_{'pause' if paused else 'resume'}",
            actor=principal.name,
            tenant_id=ALL_TENANTS,
            target="trigger",
            target_id=name,
            reason=reason,
            before={"paused": not paused},
            after={"paused": paused},
        )
        await self._triggers.set_paused(name, paused, entry)
        return await self._get(name)

    async def _get(self, name: str) -> TriggerInfo:
        for info in await self._get_all():
            if info.name == name:
                return info
        raise NotFound("trigger", name[:200])

    async def _get_all(self) -> Sequence[TriggerInfo]:
        all_heartbeats = await self._triggers.processes()
        pauses = {pause.name: pause for pause in await self._triggers.pauses()}
        by_name: dict[str, list[TriggerHeartbeat]] = {name: [] for name in pauses}
        for heartbeat in all_heartbeats:
            by_name.setdefault(heartbeat.name, []).append(heartbeat)
        now_ms = self._clock.now_ms()
        return [_merge(name, heartbeats, pauses.get(name), now_ms) for name, heartbeats in sorted(by_name.items())]


def check_replay(principal: Principal) -> None:
    """Raise `Forbidden` unless the principal may replay a trigger's dead letters.

    They may be of any tenant.
    """
    principal.require(Permission.OPERATE)
    principal.require_all_tenants("a trigger")


def _merge(name: str, heartbeats: Sequence[TriggerHeartbeat], pause: TriggerPause | None, now_ms: int) -> TriggerInfo:
    alive = tuple(heartbeat for heartbeat in heartbeats if now_ms - heartbeat.seen_at_ms < GONE_AFTER_MS)
    last = max(heartbeats, key=lambda heartbeat: heartbeat.seen_at_ms, default=None)
    return TriggerInfo(
        name=name,
        queue_name="" if last is None else last.queue_name,
        adapter="" if last is None else last.adapter,
        status=_status(alive, pause),
        processes=alive,
        pause=pause,
    )


def _status(alive: Sequence[TriggerHeartbeat], pause: TriggerPause | None) -> TriggerStatus:
    if not alive:
        return "gone"
    statuses = {heartbeat.health.get("status") for heartbeat in alive}
    if not statuses <= {"healthy", "paused"}:
        return "unhealthy"
    # A process may have been paused by its own code, or not have applied an operator's pause yet.
    return "paused" if pause is not None or "paused" in statuses else "healthy"


def _number(health: Mapping[str, Any], name: str) -> int:
    value = health.get(name)
    return value if isinstance(value, int) else 0
