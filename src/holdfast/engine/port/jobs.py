"""`JobPort`: submit, claim, settle and retry jobs; also the limits and options of an engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from holdfast.core.announcement import AnnouncedTask
from holdfast.core.fingerprint import raw_fingerprint
from holdfast.core.job import DEFAULT_QUEUE, WEBHOOK_QUEUE, Claim, Envelope, Lease, Receipt
from holdfast.core.verdict import Settlement, SettleResult
from holdfast.errors import IdempotencyKeyReused, IntakeLimited, InvalidOption
from holdfast.observe.counters import Counters

if TYPE_CHECKING:
    from holdfast.core.publishing import EventPublishing


#: Tenants of a queue that can have their own lane at the same time; further tenants share lanes.
MAX_TENANTS: Final = 64


#: Why a submission is refused.
INTAKE_PAUSED: Final = "intake is paused by an operator; retry after it is resumed"
FEED_BEHIND: Final = "its feed is full because the ledger does not read it; restore the ledger"
FEED_DETACHED: Final = (
    "its feed has no reader in this epoch (new store, wipe, restart or fail-over); restore the idempotency keys, then "
    "attach a reader"
)


#: Decides about an expired lease, whose `worker` is the previous owner.
LeaseFilter = Callable[[Lease], bool]
#: Leases of one queue that `expire_leases` lets expire in one step.
EXPIRY_BATCH: Final = 500


class RetryVia(StrEnum):
    """Where a job waits for its retry (requirement Y4)."""

    #: In a set ordered by due time; the message is acknowledged. The default.
    SCHEDULE = "schedule"
    #: In the pending list, unacknowledged, until it is due.
    PENDING = "pending"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options of an engine, besides the address of its store."""

    visibility_timeout_ms: int = 30_000
    #: How long `reclaim` waits after an outage, for surviving workers to renew their leases; 0: it does not wait.
    settle_ms: int = 0
    #: Largest payload of a foreign message that is adopted.
    payload_limit: int = 1024 * 1024
    #: Leases lost while it ran alone after which a job is a poison pill (requirement Q7).
    max_deliveries: int = 5
    #: How long the engine keeps the record of a finished job.
    finished_ttl_ms: int = 3_600_000
    #: How long an idempotency key is known after its submission (at least as long as the job is open).
    idempotency_window_ms: int = 86_400_000
    #: A ledger records dead letters; jobs wait for it in `dlq_pending`. Without one the engine makes all three moves.
    ledger: bool = False
    retry_via: Mapping[str, RetryVia] = field(default_factory=dict)
    #: Minimum wait of a retry in the pending list, however short its delay (source I's reclaim idle).
    pending_idle_ms: int = 0
    #: Approximate number of entries in `stream:result`, and the age at which they are dropped.
    result_limit: int = 10_000
    result_ttl_ms: int = 86_400_000
    #: With a ledger, entries of `stream:dlq` older than this are dropped; without one they are the record and stay.
    dlq_ttl_ms: int = 30 * 86_400_000
    #: Feed entries (batches) kept while no reader has ever been attached.
    feed_limit: int = 1_000
    #: Feed entries kept before the reader's position, for event streams.
    feed_tail: int = 0
    #: Queues that one tenant may own: those that it was the first to submit to. `UNOWNED` are not counted.
    tenant_queue_limit: int = 1_000
    #: With a reader, submissions are refused when the unread feed is larger than this.
    feed_max_bytes: int = 512 * 1024 * 1024
    #: Fingerprint of task and payload, kept with an idempotency key (E1). An app computes it from its tasks.
    fingerprint: Callable[[str, bytes], str] = raw_fingerprint
    #: Events to publish in embedded mode, where the engine's file is the ledger; otherwise the projector publishes.
    publishing: EventPublishing | None = None

    def __post_init__(self) -> None:
        for name in (
            "visibility_timeout_ms",
            "finished_ttl_ms",
            "idempotency_window_ms",
            "result_ttl_ms",
            "dlq_ttl_ms",
            "tenant_queue_limit",
        ):
            if getattr(self, name) < 1:
                raise InvalidOption(f"{name} must be at least 1, got {getattr(self, name)}")


#: Queues that all tenants share.
UNOWNED: Final = frozenset({DEFAULT_QUEUE, WEBHOOK_QUEUE})


def possible_owners(queue: str, envelopes: Iterable[Envelope]) -> list[str]:
    """Tenants of which the first with fewer queues than its limit will own a new queue; none for `UNOWNED`."""
    return [] if queue in UNOWNED else list(dict.fromkeys(envelope.tenant_id for envelope in envelopes))


#: Why one job of a batch was not accepted although others may be.
JobRefused = IdempotencyKeyReused | IntakeLimited


def has_own_key(envelope: Envelope) -> bool:
    """Whether the job has an idempotency key; its own id is the same as none."""
    return bool(envelope.idempotency_key) and envelope.idempotency_key != envelope.job_id


def joins_backlog(envelope: Envelope) -> bool:
    """Whether the job is ready when it is accepted, so that it counts towards intake limits."""
    return not (envelope.hold or envelope.delay_ms or envelope.run_at_ms)


class Promotion(msgspec.Struct, frozen=True):
    """How many due jobs became ready, and when the next job is due (0: no job waits)."""

    count: int
    next_due_at_ms: int
    now_ms: int


class EnginePart(Protocol):
    """What all ports of an engine have: its options, and the counters of this process."""

    options: EngineOptions
    counters: Counters


