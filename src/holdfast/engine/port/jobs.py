"""`JobPort`: how jobs are submitted, leased, settled and retried; limits and options of an engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from holdfast.core.job import Claim, Envelope, Lease, Receipt
from holdfast.core.verdict import Settlement, SettleResult
from holdfast.errors import InvalidOption

if TYPE_CHECKING:
    from holdfast.core.publishing import EventPublishing


#: So many tenants at a time have a part of a queue of their own; further ones share.
MAX_TENANTS: Final = 64


#: What refused submissions are told.
INTAKE_PAUSED: Final = "an operator has paused its intake; try again once it goes on"
INTAKE_FULL: Final = "as many jobs are in line or running as may be; try again when some have ended"
FEED_BEHIND: Final = "its feed is full because the ledger does not read it; bring the ledger back"
FEED_DETACHED: Final = (
    "its feed has no reader yet: the store is new, was wiped or restarted, or a replica took over; refill what the "
    "ledger knows, then register one"
)


class RetryVia(StrEnum):
    """Where a job waits for its retry (requirement Y4)."""

    #: In a set by due time; the message is acknowledged. The default.
    SCHEDULE = "schedule"
    #: In the pending list, unacknowledged, until it is found due.
    PENDING = "pending"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What an engine needs to know beside where its store is."""

    visibility_timeout_ms: int = 30_000
    #: The largest payload that is adopted from another program.
    payload_limit: int = 1024 * 1024
    #: Lost leases after which a job is a poison pill (requirement Q7).
    max_deliveries: int = 5
    #: How long the record of a finished job can be looked up in the engine.
    finished_ttl_ms: int = 3_600_000
    #: How long an idempotency key outlives its submission (it always outlives the open job).
    idempotency_window_ms: int = 86_400_000
    #: A ledger records dead letters: jobs wait for it in `dlq_pending`. Without one the engine makes all three moves.
    ledger: bool = False
    retry_via: Mapping[str, RetryVia] = field(default_factory=dict)
    #: A retry in the pending list waits at least this long, however short its delay (source I's reclaim idle).
    pending_idle_ms: int = 0
    #: `stream:result` keeps about so many entries, and none older than this.
    result_limit: int = 10_000
    result_ttl_ms: int = 86_400_000
    #: With a ledger `stream:dlq` keeps no entry older than this; without one its entries are the record, and stay.
    dlq_ttl_ms: int = 30 * 86_400_000
    #: Feed entries (batches) kept while no reader has ever registered.
    feed_limit: int = 1_000
    #: Entries kept behind the reader's position, for those who look over its shoulder (event streams).
    feed_tail: int = 0
    #: With a reader, intake is refused when the unread feed is larger than this.
    feed_max_bytes: int = 512 * 1024 * 1024
    #: Events that are published where the engine's file is the ledger; elsewhere the projector does it.
    publishing: EventPublishing | None = None

    def __post_init__(self) -> None:
        for name in (
            "visibility_timeout_ms",
            "finished_ttl_ms",
            "idempotency_window_ms",
            "result_ttl_ms",
            "dlq_ttl_ms",
        ):
            if getattr(self, name) < 1:
                raise InvalidOption(f"{name} must be at least 1, got {getattr(self, name)}")


class Promotion(msgspec.Struct, frozen=True):
    """How many waiting jobs were put in line, and when the next one is due (0: none waits)."""

    count: int
    next_due_at_ms: int
    now_ms: int


class JobPort(Protocol):
    """Moves jobs through their lives: submission, leases, retries. One batch of one queue is one atomic step."""

    async def submit(self, envelopes: Sequence[Envelope]) -> list[Receipt]:
        """Accept new jobs, in order: one receipt each.

        A known `(tenant, queue, idempotency_key)` answers with the first job, as a duplicate. The same
        envelopes again (a reply was lost) change nothing and are no duplicates. Raises `IntakeRefused`
        when a queue's intake is paused, `IntakeLimited` when it or the tenant's part of it would grow over its limit
        (duplicates are answered all the same), `FeedFull` when its feed is at its limit, and, with `options.ledger`,
        `FeedUnread` when its feed has no reader in this memory (the store is new, was wiped or restarted, or a replica
        took over: refill what the ledger knows, then `register_reader`); envelopes of other queues may have been taken.
        """
        ...

    async def claim(
        self,
        worker: str,
        queues: Sequence[str],
        limit: int,
        wait_ms: int,
        held: Callable[[], Collection[Lease]] | None = None,
    ) -> list[Claim]:
        """Lease up to `limit` jobs that may run now; wait on the server for the first up to `wait_ms`.

        Adopts foreign messages that are well formed and dead-letters the others. Paused queues give nothing.
        Tenants that have jobs in line take turns, by weight: none waits behind another's backlog. A tenant that has
        as many running as it may gets nothing. Within a tenant and a priority the oldest is first.
        A negative `limit` or unknown queue is not an error: it gives nothing.

        Whoever says which leases it has (`held`) is served by those queues that answer; a queue that did
        not is tried again later, and first gives what its lost replies had granted, as `resume` would. Without, one
        queue that does not answer fails the call.
        """
        ...

    async def recover_claims(self, worker: str, queues: Sequence[str], held: Collection[Lease]) -> list[Claim]:
        """Leases that the engine says this worker holds and that are not among the `held` ones.

        For after a lost reply: same attempt, same deliveries as in the reply that never came.
        """
        ...

    async def settle(self, settlements: Sequence[Settlement]) -> list[SettleResult]:
        """End attempts; one answer each. Repeatable: a second copy answers `ALREADY`.

        `PartlyDone.done` has None where no answer came.
        """
        ...

    async def renew(self, leases: Sequence[Lease], heartbeats: Collection[Lease] = ()) -> list[Lease]:
        """Push deadlines out; returns the leases that are lost.

        Leases that were renewed and are among `heartbeats` leave a `task.heartbeat` event each, all in
        one feed entry. `PartlyDone.done` are those that are known to be lost.
        """
        ...

    async def promote(self, queues: Sequence[str], limit: int) -> Promotion:
        """Put jobs that are due (delayed or waiting for a retry) in line."""
        ...

    async def reclaim(self, worker: str, queues: Sequence[str], limit: int) -> list[Claim]:
        """Take over lost leases, with a raised attempt, and retries due in the pending list.

        Jobs that lost `max_deliveries` leases are dead-lettered as poison pills and not returned.
        """
        ...

    async def deregister_worker(self, worker: str, queues: Sequence[str]) -> None:
        """The worker is gone for good; forgets it unless it still holds leases."""
        ...

    async def prune(self, queues: Sequence[str]) -> int:
        """Drop what has expired: old results, dead consumers; returns how many things went."""
        ...
