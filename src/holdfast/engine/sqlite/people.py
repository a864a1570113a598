"""What people are asked, what they answer and what they do: into the feed, and into the embedded ledger's own tables.

With a ledger elsewhere the feed tells it, and the tables of this file stay empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from holdfast.core.job import DEFAULT_TENANT, Ask, new_job_ids
from holdfast.engine.sqlite.journal import Journal
from holdfast.engine.sqlite.policy import Policy
from holdfast.engine.sqlite.transaction import Transaction, Value

#: Why a question to people is withdrawn, if nobody says.
WENT_ON: Final = "the job went on without an answer"

_encoder: Final = msgspec.json.Encoder()


class Deed(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody did, for the operators' log."""

    #: `operator.…`; empty: nobody wants it logged.
    type: str
    actor: str
    reason: str
    target: str
    target_id: str
    before: Any
    after: Any
    tenant_id: str = DEFAULT_TENANT


class Question(msgspec.Struct, frozen=True):
    """A job that waits for people."""

    tenant_id: str
    job_id: str
    job_type: str
    ask: Ask


def log(transaction: Transaction, policy: Policy, journal: Journal, queue: str, deed: Deed) -> None:
    """One line of the operators' log, in the same step as what it is about."""
    if not deed.type:
        return
    now_ms = policy.clock.now_ms()
    data = {name: value for name, value in msgspec.structs.asdict(deed).items() if name != "type"} | {"queue": queue}
    last, count = transaction.add("audit", type=deed.type, message=deed.reason, data=_encode(data), now=now_ms)
    journal.wrote(last, count)
    if policy.options.ledger:
        return
    transaction.run(
        "log",
        tenant=deed.tenant_id,
        id=new_job_ids(1)[0],
        type=deed.type,
        actor=deed.actor,
        target=deed.target,
        target_id=deed.target_id,
        queue=queue,
        reason=deed.reason,
        before=_encode(deed.before),
        after=_encode(deed.after),
        now=now_ms,
    )


def ask(transaction: Transaction, policy: Policy, queue: str, questions: Sequence[Question]) -> None:
    """Write down what people are asked."""
    if questions and not policy.options.ledger:
        rows = [_question(each) for each in questions]
        transaction.bulk("ask", rows, before=(policy.clock.now_ms(), queue))


def withdraw(
    transaction: Transaction, policy: Policy, queue: str, tenant_id: str, job_id: str, actor: str, reason: str
) -> None:
    """A job does not wait any more: nobody has to decide about it, unless somebody has."""
    if not policy.options.ledger:
        transaction.run(
            "withdraw",
            tenant=tenant_id,
            job_id=job_id,
            queue=queue,
            actor=actor,
            reason=reason or WENT_ON,
            now=policy.clock.now_ms(),
        )


def _question(question: Question) -> tuple[Value, ...]:
    asked = question.ask
    return (
        question.tenant_id,
        asked.approval_id,
        question.job_id,
        question.job_type,
        asked.name,
        asked.payload_hash,
        _encode(asked.policies),
        asked.reason,
        None if asked.details is None else _encode(asked.details),
        asked.quorum,
        asked.deadline_at_ms or None,
        asked.requested_by,
    )


def _encode(value: Any) -> str:
    return _encoder.encode(value).decode()
