"""The ledger's ports, by role. One instance serves one event loop; connections are made when they are first needed.

- `Projection`: the projector's writing end. Not there when embedded: engine and ledger are one file, one transaction.
- `Effects`: once-only effects and steps; batches, so that concurrent callers share a commit.
- `Recovery`: what the reconciler reads.
- `People` (`ledger.people`): tokens, votes, dead letters' fates, the operators' log.
- `Telling` (`ledger.telling`): what others are to be told by webhook.
- `TriggerBook` (`ledger.trigger_book`), `OutboxStore` (`ledger.outbox_store`): messages that came in, events on their
  way out.
- Queries for people and programs are in `ledger.queries`, read-only.

All methods raise `LedgerUnavailable` when the store does not answer, and may then be called again with the same
arguments.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from holdfast.core.job import Event
from holdfast.core.states import State
from holdfast.engine.port import FeedEntry, Finding, KnownKey
from holdfast.ledger.keys import JobKey as JobKey
from holdfast.ledger.retention import Marks

if TYPE_CHECKING:
    # Loads SQLAlchemy, which a worker without a ledger does not need.
    from holdfast.ledger.outbox_store import OutboxStore
    from holdfast.ledger.people import People
    from holdfast.ledger.queries import Queries
    from holdfast.ledger.telling import Telling
    from holdfast.ledger.trigger_book import TriggerBook

# The projector's end -------------------------------------------------------------------------------


class Position(msgspec.Struct, frozen=True):
    """How far a feed is in the ledger; both empty before its first entry."""

    position: str = ""
    nonce: str = ""


class Projected(msgspec.Struct, frozen=True):
    """What one transaction did."""

    at: Position
    events: int
    anomalies: int
    #: Jobs that wait in `dlq_pending` until the engine is told.
    dead_letters: int = 0
    #: Something in it did not fit at once, and was looked up.
    looked_up: bool = False


class PositionMoved(Exception):
    """Another projector was faster, and nothing was written. Read the position again."""


class DeadLetter(msgspec.Struct, frozen=True):
    """A dead letter that is durable, of a job that the engine has not been told about yet."""

    key: JobKey
    dlq_id: str


class Projection(Protocol):
    """Feed → ledger, exactly once: rows and position are one transaction, fenced by the old position (rules 14–18)."""

    async def take(self, queue: str, projector: str, lease_ms: int) -> Position | None:
        """Be this feed's projector for `lease_ms`; None while another one is alive or at it; never waits for one.
        Only saves work: fencing is by position, so two at once do no harm."""
        ...

    async def taken(self, queues: Sequence[str], projector: str) -> set[str]:
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
        old: Position,
        entries: Sequence[FeedEntry],
        prepared: Any = None,
    ) -> Projected:
        """Write these entries, number each job's events, move the position and renew the lease, in one transaction.

        Raises `PositionMoved` and writes nothing unless the position is `old`. Never stops on one event: what does
        not fit the ledger's story becomes an anomaly. Dead letters are written to `dlq_items`, unacknowledged.
        """
        ...

    async def written(self, queue: str, entries: Sequence[FeedEntry]) -> set[str]:
        """Positions of those entries that are in the ledger already (same position, same nonce): for after a fork."""
        ...

    async def unacked(self, queue: str, limit: int, after: DeadLetter | None = None) -> list[DeadLetter]:
        """Dead letters whose jobs are still to be moved on, by tenant and id; those that come `after` one."""
        ...

    async def letters(self, keys: Sequence[JobKey]) -> list[DeadLetter]:
        """The dead letters of these jobs, told or not, as far as there are any."""
        ...

    async def ack(self, letters: Sequence[DeadLetter]) -> None:
        """The engine has moved these on."""
        ...

    async def position(self, queue: str) -> Position:
        """How far the feed is."""
        ...

    async def wait_moved(self, queue: str, than: Position, wait_ms: int) -> Position:
        """The position once it is another one than `than`, or as it is after `wait_ms`. Does not poll."""
        ...

    async def wait_present(self, keys: Sequence[JobKey], wait_ms: int) -> set[JobKey]:
        """Those of the jobs that are in the ledger with all that was submitted, once all are, or after `wait_ms`.
        Callers share look-ups."""
        ...

    async def close(self) -> None:
        """Nobody waits any longer: those who do are cancelled."""
        ...


# Effects and steps ---------------------------------------------------------------------------------


class KeyState(StrEnum):
    """Where an effect is (requirement E2)."""

    RESERVED = "reserved"
    DONE = "done"
    IN_DOUBT = "in_doubt"


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """A wish to act under a key, and who wishes."""

    tenant_id: str
    key: str
    function: str
    fingerprint: str
    token: str
    queue: str
    job_id: str
    attempt: int
    worker: str
    #: Take over this reservation, which is in doubt or whose holder is lost, instead of making a new one.
    instead_of: str = ""


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """The row of a key. Ours, if its token is the one that we asked with."""

    state: KeyState
    token: str
    value: bytes | None
    function: str
    fingerprint: str
    queue: str
    job_id: str
    attempt: int
    worker: str
    reason: str
    updated_at_ms: int


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How an effect ended, by the reservation's token: done with a value, in doubt, or not done (the key is free)."""

    tenant_id: str
    key: str
    token: str
    state: KeyState | None
    value: bytes | None = None
    reason: str = ""
    #: A `done` key may be used again after this long; None: never.
    ttl_ms: int | None = None


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint. `position` counts the job's steps from 1 in the order of its code."""

    key: JobKey
    position: int
    name: str
    result: bytes
    attempt: int