class JobPort(EnginePart, Protocol):
    """Submission, leases and retries of jobs. One batch of one queue is one atomic step."""

    async def submit(self, envelopes: Sequence[Envelope]) -> list[Receipt]:
        """Accept new jobs, in order; return one receipt each. A batch of one queue is accepted whole or not at all.

        For a known `(tenant, queue, idempotency_key)` the receipt names the first job and is a duplicate. A key is
        known if an earlier job had it, or if it is the id of a job without a key. A submission without a key is
        identified by its id only. Repeating the same envelopes (after a lost reply) changes nothing and gives no
        duplicates.

        Raises `IdempotencyKeyReused` when a known key belongs to another task or to other arguments, by their
        fingerprints; with `on_key_reuse=RETURN` the receipt is that of a duplicate, and a `task.duplicate` event
        records it.

        Raises `IntakeRefused` when a queue's intake is paused, `IntakeLimited` when the backlog of the queue or tenant
        would exceed its limit (duplicates still get their receipts), `QueueLimitReached` when a queue is new and every
        tenant of its envelopes has its limit of queues, and `FeedFull` when the feed is at its limit.
        With `options.ledger`, raises `FeedDetached` when the feed has no reader in this epoch (new store, wipe,
        restart or fail-over): restore the idempotency keys, then call `attach_reader`. Envelopes of other queues may
        have been accepted.
        """
        ...

    async def submit_each(self, envelopes: Sequence[Envelope]) -> list[Receipt | JobRefused]:
        """Like `submit`, but the envelopes are judged one by one, in order, as if each were a call.

        An envelope that `submit` would refuse with `IdempotencyKeyReused` or `IntakeLimited` has that error instead of
        a receipt; it does not affect the others. Errors that concern a whole queue are raised.
        """
        ...

    def server_of(self, queue: str) -> object:
        """Identifies the server that has the queue. An outage of one server does not affect queues of another."""
        return None

    async def claim(
        self,
        worker: str,
        queues: Sequence[str],
        limit: int,
        wait_ms: int,
        in_flight: Callable[[], Collection[Lease]] | None = None,
    ) -> list[Claim]:
        """Lease up to `limit` ready jobs; wait on the server up to `wait_ms` for the first.

        Adopts well-formed foreign messages and dead-letters the others. Returns nothing from paused queues.
        Tenants with ready jobs share the claims by weight, so that none waits behind another's backlog. A tenant at
        its concurrency limit gets nothing. Within a tenant and priority, the oldest job is first.
        A negative `limit` or an unknown queue is not an error; it returns nothing.

        With `in_flight`, which returns the caller's leases, the queues that answer are served. A queue that did not
        answer is tried again later; it first returns the claims of its lost replies, as `recover_claims` does.
        Without `in_flight`, one queue that does not answer fails the call.
        """
        ...

    async def recover_claims(self, worker: str, queues: Sequence[str], in_flight: Collection[Lease]) -> list[Claim]:
        """Return the leases that the engine keeps for this worker and that are not among `in_flight`.

        For use after a lost reply: attempt and delivery count are those of the lost reply.
        """
        ...

    async def settle(self, settlements: Sequence[Settlement]) -> list[SettleResult]:
        """End attempts; return one result each. Repeatable: the second call returns `ALREADY`.

        `PartialFailure.completed` has None for settlements without a result.
        """
        ...

    async def renew(self, leases: Sequence[Lease], heartbeats: Collection[Lease] = ()) -> list[Lease]:
        """Extend leases; return those that are lost.

        Each renewed lease among `heartbeats` leaves a `task.heartbeat` event, all in one feed entry.
        `PartialFailure.completed` has the leases that are known to be lost.
        """
        ...

    async def promote(self, queues: Sequence[str], limit: int) -> Promotion:
        """Make due jobs (delayed or retrying) ready.

        Of many queues (over 64), those in which nothing is due soon need not be read in every call; pass a queue
        separately after a notice of a due job in it.
        """
        ...

    async def reclaim(
        self,
        worker: str,
        queues: Sequence[str],
        limit: int,
        only: LeaseFilter | None = None,
        retries: int | None = None,
    ) -> list[Claim]:
        """Claim jobs with expired leases, as a new attempt, and due retries in the pending list.

        At most `retries` of those retries, if it is given. With `only`, only leases for which it returns True; the
        others stay as they are. Returned jobs that had started must run alone, because they may be what ended their
        worker (`Claim.is_suspect`). Those that lost `max_deliveries` leases while they ran alone are dead-lettered as
        poison pills and not returned.

        For `settle_ms` after the first call and after an outage, only leases of workers passed to `expire_leases`.
        Jobs lost within one lease after an outage that another worker survived are released and not returned, so that
        the loss does not count (decision 0043).
        """
        ...

    def skip_first_wait(self) -> None:
        """Let `reclaim` not wait after the start: the process that started this one has waited already."""
        ...

    def is_settling(self, queues: Sequence[str]) -> bool:
        """Whether `reclaim` waits after an outage, so that it may have left out leases of these queues."""
        ...

    async def expire_leases(self, worker: str, queues: Sequence[str]) -> int:
        """Let leases of a worker expire now, because it has certainly ended; return how many.

        At most `EXPIRY_BATCH` per queue: call it again while it returns any. A worker that lives after all keeps those
        that it renews before they are reclaimed.
        """
        ...

    async def deregister_worker(self, worker: str, queues: Sequence[str]) -> None:
        """Deregister a worker that has stopped, unless it still has leases."""
        ...

    async def announce_tasks(self, tasks: Sequence[AnnouncedTask]) -> None:
        """Store tasks as a worker has them, with the current time.

        Other schemas of these tasks are kept for 30 days, tasks that no worker has any more for ever. Can be repeated.
        """
        ...

    async def prune(self, queues: Sequence[str]) -> int:
        """Delete what has expired (old results, dead consumers); return how many entries were deleted."""
        ...
