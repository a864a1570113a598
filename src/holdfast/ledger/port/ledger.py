"""The ledger's ports for projection, recovery and pruning, and `Ledger`, one property per role.

- `projection` (`Projection`): writes the feed. None when embedded: engine and ledger share one transaction.
- `effects` (`EffectStore`): once-only effects and steps, in batches, so that concurrent callers share a commit.
- `recovery` (`Recovery`): what the reconciler reads.
- `operators` (`OperatorStore`): tokens, votes, decisions on dead letters, the audit log, alerts.
- `notifications` (`PendingNotifications`): what has to be sent to subscribers by webhook.
- `triggers` (`TriggerStore`) and `outbox` (`OutboxStore`): messages received and events to publish.
- `queries` (`Queries`): read-only queries for users and programs.

Code that only reads takes a `LedgerReadPort`.

One instance serves one event loop and connects on first use. All methods raise `LedgerUnavailable` when the store does
not answer, and can then be called again with the same arguments. `PruneCursors` says where pruning continues;
`KEEP_ENTRIES_MS` is the least time for which feed entries are kept.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from holdfast.core.job import Event
from holdfast.core.job import JobKey as JobKey
from holdfast.core.states import State
from holdfast.engine.port.feed import FeedEntry, SubmissionKey
from holdfast.engine.port.reads import Finding
from holdfast.ledger.port.effects import EffectStore

if TYPE_CHECKING:
    from holdfast.ledger.port.messages import OutboxStore, TriggerStore
    from holdfast.ledger.port.operators import OperatorStore
    from holdfast.ledger.queries.jobs import Queries
    from holdfast.ledger.queries.operators import PendingNotifications


_DAY_MS: Final = 86_400_000
#: After a fork the projector checks which entries are already written, so entries outlive any lag and any shorter
#: retention setting.
KEEP_ENTRIES_MS: Final = 7 * _DAY_MS

#: By tenant: creation time (in the store's format) and id of the last job checked. Older jobs that are still there
#: are kept for a reason (for example an open dead letter) and are not checked each time. Without cursors, all jobs are
#: checked.
PruneCursors = dict[str, tuple[Any, str]]


# Projection ----------------------------------------------------------------------------------------


class FeedPosition(msgspec.Struct, frozen=True):
    """How far the ledger has read a feed; both empty before its first entry."""

    position: str = ""
    nonce: str = ""


class ProjectionResult(msgspec.Struct, frozen=True):
    """What one transaction wrote."""

    at: FeedPosition
    events: int
    anomalies: int
    #: Jobs that stay in `dlq_pending` until the engine is notified.
    dead_letters: int = 0
    #: Some events did not fit the batch's fast path and needed lookups.
    slow_path: bool = False


class PositionMoved(Exception):
    """Another projector moved the position first and nothing was written; read the position again."""


class RecordedDeadLetter(msgspec.Struct, frozen=True):
    """A durable dead letter, as the projector reports it to the engine."""

    key: JobKey
    dlq_id: str


class ProjectionReadPort(Protocol):
    """What the ledger has read of the feeds, read-only, and waiting for it."""

    async def position(self, queue: str) -> FeedPosition:
        """Return how far the ledger has read the feed."""
        ...

    async def wait_position_change(self, queue: str, known: FeedPosition, wait_ms: int) -> FeedPosition:
        """Return the position once it differs from `known`, or the current one after `wait_ms`.

        Does not poll in short intervals: a commit wakes it.
        """
        ...

    async def wait_recorded(self, keys: Sequence[JobKey], wait_ms: int) -> set[JobKey]:
        """Return the jobs whose whole submission is in the ledger, once all are there or after `wait_ms`.

        Concurrent callers share lookups.
        """
        ...

    async def already_written(self, queue: str, entries: Sequence[FeedEntry]) -> set[str]:
        """Return positions of entries that are already in the ledger; used after a fork.

        Position and nonce must be the same.
        """
        ...


class Projection(ProjectionReadPort, Protocol):
    """Feed → ledger, exactly once (rules 14–18).

    Rows and position are one transaction, fenced by the old position.
    """

    async def acquire(self, queue: str, projector: str, lease_ms: int) -> FeedPosition | None:
        """Become this feed's projector for `lease_ms`, without waiting.

        Returns None while another projector holds the feed or is acquiring it. The lease only saves work: writes are
        fenced by position, so two projectors at once do no harm.
        """
        ...

    async def renew(self, queues: Sequence[str], projector: str, lease_ms: int) -> dict[str, FeedPosition]:
        """Extend the leases of a projector in one step; return the positions of those that it still has."""
        ...

    async def held_by_others(self, queues: Sequence[str], projector: str) -> set[str]:
        """Return the queues whose feeds another projector holds now, in one query; for standby projectors."""
        ...

    async def release(self, queue: str, projector: str) -> None:
        """Release the lease, so that another projector can acquire it at once."""
        ...

    def prepare(self, queue: str, entries: Sequence[FeedEntry]) -> Any:
        """Do the part of `project` that needs no store, while another batch is being written.

        Returns None if there is nothing to prepare.
        """
        ...

    async def engine_epoch(self, queue: str) -> str:
        """Return the epoch of the engine in which the queue was verified last; empty before the first time."""
        ...

    async def begin_epoch(self, queue: str, epoch: str, expected: str) -> FeedPosition | None:
        """Refuse batches of other epochs from now on; return how far the feed was read before.

        Returns None and changes nothing unless the last epoch was `expected`.
        """
        ...

    async def project(
        self,
        queue: str,
        projector: str,
        lease_ms: int,
        old: FeedPosition,
        entries: Sequence[FeedEntry],
        prepared: Any = None,
        *,
        epoch: str = "",
    ) -> ProjectionResult:
        """Write entries, number each job's events, move the position and renew the lease.

        `epoch`: that of the engine in which the entries were read. All in one transaction. Raises `PositionMoved` and
        writes nothing unless the position is `old` and the epoch the one that began last. One event never
        stops it: an event that does not fit the recorded history becomes an anomaly. Dead letters are written to
        `dlq_items`, unacknowledged.
        """
        ...

    async def unacked_dead_letters(
        self, queue: str, limit: int, after: RecordedDeadLetter | None = None
    ) -> list[RecordedDeadLetter]:
        """List dead letters whose jobs the engine has not moved yet, by tenant and id.

        Continues `after` one.
        """
        ...

    async def dead_letters(self, keys: Sequence[JobKey]) -> list[RecordedDeadLetter]:
        """Return the dead letters of these jobs, acknowledged or not."""
        ...

    async def ack_dead_letters(self, dead_letters: Sequence[RecordedDeadLetter]) -> None:
        """Mark these as moved by the engine."""
        ...

    async def close(self) -> None:
        """Cancel all waiters."""
        ...


# Recovery ------------------------------------------------------------------------------------------


class OpenJob(msgspec.Struct, frozen=True):
    """A job that has not ended, as the ledger knows it."""

    key: JobKey
    state: State
    last_seq: int


class RecordedState(msgspec.Struct, frozen=True):
    """Where a job is, as the ledger knows it."""

    state: State
    attempt: int
    retry_count: int
    #: Of a job that succeeded, JSON. Its events do not have it.
    result: str | None = None


class Recovery(Protocol):
    """What the ledger knows about open jobs.

    Each page is read in its own short transaction: no snapshot is held while the caller works on a page.
    """

    def queues(self) -> Coroutine[Any, Any, list[str]]:
        """Return queues whose feed the ledger has read; the engine may have lost them."""
        ...

    def open_jobs(self, queue: str, limit: int) -> AsyncIterator[list[OpenJob]]:
        """Iterate over open jobs of a queue, in pages.

        A job that moves meanwhile may occur twice or not at all.
        """
        ...

    async def recorded(self, keys: Sequence[JobKey]) -> dict[JobKey, RecordedState]:
        """Return what the ledger has of those of the jobs that it knows, open or ended."""
        ...

    async def still_open(self, keys: Sequence[JobKey]) -> list[OpenJob]:
        """Return those of the jobs that are open now."""
        ...

    async def histories(self, keys: Sequence[JobKey]) -> dict[JobKey, list[Event]]:
        """Return each job's events in order. `data` of the creation event has the whole envelope."""
        ...

    def submission_keys(self, queue: str, window_ms: int, limit: int) -> AsyncIterator[list[SubmissionKey]]:
        """Iterate over idempotency keys still in their window, or whose job is open, in pages."""
        ...


