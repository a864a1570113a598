"""Moves of jobs of one queue, collected and then written in bulk: the jobs, their events, their dead letters.

Everything but the two hot paths goes through here: verdicts other than success, poison pills, operators. Each move is
checked against the state table when it is added, and once more by the statement that makes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import msgspec

from holdfast.core.fingerprint import fingerprint
from holdfast.core.job import Failure, Meta, new_job_ids
from holdfast.core.states import FINAL, State, check_move, chosen_event, event_for
from holdfast.engine.sqlite.journal import Journal, notify_due
from holdfast.engine.sqlite.people import Question, ask
from holdfast.engine.sqlite.policy import Policy
from holdfast.engine.sqlite.rows import encode_meta
from holdfast.engine.sqlite.transaction import Transaction, Value, expect, json_list

#: `last_error` is for looking at; the history and the dead letter have the whole.
LAST_ERROR_LIMIT: Final = 2_000
#: What the steps behind `dlq_pending` are, when nobody else makes them.
_TO_THE_END: Final = (State.DLQ_RECORDED, State.FAILED)

#: A job in one of these has a dead letter.
_BURIED: Final = frozenset({State.DLQ_PENDING, *_TO_THE_END})

_encoder: Final = msgspec.json.Encoder()


class Subject(Protocol):
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
    def place(self) -> int: ...
    @property
    def deliveries(self) -> int: ...
    @property
    def last_seq(self) -> int: ...
    @property
    def payload(self) -> str: ...


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """Where a job goes, and what is to be remembered of it."""

    job: Subject
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
    in_line: bool = False
    #: … or waits for this instant, …
    due_at_ms: int | None = None
    #: … in the pending list.
    pending: bool = False
    token: str | None = None


class Moves:
    """One step's moves; `write` makes them all, or raises and makes none."""

    def __init__(self, transaction: Transaction, policy: Policy, queue: str) -> None:
        self._transaction = transaction
        self._policy = policy
        self._queue = queue
        self._now_ms = policy.clock.now_ms()
        self._moves: list[Move] = []
        self._changes: list[tuple[Value, ...]] = []
        self._events: list[tuple[Value, ...]] = []
        self._dead: list[tuple[Value, ...]] = []
        self._dead_ids: list[int] = []

    def add(self, move: Move) -> None:
        """Raises `TransitionInvalid` if the table does not know it, `InvalidOption` if it cannot mean its event."""
        check_move(move.job.job_id, move.job.state, move.to)
        event = chosen_event(move.job.state, move.to, move.event)
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

    def write(self, journal: Journal) -> None:
        """All of it, the item before the state that says it is recorded (requirement D1)."""
        if not self._moves:
            return
        count = len(self._moves)
        journal.wrote(*self._transaction.bulk("events", self._events, before=(self._now_ms,)))
        _, changed = self._transaction.bulk("move", self._changes, before=(self._now_ms,))
        expect(changed, count, "move")
        if self._dead:
            self._bury()
        ask(self._transaction, self._policy, self._queue, [each for move in self._moves if (each := _question(move))])
        self._tell()

    def _bury(self) -> None:
        if self._policy.stream_dlq:
            self._transaction.bulk("dead_letters", self._dead, before=(self._now_ms, self._now_ms, self._queue))
        ids = json_list(self._dead_ids)
        for step in ("record", "fail"):
            expect(self._transaction.run(step, ids=ids, now=self._now_ms), len(self._dead_ids), step)

    def _tell(self) -> None:
        effects = self._transaction.effects
        dues = []
        for move in self._moves:
            if move.job.state is State.RUNNING:
                effects.freed.add(self._queue)
            if move.in_line:
                effects.ready.add(self._queue)
            elif move.due_at_ms is not None and not move.pending:
                dues.append(move.due_at_ms)
            elif move.to in FINAL or move.to is State.DLQ_PENDING:
                effects.ended.append((self._queue, move.job.job_id))
        if dues:
            notify_due(self._transaction, self._queue, min(dues))

    def _add_events(self, move: Move, event: str, meta: Meta, steps: Sequence[State], dlq_id: str) -> None:
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

    def _change(self, move: Move, meta: Meta, events: int, dlq_id: str) -> tuple[Value, ...]:
        due_at = move.due_at_ms
        return (
            move.job.id,
            move.job.state.value,
            move.job.place,
            move.job.deliveries,
            move.to.value,
            move.attempt,
            encode_meta(meta),
            *error_columns(move.failure),
            self._now_ms if move.in_line else None,
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


def _details(move: Move, meta: Meta, dlq_id: str) -> str | None:
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


def _dead_letter(move: Move, meta: Meta, dlq_id: str) -> tuple[Value, ...]:
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
        fingerprint(move.job.job_type, failure),
    )


def _question(move: Move) -> Question | None:
    asked = move.meta.ask
    if move.to is not State.WAITING_APPROVAL or asked is None:
        return None
    return Question(move.job.tenant_id, move.job.job_id, move.job.job_type, asked)


def _last_error(failure: Failure) -> str:
    text = f"{failure.type}: {failure.message}" if failure.type else failure.message
    return text[:LAST_ERROR_LIMIT]


def _encode(value: Any) -> str:
    return _encoder.encode(value).decode()
