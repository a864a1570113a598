"""The engine port: the only way a job moves from state to state.

Everything takes and returns batches; one batch of one queue is one atomic step (a Lua script on Redis,
a transaction on SQLite) that also appends to the feed exactly the moves it made. Time is the engine's.

What every adapter guarantees, and `holdfast.testing.contract` proves:

- An accepted job is never lost: `submit` has returned.
- A move that `core.states.MOVES` does not know changes nothing.
- A settle or renew whose lease is lost changes nothing.
- One final state and one final event per job.

All methods raise `EngineUnavailable` when the store does not answer; all may then be called again with
the same arguments: `submit` recognises its job ids, `settle` its lease tokens, the rest is repeatable.
Where queues are on several servers, a call for several queues serves those that answer, and raises if none
does; `settle` and `renew` raise `PartlyDone` if one does not.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import msgspec

from holdfast.core.job import Claim, Consent, Envelope, Event, JobView, Lease, Receipt
from holdfast.core.states import State
from holdfast.core.verdict import Answer, Settlement
from holdfast.errors import EngineUnavailable, InvalidOption
from holdfast.observe.counts import Counts

if TYPE_CHECKING:
    from holdfast.ledger.publishing import Publishing

T = TypeVar("T")

#: The most jobs that one atomic step handles; larger batches are cut. 500 take a Redis script 4–6 ms.
MAX_BATCH: Final = 500

#: So many tenants at a time have a part of a queue of their own; further ones share.
MAX_TENANTS: Final = 64
#: A tenant's share can be so many times another's.
MAX_WEIGHT: Final = 100


#: What refused submissions are told.
INTAKE_PAUSED: Final = "an operator has paused its intake; try again once it goes on"
INTAKE_FULL: Final = "as many jobs are in line or running as may be; try again when some have ended"
FEED_BEHIND: Final = "its feed is full because the ledger does not read it; bring the ledger back"
FEED_UNREAD: Final = (
    "its feed has no reader yet: the store is new, was wiped or restarted, or a replica took over; refill what the "
    "ledger knows, then register one"
)
#: A feed that is this full is worth a warning.
FEED_WARNING: Final = 0.8


class PartlyDone(EngineUnavailable):
    """A part of the store does not answer, the rest has done its share: `done` is what the call would have returned,
    as far as that is known."""

    def __init__(self, why: EngineUnavailable, done: list[Any]) -> None:
        super().__init__(str(why))
        self.done = done


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
    publishing: Publishing | None = None

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


class Cancelled(msgspec.Struct, frozen=True):
    """A running job was taken from its worker by `move`: stop it, its lease is gone."""

    queue: str
    job_id: str


class Due(msgspec.Struct, frozen=True):
    """A job waits that is due earlier than all others."""

    queue: str
    at_ms: int


class Controlled(msgspec.Struct, frozen=True):
    """An operator changed a queue's controls; read them with `control`."""

    queue: str


Notice = Cancelled | Due | Controlled


class TenantControl(msgspec.Struct, frozen=True, omit_defaults=True):
    """An operator's hand on one tenant's part of a queue."""

    #: Its share of the claims beside other tenants that have jobs in line.
    weight: int = 1
    #: How many of its jobs run at a time, all workers together; None: no limit.
    concurrency: int | None = None
    #: Submissions are refused while it has so many jobs in line or running; None: no limit.
    intake_limit: int | None = None


class Control(msgspec.Struct, frozen=True, omit_defaults=True):
    """An operator's hand on a queue (requirement H5)."""

    #: Claims get nothing.
    paused: bool = False
    #: Submissions are refused.
    intake_paused: bool = False
    #: How many jobs a worker process runs at a time; None leaves it to the worker.
    concurrency: int | None = None
    #: Submissions are refused while so many jobs are in line or running; None: no limit.
    intake_limit: int | None = None
    #: So many jobs in line or running raise an alert; None leaves it to the settings.
    backlog_alert: int | None = None
    tenants: dict[str, TenantControl] = {}


def check_control(control: Control) -> None:
    """Raise `InvalidOption` for controls that cannot be: both engines ask this before they keep any."""
    if len(control.tenants) > MAX_TENANTS:
        raise InvalidOption(f"a queue has controls for at most {MAX_TENANTS} tenants, got {len(control.tenants)}")
    limits = {name: getattr(control, name) for name in ("concurrency", "intake_limit", "backlog_alert")}
    for tenant, hand in control.tenants.items():
        if not 1 <= hand.weight <= MAX_WEIGHT:
            raise InvalidOption(f"the weight of tenant {tenant!r} must be 1 to {MAX_WEIGHT}, got {hand.weight}")
        limits |= {f"{name} of tenant {tenant!r}": getattr(hand, name) for name in ("concurrency", "intake_limit")}
    for name, limit in limits.items():
        if limit is not None and limit < 0:
            raise InvalidOption(f"{name} must be at least 0, got {limit}")