class LedgerReadPort(Protocol):
    """The part of a ledger that cannot change it: queries, progress and diagnosis."""

    @property
    def queries(self) -> Queries: ...
    @property
    def recovery(self) -> Recovery: ...
    @property
    def projection(self) -> ProjectionReadPort | None:
        """None when embedded: the engine writes the ledger itself."""
        ...

    async def diagnose(self) -> list[Finding]:
        """Check the ledger: whether its data is reliable, how far it is behind, and what to do about it."""
        ...


class Ledger(LedgerReadPort, Protocol):
    """History of jobs and the data of operators, triggers and outbox; one property per role."""

    @property
    def projection(self) -> Projection | None:
        """None when embedded: the engine writes the ledger itself."""
        ...

    @property
    def effects(self) -> EffectStore: ...
    @property
    def operators(self) -> OperatorStore: ...
    @property
    def notifications(self) -> PendingNotifications: ...
    @property
    def triggers(self) -> TriggerStore: ...
    @property
    def outbox(self) -> OutboxStore: ...

    async def open(self) -> None:
        """Connect and check the schema. Raises `LedgerUnavailable` or `SchemaMismatch`."""
        ...

    async def close(self) -> None:
        """Close connections. Safe to call twice."""
        ...

    def clone(self) -> Ledger:
        """Return a ledger on the same store with separate connections, for another event loop."""
        ...

    async def prune(self, keep_ms: int, limit: int, cursors: PruneCursors | None = None) -> int:
        """Delete about `limit` expired rows in one short transaction; return how many.

        Deletes jobs that ended longer ago than `keep_ms` (with events and steps), expired effect keys, old feed entries
        and old audit entries. Never an open job, a key in doubt, an open dead letter, or one whose replay is in
        progress. Starts at the cursors and advances them.
        """
        ...
