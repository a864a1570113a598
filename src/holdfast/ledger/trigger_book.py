"""What triggers need of a ledger: rows of what became of messages, who is there, who is paused."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from holdfast.ledger.people import Action


class Status(StrEnum):
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
    status: Status
    started_at_ms: int
    completed_at_ms: int
    #: The job, or the run that the runtime told of; empty if there is none.
    agent_run_id: str = ""
    error_message: str = ""
    #: Tries of the hand-over after the first one.
    retry_count: int = 0
    trace_id: str = ""


class Presence(msgspec.Struct, frozen=True, kw_only=True):
    """What one process says of one of its triggers, now and then."""

    name: str
    process: str
    queue_name: str
    adapter: str
    #: The trigger's health as a JSON object (requirement T4).
    health: Mapping[str, Any]
    seen_at_ms: int


class Pause(msgspec.Struct, frozen=True, kw_only=True):
    """A trigger that somebody has paused."""

    name: str
    paused_by: str
    reason: str
    paused_at_ms: int


class TriggerBook(Protocol):
    """The ledger's part of triggers."""

    async def record(self, executions: Sequence[Execution]) -> None:
        """Write rows of `queue_executions`, in one transaction; one that is there already is left as it is."""
        ...

    async def executions(
        self,
        tenants: Sequence[str] | None,
        *,
        queue_name: str = "",
        message_id: str = "",
        statuses: Collection[Status] = (),
        limit: int = 100,
    ) -> list[Execution]:
        """The newest first; `tenants` None and no `statuses` mean all."""
        ...

    async def report(self, presences: Sequence[Presence], *, forget_after_ms: int) -> set[str]:
        """Say that these are here, forget those that have not been heard of for so long; the names that people have
        paused."""
        ...

    async def leave(self, process: str) -> None:
        """This process's triggers are gone."""
        ...

    async def present(self) -> list[Presence]:
        """Who has been heard of, by name and process."""
        ...

    async def pauses(self) -> list[Pause]:
        """What people have paused, by name, and who it was."""
        ...

    async def set_paused(self, name: str, paused: bool, action: Action) -> bool:
        """Pause or resume a trigger in every process, with a line in the operators' log in the same transaction;
        whether that changed anything (only then the line is written)."""
        ...
