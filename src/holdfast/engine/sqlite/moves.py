"""State changes of one queue's jobs, collected and written in bulk.

`MoveBatch` writes jobs, events and dead letters, for verdicts other than success, poison pills and operators; claims
and successes, the two hot paths, have their own statements. Each move is checked against the state table when it is
added, and again by the statement that makes it.

Approval requests and audit entries go into the feed. They are also written to this file's own tables if the file is the
ledger too; with a separate ledger those tables stay empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import msgspec

from holdfast.core.job import ApprovalRequest, Failure, Meta, new_job_ids
from holdfast.core.principal import AuditEntry
from holdfast.core.states import FINAL, State, check_move, event_for, resolve_event
from holdfast.core.text import error_fingerprint
from holdfast.core.verdict import SUPERSEDED
from holdfast.engine.sqlite.feed import FeedWriter, notify_due
from holdfast.engine.sqlite.rows import encode_meta
from holdfast.engine.sqlite.store import EngineContext
from holdfast.sqlite.transaction import Transaction, Value, json_list, require_rows

_encoder: Final = msgspec.json.Encoder()


class ApprovalRequestRow(msgspec.Struct, frozen=True):
    """An approval request with its job."""

    tenant_id: str
    job_id: str
    job_type: str
    request: ApprovalRequest


def insert_audit_entry(
    transaction: Transaction, policy: EngineContext, journal: FeedWriter, queue: str, entry: AuditEntry
) -> None:
    """Write an audit entry in the same step as the action. An entry without a type is not written."""
    if not entry.type:
        return
    now_ms = policy.clock.now_ms()
    data = {name: value for name, value in msgspec.structs.asdict(entry).items() if name != "type"} | {"queue": queue}
    last, count = transaction.add(
        "insert_audit_event", type=entry.type, message=entry.reason, data=_encode(data), now=now_ms
    )
    journal.add_events(last, count)
    if policy.options.ledger:
        return
    transaction.run(
        "insert_audit_entry",
        tenant=entry.tenant_id,
        id=new_job_ids(1)[0],
        type=entry.type,
        actor=entry.actor,
        target=entry.target,
        target_id=entry.target_id,
        queue=queue,
        reason=entry.reason,
        before=_encode(entry.before),
        after=_encode(entry.after),
        now=now_ms,
    )


def insert_approval_requests(
    transaction: Transaction, policy: EngineContext, queue: str, requests: Sequence[ApprovalRequestRow]
) -> None:
    """Write approval requests, if this file is the ledger too."""
    if requests and not policy.options.ledger:
        rows = [_approval_values(each) for each in requests]
        transaction.bulk("insert_approval_requests", rows, before=(policy.clock.now_ms(), queue))


def withdraw_approvals(
    transaction: Transaction, policy: EngineContext, queue: str, tenant_id: str, job_id: str, actor: str, reason: str
) -> None:
    """Withdraw the pending approval requests of a job that no longer waits."""
    if not policy.options.ledger:
        transaction.run(
            "withdraw_approvals",
            tenant=tenant_id,
            job_id=job_id,
            queue=queue,
            actor=actor,
            reason=reason or SUPERSEDED,
            now=policy.clock.now_ms(),
        )


def _approval_values(row: ApprovalRequestRow) -> tuple[Value, ...]:
    request = row.request
    return (
        row.tenant_id,
        request.approval_id,
        row.job_id,
        row.job_type,
        request.name,
        request.payload_hash,
        _encode(request.policies),
        request.reason,
        None if request.details is None else _encode(request.details),
        request.quorum,
        request.deadline_at_ms or None,
        request.requested_by,
    )


def _encode(value: Any) -> str:
    return _encoder.encode(value).decode()


#: `last_error` is for display; the history and the dead letter have the full text.
LAST_ERROR_LIMIT: Final = 2_000
#: Moves of an operator whose failure is the operator's own.
_OPERATOR_FAILURES: Final = (State.CANCELLED, State.DLQ_PENDING)
#: The moves after `dlq_pending`, which this engine makes itself when there is no separate ledger.
_AFTER_DLQ_PENDING: Final = (State.DLQ_RECORDED, State.FAILED)

#: A job in one of these has a dead letter.
_DEAD_LETTERED: Final = frozenset({State.DLQ_PENDING, *_AFTER_DLQ_PENDING})


class MovableJob(Protocol):
    """A job to be moved, as it was read in this transaction."""

    @property
    def id(self) -> int: ...
    @property
    def job_id(self) -> str: ...
    @property
    def job_type(self) -> str: ...
    @property
    def tenant_id(self) -> str: ...
    @property
    def trace_id(self) -> str: ...
    @property
    def state(self) -> State: ...
    @property
    def claim_seq(self) -> int: ...
    @property
    def deliveries(self) -> int: ...
    @property
    def last_seq(self) -> int: ...
    @property
    def payload(self) -> str: ...


class JobMove(msgspec.Struct, frozen=True, kw_only=True):
    """One move of a job, with the values to store."""

    job: MovableJob
    to: State
    meta: Meta
    #: The job's attempt number after the move …
    attempt: int
    #: … and the event's, if it differs.
    event_attempt: int | None = None
    worker: str = ""
    #: The move's event, where it can have several.
    event: str = ""
    message: str = ""
    data: dict[str, Any] | None = None
    failure: Failure | None = None
    #: Ready at once …
    ready: bool = False
    #: … or due at this instant, …
    due_at_ms: int | None = None
    #: … waiting in the pending list.
    pending: bool = False
    token: str | None = None


class MoveBatch:
    """One step's moves; `write` makes them all, or raises and makes none."""

    def __init__(self, transaction: Transaction, policy: EngineContext, queue: str) -> None:
        self._transaction = transaction
        self._policy = policy
        self._queue = queue
        self._now_ms = policy.clock.now_ms()
        self._moves: list[JobMove] = []
        self._changes: list[tuple[Value, ...]] = []
        self._events: list[tuple[Value, ...]] = []
        self._dead: list[tuple[Value, ...]] = []
        self._dead_ids: list[int] = []

    def add(self, move: JobMove) -> None:
        """Add a move.

        Raises `TransitionInvalid` if it is illegal, `InvalidOption` if it cannot have its event.
        """
        check_move(move.job.job_id, move.job.state, move.to)
        event = resolve_event(move.job.state, move.to, move.event)
        self._moves.append(move)
        dead = move.to is State.DLQ_PENDING and not self._policy.options.ledger
        steps = (move.to, *_AFTER_DLQ_PENDING) if dead else (move.to,)
        meta = move.meta
        if move.to is State.DLQ_PENDING:
            meta = msgspec.structs.replace(meta, dlq_id=new_job_ids(1)[0])
        dlq_id = meta.dlq_id if move.to in _DEAD_LETTERED else ""
        self._add_events(move, event, meta, steps, dlq_id)
        self._changes.append(self._change(move, meta, len(steps), dlq_id))
        if dead:
            self._dead_ids.append(move.job.id)
            self._dead.append(_dead_letter(move, meta, dlq_id))

    def write(self, journal: FeedWriter) -> None:
        """Write all moves; a dead letter is written before its job is `dlq_recorded` (requirement D1)."""
        if not self._moves:
            return
        count = len(self._moves)
        journal.add_events(*self._transaction.bulk("insert_events", self._events, before=(self._now_ms,)))
        _, changed = self._transaction.bulk("move", self._changes, before=(self._now_ms,))
        require_rows(changed, count, "move")
        if self._dead:
            self._write_dead_letters()
        insert_approval_requests(
            self._transaction,
            self._policy,
            self._queue,
            [each for move in self._moves if (each := _new_approval(move))],
        )
        self._notify()

    def _write_dead_letters(self) -> None:
        if self._policy.stream_dlq:
            self._transaction.bulk("insert_dead_letters", self._dead, before=(self._now_ms, self._now_ms, self._queue))
        ids = json_list(self._dead_ids)
        for step in ("mark_dlq_recorded", "mark_failed"):
            require_rows(self._transaction.run(step, ids=ids, now=self._now_ms), len(self._dead_ids), step)

    def _notify(self) -> None:
        effects = self._transaction.effects
        dues = []
        for move in self._moves:
            if move.job.state is State.RUNNING:
                effects.freed.add(self._queue)
            if move.ready:
                effects.ready.add(self._queue)
            elif move.due_at_ms is not None and not move.pending:
                dues.append(move.due_at_ms)
            elif move.to in FINAL or move.to is State.DLQ_PENDING:
                effects.finished.append((self._queue, move.job.job_id))
        if dues:
            notify_due(self._transaction, self._queue, min(dues))

    def _add_events(self, move: JobMove, event: str, meta: Meta, steps: Sequence[State], dlq_id: str) -> None:
        from_state, job = move.job.state, move.job
        data, message = _details(move, meta, dlq_id), move.message or (move.failure.message if move.failure else "")
        for seq, to_state in enumerate(steps, job.last_seq + 1):
            self._events.append(
                (
                    job.id,
                    seq,
                    event or event_for(from_state, to_state),
                    from_state.value,
                    to_state.value,
                    move.attempt if move.event_attempt is None else move.event_attempt,
                    meta.retry_count,
                    move.worker,
                    message,
                    data,
                )
            )
            # Only the first event carries the details.
            from_state, event, message, data = to_state, "", "", _encode({"dlq_id": dlq_id})

    def _change(self, move: JobMove, meta: Meta, events: int, dlq_id: str) -> tuple[Value, ...]:
        due_at = move.due_at_ms
        return (
            move.job.id,
            move.job.state.value,
            move.job.claim_seq,
            move.job.deliveries,
            move.to.value,
            move.attempt,
            encode_meta(meta),
            *error_columns(move.failure),
            self._now_ms if move.ready else None,
            None if move.pending else due_at,
            due_at if move.pending else None,
            due_at if move.to is State.RETRYING else None,
            dlq_id or None,
            self._now_ms if move.to in FINAL else None,
            move.token,
            move.job.last_seq + events,
        )


