"""The ledger's ports for projection, recovery and pruning, and `Ledger`, which has one property per role.

- `projection` (`Projection`): writes the feed. None when embedded: engine and ledger share one transaction.
- `effects` (`EffectStore`): once-only effects and steps, in batches, so that concurrent callers share a commit.
- `recovery` (`Recovery`): what the reconciler reads.
- `operators` (`OperatorStore`): tokens, votes, decisions on dead letters, the audit log, alerts.
- `notifications` (`PendingNotifications`): what has to be sent to subscribers by webhook.
- `triggers` (`TriggerStore`) and `outbox` (`OutboxStore`): messages received and events to publish.
- `queries` (`Queries`): read-only queries for users and programs.

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
#: After a fork the projector asks whether it has an entry already, so these outlive any lag, and any wish to keep less.
KEEP_ENTRIES_MS: Final = 7 * _DAY_MS

#: By tenant: creation (in the store's own terms) and id of the last job that was looked at. Whatever is older and still
#: there is kept for a reason (an open dead letter, say), and need not be looked at each time. Who starts with no marks
#: looks at everything.
PruneCursors = dict[str, tuple[Any, str]]


# The projector's end -------------------------------------------------------------------------------


class FeedPosition(msgspec.Struct, frozen=True):
    """How far a feed is in the ledger; both empty before its first entry."""

    position: str = ""
    nonce: str = ""


class ProjectionResult(msgspec.Struct, frozen=True):
    """What one transaction did."""

    at: FeedPosition
    events: int
    anomalies: int
    #: Jobs that wait in `dlq_pending` until the engine is told.
    dead_letters: int = 0
    #: Something in it did not fit at once, and was looked up.
    slow_path: bool = False


class PositionMoved(Exception):
    """Another projector was faster, and nothing was written. Read the position again."""


class RecordedDeadLetter(msgspec.Struct, frozen=True):
    """A dead letter that is durable, of a job that the engine has not been told about yet."""

    key: JobKey
    dlq_id: str


class Projection(Protocol):
    """Feed → ledger, exactly once: rows and position are one transaction, fenced by the old position (rules 14–18)."""

    async def acquire(self, queue: str, projector: str, lease_ms: int) -> FeedPosition | None:
        """Be this feed's projector for `lease_ms`; None while another one is alive or at it; never waits for one.
        Only saves work: fencing is by position, so two at once do no harm."""
        ...

    async def held_by_others(self, queues: Sequence[str], projector: str) -> set[str]:
        """Those of the feeds that another projector has now, in one look: for standing by."""
        ...

    async def release(self, queue: str, projector: str) -> None:
        """Another may take it at once."""
        ...

    def prepare(self, queue: str, entries: Sequence[FeedEntry]) -> Any:
        """The part of `project` that needs no store, to be done while another batch is being written; None: nothing."""
        ...

    async def project(
        self,
        queue: str,
        projector: str,
        lease_ms: int,
        old: FeedPosition,
        entries: Sequence[FeedEntry],
        prepared: Any = None,
    ) -> ProjectionResult:
        """Write these entries, number each job's events, move the position and renew the lease, in one transaction.

        Raises `PositionMoved` and writes nothing unless the position is `old`. Never stops on one event: what does
        not fit the ledger's story becomes an anomaly. Dead letters are written to `dlq_items`, unacknowledged.
        """
        ...

    async def already_written(self, queue: str, entries: Sequence[FeedEntry]) -> set[str]:
        """Positions of those entries that are in the ledger already (same position, same nonce): for after a fork."""
        ...

    async def unacked_dead_letters(
        self, queue: str, limit: int, after: RecordedDeadLetter | None = None
    ) -> list[RecordedDeadLetter]:
        """Dead letters whose jobs are still to be moved on, by tenant and id; those that come `after` one."""
        ...

    async def dead_letters(self, keys: Sequence[JobKey]) -> list[RecordedDeadLetter]:
        """The dead letters of these jobs, told or not, as far as there are any."""
        ...

    async def ack_dead_letters(self, letters: Sequence[RecordedDeadLetter]) -> None:
        """The engine has moved these on."""
        ...

    async def position(self, queue: str) -> FeedPosition:
        """How far the feed is."""
        ...

    async def wait_position_change(self, queue: str, than: FeedPosition, wait_ms: int) -> FeedPosition:
        """The position once it is another one than `than`, or as it is after `wait_ms`. Does not poll."""
        ...

    async def wait_recorded(self, keys: Sequence[JobKey], wait_ms: int) -> set[JobKey]:
        """Those of the jobs that are in the ledger with all that was submitted, once all are, or after `wait_ms`.
        Callers share look-ups."""
        ...

    async def close(self) -> None:
        """Nobody waits any longer: those who do are cancelled."""
        ...


# The reconciler's end ------------------------------------------------------------------------------


class OpenJob(msgspec.Struct, frozen=True):
    """A job that has not ended, as the ledger knows it."""

    key: JobKey
    state: State
    last_seq: int


class Recovery(Protocol):
    """What the ledger knows about open jobs. Pages are read one by one, each in a short transaction of its own: no
    snapshot is kept while somebody works on a page."""

    def queues(self) -> Coroutine[Any, Any, list[str]]:
        """Queues that the ledger has read a feed of: the engine may have forgotten them."""
        ...

    def open_jobs(self, queue: str, limit: int) -> AsyncIterator[list[OpenJob]]:
        """Open jobs of a queue, in pages. One that moves meanwhile may be seen twice, or not at all."""
        ...

    async def still_open(self, keys: Sequence[JobKey]) -> list[OpenJob]:
        """Those of them that are open now."""
        ...

    async def histories(self, keys: Sequence[JobKey]) -> dict[JobKey, list[Event]]:
        """Each job's events in order. The creation's `data` has the whole envelope."""
        ...

    def submission_keys(self, queue: str, window_ms: int, limit: int) -> AsyncIterator[list[SubmissionKey]]:
        """Idempotency keys that are still in their window, or whose job is open, in pages."""
        ...


class Ledger(Protocol):
    """Remembers."""

    @property
    def projection(self) -> Projection | None:
        """None when embedded: the engine writes the ledger itself."""
        ...

    @property
    def effects(self) -> EffectStore: ...
    @property
    def recovery(self) -> Recovery: ...
    @property
    def queries(self) -> Queries: ...
    @property
    def operators(self) -> OperatorStore: ...
    @property
    def notifications(self) -> PendingNotifications: ...
    @property
    def triggers(self) -> TriggerStore: ...
    @property
    def outbox(self) -> OutboxStore: ...

    async def open(self) -> None:
        """Connect and look at the schema. Raises `LedgerUnavailable`, or `SchemaMismatch`."""
        ...

    async def close(self) -> None:
        """Give connections back. Safe to call twice."""
        ...

    def clone(self) -> Ledger:
        """A ledger on the same store with connections of its own, for another event loop."""
        ...

    async def prune(self, keep_ms: int, limit: int, marks: PruneCursors | None = None) -> int:
        """Drop finished jobs (with events, steps) that ended longer ago, expired effect keys, old feed entries: about
        `limit` rows in one short transaction; how many went; old lines of the operators' log, too. Never an open job,
        a key in doubt, an open dead letter, or one whose replay is on its way.
        Begins at the marks, and moves them.
        """
        ...

    async def diagnose(self) -> list[Finding]:
        """Whether this ledger can be trusted, how far it is behind, and what to do."""
        ...
