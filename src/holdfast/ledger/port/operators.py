"""Ports for operators' writes and for marks on sent notifications, with the rows they use.

`OperatorStore` keeps tokens, votes on approvals, decisions on dead letters, the audit log and alerts. Each write is one
transaction together with its audit entry; of two concurrent decisions the second raises `Conflict`. Work that the
engine still has to do (move an approved job, submit a replay) is left as a mark in the ledger. Upkeep finishes what a
crash interrupted; every such step can be repeated.

`NotificationMarks` marks rows whose webhook notifications were submitted (requirement H7). Rows are marked after their
deliveries were submitted under idempotency keys, so a crash between the two steps, or a second process doing the same,
does not send a notification twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from holdfast.core.announcement import AnnouncedTask
from holdfast.core.job import JobKey, Meta
from holdfast.core.principal import AuditEntry, Role
from holdfast.core.states import State

if TYPE_CHECKING:
    from holdfast.ledger.port.effects import EffectOutcome


class TokenRow(msgspec.Struct, frozen=True, kw_only=True):
    """A token without its secret."""

    token_id: str
    name: str
    role: Role
    tenants: tuple[str, ...]
    #: SHA-256 of the secret, in hexadecimal digits.
    secret_hash: str
    created_by: str
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None


class ApprovalStatus(StrEnum):
    REQUESTED = "requested"
    APPROVED = "approved"
    REJECTED = "rejected"
    EXPIRED = "expired"
    #: The payload is not the one that was shown, or the job ended without a decision.
    WITHDRAWN = "withdrawn"


class VoteRow(msgspec.Struct, frozen=True, kw_only=True):
    voter: str
    approve: bool
    reason: str
    at: datetime


class ApprovalRow(msgspec.Struct, frozen=True, kw_only=True):
    """An approval request, and its decision if there is one."""

    tenant_id: str
    approval_id: str
    job_id: str
    queue: str
    job_type: str
    status: ApprovalStatus
    name: str
    payload_hash: str
    policies: tuple[str, ...]
    reason: str
    details: Any
    quorum: int
    requested_by: str
    requested_at: datetime
    deadline: datetime | None
    decided_by: str | None
    decided_at: datetime | None
    decision_reason: str | None
    votes: tuple[VoteRow, ...] = ()


class DeadLetterStatus(StrEnum):
    OPEN = "open"
    DISCARD_REQUESTED = "discard_requested"
    DISCARDED = "discarded"
    REPLAYED = "replayed"


class ReplayReservation(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter to be submitted as a new job, with everything the submission needs."""

    tenant_id: str
    dlq_id: str
    #: The job of the dead letter.
    job_id: str
    queue: str
    job_type: str
    trace_id: str
    #: Of the first job in a chain of replays: effects keyed by it remain the same effects.
    idempotency_key: str
    context: Any
    priority: int
    #: Original or edited.
    payload: bytes
    #: Id of the new job, and the replay's number; its idempotency key is `dlq:<dlq_id>:<number>`.
    new_job_id: str
    number: int
    actor: str
    #: What the failed job was submitted with; empty if the ledger no longer has the job.
    meta: Meta
    #: Whether it has to be submitted; False for a known key whose replay was submitted.
    pending: bool = True
    #: Whether the key was known.
    duplicate: bool = False
    #: The job of the replay before this one, which counts again if this one is cancelled; empty if unknown.
    previous: str = ""


class ReplayKey(msgspec.Struct, frozen=True):
    """The idempotency key of a replay."""

    key: str
    #: Of the dead letter and the options: the key cannot be used for others.
    fingerprint: str
    #: For how long the key is known.
    window_ms: int


#: Checks a payload: name of the task, payload.
PayloadCheck = Callable[[str, bytes], object]


