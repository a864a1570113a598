"""Operators' actions on SQLite: move, set_control, expedite, claim_job.

Moves obey the state table like all others.
"""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.core.job import Approval, Claim, Failure, Meta
from holdfast.core.principal import AuditEntry
from holdfast.core.states import EXPEDITED_EVENT, OPERATOR_TARGETS, State, is_legal
from holdfast.core.verdict import operator_failure, waits_for, with_approval, with_retries_reset
from holdfast.engine.port.operators import QueueControl
from holdfast.engine.sqlite.claims import lease_jobs, running_jobs
from holdfast.engine.sqlite.feed import FeedWriter, notify, notify_due
from holdfast.engine.sqlite.moves import JobMove, MoveBatch, insert_audit_entry, withdraw_approvals
from holdfast.engine.sqlite.rows import CONTROL, VIEW_ROWS, WORK_ROWS, WorkRow, read_meta
from holdfast.engine.sqlite.store import EngineContext
from holdfast.errors import ConcurrencyLimited, ControlChanged, TransitionInvalid, UnknownJob
from holdfast.sqlite.transaction import Transaction, json_list


class OperatorCommand(msgspec.Struct, frozen=True, kw_only=True):
    """An operator's request: who, why, and the options of a move."""

    actor: str
    reason: str
    expected: State | None = None
    event: str = ""
    approval: Approval | None = None
    approval_id: str = ""
    audit: str = ""

    @property
    def event_data(self) -> dict[str, Any]:
        """The data of the resulting event."""
        data: dict[str, Any] = {"actor": self.actor, "reason": self.reason}
        return data if self.approval is None else {**data, "approval": self.approval}

    def audit_entry(self, job: WorkRow, before: Any, after: Any) -> AuditEntry:
        return AuditEntry(
            type=self.audit,
            actor=self.actor,
            reason=self.reason,
            target="job",
            target_id=job.job_id,
            before=before,
            after=after,
            tenant_id=job.tenant_id,
        )


def move(
    transaction: Transaction, policy: EngineContext, queue: str, job_id: str, to: State, command: OperatorCommand
) -> State:
    """Move a job; returns its previous state. The same step fences a running job's worker."""
    row = _find(transaction, queue, job_id)
    is_expected = command.expected in (None, row.state) and waits_for(
        row.state, read_meta(row.meta), command.approval_id
    )
    if to not in OPERATOR_TARGETS or not is_expected:
        raise TransitionInvalid(job_id, row.state, to)
    moves = MoveBatch(transaction, policy, queue)
    moves.add(_move(row, to, command, policy.clock.now_ms()))
    journal = FeedWriter(transaction, queue, policy.options)
    moves.write(journal)
    insert_audit_entry(transaction, policy, journal, queue, command.audit_entry(row, row.state, to))
    journal.close()
    if row.state is State.WAITING_APPROVAL:
        withdraw_approvals(transaction, policy, queue, row.tenant_id, job_id, command.actor, command.reason)
    if row.state is State.RUNNING:
        notify(transaction, queue, "cancelled", job_id)
    return row.state


def set_control(
    transaction: Transaction,
    policy: EngineContext,
    queue: str,
    control: QueueControl,
    expected: QueueControl | None,
    command: OperatorCommand,
) -> None:
    """Set a queue's controls and wake listeners and claims.

    Raises `ControlChanged` if the controls are not as `expected`.
    """
    before = transaction.rows("get_control", CONTROL, queue=queue).as_control()
    if expected is not None and before != expected:
        raise ControlChanged(queue)
    transaction.run(
        "set_control",
        queue=queue,
        paused=int(control.paused),
        intake_paused=int(control.intake_paused),
        concurrency=control.concurrency,
        worker_concurrency=control.worker_concurrency,
        intake_limit=control.intake_limit,
        backlog_alert=control.backlog_alert,
        tenants=msgspec.json.encode(control.tenants).decode() if control.tenants else None,
    )
    journal = FeedWriter(transaction, queue, policy.options)
    entry = AuditEntry(
        type=command.audit,
        actor=command.actor,
        reason=command.reason,
        target="queue",
        target_id=queue,
        before=before,
        after=control,
    )
    insert_audit_entry(transaction, policy, journal, queue, entry)
    journal.close()
    notify(transaction, queue, "controlled")
    transaction.effects.ready.add(queue)