class QueueStats(msgspec.Struct, frozen=True, kw_only=True):
    """A queue at one moment. `states` counts open jobs; `delayed` is the part of `queued` that is not due yet."""

    queue: str
    states: dict[State, int]
    delayed: int
    control: Control
    workers: int
    feed_entries: int
    #: How full the feed is, from 0 to 1; 0 without a reader, when it is bounded by itself.
    feed_share: float = 0.0
    dead_letters: int
    #: Jobs in line or running: what intake limits and backlog alerts are about.
    backlog: int = 0
    #: Leases that are held, and retries in the pending list.
    pending: int = 0
    #: The same by tenant, as far as the engine keeps tenants apart; for those who may see all of them.
    tenants: dict[str, int] = {}


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that claims from a queue, as the engine last saw it."""

    worker: str
    queue: str
    seen_at_ms: int
    #: Leases that it holds.
    pending: int


class FeedEntry(msgspec.Struct, frozen=True, gc=False):
    """One atomic step's moves, in order. `nonce` tells an entry from another at the same position after a wipe."""

    position: str
    nonce: str
    events: list[Event]
    #: A durable submission waits for it: do not linger.
    hurry: bool = False
    #: About how many bytes it takes; 0: unknown.
    size: int = 0
    #: Why nothing could be read from it: another program's, damaged, or of a newer release.
    fault: str = ""


class Survey(msgspec.Struct, frozen=True):
    """A cut through the engine, made in one atomic step: which of the asked jobs it does not know, and where its
    feed ended at that moment (both empty while the feed has never had an entry)."""

    unknown: list[str]
    position: str
    nonce: str
    at_ms: int


class KnownKey(msgspec.Struct, frozen=True):
    """An idempotency key that the ledger remembers (requirement E1), to be known to the engine again after a wipe."""

    tenant_id: str
    key: str
    job_id: str
    expires_at_ms: int


class Finding(msgspec.Struct, frozen=True):
    """One line of `holdfast doctor`."""

    check: str
    ok: bool
    message: str
    advice: str = ""
    #: A finding that is not ok but does not endanger jobs.
    warning: bool = False


def feed_finding(stats: QueueStats) -> Finding:
    """Whether a queue's feed has room left."""
    good = stats.feed_share < FEED_WARNING
    return Finding(
        f"feed of {stats.queue}",
        good,
        f"{stats.feed_entries:,} entries, {stats.feed_share:.0%} of its limit",
        "" if good else "its reader is behind: at the limit new jobs are refused; bring the ledger back",
    )


