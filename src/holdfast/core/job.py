"""Data structures of a job, shared by all engines, the ledger and workers.

`Envelope` is what a caller submits, `Receipt` the engine's answer, `Claim` what a worker gets, `JobInfo` what a reader
gets, `Event` what the feed passes to the ledger. `JobKey` identifies one job in the ledger. `Meta` is the part that
grows during a job's lifetime: counters, its own policy, history (requirement Y6). Instants are whole milliseconds of
the engine's clock.
"""

from __future__ import annotations

import os
import time
from enum import IntEnum
from typing import Annotated, Any, Final

import msgspec

from holdfast.core.retry import Retry
from holdfast.core.states import State

DEFAULT_QUEUE: Final = "default"
DEFAULT_TENANT: Final = "default"

#: A history keeps this many attempts: the first ones and the latest ones.
HISTORY_FIRST: Final = 5
HISTORY_LATEST: Final = 20


class Priority(IntEnum):
    """Which line a job waits in. 0 is served first; `read_order` keeps the last from starving."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


#: Claims take the lines in this order, turn by turn: out of eight turns one begins with the lowest
#: line and two with the middle one, so that a flood of urgent jobs slows the rest but never stops it.
_ORDERS: Final = (
    (0, 1, 2),
    (0, 1, 2),
    (1, 0, 2),
    (0, 1, 2),
    (2, 0, 1),
    (0, 1, 2),
    (1, 0, 2),
    (0, 1, 2),
)


def priority_order(turn: int) -> tuple[int, ...]:
    """The order of priorities for the `turn`-th claim of a worker."""
    return _ORDERS[turn % len(_ORDERS)]


class Failure(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why an attempt did not succeed. `code` is ours and stable, `type` is the exception's name."""

    code: str
    message: str
    type: str = ""
    stack: str = ""


class Attempt(msgspec.Struct, frozen=True, omit_defaults=True):
    """One run of a job that did not end it, or that ended it."""

    number: int
    worker: str
    started_at_ms: int
    finished_at_ms: int
    outcome: str
    failure: Failure | None = None


#: Bounds are checked when a message is read: other programs can write to a line.
Count = Annotated[int, msgspec.Meta(ge=0, le=10**9)]
InstantMs = Annotated[int, msgspec.Meta(ge=0, le=10**15)]
PriorityLevel = Annotated[int, msgspec.Meta(ge=0, le=len(Priority) - 1)]


class ApprovalRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A question to people that keeps a job from running until they answer (requirements A1–A3)."""

    approval_id: str
    #: Of task, tenant and payload as they were shown; an approval is for these and no others.
    payload_hash: str
    #: Empty: a guard asks whether the job may run at all; else the task's own question, by the name that it gave.
    name: str = ""
    reason: str = ""
    #: Names of the guard's rules that want it.
    policies: tuple[str, ...] = ()
    #: How many different people have to approve.
    quorum: Annotated[int, msgspec.Meta(ge=1, le=100)] = 1
    #: Unanswered by then, the job is cancelled; 0: it waits for ever.
    deadline_at_ms: InstantMs = 0
    #: Who wants the job, as far as is known: may not approve it.
    requested_by: str = ""
    #: What the task shows to whoever decides: plain JSON.
    details: Any = None


class Approval(msgspec.Struct, frozen=True, omit_defaults=True):
    """People's yes to an `Ask`."""

    approval_id: str
    by: tuple[str, ...]
    at_ms: InstantMs
    reason: str = ""
    #: Of what was shown to them, as in the `Ask`.
    payload_hash: str = ""


class ReplayOrigin(msgspec.Struct, frozen=True, omit_defaults=True):
    """The dead letter that a job was made from (requirement D3)."""

    dlq_id: str
    job_id: str
    #: The first job's idempotency key: effects that are named by it are still the same effects.
    key: str