def error_columns(failure: Failure | None) -> tuple[str | None, str | None, str | None]:
    """A failure as error_code, last_error, error_message."""
    if failure is None:
        return None, None, None
    return failure.code, _last_error(failure), f"the job failed with {failure.code}"


def _details(move: JobMove, meta: Meta, dlq_id: str) -> str | None:
    data: dict[str, Any] = dict(move.data or {})
    # Any other move of an operator carries the operator's reason, not the job's earlier failure.
    if move.failure is not None and (move.to in _OPERATOR_FAILURES or "actor" not in data):
        data |= {name: text for name, text in msgspec.structs.asdict(move.failure).items() if text}
    if move.due_at_ms is not None:
        data["next_attempt_at_ms"] = move.due_at_ms
    if dlq_id:
        data["dlq_id"] = dlq_id
    if move.to is State.DLQ_PENDING:
        data["history"] = meta.history
    return _encode(data) if data else None


def _dead_letter(move: JobMove, meta: Meta, dlq_id: str) -> tuple[Value, ...]:
    failure = move.failure or Failure("UNKNOWN", "")
    return (
        move.job.tenant_id,
        dlq_id,
        move.job.job_id,
        move.job.job_type,
        move.job.trace_id,
        move.job.payload,
        failure.code,
        failure.message,
        failure.stack,
        meta.retry_count,
        _encode(meta.history),
        error_fingerprint(move.job.job_type, failure),
    )


def _new_approval(move: JobMove) -> ApprovalRequestRow | None:
    request = move.meta.approval_request
    if move.to is not State.WAITING_APPROVAL or request is None:
        return None
    return ApprovalRequestRow(move.job.tenant_id, move.job.job_id, move.job.job_type, request)


def _last_error(failure: Failure) -> str:
    text = f"{failure.type}: {failure.message}" if failure.type else failure.message
    return text[:LAST_ERROR_LIMIT]
