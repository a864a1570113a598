"""Fold a batch of feed events into what the ledger writes, one row per job. Pure.

`fold_optimistic` needs no look-up. It assumes that a job created in the batch is new, and that any other is in the
state and attempt from which its first event moves it. The store checks both against its rows and rolls everything back
if one does not match; then `fold_known` gets what the ledger has and decides event by event. An event that does not
fit the job's history in the ledger is an anomaly:

- the job has ended in the ledger: nothing follows a final state, so the event is kept as an anomaly only;
- the job is open, but in another state, or in a later attempt in the same state: the engine continued from an earlier
  point (a stale replica, a truncated AOF). The history gets a `ledger.forked` event to the engine's state, then the
  event;
- the ledger does not have the job (its feed was trimmed before it was read): the same, after a substitute creation.

What operators did (`operator.…`) is not part of a job's history. It goes into the audit log unchanged.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from holdfast.core.job import Event, Failure
from holdfast.core.states import EXPEDITED_EVENT, FINAL, FORKED_EVENT, OPERATOR_PREFIX, RESTORED_EVENT, State, event_for
from holdfast.core.verdict import failure_of_event
from holdfast.ledger.fold_events import LAST_ERROR_LIMIT, dead_letter_id

#: Reasons for which an event is an anomaly.
AFTER_THE_END: Final = "the job had ended in the ledger"
CREATED_AGAIN: Final = "the ledger has this job already"
FORKED: Final = "the engine continued from an earlier point than the ledger's"
UNKNOWN_JOB: Final = "the ledger has no such job"
_KEEP_ERRORS: Final = frozenset({State.DLQ_RECORDED, State.FAILED})

#: Tenant and job id, within one queue.
Name = tuple[str, str]


class BatchMismatch(Exception):
    """The events of a batch do not follow one another, or do not follow the ledger's rows.

    The batch has to be folded onto what the ledger has (`fold_known`).
    """


#: Raised for rows that cannot be built or do not fit, not for a store that does not answer.
INVALID_ROWS: Final = (
    BatchMismatch,
    ValueError,
    TypeError,
    ArithmeticError,
    LookupError,
    AttributeError,
    AssertionError,
    RecursionError,
    struct.error,
)


class RecordedJob(msgspec.Struct, frozen=True):
    """A job as the ledger has it."""

    state: State
    last_seq: int
    attempt: int = 0
    retry_count: int = 0


class Anomaly(msgspec.Struct, frozen=True):
    """An event that the ledger could not record as it came."""

    event: Event
    reason: str


class JobDraft(msgspec.Struct, eq=False, gc=False):
    """A job as it is after the batch."""

    tenant_id: str
    job_id: str
    #: The state it must have in the ledger; None: it is new, or no event moves it.
    previous_state: State | None
    #: The ledger must not have a later attempt, and must have this retry count or one less (None: any).
    previous_attempt: int = 0
    previous_retries: int | None = 0
    #: The number of its last event before the batch, where known.
    seq: int = 0
    creation: Event | None = None
    #: Its state after the batch; None: no event has moved it.
    state: State | None = None
    ended: bool = False
    attempt: int = 0
    retry_count: int = 0
    worker: str | None = None
    keeps_errors: bool = True
    error_code: str | None = None
    last_error: str | None = None
    error_message: str | None = None
    result: str | None = None
    run_at_ms: int = 0
    next_retry_at_ms: int = 0
    #: When it was expedited, which replaces any later due time in the ledger; 0: it was not.
    expedited_at_ms: int = 0
    dlq_id: str | None = None
    dead_letter: Event | None = None
    #: It entered `waiting_approval` in this batch.
    awaiting_approval: bool = False
    at_ms: int = 0
    events: list[Event] = []

    @property
    def new(self) -> bool:
        return self.creation is not None

    @property
    def finished_at_ms(self) -> int:
        """0: not ended."""
        return self.at_ms if self.ended else 0


class FoldedBatch(msgspec.Struct, frozen=True):
    """What to write for a batch. Events of a draft are numbered from its `seq` + 1."""

    drafts: list[JobDraft]
    anomalies: list[Anomaly]
    #: What operators did to jobs and queues.
    audit_events: list[Event] = []


# Two ways to fold ----------------------------------------------------------------------------------


def fold_optimistic(events: Iterable[Event]) -> FoldedBatch:
    """Fold without reading the ledger. Raises `BatchMismatch` if the events contradict one another."""
    drafts: dict[Name, JobDraft] = {}
    audit_events: list[Event] = []
    for event in events:
        if event.to_state is None and event.type.startswith(OPERATOR_PREFIX):
            audit_events.append(event)
            continue
        name = (event.tenant_id, event.job_id)
        draft = drafts.get(name)
        from_state = event.from_state
        if draft is None:
            if event.to_state is not None and from_state is None:
                drafts[name] = draft = JobDraft(*name, None)
                _create(draft, event)
                continue
            drafts[name] = draft = JobDraft(*name, None)
        if event.to_state is not None:
            if draft.state is None:
                if from_state is None or from_state in FINAL:
                    raise BatchMismatch(event)
                draft.previous_state = from_state
                # `_attempt_before`, inlined because every event of a busy queue passes here.
                draft.previous_attempt = event.attempt - 1 if event.to_state is State.RUNNING else event.attempt
                draft.previous_retries = (
                    None if from_state is State.SUSPENDED and _resumes(event) else event.retry_count
                )
            elif from_state is not draft.state or draft.ended:
                raise BatchMismatch(event)
        _apply(draft, event)
    return FoldedBatch(list(drafts.values()), [], audit_events)


def fold_known(events: Iterable[Event], known: Mapping[Name, RecordedJob]) -> FoldedBatch:
    """Fold onto what the ledger has of these jobs."""
    drafts: dict[Name, JobDraft] = {}
    anomalies: list[Anomaly] = []
    audit_events: list[Event] = []
    for event in events:
        if event.to_state is None and event.type.startswith(OPERATOR_PREFIX):
            audit_events.append(event)
            continue
        name = (event.tenant_id, event.job_id)
        draft = drafts.get(name)
        if draft is None and (row := known.get(name)) is not None:
            draft = drafts[name] = JobDraft(*name, row.state, row.attempt, row.retry_count, row.last_seq)
            draft.attempt, draft.retry_count = row.attempt, row.retry_count
            draft.ended = row.state in FINAL
        if draft is None:
            if event.to_state is None or event.from_state in FINAL:
                anomalies.append(Anomaly(event, UNKNOWN_JOB))
                continue
            draft = drafts[name] = JobDraft(*name, None)
            if event.from_state is None:
                _create(draft, event)
            else:
                _create(draft, _creation(event))
                _apply(draft, _fork(State.QUEUED, event))
                _apply(draft, event)
                anomalies.append(Anomaly(event, UNKNOWN_JOB))
        elif (reason := _continue(draft, event)) is not None:
            anomalies.append(Anomaly(event, reason))
    return FoldedBatch([draft for draft in drafts.values() if draft.events], anomalies, audit_events)


def _continue(draft: JobDraft, event: Event) -> str | None:
    """Apply the next event of a job that the ledger has; return the reason if it is an anomaly."""
    state = draft.state or draft.previous_state
    if event.to_state is None or (event.from_state is state and not draft.ended and _follows(draft, event)):
        _apply(draft, event)
        return None
    if event.from_state is None:
        return CREATED_AGAIN
    if draft.ended or event.from_state in FINAL or state is None:
        return AFTER_THE_END
    _apply(draft, _fork(state, event))
    _apply(draft, event)
    return FORKED


def _follows(draft: JobDraft, event: Event) -> bool:
    """Whether the event's counts continue from the job's, not from an earlier point in its state.

    An engine that lost data only goes back, so an attempt later than expected is not a fork.
    """
    if _attempt_before(event) < draft.attempt:
        return False
    return _resumes(event) or 0 <= event.retry_count - draft.retry_count <= 1


def _attempt_before(event: Event) -> int:
    """The attempt before the event: a claim starts a new one, other events belong to the last one."""
    return event.attempt - 1 if event.to_state is State.RUNNING else event.attempt


def _resumes(event: Event) -> bool:
    """Whether the event resumes a suspended job, which resets its retry count."""
    return event.from_state is State.SUSPENDED and event.to_state is State.QUEUED


def _creation(event: Event) -> Event:
    """Build a substitute for a creation event that was lost."""
    return Event(
        type=event_for(None, State.QUEUED),
        job_id=event.job_id,
        tenant_id=event.tenant_id,
        at_ms=event.at_ms,
        to_state=State.QUEUED,
        message=UNKNOWN_JOB,
    )


def _fork(state: State, event: Event) -> Event:
    return Event(
        type=FORKED_EVENT,
        job_id=event.job_id,
        tenant_id=event.tenant_id,
        at_ms=event.at_ms,
        from_state=state,
        to_state=event.from_state,
        attempt=max(0, _attempt_before(event)),
        retry_count=event.retry_count,
        message=FORKED,
    )


# What an event does to a job -----------------------------------------------------------------------


def _create(draft: JobDraft, event: Event) -> None:
    draft.creation = event
    draft.events.append(event)
    draft.state = event.to_state
    draft.at_ms = event.at_ms
    draft.awaiting_approval = event.to_state is State.WAITING_APPROVAL
    if event.data:
        draft.run_at_ms = event.data.get("run_at_ms") or 0


def _apply(draft: JobDraft, event: Event) -> None:
    draft.events.append(event)
    to_state = event.to_state
    if to_state is None:
        if event.type == EXPEDITED_EVENT and not draft.ended:
            _expedite(draft, event.at_ms)
        return
    draft.state = to_state
    draft.at_ms = event.at_ms
    draft.attempt = event.attempt
    draft.retry_count = event.retry_count
    draft.next_retry_at_ms = 0
    if to_state is State.RUNNING:
        draft.worker = event.worker
        return
    draft.worker = None
    if to_state is State.SUCCEEDED:
        draft.ended = True
        draft.keeps_errors = False
        draft.error_code = draft.last_error = draft.error_message = None
        draft.result = event.data.get("result") if event.data else None
        return
    if event.type != FORKED_EVENT:
        _move(draft, event, to_state, event.data or {})


def _expedite(draft: JobDraft, at_ms: int) -> None:
    draft.expedited_at_ms = draft.at_ms = at_ms
    draft.run_at_ms = min(draft.run_at_ms, at_ms)
    draft.next_retry_at_ms = min(draft.next_retry_at_ms, at_ms)


def _move(draft: JobDraft, event: Event, to_state: State, data: Mapping[str, Any]) -> None:
    draft.ended = to_state in FINAL
    due_ms = data.get("next_attempt_at_ms") or 0
    draft.awaiting_approval = draft.awaiting_approval or to_state is State.WAITING_APPROVAL
    if to_state is State.RETRYING:
        draft.next_retry_at_ms = due_ms
    elif to_state is State.QUEUED and due_ms:
        draft.run_at_ms = due_ms
    if data.get("started") is False:
        # The number of an attempt that did not start is used again.
        draft.attempt = max(0, event.attempt - 1)
    if "dlq_id" in data:
        draft.dlq_id = str(data["dlq_id"])
    if event.type == RESTORED_EVENT:
        if to_state in (State.DLQ_PENDING, State.DLQ_RECORDED):
            # The dead letter exists, but the engine has lost its confirmation: confirm it again.
            draft.dead_letter = event
    elif to_state is State.DLQ_PENDING:
        draft.dead_letter = event
        draft.dlq_id = draft.dlq_id or dead_letter_id(event)
    if to_state not in _KEEP_ERRORS and event.type != RESTORED_EVENT:
        _set_errors(draft, failure_of_event(event))


def _set_errors(draft: JobDraft, failure: Failure | None) -> None:
    draft.keeps_errors = False
    if failure is None:
        draft.error_code = draft.last_error = draft.error_message = None
        return
    text = f"{failure.type}: {failure.message}" if failure.type else failure.message
    draft.error_code = failure.code
    draft.last_error = text[:LAST_ERROR_LIMIT]
    draft.error_message = f"the job failed with {failure.code}"


def split_batch(events: Sequence[Event]) -> Iterator[list[Event]]:
    """Split a batch into two, to be written one after the other.

    Splits between jobs; the events of a single job are split by time.
    """
    names = list(dict.fromkeys((event.tenant_id, event.job_id) for event in events))
    if len(names) > 1:
        first = set(names[: len(names) // 2])
        yield [event for event in events if (event.tenant_id, event.job_id) in first]
        yield [event for event in events if (event.tenant_id, event.job_id) not in first]
    else:
        middle = len(events) // 2
        yield list(events[:middle])
        yield list(events[middle:])
