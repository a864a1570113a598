"""Ports of the outbox and of triggers, and the rows they read and write.

`OutboxStore` is what the relay needs from the store that has `outbox_events`. `TriggerStore` records what became of
received messages (`queue_executions`), which processes run a trigger, and which triggers are paused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, Protocol

import msgspec

from holdfast.core.principal import AuditEntry

#: Where transactional enqueue goes; every other destination is a broker of the relay's configuration.
ENGINE_DESTINATION: Final = "holdfast"


class OutboxStatus(StrEnum):
    """Where an event is (requirement O1)."""

    NEW = "NEW"
    RETRYING = "RETRYING"
    SENT = "SENT"
    DEAD = "DEAD"


class OutboxEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `outbox_events`."""

    tenant_id: str
    id: str
    destination: str
    topic: str
    #: Empty: no order is asked for.
    key: str
    #: JSON, or base64 of bytes if the headers say so: see `outbox.writing`.
    payload: str
    headers: Mapping[str, str]
    status: OutboxStatus
    attempt_count: int
    next_retry_at_ms: int | None
    last_error: str
    created_at_ms: int
    sent_at_ms: int | None
    #: Grows with every row that is written; of one key, the order of publishing.
    position: int


class PublishResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one try."""

    tenant_id: str
    id: str
    status: OutboxStatus
    attempt_count: int
    next_retry_at_ms: int | None = None
    last_error: str = ""


class OutboxBacklog(msgspec.Struct, frozen=True):
    """What waits."""

    waiting: int
    dead: int
    #: When the oldest of those that wait was written.
    oldest_ms: int | None


class OutboxStore(Protocol):
    """On PostgreSQL and SQLite, by the store's own clock."""

    async def open(self) -> None: ...
    async def close(self) -> None: ...

    async def now_ms(self) -> int: ...

    async def acquire_lanes(
        self, relay: str, destinations: Sequence[str], most: int, lease_ms: int, *, dead_blocks: bool = False
    ) -> list[int]:
        """Lanes that have something due for these destinations, free or ours, up to `most`; ours for `lease_ms` now.
        Those that nobody has held for longest come first.

        `FOR UPDATE SKIP LOCKED` on PostgreSQL: relays that ask at the same moment do not wait for each other. A lane
        whose first events all wait behind others may be given though nothing in it is due: `due` looks closer.
        """
        ...

    async def due_events(
        self, relay: str, lanes: Sequence[int], destinations: Sequence[str], limit: int, *, dead_blocks: bool
    ) -> list[OutboxEvent]:
        """What is to be published now from lanes that are still ours, by position.

        None whose key has an earlier event that waits for its next try (or is dead, if `dead_blocks`); one that is
        tried again goes alone, and the later ones of its key after it was sent.

        Positions are given when rows are written, not when they are committed: transactions that overlap and write the
        same key are in no order, and the one that commits late may be published after a later position.
        """
        ...

    async def record_results(self, relay: str, lanes: Sequence[int], marks: Sequence[PublishResult]) -> bool:
        """Write down what became of them, and give lanes one more lease, as long as the last one; False if one of the
        lanes is no longer ours: then nothing is written, and whoever has it publishes them again."""
        ...

    async def release_lanes(self, relay: str, lanes: Sequence[int] | None = None) -> None:
        """Its lanes are free, or these of them."""
        ...

    async def wait_for_events(self, timeout_s: float) -> None:
        """Until somebody has written something, or it is time: `LISTEN` on PostgreSQL, the file's version on SQLite."""
        ...

    async def next_due_ms(self, destinations: Sequence[str], *, dead_blocks: bool = False) -> int | None:
        """When the next retry is due; None: nothing waits."""
        ...

    async def destinations(self) -> list[str]:
        """Those that something waits for, whoever serves them."""
        ...

    async def backlog(self) -> OutboxBacklog: ...

    async def get(self, tenant_id: str, event_id: str) -> OutboxEvent | None:
        """One event."""
        ...

    async def find(
        self,
        tenants: Sequence[str] | None,
        *,
        status: OutboxStatus | None = None,
        destination: str = "",
        topic: str = "",
        key: str = "",
        after: int | None = None,
        limit: int = 100,
    ) -> list[OutboxEvent]:
        """The newest first, `after` a position."""
        ...

    async def retry_events(self, tenants: Sequence[str] | None, ids: Sequence[str], actor: str, reason: str) -> int:
        """DEAD or RETRYING events are tried again now, with all their attempts; how many. A line in the operators' log
        for each call that changed something."""
        ...

    async def prune(self, keep_ms: int, limit: int) -> int:
        """Delete SENT events that are older."""
        ...


class ExecutionStatus(StrEnum):
    """What became of a message (`queue_executions.status`)."""

    #: Handed over, and the runtime has taken it.
    SUCCESS = "success"
    #: Somebody has handed it over before.
    DUPLICATE = "duplicate"
    #: A guard said no.
    REJECTED = "rejected"
    #: Cannot be parsed.
    UNPARSABLE = "unparsable"
    #: The hand-over failed for good.
    FAILED = "failed"


class Execution(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `queue_executions`."""

    tenant_id: str
    #: Of the delivery, so that a record that is written twice is one row.
    id: str
    message_id: str
    queue_name: str
    event_name: str
    status: ExecutionStatus
    started_at_ms: int
    completed_at_ms: int
    #: The job, or the run that the runtime told of; empty if there is none.
    agent_run_id: str = ""
    error_message: str = ""
    #: Tries of the hand-over after the first one.
    retry_count: int = 0
    trace_id: str = ""


class TriggerHeartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """What one process says of one of its triggers, now and then."""

    name: str
    process: str
    queue_name: str
    adapter: str
    #: The trigger's health as a JSON object (requirement T4).
    health: Mapping[str, Any]
    seen_at_ms: int


class TriggerPause(msgspec.Struct, frozen=True, kw_only=True):
    """A trigger that somebody has paused."""

    name: str
    paused_by: str
    reason: str
    paused_at_ms: int


class TriggerStore(Protocol):
    """The ledger's part of triggers."""

    async def record_executions(self, executions: Sequence[Execution]) -> None:
        """Write rows of `queue_executions`, in one transaction; one that is there already is left as it is."""
        ...

    async def executions(
        self,
        tenants: Sequence[str] | None,
        *,
        queue_name: str = "",
        message_id: str = "",
        statuses: Collection[ExecutionStatus] = (),
        limit: int = 100,
    ) -> list[Execution]:
        """The newest first; `tenants` None and no `statuses` mean all."""
        ...

    async def heartbeat(self, presences: Sequence[TriggerHeartbeat], *, forget_after_ms: int) -> set[str]:
        """Say that these are here, forget those that have not been heard of for so long; the names that people have
        paused."""
        ...

    async def remove_process(self, process: str) -> None:
        """This process's triggers are gone."""
        ...

    async def processes(self) -> list[TriggerHeartbeat]:
        """Who has been heard of, by name and process."""
        ...

    async def pauses(self) -> list[TriggerPause]:
        """What people have paused, by name, and who it was."""
        ...

    async def set_paused(self, name: str, paused: bool, action: AuditEntry) -> bool:
        """Pause or resume a trigger in every process, with a line in the operators' log in the same transaction;
        whether that changed anything (only then the line is written)."""
        ...


class OutboxOpener(Protocol):
    """The outbox of an app, not opened yet."""

    async def open(self) -> OutboxStore: ...