class Effects(Protocol):
    """Reservations and checkpoints. Every method takes a batch and is one transaction."""

    async def reserve(self, wishes: Sequence[Reservation]) -> list[Held]:
        """The key's row after the wish, one each: new keys, and done ones that have expired, become the wisher's."""
        ...

    async def conclude(self, outcomes: Sequence[Outcome]) -> list[bool]:
        """Whether each still held its key. False: it was reserved again meanwhile, so it may have happened twice."""
        ...

    async def look(self, keys: Sequence[tuple[str, str]]) -> list[Held | None]:
        """The rows of `(tenant_id, key)`."""
        ...

    async def steps(self, jobs: Sequence[JobKey]) -> list[list[Step]]:
        """Each job's recorded steps, by position."""
        ...

    async def record_steps(self, steps: Sequence[Step]) -> list[Step]:
        """The step as it is recorded now, one each: the first one to record a position wins."""
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

    async def stories(self, keys: Sequence[JobKey]) -> dict[JobKey, list[Event]]:
        """Each job's events in order. The creation's `data` has the whole envelope."""
        ...

    def submission_keys(self, queue: str, window_ms: int, limit: int) -> AsyncIterator[list[KnownKey]]:
        """Idempotency keys that are still in their window, or whose job is open, in pages."""
        ...


class Ledger(Protocol):
    """Remembers."""

    @property
    def projection(self) -> Projection | None:
        """None when embedded: the engine writes the ledger itself."""
        ...

    @property
    def effects(self) -> Effects: ...
    @property
    def recovery(self) -> Recovery: ...
    @property
    def queries(self) -> Queries: ...
    @property
    def people(self) -> People: ...
    @property
    def telling(self) -> Telling: ...
    @property
    def triggers(self) -> TriggerBook: ...
    @property
    def outbox(self) -> OutboxStore: ...

    async def open(self) -> None:
        """Connect and look at the schema. Raises `LedgerUnavailable`, or `SchemaMismatch`."""
        ...

    async def close(self) -> None:
        """Give connections back. Safe to call twice."""
        ...

    def sibling(self) -> Ledger:
        """A ledger on the same store with connections of its own, for another event loop."""
        ...

    async def prune(self, keep_ms: int, limit: int, marks: Marks | None = None) -> int:
        """Drop finished jobs (with events, steps) that ended longer ago, expired effect keys, old feed entries: about
        `limit` rows in one short transaction; how many went; old lines of the operators' log, too. Never an open job,
        a key in doubt, an open dead letter, or one whose replay is on its way.
        Begins at the marks, and moves them.
        """
        ...

    async def diagnose(self) -> list[Finding]:
        """Whether this ledger can be trusted, how far it is behind, and what to do."""
        ...
