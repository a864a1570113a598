"""Explain why a job is in its state and what comes next, in sentences for `explain`. Pure.

Reads the job's events in order and `JobFacts`: what is known besides the events, including what the engine says about
the job now, if it knows it. Every state has its sentence. Also holds the phrases that `explain` shares: instants,
durations, errors, actors.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Final

import msgspec

from holdfast.clock import to_datetime
from holdfast.core.job import Event, JobInfo
from holdfast.core.states import FINAL, HEARTBEAT_EVENT, State
from holdfast.errors import EffectInDoubt
from holdfast.ledger.port.operators import ApprovalRow, ApprovalStatus

_ORDINALS: Final = ("no", "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")


def error_of(event: Event) -> str:
    data = event.data or {}
    kind = data.get("type") or data.get("code") or ""
    message = " ".join(str(data.get("message") or event.message or "").split())
    # The remedy is in a later sentence; here it would be truncated in the middle of a command.
    message = message.partition(EffectInDoubt.ADVICE)[0]
    error = ": ".join(part for part in (str(kind), message) if part)
    return f": {error[:200]}" if error else ""


def actor_phrase(event: Event) -> str:
    actor = (event.data or {}).get("actor")
    return f" by {actor}" if actor else ""


def reason_of(event: Event) -> str:
    data = event.data or {}
    # An operator's reason is in the data, if there is one; not every store writes a message as well.
    reason = str(data.get("reason") or ("" if "actor" in data else event.message))
    reason = reason.partition(EffectInDoubt.ADVICE)[0]
    return f" ({' '.join(reason.split())[:200]})" if reason else ""


def join_names(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def state_phrase(state: State | None) -> str:
    return name_phrase(state.value) if state is not None else "nothing"


def name_phrase(name: str) -> str:
    return name.replace("dlq_", "dead letter ").replace("_", " ")


def ordinal(number: int) -> str:
    return _ORDINALS[number] if number < len(_ORDINALS) else f"{number}th"


def time_phrase(at_ms: int) -> str:
    return f"{to_datetime(at_ms):%Y-%m-%d %H:%M:%S} UTC"


def duration_phrase(duration_ms: int) -> str:
    if abs(duration_ms) < 10_000:
        return f"{duration_ms / 1000:g} s" if abs(duration_ms) >= 1_000 else f"{duration_ms} ms"
    whole = timedelta(seconds=round(duration_ms / 1000))
    days, seconds = whole.days, whole.seconds
    parts = ((days, "d"), (seconds // 3600, "h"), (seconds // 60 % 60, "min"), (seconds % 60, "s"))
    nonzero = [f"{count} {unit}" for count, unit in parts if count]
    return " ".join(nonzero[:2])


class OperatorAction(msgspec.Struct, frozen=True, kw_only=True):
    """An operator's action on a job, from the audit log."""

    type: str
    actor: str
    reason: str
    at_ms: int


class JobFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known besides the events."""

    job_id: str
    now_ms: int
    #: The submitted task; not every store repeats it in the first event.
    task: str = ""
    #: Its arguments as text; empty: unknown.
    arguments: str = ""
    queue: str = ""
    #: Whether an operator has paused the queue; None: unknown.
    paused: bool | None = None
    #: Whether its jobs wait until engine and ledger have been compared.
    unverified: bool = False
    #: How many workers claim from the queue; None: unknown.
    workers: int | None = None
    #: How many jobs of the queue may run at a time (None: no limit or unknown), and how many do.
    concurrency: int | None = None
    running: int = 0
    #: The engine's view; None: the engine does not have the job, or was not queried.
    live: JobInfo | None = None
    #: Lease time: the job of a crashed worker is reclaimed within it.
    lease_ms: int = 30_000
    dlq_id: str | None = None
    dead_letter_status: str | None = None
    #: The job that its dead letter was replayed as.
    replayed_as: str | None = None
    #: The job that this one is a replay of.
    replay_of: str | None = None
    #: Keys of effects in doubt.
    in_doubt: tuple[str, ...] = ()
    #: Approval requests of the job, the oldest first.
    approvals: tuple[ApprovalRow, ...] = ()
    #: Operators' actions on it; those that its events record are not repeated.
    operator_actions: tuple[OperatorAction, ...] = ()


# Why it is in its state, and what comes next -------------------------------------------------------------

_WhyAndThen = tuple[list[str], list[str]]


def _is_queued(last: Event, events: Sequence[Event], facts: JobFacts) -> _WhyAndThen:
    due_ms = _due(last, facts)
    obstacle, remedy = _obstacle(facts)
    if (last.data or {}).get("unknown"):
        reason = ["No worker that claimed it so far knows its task, or has the schema that it was submitted with."]
        after = ["It is offered to workers repeatedly until HOLDFAST_UNKNOWN_TASK_GRACE_S has passed."]
        return [*reason, *obstacle], remedy or ["Start a worker that has the task.", *after]
    if due_ms > facts.now_ms:
        reason = [f"It is delayed: it is due {_due_phrase(due_ms, facts)}.", *obstacle]
        return reason, remedy or ["Then the next free worker claims it."]
    waits = duration_phrase(max(0, facts.now_ms - last.at_ms))
    return [f"It has been queued for {waits}.", *obstacle], remedy or ["The next free worker of its queue claims it."]


def _obstacle(facts: JobFacts) -> _WhyAndThen:
    """Why no worker claims jobs of the queue, and what to do about it."""
    queue = shlex.quote(facts.queue)
    if facts.paused:
        return ["Its queue is paused."], [f"It runs after the queue is resumed: `holdfast queues resume {queue}`."]
    if facts.unverified:
        return (
            ["Its queue waits: the engine was started or replaced, and has not been compared with the ledger since."],
            ["It runs once they were compared, which a worker or `holdfast upkeep` does when the ledger answers."],
        )
    if facts.workers == 0:
        return ["No worker serves its queue."], [f"It runs once a worker does: `holdfast worker APP --queue {queue}`."]
    if facts.concurrency is not None and facts.running >= facts.concurrency:
        when = "when a running job of the queue ends" if facts.concurrency else "when the limit is raised"
        return (
            [f"Its queue is at its concurrency limit: {facts.running} of {facts.concurrency} jobs are running."],
            [f"A worker can claim it {when}. To change the limit: `holdfast queues concurrency {queue} N`."],
        )
    return [], []


def _is_waiting_approval(last: Event, events: Sequence[Event], facts: JobFacts) -> _WhyAndThen:
    reason = f"It has been waiting for approval since {time_phrase(last.at_ms)}."
    then = "It needs a decision: when approved, it is queued; when rejected, it is cancelled."
    request = next((row for row in reversed(facts.approvals) if row.status is ApprovalStatus.REQUESTED), None)
    if request is None:
        return [reason], [then]
    if request.deadline is not None:
        then = f"Without a decision it is cancelled at {request.deadline:%Y-%m-%d %H:%M:%S} UTC."
    show = f"`holdfast approvals show {request.approval_id}`"
    return [reason, *_request_sentences(request)], [f"{show} shows what would run. {then}"]


def _request_sentences(request: ApprovalRow) -> Iterator[str]:
    rules = f" by {join_names(request.policies)}" if request.policies else ""
    reason = " ".join(request.reason.split())[:200]
    if rules or reason:
        yield f"Approval is required{rules}{f': {reason}' if reason else ''}."
    approvers = [vote.voter for vote in request.votes if vote.approve]
    if request.quorum > 1:
        so_far = f"approved by {join_names(approvers)}" if approvers else "none so far"
        yield f"It needs {request.quorum} different approvers; {so_far}."


def _is_running(last: Event, events: Sequence[Event], facts: JobFacts) -> _WhyAndThen:
    alive_ms = max(event.at_ms for event in events if event.to_state is not None or event.type == HEARTBEAT_EVENT)
    worker = last.worker or "an unknown worker"
    heartbeat = f", last heartbeat {duration_phrase(facts.now_ms - alive_ms)} ago" if alive_ms > last.at_ms else ""
    lease = duration_phrase(facts.lease_ms)
    return (
        [f"It has been running on {worker} for {duration_phrase(max(0, facts.now_ms - last.at_ms))}{heartbeat}."],
        [
            f"If the worker fails, another reclaims it within {lease}, as attempt {last.attempt + 1}.",
        ],
    )


def _is_retrying(last: Event, events: Sequence[Event], facts: JobFacts) -> _WhyAndThen:
    due_ms = _due(last, facts)
    which = f"its {ordinal(last.retry_count)} retry" if last.retry_count else "the outage to end"
    when = f", due {_due_phrase(due_ms, facts)}" if due_ms else ""
    obstacle, remedy = _obstacle(facts)
    return [f"It waits for {which}{when}.", *obstacle], [f"Then it runs again, as attempt {last.attempt + 1}.", *remedy]


def _is_suspended(last: Event, events: Sequence[Event], facts: JobFacts) -> _WhyAndThen:
    resume = f"`holdfast jobs resume {facts.job_id}`"
    if facts.in_doubt:
        keys = ", ".join(facts.in_doubt)
        resolve = f"holdfast effects resolve {shlex.quote(facts.in_doubt[0])}"
        return (
            [f"An operator has to decide: it is unknown whether this effect happened: {keys}."],
            [f"Check whether it happened, then run `{resolve}` with --done or --not-done, which resumes the job."],
        )
    if (last.data or {}).get("code") == EffectInDoubt.code:
        return (
            ["An effect was in doubt and no longer is: its outcome has been recorded, or its key was released."],
            [f"It stays suspended until an operator resumes it: {resume}."],
        )
    return (
        [f"An operator has to decide: it has been suspended since {time_phrase(last.at_ms)}{reason_of(last)}."],
        [f"{resume} resumes it with a new set of retries; otherwise cancel it."],
    )


def _is_succeeded(last: Event, events: Sequence[Event], facts: JobFacts) -> _WhyAndThen:
    return ["It has succeeded."], ["Nothing more happens to it."]


def _is_dlq_pending(last: Event, events: Sequence[Event], facts: JobFacts) -> _WhyAndThen:
    return (
        ["It failed for good, and its dead letter is not written yet."],
        [
            "A worker's upkeep writes it as soon as the ledger answers; then the job ends as failed.",
            "If this lasts, check that a worker or `holdfast upkeep` runs and that the ledger is up.",
        ],
    )


def _is_dlq_recorded(last: Event, events: Sequence[Event], facts: JobFacts) -> _WhyAndThen:
    return [f"Its dead letter{_dead_letter_id(facts)} is written."], ["It ends as failed shortly."]


def _is_failed(last: Event, events: Sequence[Event], facts: JobFacts) -> _WhyAndThen:
    failure = next((event for event in reversed(events) if event.type == "task.dlq_pending"), last)
    decided = facts.dead_letter_status not in (None, "open")
    state = f" and is {name_phrase(facts.dead_letter_status or '')}" if decided else ""
    reason = [
        f"It failed{error_of(failure) or ' for good'}. Its dead letter{_dead_letter_id(facts)} is written{state}."
    ]
    then = "This job will not run again."
    if facts.replayed_as:
        return reason, [f"{then} It was replayed as job {facts.replayed_as}."]
    if decided:
        return reason, [then]
    show = f"`holdfast dlq show{_dead_letter_id(facts)}`"
    return reason, [f"{then} An operator can check the dead letter ({show}) and replay it."]


def _is_cancelled(last: Event, events: Sequence[Event], facts: JobFacts) -> _WhyAndThen:
    return [f"It was cancelled{actor_phrase(last)}{reason_of(last)}."], ["It will not run again."]


_STATE_SENTENCES: Final[Mapping[State, Callable[[Event, Sequence[Event], JobFacts], _WhyAndThen]]] = MappingProxyType(
    {
        State.QUEUED: _is_queued,
        State.WAITING_APPROVAL: _is_waiting_approval,
        State.RUNNING: _is_running,
        State.RETRYING: _is_retrying,
        State.SUSPENDED: _is_suspended,
        State.SUCCEEDED: _is_succeeded,
        State.DLQ_PENDING: _is_dlq_pending,
        State.DLQ_RECORDED: _is_dlq_recorded,
        State.FAILED: _is_failed,
        State.CANCELLED: _is_cancelled,
    }
)


def _disagreement(state: State, facts: JobFacts) -> list[str]:
    """Sentence for a job whose state differs between engine and ledger."""
    live = facts.live
    if live is None or live.state is state:
        return []
    if state in FINAL:
        return [
            f"The engine still has it as {state_phrase(live.state)}: it lost the end. A second end is not recorded."
        ]
    return [f"The engine is ahead of the ledger: there it is {state_phrase(live.state)}. The ledger follows shortly."]


# Helpers ---------------------------------------------------------------------------------------------


def _due(last: Event, facts: JobFacts) -> int:
    if facts.live is not None and facts.live.state is last.to_state and facts.live.next_attempt_at_ms:
        return facts.live.next_attempt_at_ms
    data = last.data or {}
    return int(data.get("next_attempt_at_ms") or data.get("run_at_ms") or 0)


def _due_phrase(due_ms: int, facts: JobFacts) -> str:
    left_ms = due_ms - facts.now_ms
    return f"in {duration_phrase(left_ms)} ({time_phrase(due_ms)})" if left_ms > 0 else f"since {time_phrase(due_ms)}"


def _dead_letter_id(facts: JobFacts) -> str:
    return f" {facts.dlq_id}" if facts.dlq_id else ""
