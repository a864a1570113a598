"""Data structures of a job, shared by all engines, the ledger and workers.

A caller submits an `Envelope` and gets a `Receipt`, a worker gets a `Claim`, a reader a `JobInfo`, and the feed passes
an `Event` to the ledger. `JobKey` identifies one job in the ledger. `Meta` is the part that grows during a job's
lifetime: counters, the job's policy, history (requirement Y6). Instants are whole milliseconds of the engine's clock.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from enum import IntEnum, StrEnum
from typing import Annotated, Any, Final

import msgspec

from holdfast.core.fingerprint import FINGERPRINT_LENGTH
from holdfast.core.retry import Retry
from holdfast.core.states import State

DEFAULT_QUEUE: Final = "default"
#: Deliveries of webhooks are jobs of this queue.
WEBHOOK_QUEUE: Final = "holdfast.webhooks"
DEFAULT_TENANT: Final = "default"

#: A history keeps this many attempts: the first ones and the latest ones.
HISTORY_FIRST: Final = 5
HISTORY_LATEST: Final = 20


class Priority(IntEnum):
    """A job's priority. 0 is served first; `priority_order` keeps the lowest from starving."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


class KeyReuse(StrEnum):
    """What a submission gets whose idempotency key belongs to another request."""

    #: `IdempotencyKeyReused`. The default.
    REFUSE = "refuse"
    #: The first job, as a duplicate; a `task.duplicate` event records that the arguments differ.
    RETURN = "return"


#: The order of priorities for successive claims. Out of eight claims, one begins with the lowest priority and two with
#: the middle one, so that a flood of urgent jobs slows the rest but never stops it.
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


def priority_order(count: int) -> tuple[int, ...]:
    """The order of priorities for a worker's `count`-th claim."""
    return _ORDERS[count % len(_ORDERS)]