def expedite(
    transaction: Transaction, policy: EngineContext, queue: str, job_id: str, command: OperatorCommand
) -> None:
    """Make a delayed or retrying job due now."""
    row, now_ms = _find(transaction, queue, job_id), policy.clock.now_ms()
    (view,) = transaction.rows("get", VIEW_ROWS, queue=queue, ids=json_list([job_id]), expired=0)
    before = {"state": row.state, "next_attempt_at_ms": view.to_info().next_attempt_at_ms}
    if not transaction.run("expedite", id=row.id, now=now_ms):
        raise TransitionInvalid(job_id, row.state, State.RUNNING)
    journal = FeedWriter(transaction, queue, policy.options)
    data = msgspec.json.encode({**command.event_data, "next_attempt_at_ms": now_ms}).decode()
    counts = (row.attempt, read_meta(row.meta).retry_count)
    event = (row.id, row.last_seq + 1, EXPEDITED_EVENT, None, None, *counts, "", command.reason, data)
    journal.add_events(*transaction.bulk("insert_events", [event], before=(now_ms,)))
    insert_audit_entry(
        transaction, policy, journal, queue, command.audit_entry(row, before, {**before, "next_attempt_at_ms": now_ms})
    )
    journal.close()
    notify_due(transaction, queue, now_ms)


def claim_job(transaction: Transaction, policy: EngineContext, worker: str, queue: str, job_id: str) -> Claim:
    """Lease this one job, whether it is due or not."""
    row = _find(transaction, queue, job_id)
    if not is_legal(row.state, State.RUNNING):
        raise TransitionInvalid(job_id, row.state, State.RUNNING)
    limit = transaction.rows("get_control", CONTROL, queue=queue).concurrency
    if limit is not None and running_jobs(transaction, queue) >= limit:
        raise ConcurrencyLimited(queue, limit)
    transaction.run("touch_worker", worker=worker, queue=queue, now=policy.clock.now_ms())
    journal = FeedWriter(transaction, queue, policy.options)
    (claim,) = lease_jobs(transaction, policy, journal, worker, queue, [row], early=True)
    journal.close()
    return claim


def _find(transaction: Transaction, queue: str, job_id: str) -> WorkRow:
    rows = transaction.rows("job_for_move", WORK_ROWS, queue=queue, job_id=job_id)
    if not rows:
        raise UnknownJob(job_id)
    return rows[0]


def _move(row: WorkRow, to: State, command: OperatorCommand, now_ms: int) -> JobMove:
    back = to is State.QUEUED
    due_at_ms = row.run_at if back and row.run_at is not None and row.run_at > now_ms else None
    return JobMove(
        job=row,
        to=to,
        meta=_meta(row, to, command.approval),
        attempt=row.attempt,
        event=command.event,
        message=command.reason,
        data=command.event_data,
        failure=_failure(row, to, command),
        ready=back and due_at_ms is None,
        due_at_ms=due_at_ms,
    )


def _meta(row: WorkRow, to: State, approval: Approval | None) -> Meta:
    meta = read_meta(row.meta)
    if row.state is State.RUNNING:
        # The next claim starts at one delivery, so leases lost on this one are added here.
        meta = msgspec.structs.replace(meta, lost_leases=meta.lost_leases + row.deliveries - 1)
    if row.state is State.SUSPENDED and to is State.QUEUED:
        meta = with_retries_reset(meta)
    if row.state is State.WAITING_APPROVAL:
        meta = with_approval(meta, approval if to is State.QUEUED else None)
    return meta


def _failure(row: WorkRow, to: State, command: OperatorCommand) -> Failure | None:
    """The failure to store with the move.

    The operator's for `cancelled` and `dlq_pending`, none for `queued`, otherwise that of the job's last attempt.
    """
    if to is State.CANCELLED or to is State.DLQ_PENDING:
        return operator_failure(to, command.actor, command.reason, command.event)
    history = read_meta(row.meta).history
    return history[-1].failure if history and to is not State.QUEUED else None
