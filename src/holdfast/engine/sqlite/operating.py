"""move and set_control: an operator's hand, by the same state table as every other move."""

from __future__ import annotations

import msgspec

from holdfast.core.job import Failure, Meta
from holdfast.core.states import OPERATOR_TARGETS, State
from holdfast.core.verdict import by_operator, resumed
from holdfast.engine.port import Control
from holdfast.engine.sqlite.journal import Journal, notify
from holdfast.engine.sqlite.moves import Move, Moves
from holdfast.engine.sqlite.policy import Policy
from holdfast.engine.sqlite.rows import WORK_ROWS, WorkRow, decode_meta
from holdfast.engine.sqlite.transaction import Transaction
from holdfast.errors import TransitionInvalid, UnknownJob


def move(
    transaction: Transaction,
    policy: Policy,
    queue: str,
    job_id: str,
    to: State,
    actor: str,
    reason: str,
    expected: State | None,
) -> State:
    """The state it came from. A running job is fenced off from its worker by the same step."""
    rows = transaction.rows("job", WORK_ROWS, queue=queue, job_id=job_id)
    if not rows:
        raise UnknownJob(job_id)
    (row,) = rows
    if to not in OPERATOR_TARGETS or (expected is not None and row.state is not expected):
        raise TransitionInvalid(job_id, row.state, to)
    moves = Moves(transaction, policy, queue)
    moves.add(_move(row, to, actor, reason, policy.clock.now_ms()))
    journal = Journal(transaction, queue, policy.options.feed_limit)
    moves.write(journal)
    journal.close()
    if row.state is State.RUNNING:
        notify(transaction, queue, "cancelled", job_id)
    return row.state


def set_control(transaction: Transaction, queue: str, control: Control) -> None:
    """Set them, and tell everyone who listens or waits."""
    transaction.run(
        "set_control",
        queue=queue,
        paused=int(control.paused),
        intake_paused=int(control.intake_paused),
        concurrency=control.concurrency,
    )
    notify(transaction, queue, "controlled")
    transaction.effects.ready.add(queue)


def _move(row: WorkRow, to: State, actor: str, reason: str, now_ms: int) -> Move:
    back = to is State.QUEUED
    due_at_ms = row.run_at if back and row.run_at is not None and row.run_at > now_ms else None
    return Move(
        job=row,
        to=to,
        meta=_meta(row, to),
        attempt=row.attempt,
        message=reason,
        data={"actor": actor, "reason": reason},
        failure=_failure(row, to, actor, reason),
        in_line=back and due_at_ms is None,
        due_at_ms=due_at_ms,
    )


def _meta(row: WorkRow, to: State) -> Meta:
    meta = decode_meta(row.meta)
    if row.state is State.RUNNING:
        # The next claim starts at one delivery, so leases lost on this one are added up here.
        meta = msgspec.structs.replace(meta, lost_leases=meta.lost_leases + row.deliveries - 1)
    if row.state is State.SUSPENDED and to is State.QUEUED:
        meta = resumed(meta)
    return meta


def _failure(row: WorkRow, to: State, actor: str, reason: str) -> Failure | None:
    """An operator's word for an end that is theirs; else what the job failed with last, unless it runs again."""
    if to is State.CANCELLED or to is State.DLQ_PENDING:
        return by_operator(to, actor, reason)
    history = decode_meta(row.meta).history
    return history[-1].failure if history and to is not State.QUEUED else None
