"""What people do, as the ledger keeps it: tokens, votes on approvals, dead letters' fates, the operators' log, alerts.

Each write is one transaction with its entry in the operators' log; whoever comes second loses with `Conflict`. What has
to be carried on into the engine (an approved job has to move, a replayed letter has to be submitted) is left with a
mark, and upkeep carries on whatever a crash has left behind: every such step may be repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from holdfast.core.person import Role

if TYPE_CHECKING:
    from holdfast.ledger.port import Outcome


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the operators' log."""

    #: `operator.…`, `alert.…`
    type: str
    actor: str
    tenant_id: str
    #: What it was done to: `job`, `queue`, `dlq`, `approval`, `token` …
    target: str
    target_id: str
    queue: str = ""
    reason: str = ""
    #: Plain JSON.
    before: Any = None
    after: Any = None


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


class LetterStatus(StrEnum):
    OPEN = "open"
    DISCARD_REQUESTED = "discard_requested"
    DISCARDED = "discarded"
    REPLAYED = "replayed"


class ReplayRow(msgspec.Struct, frozen=True, kw_only=True):
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


class People(Protocol):
    """All raise `LedgerUnavailable`; `Unknown` for what is not there; `Conflict` for what is decided already.

    `tenants` are those that the caller may see; None means all. What is of another tenant is not there.
    """

    # Tokens

    async def add_token(self, token: TokenRow, action: Action) -> None: ...
    async def token(self, token_id: str) -> TokenRow | None: ...
    async def tokens(self) -> list[TokenRow]: ...
    async def revoke_token(self, token_id: str, action: Action) -> None: ...

    # Approvals: requested by the engine's `approval.requested` (the projector, or the embedded engine, writes the row)

    async def vote(
        self, tenants: Sequence[str] | None, approval_id: str, *, person: str, approve: bool, reason: str
    ) -> ApprovalRow:
        """The approval after this vote: one no rejects it, `quorum` different people's yes approves it.

        Raises `Conflict` if it is decided, expired, or this person has voted; `Forbidden` for whoever asked for it.
        """
        ...

    async def withdraw(self, tenant_id: str, approval_id: str, reason: str) -> None:
        """Nobody has to decide any more; nothing if somebody has. The engine is still to be told (`delivered`)."""
        ...

    async def expire(self, limit: int) -> list[ApprovalRow]:
        """Those whose deadline has passed unanswered, marked as expired."""
        ...

    async def undelivered_approvals(self, limit: int, after: ApprovalRow | None = None) -> list[ApprovalRow]:
        """Decided ones that the engine has not been told of: by tenant, the oldest decision first; those that come
        `after` one, for whoever cannot deliver all."""
        ...

    async def delivered(self, told: Sequence[ApprovalRow]) -> None:
        """The engine has been told of these, or there is nobody left to tell."""
        ...

    async def undeliver(self, queue: str, since_ms: int) -> int:
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

    async def begin_replay(
        self,
        tenants: Sequence[str] | None,
        dlq_id: str,
        *,
        person: str,
        reason: str,
        payload: bytes | None,
        expected: int | None = None,
    ) -> ReplayRow:
        """Reserve the next replay; `payload` if it was edited. A second call while one is on its way gets that one.

        An item can be replayed again once its replay has been submitted. Raises `Conflict` for an item
        that is discarded or that somebody wants to discard, and if none is on its way and it has been replayed another
        number of times than `expected` (`replay_count`): two people who saw the same item make one job.
        """
        ...

    async def abandon_replay(self, replay: ReplayRow, *, person: str, reason: str) -> None:
        """A reserved replay that will not be submitted (a guard denies it): the item is open again, its number is not
        used a second time, and the log says why. Nothing if it was submitted meanwhile."""
        ...

    async def unsubmitted_replays(self, limit: int, after: ReplayRow | None = None) -> list[ReplayRow]:
        """Replays that were begun and not handed in, by tenant and item; those that come `after` one."""
        ...

    async def submitted(self, replays: Sequence[ReplayRow]) -> None:
        """These have been handed in."""
        ...

    # Effects

    async def resolve_effect(self, outcome: Outcome, action: Action) -> None:
        """A person's word on an effect in doubt: done with a result, or free again.

        Raises `Unknown` if there is no such key, `Conflict` if it was reserved or settled meanwhile.
        """
        ...

    # The operators' log and alerts

    async def record(self, actions: Sequence[Action]) -> None: ...

    async def raise_alert(self, key: str, action: Action) -> bool:
        """Whether it was raised now: one that stands already is not raised twice, whoever raises it."""
        ...

    async def clear_alert(self, key: str, action: Action) -> bool: ...
