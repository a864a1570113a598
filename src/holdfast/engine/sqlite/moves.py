"""State changes of one queue's jobs, collected and written in bulk, with approval requests and audit entries.

`MoveBatch` writes jobs, events and dead letters. It handles everything except the two hot paths: verdicts other than
success, poison pills, operators. Each move is checked against the state table when it is added, and again by the
statement that makes it.

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
from holdfast.engine.sqlite.feed import FeedWriter, notify_due
from holdfast.engine.sqlite.rows import encode_meta
from holdfast.engine.sqlite.store import EngineContext
from holdfast.sqlite.transaction import Transaction, Value, json_list, require_rows

#: Why a question to people is withdrawn, if nobody says.
SUPERSEDED: Final = "the job went on without an answer"

_encoder: Final = msgspec.json.Encoder()


class ApprovalRequestRow(msgspec.Struct, frozen=True):
    """A job that waits for people."""

    tenant_id: str
    job_id: str
    job_type: str
    request: ApprovalRequest


def insert_audit_entry(
    transaction: Transaction, policy: EngineContext, journal: FeedWriter, queue: str, deed: AuditEntry
) -> None:
    """One line of the operators' log, in the same step as what it is about."""
    if not deed.type:
        return
    now_ms = policy.clock.now_ms()
    data = {name: value for name, value in msgspec.structs.asdict(deed).items() if name != "type"} | {"queue": queue}
    last, count = transaction.add("audit", type=deed.type, message=deed.reason, data=_encode(data), now=now_ms)
    journal.add_events(last, count)
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


def insert_approval_requests(
    transaction: Transaction, policy: EngineContext, queue: str, questions: Sequence[ApprovalRequestRow]
) -> None:
    """Write down what people are asked."""
    if questions and not policy.options.ledger:
        rows = [_approval_values(each) for each in questions]
        transaction.bulk("ask", rows, before=(policy.clock.now_ms(), queue))


def withdraw_approvals(
    transaction: Transaction, policy: EngineContext, queue: str, tenant_id: str, job_id: str, actor: str, reason: str
) -> None:
    """A job does not wait any more: nobody has to decide about it, unless somebody has."""
    if not policy.options.ledger:
        transaction.run(
            "withdraw",
            tenant=tenant_id,
            job_id=job_id,
            queue=queue,
            actor=actor,
            reason=reason or SUPERSEDED,
            now=policy.clock.now_ms(),
        )


def _approval_values(question: ApprovalRequestRow) -> tuple[Value, ...]:
    asked = question.request
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


#: `last_error` is for looking at; the history and the dead letter have the whole.
LAST_ERROR_LIMIT: Final = 2_000
#: What the steps behind `dlq_pending` are, when nobody else makes them.
_TO_THE_END: Final = (State.DLQ_RECORDED, State.FAILED)

#: A job in one of these has a dead letter.
_BURIED: Final = frozenset({State.DLQ_PENDING, *_TO_THE_END})


class MovableJob(Protocol):
    """A job that is to be moved, as it was read in this transaction."""

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
    """Where a job goes, and what is to be remembered of it."""

    job: MovableJob
    to: State
    meta: Meta
    #: The attempt that the job counts from now on …
    attempt: int
    #: … and the one that the event is about, if that is another.
    event_attempt: int | None = None
    worker: str = ""
    #: What the move means, where it can mean several things.
    event: str = ""
    message: str = ""
    data: dict[str, Any] | None = None
    failure: Failure | None = None
    #: Goes in line at once …
    ready: bool = False
    #: … or waits for this instant, …
    due_at_ms: int | None = None
    #: … in the pending list.
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
        """Raises `TransitionInvalid` if the table does not know it, `InvalidOption` if it cannot mean its event."""
        check_move(move.job.job_id, move.job.state, move.to)
        event = resolve_event(move.job.state, move.to, move.event)
        self._moves.append(move)
        dead = move.to is State.DLQ_PENDING and not self._policy.options.ledger
        steps = (move.to, *_TO_THE_END) if dead else (move.to,)
        meta = move.meta
        if move.to is State.DLQ_PENDING:
            meta = msgspec.structs.replace(meta, dlq_id=new_job_ids(1)[0])
        dlq_id = meta.dlq_id if move.to in _BURIED else ""
        self._add_events(move, event, meta, steps, dlq_id)
        self._changes.append(self._change(move, meta, len(steps), dlq_id))
        if dead:
            self._dead_ids.append(move.job.id)
            self._dead.append(_dead_letter(move, meta, dlq_id))

    def write(self, journal: FeedWriter) -> None:
        """All of it, the item before the state that says it is recorded (requirement D1)."""
        if not self._moves:
            return
        count = len(self._moves)
        journal.add_events(*self._transaction.bulk("events", self._events, before=(self._now_ms,)))
        _, changed = self._transaction.bulk("move", self._changes, before=(self._now_ms,))
        require_rows(changed, count, "move")
        if self._dead:
            self._bury()
        insert_approval_requests(
            self._transaction,
            self._policy,
            self._queue,
            [each for move in self._moves if (each := _new_approval(move))],
        )
        self._tell()

    def _bury(self) -> None:
        if self._policy.stream_dlq:
            self._transaction.bulk("dead_letters", self._dead, before=(self._now_ms, self._now_ms, self._queue))
        ids = json_list(self._dead_ids)
        for step in ("record", "fail"):
            require_rows(self._transaction.run(step, ids=ids, now=self._now_ms), len(self._dead_ids), step)

    def _tell(self) -> None:
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
            # What is behind the first step is told once.
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
    # An operator's move tells the operator's reasons, not what the job failed with before.
    if move.failure is not None and (move.to is State.DLQ_PENDING or "actor" not in data):
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
    asked = move.meta.ask
    if move.to is not State.WAITING_APPROVAL or asked is None:
        return None
    return ApprovalRequestRow(move.job.tenant_id, move.job.job_id, move.job.job_type, asked)


def _last_error(failure: Failure) -> str:
    text = f"{failure.type}: {failure.message}" if failure.type else failure.message
    return text[:LAST_ERROR_LIMIT]