class Engine(Protocol):
    """Decides. One instance serves one event loop; `sibling` makes another for a second thread."""

    options: EngineOptions
    counts: Counts

    # Life ------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect and prepare the store. Raises `EngineUnavailable` at once if that fails."""
        ...

    async def close(self) -> None:
        """Give connections back. Safe to call twice."""
        ...

    def sibling(self) -> Engine:
        """An engine on the same store with connections of its own, not opened yet."""
        ...

    # A job's life ----------------------------------------------------------------------------------

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

    async def resume(self, worker: str, queues: Sequence[str], held: Collection[Lease]) -> list[Claim]:
        """Leases that the engine says this worker holds and that are not among the `held` ones.

        For after a lost reply: same attempt, same deliveries as in the reply that never came.
        """
        ...

    async def settle(self, settlements: Sequence[Settlement]) -> list[Answer]:
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

    async def leave(self, worker: str, queues: Sequence[str]) -> None:
        """The worker is gone for good; forgets it unless it still holds leases."""
        ...

    # Operators -------------------------------------------------------------------------------------

    async def move(
        self,
        queue: str,
        job_id: str,
        to: State,
        *,
        actor: str,
        reason: str,
        expected: State | None = None,
        event: str = "",
        consent: Consent | None = None,
        approval_id: str = "",
        audit: str = "",
    ) -> State:
        """An operator's move; returns the state it came from.

        `event` is what the move means where it can mean several things (`core.states.EVENT_CHOICES`). `consent` is
        people's yes to the job's `ask`, and goes with a move from `waiting_approval` to `queued`
        (`core.verdict.answered`); such a move without one asks again when the job is run. With an `approval_id` the job
        moves only while it waits for that approval: a decision that arrives late must not answer the next request.
        `audit` is the type of an `operator.…` event that the same atomic step leaves in the feed beside the move, with
        actor, reason, and the states before and after in its data.

        To `queued` (resume, approve), `suspended`, `waiting_approval`, `cancelled`, `dlq_pending`,
        `dlq_recorded` or `failed`. A running job that is moved is fenced off from its worker at once, which
        learns of it by a `Cancelled` notice. Raises `UnknownJob`, or `TransitionInvalid` (also when the
        job is not in the `expected` state, or does not wait for that approval) and changes nothing.
        """
        ...

    async def control(self, queue: str) -> Control:
        """The queue's controls."""
        ...

    async def set_control(
        self,
        queue: str,
        control: Control,
        *,
        expected: Control | None = None,
        actor: str = "",
        reason: str = "",
        audit: str = "",
    ) -> None:
        """Set them, and tell everyone who listens.

        Raises `ControlChanged` and changes nothing if they are no longer as `expected`. `audit` as in `move`; before
        and after are the controls. Tenants that are named get a part of the queue of their own, of which there are
        `MAX_TENANTS`: more are `InvalidOption`.
        """
        ...

    async def expedite(self, queue: str, job_id: str, *, actor: str, reason: str, audit: str = "") -> None:
        """A job that waits for its time (delayed, or for a retry) is due now; leaves a `task.expedited` event.

        Raises `UnknownJob`, or `TransitionInvalid` (to `running`) if it waits for no time.
        """
        ...

    async def take(self, worker: str, queue: str, job_id: str) -> Claim:
        """Lease this one job, whether it is due or not and whoever is before it in line, as `claim` would.

        For a queued or retrying job. Raises `UnknownJob`, or `TransitionInvalid` (to `running`) for any other.
        """
        ...

    # Readers ---------------------------------------------------------------------------------------

    async def get(self, queue: str, job_ids: Sequence[str]) -> list[JobView | None]:
        """Live state, one answer each; None for unknown or expired ones."""
        ...

    async def find(self, queue: str, states: Collection[State], limit: int) -> list[JobView]:
        """Some jobs in these states, newest first as far as the store can tell. For people, not for logic."""
        ...

    async def wait_final(self, queue: str, job_id: str, wait_ms: int) -> JobView | None:
        """The job once it is final, or as it is after `wait_ms`; None if unknown."""
        ...

    async def stats(self, queue: str) -> QueueStats:
        """Counts of open jobs and the queue's controls."""
        ...

    async def workers(self, queues: Sequence[str]) -> list[WorkerView]:
        """Workers that claim from these queues, by name."""
        ...

    async def queues(self) -> list[str]:
        """Queues that ever had a job, sorted."""
        ...

    async def reach(
        self, queues: Iterable[str], step: Callable[[str], Awaitable[T]]
    ) -> tuple[dict[str, T], dict[str, EngineUnavailable]]:
        """Take a step for each queue, in order: what came of it, and which of them did not answer while others did, and
        why: queues may be on several servers, and one may be damaged. Raises if none did."""
        return {queue: await step(queue) for queue in queues}, {}

    async def listen(self, queues: Sequence[str], wait_ms: int) -> list[Notice]:
        """What happened since the last call on this instance; waits up to `wait_ms` for the first."""
        ...

    async def now_ms(self) -> int:
        """The engine's clock."""
        ...

    async def diagnose(self, queues: Sequence[str]) -> list[Finding]:
        """Whether this store can be trusted with jobs, and what to do if not."""
        ...

    # The ledger's end ------------------------------------------------------------------------------

    async def incarnation(self, queue: str) -> str:
        """Whose memory the engine has now: another one after a restart or a fail-over, which may have lost some."""
        ...

    async def register_reader(self, queue: str, incarnation: str = "", *, reminded: bool = False) -> None:
        """From now on nothing unread is dropped from the feed, and with a ledger the queue takes jobs, in this
        incarnation only; without one named, in the present one.

        `reminded`: keys were put back before; the feed says so, if it has said anything, in an entry without events.
        """
        ...

    async def feed(self, queue: str, start: str, limit: int) -> list[FeedEntry]:
        """Entries from a position on, that one included, oldest first; `start=""` is the oldest one kept.

        A reader begins at the entry it read last and looks at its nonce: missing or another one means that the feed
        has forked (a wipe, a fail-over to a stale replica).
        """
        ...

    async def wait_feed(self, positions: Mapping[str, str], wait_ms: int) -> list[str]:
        """Queues whose feed has an entry after the given position ("": any); waits up to `wait_ms` for the first."""
        ...

    async def forget(self, queue: str, position: str) -> None:
        """The reader has everything before `position`; the entry at `position` itself is kept (it proves identity),
        and `feed_tail` entries before it."""
        ...

    async def survey(self, queue: str, job_ids: Sequence[str]) -> Survey:
        """Which of these jobs (at most `MAX_BATCH`) are unknown, and where the feed ends, in one atomic step."""
        ...

    async def restore(self, queue: str, cut: Survey, jobs: Sequence[JobView]) -> list[bool]:
        """Put lost jobs back under their own id, state, attempt, retry count and due time; whether each was.

        Only jobs that are still unknown, and only while the feed still has the cut's entry under the cut's nonce
        (while it is still empty, if it was; else nothing is restored). `running` jobs go back in line: their lease is
        gone. `next_attempt_at_ms` is when a queued or retrying job is due, `meta.run_at_ms` what its submitter asked
        for. Each leaves a `task.restored` event. Their idempotency keys are known again, for as long as they are open.
        Raises `InvalidOption` and restores nothing if one of them has ended.
        """
        ...

    async def remember_keys(self, queue: str, keys: Sequence[KnownKey]) -> None:
        """Know these keys again until they end; one that is known to the engine already stays as it is."""
        ...

    async def prune(self, queues: Sequence[str]) -> int:
        """Drop what has expired: old results, dead consumers; returns how many things went."""
        ...