class Meta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a job carries beside its arguments; empty for a fresh job with default policy."""

    retry_count: Count = 0
    #: Below zero for a retry in the pending list, whose earlier deliveries were no lost leases.
    lost_leases: Annotated[int, msgspec.Meta(ge=-(10**9), le=10**9)] = 0
    unavailable_count: Count = 0
    unavailable_since_ms: InstantMs = 0
    priority: PriorityLevel = Priority.NORMAL
    run_at_ms: InstantMs = 0
    retry: Retry | None = None
    max_retries: Count | None = None
    context: dict[str, Any] | None = None
    history: tuple[Attempt, ...] = ()
    dlq_id: str = ""
    #: What people are asked at the moment; there while the job is in `waiting_approval`.
    ask: ApprovalRequest | None = None
    #: The payload hash that a guard has allowed, or people have approved; another payload has to be asked for again.
    cleared: str = ""
    #: Answers to the task's own questions, by name.
    consents: dict[str, Approval] | None = None
    replay: ReplayOrigin | None = None
    #: Told of the job's end (requirement H7).
    webhook: str = ""
    #: W3C trace context of whoever submitted it (requirement M3).
    traceparent: str = ""
    #: Who submitted it over HTTP, by the name of their token.
    submitted_by: str = ""
    #: How long after its submission its idempotency key is known, if not for as long as the engine's others.
    key_window_ms: InstantMs = 0


EMPTY_META: Final = Meta()


class Envelope(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A submission. `payload` is a JSON object of keyword arguments (or an array of positional ones)."""

    job_id: str
    task: str
    payload: bytes
    queue: str = DEFAULT_QUEUE
    tenant_id: str = DEFAULT_TENANT
    #: Empty: the job id is the key (requirement E1).
    idempotency_key: str = ""
    trace_id: str = ""
    meta: Meta = EMPTY_META
    #: Run no earlier than this long after acceptance, by the engine's clock …
    delay_ms: int = 0
    #: … or no earlier than this instant; 0 is "now".
    run_at_ms: int = 0
    #: A guard wants a person to approve it first.
    hold: bool = False
    #: Somebody waits until the ledger has it: its feed entry says `hurry`.
    durable: bool = False


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """The engine's answer to one envelope. A duplicate names the job that was there first."""

    job_id: str
    duplicate: bool = False


class Lease(msgspec.Struct, frozen=True, gc=False):
    """The right to finish one attempt: this place, delivered this often, to this worker incarnation."""

    queue: str
    job_id: str
    position: str
    deliveries: int
    worker: str

    @property
    def token(self) -> str:
        """Names one attempt for ever; a settle sent twice is recognised by it."""
        return f"{self.position}:{self.deliveries}:{self.worker}"


class Claim(msgspec.Struct, frozen=True, gc=False):
    """A leased job, ready to run."""

    lease: Lease
    task: str
    payload: bytes
    tenant_id: str
    idempotency_key: str
    trace_id: str
    attempt: int
    created_at_ms: int
    claimed_at_ms: int
    meta: Meta

    @property
    def job_id(self) -> str:
        return self.lease.job_id

    @property
    def queue(self) -> str:
        return self.lease.queue


class JobInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A job as a reader sees it at one moment."""

    job_id: str
    task: str
    queue: str
    tenant_id: str
    state: State
    attempt: int
    payload: bytes
    idempotency_key: str
    trace_id: str
    meta: Meta
    created_at_ms: int
    worker: str = ""
    result: bytes | None = None
    failure: Failure | None = None
    next_attempt_at_ms: int = 0
    finished_at_ms: int = 0


class Event(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One line of a job's story, as the feed hands it to the ledger (requirement S4)."""

    type: str
    job_id: str
    at_ms: int
    tenant_id: str = DEFAULT_TENANT
    from_state: State | None = None
    to_state: State | None = None
    attempt: int = 0
    retry_count: int = 0
    worker: str = ""
    message: str = ""
    #: What only this kind of event has: the envelope at creation, the result, the failure, the old owner.
    data: dict[str, Any] | None = None


def new_job_ids(count: int) -> list[str]:
    """Fresh ids: UUID version 7 in 32 hexadecimal digits, so that neighbours in time are neighbours in an index."""
    stamp = f"{time.time_ns() // 1_000_000:012x}7"
    random = os.urandom(10 * count).hex()
    ids = []
    for start in range(0, 20 * count, 20):
        variant = "89ab"[int(random[start], 16) & 3]
        ids.append(f"{stamp}{random[start + 1 : start + 4]}{variant}{random[start + 4 : start + 19]}")
    return ids


def append_attempt(history: tuple[Attempt, ...], attempt: Attempt) -> tuple[Attempt, ...]:
    """A history with one more attempt, bounded: a job that waits out an outage for days stays small."""
    grown = (*history, attempt)
    if len(grown) > HISTORY_FIRST + HISTORY_LATEST:
        grown = grown[:HISTORY_FIRST] + grown[-HISTORY_LATEST:]
    return grown


#: The most jobs that one atomic step handles; larger batches are cut. 500 take a Redis script 4–6 ms.
MAX_BATCH: Final = 500


class JobKey(msgspec.Struct, frozen=True):
    """Names one job in the ledger: ids are unique within a queue only, since other programs may choose them."""

    tenant_id: str
    queue: str
    job_id: str