class Failure(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why an attempt did not succeed. `code` is holdfast's and stable, `type` is the exception's name."""

    code: str
    message: str
    type: str = ""
    stack: str = ""


class Attempt(msgspec.Struct, frozen=True, omit_defaults=True):
    """One run of a job, and how it ended."""

    number: int
    worker: str
    started_at_ms: int
    finished_at_ms: int
    outcome: str
    failure: Failure | None = None


#: Bounds are checked when a message is read: other programs can write to a stream.
Count = Annotated[int, msgspec.Meta(ge=0, le=10**9)]
InstantMs = Annotated[int, msgspec.Meta(ge=0, le=10**15)]
PriorityLevel = Annotated[int, msgspec.Meta(ge=0, le=len(Priority) - 1)]


class ApprovalRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request for approval; the job does not run until it is decided (requirements A1–A3)."""

    approval_id: str
    #: Hash of task, tenant and payload as shown to the approvers; an approval covers exactly these.
    payload_hash: str
    #: Empty: a guard's request, whether the job may run at all; otherwise the name that the task gave its request.
    name: str = ""
    reason: str = ""
    #: Names of the guards and rules that require approval.
    policies: tuple[str, ...] = ()
    #: Number of different approvers needed.
    quorum: Annotated[int, msgspec.Meta(ge=1, le=100)] = 1
    #: A request still pending at this time cancels the job; 0: no deadline.
    deadline_at_ms: InstantMs = 0
    #: Who submitted the job, if known; may not approve it.
    requested_by: str = ""
    #: What the task shows to the approvers: plain JSON.
    details: Any = None


class Approval(msgspec.Struct, frozen=True, omit_defaults=True):
    """The decision "approved" on an `ApprovalRequest`."""

    approval_id: str
    by: tuple[str, ...]
    at_ms: InstantMs
    reason: str = ""
    #: As in the `ApprovalRequest`.
    payload_hash: str = ""


class ReplayOrigin(msgspec.Struct, frozen=True, omit_defaults=True):
    """The dead letter that a job replays (requirement D3)."""

    dlq_id: str
    job_id: str
    #: The first job's idempotency key: effects whose keys derive from it stay the same effects.
    key: str


class Meta(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fields of a job besides its arguments; empty for a new job with default policy."""

    retry_count: Count = 0
    #: Negative for a retry in the pending list: its earlier deliveries were not lost leases.
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
    #: The open approval request; set while the job is in `waiting_approval`.
    approval_request: ApprovalRequest | None = None
    #: The payload hash that a guard allowed or approvers approved; another payload needs a new approval.
    approved_hash: str = ""
    #: Approvals of the task's own requests, by name.
    approvals: dict[str, Approval] | None = None
    replay: ReplayOrigin | None = None
    #: URL that is notified when the job ends (requirement H7).
    webhook: str = ""
    #: W3C trace context of the submitter (requirement M3).
    traceparent: str = ""
    #: Name of the token with which it was submitted over HTTP.
    submitted_by: str = ""
    #: The job's own idempotency window, counted from its submission; 0: the engine's.
    key_window_ms: InstantMs = 0
    #: Since when workers have released it because they do not know its task, or not with this schema; 0: none has.
    unknown_since_ms: InstantMs = 0
    #: Task and arguments under the job's idempotency key (`core.fingerprint`); the engine sets it. Empty: no key.
    key_fingerprint: Annotated[str, msgspec.Meta(max_length=FINGERPRINT_LENGTH)] = ""


EMPTY_META: Final = Meta()

#: Renamed keys of `Meta` (old → current) and of event data (current → old): stores may still hold the old ones.
_OLD_META_KEYS: Final = {"ask": "approval_request", "cleared": "approved_hash", "consents": "approvals"}
_OLD_DATA_KEYS: Final = {"approval_request": "ask", "approval": "consent"}
_OLD_META: Final = re.compile(rb'"(?:ask|cleared|consents)"')
_META: Final = msgspec.json.Decoder(Meta)


def decode_meta(text: bytes | str | None) -> Meta:
    """Decode `Meta` from stored JSON; `EMPTY_META` if there is none. Raises `msgspec.MsgspecError`."""
    if not text:
        return EMPTY_META
    encoded = text.encode() if isinstance(text, str) else text
    if _OLD_META.search(encoded) is None:
        return _META.decode(encoded)
    return convert_meta(msgspec.json.decode(encoded))


def convert_meta(fields: Any) -> Meta:
    """Convert decoded JSON to `Meta`. Raises `msgspec.ValidationError`."""
    if isinstance(fields, dict):
        fields = {_OLD_META_KEYS.get(key, key): value for key, value in fields.items()}
    return msgspec.convert(fields, Meta)


def approval_data(data: Mapping[str, Any] | None, name: str) -> Any:
    """The `approval_request` or `approval` in an event's data; None if it has none."""
    data = data or {}
    return data.get(name) or data.get(_OLD_DATA_KEYS[name])


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
    #: It must be approved first, as a guard or the submitter requires.
    hold: bool = False
    #: The caller waits until the ledger has it: the feed entry is marked as urgent.
    durable: bool = False
    #: Fingerprint of the schema that the arguments were checked with; empty: they were not.
    schema: str = ""
    on_key_reuse: KeyReuse = KeyReuse.REFUSE


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """The engine's answer to one envelope. A duplicate names the job that was there first."""

    job_id: str
    duplicate: bool = False


class Lease(msgspec.Struct, frozen=True, gc=False):
    """The right to finish one attempt: message position, delivery count and worker incarnation."""

    queue: str
    job_id: str
    position: str
    deliveries: int
    worker: str

    @property
    def token(self) -> str:
        """Unique to one attempt; identifies a settlement that was sent twice."""
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
    #: The delivery count with which it was claimed from its queue. Each further delivery is a lease that was lost.
    first_delivery: int = 1

    @property
    def job_id(self) -> str:
        return self.lease.job_id

    @property
    def queue(self) -> str:
        return self.lease.queue

    @property
    def is_suspect(self) -> bool:
        """Whether a worker lost it and it may be the cause: it must run alone."""
        return self.lease.deliveries > self.first_delivery

    @property
    def lost_alone(self) -> int:
        """Leases that it lost while it ran alone: all but the first, which it may have lost among other jobs."""
        return max(0, self.lease.deliveries - self.first_delivery - 1)


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
    #: As in the `Envelope`, while the job is open; lost if the engine loses the job and the ledger restores it.
    schema: str = ""


class Event(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One event of a job's history, as the feed passes it to the ledger (requirement S4)."""

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
    #: Data of this event type only: the envelope at creation, the result, the failure, the previous owner.
    data: dict[str, Any] | None = None


def new_job_ids(count: int) -> list[str]:
    """New ids: UUID version 7 in 32 hexadecimal digits, so that ids of one time are adjacent in an index."""
    prefix = f"{time.time_ns() // 1_000_000:012x}7"
    random = os.urandom(10 * count).hex()
    ids = []
    for start in range(0, 20 * count, 20):
        variant = "89ab"[int(random[start], 16) & 3]
        ids.append(f"{prefix}{random[start + 1 : start + 4]}{variant}{random[start + 4 : start + 19]}")
    return ids


def append_attempt(history: tuple[Attempt, ...], attempt: Attempt) -> tuple[Attempt, ...]:
    """Return the history plus one attempt, bounded.

    A job that is retried for days during an outage stays small.
    """
    grown = (*history, attempt)
    if len(grown) > HISTORY_FIRST + HISTORY_LATEST:
        grown = grown[:HISTORY_FIRST] + grown[-HISTORY_LATEST:]
    return grown


#: The most jobs in one atomic step; larger batches are split. A Redis script takes 4–6 ms for 500.
MAX_BATCH: Final = 500


class JobKey(msgspec.Struct, frozen=True):
    """Identity of one job in the ledger.

    Ids are unique within a queue only, since other programs may choose them.
    """

    tenant_id: str
    queue: str
    job_id: str
