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
    # What to do stands at the end of the story; here half of a command would be left of it.
    message = message.partition(EffectInDoubt.ADVICE)[0]
    told = ": ".join(part for part in (str(kind), message) if part)
    return f": {told[:200]}" if told else ""


def actor_phrase(event: Event) -> str:
    actor = (event.data or {}).get("actor")
    return f" by {actor}" if actor else ""


def reason_of(event: Event) -> str:
    data = event.data or {}
    # What an operator did has its reason there, or none; not every store writes a message as well.
    said = str(data.get("reason") or ("" if "actor" in data else event.message))
    said = said.partition(EffectInDoubt.ADVICE)[0]
    return f" ({' '.join(said.split())[:200]})" if said else ""


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
    told = [f"{count} {unit}" for count, unit in parts if count]
    return " ".join(told[:2])


class OperatorAction(msgspec.Struct, frozen=True, kw_only=True):
    """What a person did about a job, as the operators' log tells it."""

    type: str
    actor: str
    reason: str
    at_ms: int


class JobFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known beside the events."""

    job_id: str
    now_ms: int
    #: What it was submitted to run: not every store repeats it in the first event.
    task: str = ""
    queue: str = ""
    #: Whether an operator has paused the queue; None: not known.
    paused: bool | None = None
    #: How many workers claim from the queue; None: not known.
    workers: int | None = None
    #: The engine's word; None: it does not know the job (any more), or nobody asked it.
    live: JobInfo | None = None
    #: How long a lease lasts: a dead worker's job is taken over within this.
    lease_ms: int = 30_000
    dlq_id: str | None = None
    dead_letter_status: str | None = None
    #: The job that its dead letter was sent back to work as.
    replayed_as: str | None = None
    #: The job that this one is a replay of.
    replay_of: str | None = None
    #: Keys of effects of which nobody knows whether they happened.
    in_doubt: tuple[str, ...] = ()
    #: What people were asked about it, the oldest first.
    approvals: tuple[ApprovalRow, ...] = ()
    #: What people did about it; those that its own events tell are not told twice.
    operator_actions: tuple[OperatorAction, ...] = ()


# Why it is where it is, and what comes next --------------------------------------------------------------

_Present = tuple[list[str], list[str]]


def _is_queued(last: Event, events: Sequence[Event], scene: JobFacts) -> _Present:
    due_ms = _due(last, scene)
    obstacle, remedy = _obstacle(scene)
    if due_ms > scene.now_ms:
        why = [f"It waits for its time: it is due {_in(due_ms, scene)}.", *obstacle]
        return why, remedy or ["Then the next free worker takes it."]
    waits = duration_phrase(max(0, scene.now_ms - last.at_ms))
    return [f"It has waited in line for {waits}.", *obstacle], remedy or ["The next free worker of its queue takes it."]


def _obstacle(scene: JobFacts) -> _Present:
    """Why no worker takes a job of the queue, and what to do about it."""
    queue = shlex.quote(scene.queue)
    if scene.paused:
        return ["Its queue is paused."], [f"No worker takes it before `holdfast queues resume {queue}`."]
    if scene.workers == 0:
        return ["No worker serves its queue."], [f"It runs once one does: `holdfast worker APP --queue {queue}`."]
    return [], []


def _is_waiting_approval(last: Event, events: Sequence[Event], scene: JobFacts) -> _Present:
    why = f"A person has to decide: it has waited for approval since {time_phrase(last.at_ms)}."
    then = "Nothing happens by itself. Approved, it goes in line; rejected, it is cancelled."
    asked = next((row for row in reversed(scene.approvals) if row.status is ApprovalStatus.REQUESTED), None)
    if asked is None:
        return [why], [then]
    if asked.deadline is not None:
        then = f"Unanswered, it is cancelled at {asked.deadline:%Y-%m-%d %H:%M:%S} UTC."
    return [why, *_question(asked)], [f"`holdfast approvals show {asked.approval_id}` tells what would run. {then}"]


def _question(asked: ApprovalRow) -> Iterator[str]:
    rules = f" by {join_names(asked.policies)}" if asked.policies else ""
    reason = " ".join(asked.reason.split())[:200]
    if rules or reason:
        yield f"It is asked for{rules}{f': {reason}' if reason else ''}."
    yes = [vote.person for vote in asked.votes if vote.approve]
    if asked.quorum > 1:
        given = f"{join_names(yes)} did" if yes else "nobody did yet"
        yield f"It takes {asked.quorum} different people to approve it; {given}."


def _is_running(last: Event, events: Sequence[Event], scene: JobFacts) -> _Present:
    alive_ms = max(event.at_ms for event in events if event.to_state is not None or event.type == HEARTBEAT_EVENT)
    worker = last.worker or "an unknown worker"
    seen = f", last heard of {duration_phrase(scene.now_ms - alive_ms)} ago" if alive_ms > last.at_ms else ""
    lease = duration_phrase(scene.lease_ms)
    return (
        [f"Its worker {worker} has held it for {duration_phrase(max(0, scene.now_ms - last.at_ms))}{seen}."],
        [
            f"If the worker dies, another takes over within {lease}, as attempt {last.attempt + 1}.",
        ],
    )


def _is_retrying(last: Event, events: Sequence[Event], scene: JobFacts) -> _Present:
    due_ms = _due(last, scene)
    which = f"its {ordinal(last.retry_count)} retry" if last.retry_count else "the outage to end"
    when = f", due {_in(due_ms, scene)}" if due_ms else ""
    obstacle, remedy = _obstacle(scene)
    return [f"It waits for {which}{when}.", *obstacle], [f"Then it runs again, as attempt {last.attempt + 1}.", *remedy]


def _is_suspended(last: Event, events: Sequence[Event], scene: JobFacts) -> _Present:
    resume = f"`holdfast jobs resume {scene.job_id}`"
    if scene.in_doubt:
        keys = ", ".join(scene.in_doubt)
        resolve = f"holdfast effects resolve {shlex.quote(scene.in_doubt[0])}"
        return (
            [f"A person has to decide: nobody knows whether this effect happened: {keys}."],
            [f"Look, then `{resolve}` with --done or --not-done, which sends the job back to work."],
        )
    if (last.data or {}).get("code") == EffectInDoubt.code:
        return (
            ["An effect was in doubt, and no longer is: its end has been recorded, or its key is free again."],
            [f"Nothing happens by itself. {resume} sends it back to work."],
        )
    return (
        [f"A person has to decide: it is suspended since {time_phrase(last.at_ms)}{reason_of(last)}."],
        [f"Nothing happens by itself. {resume} sends it back to work with fresh retries; else cancel it."],
    )


def _is_succeeded(last: Event, events: Sequence[Event], scene: JobFacts) -> _Present:
    return ["It is done."], ["Nothing more will happen to it."]


def _is_dlq_pending(last: Event, events: Sequence[Event], scene: JobFacts) -> _Present:
    return (
        ["It was given up, and its dead letter is not written yet."],
        [
            "A worker's upkeep writes it as soon as the ledger answers; then the job ends as failed.",
            "If this lasts: does a worker or `holdfast upkeep` run, and is the ledger up?",
        ],
    )


def _is_dlq_recorded(last: Event, events: Sequence[Event], scene: JobFacts) -> _Present:
    return [f"Its dead letter{_letter_id(scene)} is written."], ["It ends as failed in a moment."]


def _is_failed(last: Event, events: Sequence[Event], scene: JobFacts) -> _Present:
    failure = next((event for event in reversed(events) if event.type == "task.dlq_pending"), last)
    decided = scene.dead_letter_status not in (None, "open")
    state = f" and is {name_phrase(scene.dead_letter_status or '')}" if decided else ""
    why = [f"It failed{error_of(failure) or ' for good'}. Its dead letter{_letter_id(scene)} is written{state}."]
    then = "This job will not run again."
    if scene.replayed_as:
        return why, [f"{then} Its work goes on as job {scene.replayed_as}."]
    if decided:
        return why, [then]
    return why, [f"{then} A person can look at the dead letter and replay it (`holdfast dlq show{_letter_id(scene)}`)."]


def _is_cancelled(last: Event, events: Sequence[Event], scene: JobFacts) -> _Present:
    return [f"It was cancelled{actor_phrase(last)}{reason_of(last)}."], ["It will not run again."]


_PRESENT: Final[Mapping[State, Callable[[Event, Sequence[Event], JobFacts], _Present]]] = MappingProxyType(
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


def _apart(state: State, scene: JobFacts) -> list[str]:
    """Where engine and ledger do not say the same."""
    live = scene.live
    if live is None or live.state is state:
        return []
    if state in FINAL:
        return [
            f"The engine still has it as {state_phrase(live.state)}: it forgot the end. A second end is not recorded."
        ]
    return [
        f"The engine is further on already: there it is {state_phrase(live.state)}. The ledger follows in a moment."
    ]


# Words -----------------------------------------------------------------------------------------------


def _due(last: Event, scene: JobFacts) -> int:
    if scene.live is not None and scene.live.state is last.to_state and scene.live.next_attempt_at_ms:
        return scene.live.next_attempt_at_ms
    data = last.data or {}
    return int(data.get("next_attempt_at_ms") or data.get("run_at_ms") or 0)


def _in(due_ms: int, scene: JobFacts) -> str:
    left_ms = due_ms - scene.now_ms
    return f"in {duration_phrase(left_ms)} ({time_phrase(due_ms)})" if left_ms > 0 else f"since {time_phrase(due_ms)}"


def _letter_id(scene: JobFacts) -> str:
    return f" {scene.dlq_id}" if scene.dlq_id else ""
