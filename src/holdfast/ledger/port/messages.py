"""Ports of the outbox and of triggers, and the rows they read and write.

`OutboxStore` is what the relay needs from the store that has `outbox_events`. `TriggerStore` records the outcome of
received messages (`queue_executions`), which processes run a trigger, and which triggers are paused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, Protocol

import msgspec

from holdfast.core.principal import AuditEntry

#: Destination of transactional enqueue; every other destination is a broker in the relay's configuration.
ENGINE_DESTINATION: Final = "holdfast"


class OutboxStatus(StrEnum):
    """State of an outbox event (requirement O1)."""

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
    #: Empty: no order is required.
    key: str
    #: JSON, or base64 of bytes if the headers say so; see `outbox.writer.payload_of`.
    payload: str
    headers: Mapping[str, str]
    status: OutboxStatus
    attempt_count: int
    next_retry_at_ms: int | None
    last_error: str
    created_at_ms: int
    sent_at_ms: int | None
    #: Increases with every row written; events of one key are published in this order.
    position: int


class PublishResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one attempt to publish an event."""

    tenant_id: str
    id: str
    status: OutboxStatus
    attempt_count: int
    next_retry_at_ms: int | None = None
    last_error: str = ""


class OutboxBacklog(msgspec.Struct, frozen=True):
    """Counts of unpublished events."""

    waiting: int
    dead: int
    #: When the oldest waiting event was written.
    oldest_ms: int | None


class OutboxStore(Protocol):
    """Access of relay and operators to `outbox_events`. Times are the store's."""

    async def open(self) -> None: ...
    async def close(self) -> None: ...

    async def now_ms(self) -> int: ...

    async def acquire_lanes(
        self, relay: str, destinations: Sequence[str], most: int, lease_ms: int, *, dead_blocks: bool = False
    ) -> list[int]:
        """Lease up to `most` lanes with events due for these destinations, for `lease_ms`.

        Only lanes that are free or already this relay's; those unleased for longest come first. Concurrent relays do
        not wait for each other (`FOR UPDATE SKIP LOCKED` on PostgreSQL). A lane whose first events all wait behind
        others may be returned although nothing in it is due; `due_events` checks exactly.
        """
        ...

    async def due_events(
        self, relay: str, lanes: Sequence[int], destinations: Sequence[str], limit: int, *, dead_blocks: bool
    ) -> list[OutboxEvent]:
        """Return events to publish now from lanes this relay still leases, by position.

        Omits events whose key has an earlier event waiting for a retry (or dead, if `dead_blocks`). A retried event is
        published alone; later events of its key follow after it was sent.

        Positions are assigned when rows are written, not when they are committed. Overlapping transactions that write
        the same key have no order: one that commits late may be published after a later position.
        """
        ...

    async def record_results(self, relay: str, lanes: Sequence[int], results: Sequence[PublishResult]) -> bool:
        """Record results and renew the lanes' leases by the last lease time; return whether that was done.

        False if this relay has lost one of the lanes: nothing is written, and the lane's new holder publishes the
        events again.
        """
        ...

    async def release_lanes(self, relay: str, lanes: Sequence[int] | None = None) -> None:
        """Release the relay's lanes, or only the given ones."""
        ...

    async def wait_for_events(self, timeout_s: float) -> None:
        """Wait for a new event, at most `timeout_s`: `LISTEN` on PostgreSQL, the file's version on SQLite."""
        ...

    async def next_due_ms(self, destinations: Sequence[str], *, dead_blocks: bool = False) -> int | None:
        """Return when the next retry is due; None if there is none."""
        ...

    async def destinations(self) -> list[str]:
        """Return all destinations with waiting events, of any relay."""
        ...

    async def backlog(self) -> OutboxBacklog: ...

    async def get(self, tenant_id: str, event_id: str) -> OutboxEvent | None:
        """Return one event, or None."""
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
        """List events, newest first, continuing `after` a position."""
        ...

    async def retry_events(self, tenants: Sequence[str] | None, ids: Sequence[str], actor: str, reason: str) -> int:
        """Make DEAD and RETRYING events due now, with a new set of attempts; return how many.

        A call that changes something leaves one audit entry per tenant.
        """
        ...

    async def prune(self, keep_ms: int, limit: int) -> int:
        """Delete up to `limit` events that were SENT longer ago than `keep_ms`; return how many."""
        ...


class ExecutionStatus(StrEnum):
    """How the handling of a message ended (`queue_executions.status`)."""

    #: The runtime accepted it.
    SUCCESS = "success"
    #: It was passed to the runtime before.
    DUPLICATE = "duplicate"
    #: A guard denied it.
    REJECTED = "rejected"
    #: It cannot be parsed.
    UNPARSABLE = "unparsable"
    #: Passing it to the runtime failed permanently.
    FAILED = "failed"


class Execution(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `queue_executions`."""

    tenant_id: str
    #: Derived from the delivery, so that a record written twice is one row.
    id: str
    message_id: str
    queue_name: str
    event_name: str
    status: ExecutionStatus
    started_at_ms: int
    completed_at_ms: int
    #: The job, or the run id that the runtime returned; empty if there is none.
    agent_run_id: str = ""
    error_message: str = ""
    #: Retries of passing it to the runtime.
    retry_count: int = 0
    trace_id: str = ""


class TriggerHeartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """Periodic report of one process about one of its triggers."""

    name: str
    process: str
    queue_name: str
    adapter: str
    #: The trigger's health as a JSON object (requirement T4).
    health: Mapping[str, Any]
    seen_at_ms: int


class TriggerPause(msgspec.Struct, frozen=True, kw_only=True):
    """A trigger that an operator has paused."""

    name: str
    paused_by: str
    reason: str
    paused_at_ms: int


class TriggerStore(Protocol):
    """Executions, heartbeats and pauses of triggers."""

    async def record_executions(self, executions: Sequence[Execution]) -> None:
        """Write rows of `queue_executions` in one transaction; existing rows are left unchanged."""
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
        """List executions, newest first; `tenants` None and no `statuses` mean all."""
        ...

    async def heartbeat(self, heartbeats: Sequence[TriggerHeartbeat], *, expire_after_ms: int) -> set[str]:
        """Record heartbeats and return the names of paused triggers.

        Deletes heartbeats older than `expire_after_ms`.
        """
        ...

    async def remove_process(self, process: str) -> None:
        """Delete the heartbeats of a process."""
        ...

    async def processes(self) -> list[TriggerHeartbeat]:
        """Return the latest heartbeats, by name and process."""
        ...

    async def pauses(self) -> list[TriggerPause]:
        """Return paused triggers by name, and who paused them."""
        ...

    async def set_paused(self, name: str, paused: bool, entry: AuditEntry) -> bool:
        """Pause or resume a trigger in every process; return whether that changed anything.

        The audit entry is written in the same transaction, and only if something changed.
        """
        ...


class OutboxOpener(Protocol):
    """Opens an app's outbox on first use."""

    async def open(self) -> OutboxStore: ...
