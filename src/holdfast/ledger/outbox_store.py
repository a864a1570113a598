"""What the relay needs of the store that has `outbox_events`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final, Protocol
from zlib import crc32

import msgspec

#: Keys are spread over so many lanes by `lane_of`; a relay holds whole lanes, so that no two publish one key at a time.
LANES: Final = 64
#: Where transactional enqueue goes; every other destination is a broker of the relay's configuration.
HOLDFAST: Final = "holdfast"


def lane_of(destination: str, topic: str, key: str | None, event_id: str) -> int:
    """The lane of a key; without a key any lane will do. Who writes in another language may use another function, as
    long as it is the same for all events of a key."""
    return crc32("\0".join((destination, topic, key or event_id)).encode()) % LANES


class Status(StrEnum):
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
    status: Status
    attempt_count: int
    next_retry_at_ms: int | None
    last_error: str
    created_at_ms: int
    sent_at_ms: int | None
    #: Grows with every row that is written; of one key, the order of publishing.
    position: int


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one try."""

    tenant_id: str
    id: str
    status: Status
    attempt_count: int
    next_retry_at_ms: int | None = None
    last_error: str = ""


class Backlog(msgspec.Struct, frozen=True):
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

    async def take_lanes(
        self, relay: str, destinations: Sequence[str], most: int, lease_ms: int, *, dead_blocks: bool = False
    ) -> list[int]:
        """Lanes that have something due for these destinations, free or ours, up to `most`; ours for `lease_ms` now.
        Those that nobody has held for longest come first.

        `FOR UPDATE SKIP LOCKED` on PostgreSQL: relays that ask at the same moment do not wait for each other. A lane
        whose first events all wait behind others may be given though nothing in it is due: `due` looks closer.
        """
        ...

    async def due(
        self, relay: str, lanes: Sequence[int], destinations: Sequence[str], limit: int, *, dead_blocks: bool
    ) -> list[OutboxEvent]:
        """What is to be published now from lanes that are still ours, by position.

        None whose key has an earlier event that waits for its next try (or is dead, if `dead_blocks`); one that is
        tried again goes alone, and the later ones of its key after it was sent.

        Positions are given when rows are written, not when they are committed: transactions that overlap and write the
        same key are in no order, and the one that commits late may be published after a later position.
        """
        ...

    async def mark(self, relay: str, lanes: Sequence[int], marks: Sequence[Mark]) -> bool:
        """Write down what became of them, and give lanes one more lease, as long as the last one; False if one of the
        lanes is no longer ours: then nothing is written, and whoever has it publishes them again."""
        ...

    async def release(self, relay: str, lanes: Sequence[int] | None = None) -> None:
        """Its lanes are free, or these of them."""
        ...

    async def wait(self, timeout_s: float) -> None:
        """Until somebody has written something, or it is time: `LISTEN` on PostgreSQL, the file's version on SQLite."""
        ...

    async def next_due_ms(self, destinations: Sequence[str], *, dead_blocks: bool = False) -> int | None:
        """When the next retry is due; None: nothing waits."""
        ...

    async def destinations(self) -> list[str]:
        """Those that something waits for, whoever serves them."""
        ...

    async def backlog(self) -> Backlog: ...

    async def get(self, tenant_id: str, event_id: str) -> OutboxEvent | None:
        """One event."""
        ...

    async def find(
        self,
        tenants: Sequence[str] | None,
        *,
        status: Status | None = None,
        destination: str = "",
        topic: str = "",
        key: str = "",
        after: int | None = None,
        limit: int = 100,
    ) -> list[OutboxEvent]:
        """The newest first, `after` a position."""
        ...

    async def revive(self, tenants: Sequence[str] | None, ids: Sequence[str], actor: str, reason: str) -> int:
        """DEAD or RETRYING events are tried again now, with all their attempts; how many. A line in the operators' log
        for each call that changed something."""
        ...

    async def prune(self, keep_ms: int, limit: int) -> int:
        """Delete SENT events that are older."""
        ...