class OperatorStore(Protocol):
    """Operators' writes.

    All raise `LedgerUnavailable`; `NotFound` if the row is absent; `Conflict` if it is already decided.

    `tenants` are those that the caller may see; None means all. Rows of other tenants are treated as absent.
    """

    # Tokens

    async def add_token(self, token: TokenRow, entry: AuditEntry) -> None: ...
    async def token(self, token_id: str) -> TokenRow | None: ...
    async def tokens(self, token_ids: Sequence[str] | None = None) -> list[TokenRow]:
        """Return these tokens, in one query; None: all."""
        ...

    async def revoke_token(self, token_id: str, entry: AuditEntry) -> None: ...

    # Tasks

    async def announce_tasks(self, tasks: Sequence[AnnouncedTask]) -> None:
        """Store announcements with the time of each, the current time if it has none.

        With them, a wiped engine does not refuse submissions of known tasks. Can be repeated.
        """
        ...

    async def announced_tasks(self) -> list[AnnouncedTask]:
        """As `ReadPort.announced_tasks`."""
        ...

    # Approvals: the projector, or the embedded engine, writes the row from the engine's event `approval.requested`

    async def vote(
        self, tenants: Sequence[str] | None, approval_id: str, *, actor: str, approve: bool, reason: str
    ) -> ApprovalRow:
        """Record a vote and return the approval.

        One rejection rejects it, `quorum` approving actors approve it. Raises `Conflict` if it is decided or expired or
        the actor has already voted; `Forbidden` if the actor requested it.
        """
        ...

    async def withdraw_approval(self, tenant_id: str, approval_id: str, reason: str) -> None:
        """Withdraw a pending approval; no effect on a decided one. The engine still has to be notified."""
        ...

    async def expire_approvals(self, limit: int) -> list[ApprovalRow]:
        """Mark pending approvals past their deadline as expired, and return them."""
        ...

    async def undelivered_approvals(self, limit: int, after: ApprovalRow | None = None) -> list[ApprovalRow]:
        """List decided approvals that the engine has not applied, by tenant, oldest decision first.

        Continues `after` one, so that approvals that cannot be delivered do not block the rest.
        """
        ...

    async def mark_delivered(self, rows: Sequence[ApprovalRow]) -> None:
        """Mark these as applied by the engine, or as no longer applicable."""
        ...

    async def mark_undelivered(self, queue: str, since_ms: int) -> int:
        """Mark approvals delivered in the last `since_ms` as undelivered; return how many.

        For an engine that may have lost them.
        """
        ...

    # Dead letters

    async def request_discard(self, tenants: Sequence[str] | None, dlq_id: str, *, actor: str, reason: str) -> None:
        """Request a discard. Raises `Conflict` unless the dead letter is open."""
        ...

    async def confirm_discard(self, tenants: Sequence[str] | None, dlq_id: str, *, actor: str) -> None:
        """Discard. Raises `Forbidden` if the same actor requested it, `Conflict` if no discard was requested."""
        ...

    async def keep(self, tenants: Sequence[str] | None, dlq_id: str, *, actor: str, reason: str) -> None:
        """Withdraw a requested discard."""
        ...

    async def reserve_replay(
        self,
        tenants: Sequence[str] | None,
        dlq_id: str,
        *,
        actor: str,
        reason: str,
        payload: bytes | None,
        check: PayloadCheck | None = None,
        key: ReplayKey | None = None,
        again: bool = False,
    ) -> ReplayReservation:
        """Reserve the next replay, or return the one that was reserved with the same key.

        `payload` is the edited payload, if it was edited. `check` is called before anything is written; an error that
        it raises is raised. Raises `AlreadyReplayed` while a replay is pending and, unless `again`, if the job of the
        latest replay is open or succeeded as far as the ledger knows; `ReplayKeyReused` if the key has another
        fingerprint; `Conflict` if the dead letter is discarded or its discard is requested.
        """
        ...

    async def cancel_replay(self, replay: ReplayReservation, *, actor: str, reason: str) -> None:
        """Cancel a reservation that will not be submitted, for example because a guard denies it.

        The dead letter is open again, or replayed as the job before it; the key is released, the number is not reused,
        and the audit log has the reason. No effect if the replay was submitted meanwhile.
        """
        ...

    async def unsubmitted_replays(self, limit: int, after: ReplayReservation | None = None) -> list[ReplayReservation]:
        """List reserved replays that were not submitted, by tenant and dead letter, continuing `after` one."""
        ...

    async def mark_submitted(self, replays: Sequence[ReplayReservation]) -> None:
        """Mark these as submitted, also those that another process has cancelled meanwhile."""
        ...

    # Effects

    async def resolve_effect(self, outcome: EffectOutcome, entry: AuditEntry) -> None:
        """Resolve an effect in doubt: done with a result, or its key released.

        Raises `NotFound` if the key does not exist, `Conflict` if it was reserved or settled meanwhile.
        """
        ...

    # Audit log and alerts

    async def record_audit(self, entries: Sequence[AuditEntry]) -> None: ...

    async def raise_alert(self, key: str, entry: AuditEntry) -> bool:
        """Raise an alert; return whether this call raised it. A standing alert is not raised twice."""
        ...

    async def clear_alert(self, key: str, entry: AuditEntry) -> bool: ...


#: Older approvals and alerts are not sent: there was no subscriber when they happened.
MAX_NOTIFICATION_AGE: Final = timedelta(days=1)

ALERT_PREFIX: Final = "alert."


class FinishedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job that has ended, as notifications show it."""

    key: JobKey
    job_type: str
    state: State
    attempt: int
    retry_count: int
    trace_id: str
    idempotency_key: str
    error_code: str | None
    #: Safe to show outside.
    error_message: str | None
    #: JSON.
    result: str | None
    dlq_id: str | None
    #: A URL, or `core.webhook_url.ANY_SUBSCRIBER`.
    webhook: str
    created_at: datetime
    finished_at: datetime
    #: W3C trace context of its submission; empty if it was not traced.
    traceparent: str


class ApprovalNotification(msgspec.Struct, frozen=True, kw_only=True):
    """An approval whose status has not been sent to subscribers."""

    tenant_id: str
    approval_id: str
    job_id: str
    queue: str
    job_type: str
    status: ApprovalStatus
    notified_status: ApprovalStatus | None
    name: str
    reason: str
    #: JSON.
    policies: str
    details: str | None
    quorum: int
    requested_by: str
    requested_at: datetime
    deadline: datetime | None
    decided_by: str | None
    decided_at: datetime | None
    decision_reason: str | None
    #: Of the job; empty if the ledger no longer has it.
    trace_id: str
    traceparent: str


class AlertNotification(msgspec.Struct, frozen=True, kw_only=True):
    """An alert that was raised or cleared."""

    tenant_id: str
    id: str
    type: str
    target: str
    target_id: str
    queue: str
    reason: str
    #: JSON.
    after: str | None
    at: datetime


class NotificationMarks(Protocol):
    """Marks rows whose notifications were submitted. Each call is one transaction and can be repeated."""

    async def jobs(self, keys: Sequence[JobKey]) -> None: ...
    async def approvals(self, rows: Sequence[ApprovalNotification]) -> None: ...
    async def alerts(self, rows: Sequence[AlertNotification]) -> None: ...
