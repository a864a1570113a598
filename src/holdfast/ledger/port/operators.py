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

from collections.abc import Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from holdfast.core.job import JobKey
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
    #: The payload is not the one that was shown, or the job ended without an answer.
    WITHDRAWN = "withdrawn"


class VoteRow(msgspec.Struct, frozen=True, kw_only=True):
    person: str
    approve: bool
    reason: str
    at: datetime


class ApprovalRow(msgspec.Struct, frozen=True, kw_only=True):
    """A question to people, and what came of it."""

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
    """A dead letter that is to be submitted as a new job, with all that this takes."""

    tenant_id: str
    dlq_id: str
    #: The job that the letter is about.
    job_id: str
    queue: str
    job_type: str
    trace_id: str
    #: Of the very first job, if the letter is a replay's own: effects under it are still the same effects.
    idempotency_key: str
    context: Any
    priority: int
    #: As it was, or as edited.
    payload: bytes
    #: The new job, and the how manyeth replay it is: its key is `dlq:<dlq_id>:<number>`.
    new_job_id: str
    number: int
    actor: str


class OperatorStore(Protocol):
    """All raise `LedgerUnavailable`; `Unknown` for what is not there; `Conflict` for what is decided already.

    `tenants` are those that the caller may see; None means all. What is of another tenant is not there.
    """

    # Tokens

    async def add_token(self, token: TokenRow, action: AuditEntry) -> None: ...
    async def token(self, token_id: str) -> TokenRow | None: ...
    async def tokens(self) -> list[TokenRow]: ...
    async def revoke_token(self, token_id: str, action: AuditEntry) -> None: ...

    # Approvals: requested by the engine's `approval.requested` (the projector, or the embedded engine, writes the row)

    async def vote(
        self, tenants: Sequence[str] | None, approval_id: str, *, person: str, approve: bool, reason: str
    ) -> ApprovalRow:
        """The approval after this vote: one no rejects it, `quorum` different people's yes approves it.

        Raises `Conflict` if it is decided, expired, or this person has voted; `Forbidden` for whoever asked for it.
        """
        ...

    async def withdraw_approval(self, tenant_id: str, approval_id: str, reason: str) -> None:
        """Nobody has to decide any more; nothing if somebody has. The engine is still to be told (`delivered`)."""
        ...

    async def expire_approvals(self, limit: int) -> list[ApprovalRow]:
        """Those whose deadline has passed unanswered, marked as expired."""
        ...

    async def undelivered_approvals(self, limit: int, after: ApprovalRow | None = None) -> list[ApprovalRow]:
        """Decided ones that the engine has not been told of: by tenant, the oldest decision first; those that come
        `after` one, for whoever cannot deliver all."""
        ...

    async def mark_delivered(self, told: Sequence[ApprovalRow]) -> None:
        """The engine has been told of these, or there is nobody left to tell."""
        ...

    async def mark_undelivered(self, queue: str, since_ms: int) -> int:
        """The engine may have forgotten what it was told of these in so many milliseconds: it is to be told again.
        Returns how many."""
        ...

    # Dead letters

    async def request_discard(self, tenants: Sequence[str] | None, dlq_id: str, *, person: str, reason: str) -> None:
        """Raises `Conflict` unless the item is open."""
        ...

    async def confirm_discard(self, tenants: Sequence[str] | None, dlq_id: str, *, person: str) -> None:
        """Raises `Forbidden` if the same person asked, `Conflict` if nobody did."""
        ...

    async def keep(self, tenants: Sequence[str] | None, dlq_id: str, *, person: str, reason: str) -> None:
        """A discard that was asked for is not wanted after all."""
        ...

    async def reserve_replay(
        self,
        tenants: Sequence[str] | None,
        dlq_id: str,
        *,
        person: str,
        reason: str,
        payload: bytes | None,
        expected: int | None = None,
    ) -> ReplayReservation:
        """Reserve the next replay; `payload` if it was edited. A second call while one is on its way gets that one.

        An item can be replayed again once its replay has been submitted. Raises `Conflict` for an item
        that is discarded or that somebody wants to discard, and if none is on its way and it has been replayed another
        number of times than `expected` (`replay_count`): two people who saw the same item make one job.
        """
        ...

    async def cancel_replay(self, replay: ReplayReservation, *, person: str, reason: str) -> None:
        """A reserved replay that will not be submitted (a guard denies it): the item is open again, its number is not
        used a second time, and the log says why. Nothing if it was submitted meanwhile."""
        ...

    async def unsubmitted_replays(self, limit: int, after: ReplayReservation | None = None) -> list[ReplayReservation]:
        """Replays that were begun and not handed in, by tenant and item; those that come `after` one."""
        ...

    async def mark_submitted(self, replays: Sequence[ReplayReservation]) -> None:
        """These have been handed in."""
        ...

    # Effects

    async def resolve_effect(self, outcome: EffectOutcome, action: AuditEntry) -> None:
        """A person's word on an effect in doubt: done with a result, or free again.

        Raises `Unknown` if there is no such key, `Conflict` if it was reserved or settled meanwhile.
        """
        ...

    # The operators' log and alerts

    async def record_audit(self, actions: Sequence[AuditEntry]) -> None: ...

    async def raise_alert(self, key: str, action: AuditEntry) -> bool:
        """Whether it was raised now: one that stands already is not raised twice, whoever raises it."""
        ...

    async def clear_alert(self, key: str, action: AuditEntry) -> bool: ...


#: Approvals and alerts that are older are no news: nobody had subscribed when they happened.
MAX_NOTIFICATION_AGE: Final = timedelta(days=1)

ALERT_PREFIX: Final = "alert."


class FinishedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job that has ended, without its insides."""

    key: JobKey
    job_type: str
    state: State
    attempt: int
    retry_count: int
    trace_id: str
    idempotency_key: str
    error_code: str | None
    #: For outsiders.
    error_message: str | None
    #: JSON.
    result: str | None
    dlq_id: str | None
    #: An address, or `core.webhook.SUBSCRIBERS`.
    webhook: str
    created_at: datetime
    finished_at: datetime
    #: W3C trace context of its submission; empty if it was not traced.
    traceparent: str


class ApprovalNotification(msgspec.Struct, frozen=True, kw_only=True):
    """An approval whose status subscribers have not been told of."""

    tenant_id: str
    approval_id: str
    job_id: str
    queue: str
    job_type: str
    status: ApprovalStatus
    told: ApprovalStatus | None
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
    """An alert that was raised or has ended."""

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
    """Writes marks. Each call is one transaction; to mark what is marked does nothing."""

    async def jobs(self, keys: Sequence[JobKey]) -> None: ...
    async def approvals(self, told: Sequence[ApprovalNotification]) -> None: ...
    async def alerts(self, told: Sequence[AlertNotification]) -> None: ...
