"""Every state and every event has a plain sentence. The texts here are what operators read."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.clock import to_datetime
from holdfast.core.job import EMPTY_META, Event, JobInfo
from holdfast.core.states import (
    DUPLICATE_EVENT,
    EVENT_CHOICES,
    EVENTS,
    EVENTS_BY_MOVE,
    EXPEDITED_EVENT,
    FORKED_EVENT,
    HEARTBEAT_EVENT,
    RESTORED_EVENT,
    State,
    event_for,
)
from holdfast.ledger.port.operators import ApprovalRow, ApprovalStatus, VoteRow
from holdfast.ledger.queries.explain import KNOWN_EVENTS, Explanation, explain
from holdfast.ledger.queries.explain_state import JobFacts, OperatorAction

S = State
#: 2026-11-15 14:00:00 UTC.
START_MS = 1_794_751_200_000
Step = State | tuple[State, dict[str, Any]] | Event


def make_history(*steps: Step) -> list[Event]:
    """Make a history with one event every two seconds."""
    events: list[Event] = []
    state: State | None = None
    attempt = retries = 0
    for number, step in enumerate(steps):
        at_ms = START_MS + 2_000 * number
        if isinstance(step, Event):
            events.append(Event(type=step.type, job_id="j", at_ms=at_ms, message=step.message))
            continue
        to, overrides = step if isinstance(step, tuple) else (step, {})
        attempt += to is S.RUNNING
        retries += to is S.RETRYING
        fields = {"type": event_for(state, to), "attempt": attempt, "retry_count": retries, **overrides}
        worker = "host-1" if to is S.RUNNING else ""
        events.append(
            Event(**{"job_id": "j", "at_ms": at_ms, "from_state": state, "to_state": to, "worker": worker, **fields})
        )
        state = to
    return events


def side_event(name: str, message: str = "") -> Event:
    return Event(type=name, job_id="j", at_ms=0, message=message)


def explain_events(events: list[Event], after_s: float = 60, **facts: Any) -> Explanation:
    return explain(events, JobFacts(job_id="j", now_ms=START_MS + round(after_s * 1000), **facts))


def make_info(state: State, **fields: Any) -> JobInfo:
    return JobInfo(
        **{
            "job_id": "j",
            "task": "t",
            "queue": "default",
            "tenant_id": "default",
            "state": state,
            "attempt": 1,
            "payload": b"{}",
            "idempotency_key": "j",
            "trace_id": "",
            "meta": EMPTY_META,
            "created_at_ms": START_MS,
            **fields,
        }
    )


FAILURE = {"code": "TASK_ERROR", "type": "ValueError", "message": "boom"}
RETRY = (S.RETRYING, {"data": {**FAILURE, "next_attempt_at_ms": START_MS + 72_000}})
BY_ANN = {"data": {"actor": "ann", "reason": "customer withdrew"}}

FORK_SENTENCE = (
    "At 2026-11-15 14:00:04 UTC the engine turned out to have lost its latest events (a wipe, or an older copy): "
    "it continued from queued, where the ledger had it running."
)

HISTORIES: dict[str, tuple[list[Event], str]] = {
    "created": (
        make_history((S.QUEUED, {"data": {"task": "shop.charge"}})),
        "It was submitted at 2026-11-15 14:00:00 UTC to run shop.charge.",
    ),
    "cancelled without a reason": (
        make_history(S.QUEUED, (S.CANCELLED, {"data": {"actor": "ann"}, "message": "no reason given (by ann)"})),
        "It was cancelled at 2026-11-15 14:00:02 UTC by ann.",
    ),
    "created for later": (
        make_history((S.QUEUED, {"data": {"run_at_ms": START_MS + 60_000}})),
        "It was submitted at 2026-11-15 14:00:00 UTC, no earlier than 2026-11-15 14:01:00 UTC.",
    ),
    "held": (
        make_history(S.WAITING_APPROVAL),
        "It was submitted at 2026-11-15 14:00:00 UTC and needs approval before it can run.",
    ),
    "requested by the task": (
        make_history(S.QUEUED, S.RUNNING, S.WAITING_APPROVAL),
        "After 2 s attempt 1 requested approval and released its worker.",
    ),
    "held while queued": (
        make_history(S.QUEUED, (S.WAITING_APPROVAL, {"message": "policy 4"})),
        "It was held for approval at 2026-11-15 14:00:02 UTC (policy 4).",
    ),
    "approved": (
        make_history(S.WAITING_APPROVAL, (S.QUEUED, {"data": {"actor": "bob"}})),
        "It was approved at 2026-11-15 14:00:02 UTC by bob.",
    ),
    "claimed": (make_history(S.QUEUED, S.RUNNING), "Attempt 1 began at 2026-11-15 14:00:02 UTC on host-1."),
    "reclaimed": (
        make_history(S.QUEUED, S.RUNNING, (S.RUNNING, {"worker": "host-2", "data": {"old_worker": "host-1"}})),
        "2 s later the lease of host-1 had expired (crash or lost connection): host-2 reclaimed it as attempt 2.",
    ),
    "released": (
        make_history(S.QUEUED, S.RUNNING, S.QUEUED),
        "Its worker released it unfinished after 2 s; it was queued again.",
    ),
    "sleeping": (
        make_history(S.QUEUED, S.RUNNING, (S.QUEUED, {"data": {"next_attempt_at_ms": START_MS + 3_600_000}})),
        "After 2 s it was put to sleep until 2026-11-15 15:00:00 UTC and released its worker.",
    ),
    "succeeded": (make_history(S.QUEUED, S.RUNNING, S.SUCCEEDED), "Attempt 1 succeeded after 2 s."),
    "retrying": (
        make_history(S.QUEUED, S.RUNNING, RETRY),
        "Attempt 1 failed after 2 s: ValueError: boom; it was to run again at 2026-11-15 14:01:12 UTC.",
    ),
    "an outage": (
        make_history(S.QUEUED, S.RUNNING, (S.RETRYING, {"data": {"code": "UNAVAILABLE", "counted": False}})),
        "Attempt 1 found a dependency down after 2 s: UNAVAILABLE. This does not use up a retry.",
    ),
    "suspended after a failure": (
        make_history(S.QUEUED, S.RUNNING, (S.SUSPENDED, {"data": FAILURE})),
        "Attempt 1 failed after 2 s: ValueError: boom, and the job was suspended.",
    ),
    "suspended by an operator": (
        make_history(S.QUEUED, (S.SUSPENDED, BY_ANN)),
        "It was suspended at 2026-11-15 14:00:02 UTC by ann (customer withdrew).",
    ),
    "resumed": (
        make_history(S.QUEUED, S.SUSPENDED, (S.QUEUED, {"data": {"actor": "ann"}})),
        "It was resumed at 2026-11-15 14:00:04 UTC by ann; its retries start again.",
    ),
    "dead-lettered": (
        make_history(S.QUEUED, S.RUNNING, (S.DLQ_PENDING, {"data": FAILURE})),
        "Attempt 1 failed for good after 2 s: ValueError: boom.",
    ),
    "dead-lettered unstarted": (
        make_history(S.QUEUED, (S.DLQ_PENDING, {"data": {"code": "INVALID_PAYLOAD", "message": "no JSON"}})),
        "It was dead-lettered at 2026-11-15 14:00:02 UTC: INVALID_PAYLOAD: no JSON.",
    ),
    "dead letter": (
        make_history(S.QUEUED, S.RUNNING, S.DLQ_PENDING, S.DLQ_RECORDED),
        "Its dead letter was written at 2026-11-15 14:00:06 UTC.",
    ),
    "failed": (
        make_history(S.QUEUED, S.RUNNING, S.DLQ_PENDING, S.DLQ_RECORDED, S.FAILED),
        "It ended as failed at 2026-11-15 14:00:08 UTC.",
    ),
    "cancelled": (
        make_history(S.QUEUED, (S.CANCELLED, BY_ANN)),
        "It was cancelled at 2026-11-15 14:00:02 UTC by ann (customer withdrew).",
    ),
    "restored": (
        make_history(S.QUEUED, S.RUNNING, (S.QUEUED, {"type": RESTORED_EVENT})),
        "The engine had lost it; at 2026-11-15 14:00:04 UTC it was queued again, as recorded in the ledger.",
    ),
    "restored in its state": (
        make_history(S.QUEUED, (S.QUEUED, {"type": RESTORED_EVENT})),
        "The engine had lost it; at 2026-11-15 14:00:02 UTC it was restored as queued, as recorded in the ledger.",
    ),
    "forked": (
        make_history(S.QUEUED, S.RUNNING, (S.QUEUED, {"type": FORKED_EVENT})),
        FORK_SENTENCE,
    ),
    "duplicate": (
        make_history(S.QUEUED, side_event(DUPLICATE_EVENT)),
        "A second copy of it arrived at 2026-11-15 14:00:02 UTC and was dropped.",
    ),
    "one heartbeat": (
        make_history(S.QUEUED, S.RUNNING, side_event(HEARTBEAT_EVENT)),
        "Its worker sent 1 heartbeat.",
    ),
    "heartbeats": (
        make_history(
            S.QUEUED, S.RUNNING, side_event(HEARTBEAT_EVENT), side_event(HEARTBEAT_EVENT), side_event(HEARTBEAT_EVENT)
        ),
        "Its worker sent 3 heartbeats.",
    ),
    "something new": (
        make_history(S.QUEUED, side_event("operator.noted", "check this")),
        "operator.noted at 2026-11-15 14:00:02 UTC (check this).",
    ),
    "approved by two": (
        make_history(S.WAITING_APPROVAL, (S.QUEUED, {"data": {"approval": {"by": ["ann", "bob"]}, "actor": "bob"}})),
        "It was approved at 2026-11-15 14:00:02 UTC by ann and bob.",
    ),
    "withdrawn": (
        make_history(
            S.WAITING_APPROVAL, (S.QUEUED, {"type": "approval.withdrawn", "data": {"reason": "it was another payload"}})
        ),
        "The approval request was withdrawn at 2026-11-15 14:00:02 UTC (it was another payload); it was queued again.",
    ),
    "rejected": (
        make_history(
            S.WAITING_APPROVAL,
            (S.CANCELLED, {"type": "approval.rejected", "data": {"actor": "bob", "reason": "too much"}}),
        ),
        "It was rejected at 2026-11-15 14:00:02 UTC by bob (too much) and cancelled.",
    ),
    "expired": (
        make_history(S.WAITING_APPROVAL, (S.CANCELLED, {"type": "approval.expired", "data": {"actor": "holdfast"}})),
        "It was not approved in time and was cancelled at 2026-11-15 14:00:02 UTC.",
    ),
    "expedited": (
        make_history(S.QUEUED, side_event(EXPEDITED_EVENT, "it is urgent")),
        "It was expedited at 2026-11-15 14:00:02 UTC (it is urgent).",
    ),
}


@pytest.mark.parametrize(("events", "sentence"), HISTORIES.values(), ids=HISTORIES.keys())
def test_the_last_event_is_explained(events: list[Event], sentence: str) -> None:
    assert explain_events(events).history[-1] == sentence


def test_every_event_has_a_sentence_and_a_test() -> None:
    event_types = {
        *EVENTS.values(),
        *EVENTS_BY_MOVE.values(),
        HEARTBEAT_EVENT,
        RESTORED_EVENT,
        FORKED_EVENT,
        DUPLICATE_EVENT,
    }
    event_types |= {EXPEDITED_EVENT, *(name for names in EVENT_CHOICES.values() for name in names)}
    assert event_types <= KNOWN_EVENTS
    assert event_types <= {event.type for events, _ in HISTORIES.values() for event in events}


DEAD_LETTERED = (S.QUEUED, S.RUNNING, (S.DLQ_PENDING, {"data": FAILURE}), S.DLQ_RECORDED, S.FAILED)

CURRENT: dict[str, tuple[Explanation, list[str]]] = {
    "queued": (
        explain_events(make_history(S.QUEUED)),
        [
            "It has been queued for 1 min.",
            "The next free worker of its queue claims it.",
        ],
    ),
    "queued and paused": (
        explain_events(make_history(S.QUEUED), queue="my mail", paused=True, workers=0),
        [
            "It has been queued for 1 min.",
            "Its queue is paused.",
            "It runs after the queue is resumed: `holdfast queues resume 'my mail'`.",
        ],
    ),
    "queued and unserved": (
        explain_events(make_history(S.QUEUED), queue="mail", paused=False, workers=0),
        [
            "It has been queued for 1 min.",
            "No worker serves its queue.",
            "It runs once a worker does: `holdfast worker APP --queue mail`.",
        ],
    ),
    "queued and served": (
        explain_events(make_history(S.QUEUED), queue="mail", paused=False, workers=2),
        ["It has been queued for 1 min.", "The next free worker of its queue claims it."],
    ),
    "queued at the limit": (
        explain_events(make_history(S.QUEUED), queue="mail", paused=False, workers=2, concurrency=5, running=5),
        [
            "It has been queued for 1 min.",
            "Its queue is at its concurrency limit: 5 of 5 jobs are running.",
            (
                "A worker can claim it when a running job of the queue ends. To change the limit: "
                "`holdfast queues concurrency mail N`."
            ),
        ],
    ),
    "queued below the limit": (
        explain_events(make_history(S.QUEUED), queue="mail", paused=False, workers=2, concurrency=5, running=4),
        ["It has been queued for 1 min.", "The next free worker of its queue claims it."],
    ),
    "queued and nothing may run": (
        explain_events(make_history(S.QUEUED), queue="mail", paused=False, workers=2, concurrency=0),
        [
            "It has been queued for 1 min.",
            "Its queue is at its concurrency limit: 0 of 0 jobs are running.",
            (
                "A worker can claim it when the limit is raised. To change the limit: "
                "`holdfast queues concurrency mail N`."
            ),
        ],
    ),
    "queued for later and paused": (
        explain_events(make_history((S.QUEUED, {"data": {"run_at_ms": START_MS + 90_000}})), queue="mail", paused=True),
        [
            "It is delayed: it is due in 30 s (2026-11-15 14:01:30 UTC).",
            "Its queue is paused.",
            "It runs after the queue is resumed: `holdfast queues resume mail`.",
        ],
    ),
    "retrying and paused": (
        explain_events(make_history(S.QUEUED, S.RUNNING, RETRY), 80, queue="mail", paused=True),
        [
            "It waits for its first retry, due since 2026-11-15 14:01:12 UTC.",
            "Its queue is paused.",
            "Then it runs again, as attempt 2.",
            "It runs after the queue is resumed: `holdfast queues resume mail`.",
        ],
    ),
    "queued for later": (
        explain_events(make_history((S.QUEUED, {"data": {"run_at_ms": START_MS + 90_000}}))),
        [
            "It is delayed: it is due in 30 s (2026-11-15 14:01:30 UTC).",
            "Then the next free worker claims it.",
        ],
    ),
    "waiting_approval": (
        explain_events(make_history(S.WAITING_APPROVAL)),
        [
            "It has been waiting for approval since 2026-11-15 14:00:00 UTC.",
            "It needs a decision: when approved, it is queued; when rejected, it is cancelled.",
        ],
    ),
    "running": (
        explain_events(make_history(S.QUEUED, S.RUNNING), 42),
        [
            "It has been running on host-1 for 40 s.",
            "If the worker fails, another reclaims it within 30 s, as attempt 2.",
        ],
    ),
    "running with heartbeats": (
        explain_events(make_history(S.QUEUED, S.RUNNING, side_event(HEARTBEAT_EVENT)), 42, lease_ms=600_000),
        [
            "It has been running on host-1 for 40 s, last heartbeat 38 s ago.",
            "If the worker fails, another reclaims it within 10 min, as attempt 2.",
        ],
    ),
    "retrying": (
        explain_events(make_history(S.QUEUED, S.RUNNING, S.RETRYING, S.RUNNING, S.RETRYING, S.RUNNING, RETRY)),
        [
            "It waits for its third retry, due in 12 s (2026-11-15 14:01:12 UTC).",
            "Then it runs again, as attempt 4.",
        ],
    ),
    "retrying and due": (
        explain_events(make_history(S.QUEUED, S.RUNNING, RETRY), 80),
        [
            "It waits for its first retry, due since 2026-11-15 14:01:12 UTC.",
            "Then it runs again, as attempt 2.",
        ],
    ),
    "retrying, the engine has a newer time": (
        explain_events(
            make_history(S.QUEUED, S.RUNNING, RETRY), live=make_info(S.RETRYING, next_attempt_at_ms=START_MS + 66_000)
        ),
        [
            "It waits for its first retry, due in 6 s (2026-11-15 14:01:06 UTC).",
            "Then it runs again, as attempt 2.",
        ],
    ),
    "waiting out an outage": (
        explain_events(make_history(S.QUEUED, S.RUNNING, (S.RETRYING, {"retry_count": 0, "data": {"counted": False}}))),
        ["It waits for the outage to end.", "Then it runs again, as attempt 2."],
    ),
    "suspended": (
        explain_events(make_history(S.QUEUED, (S.SUSPENDED, BY_ANN))),
        [
            "An operator has to decide: it has been suspended since 2026-11-15 14:00:02 UTC (customer withdrew).",
            "`holdfast jobs resume j` resumes it with a new set of retries; otherwise cancel it.",
        ],
    ),
    "suspended in doubt": (
        explain_events(make_history(S.QUEUED, S.RUNNING, S.SUSPENDED), in_doubt=("pay:17",)),
        [
            "An operator has to decide: it is unknown whether this effect happened: pay:17.",
            (
                "Check whether it happened, then run `holdfast effects resolve pay:17` with --done or --not-done, "
                "which resumes the job."
            ),
        ],
    ),
    "suspended for a doubt with an odd key": (
        explain_events(make_history(S.QUEUED, S.RUNNING, S.SUSPENDED), in_doubt=("pay 17",)),
        [
            "An operator has to decide: it is unknown whether this effect happened: pay 17.",
            (
                "Check whether it happened, then run `holdfast effects resolve 'pay 17'` with --done or --not-done, "
                "which resumes the job."
            ),
        ],
    ),
    "suspended for a doubt that is resolved": (
        explain_events(make_history(S.QUEUED, S.RUNNING, (S.SUSPENDED, {"data": {"code": "EFFECT_IN_DOUBT"}}))),
        [
            "An effect was in doubt and no longer is: its outcome has been recorded, or its key was released.",
            "It stays suspended until an operator resumes it: `holdfast jobs resume j`.",
        ],
    ),
    "succeeded": (
        explain_events(make_history(S.QUEUED, S.RUNNING, S.SUCCEEDED)),
        ["It has succeeded.", "Nothing more happens to it."],
    ),
    "dlq_pending": (
        explain_events(make_history(*DEAD_LETTERED[:3])),
        [
            "It failed for good, and its dead letter is not written yet.",
            "A worker's upkeep writes it as soon as the ledger answers; then the job ends as failed.",
            "If this lasts, check that a worker or `holdfast upkeep` runs and that the ledger is up.",
        ],
    ),
    "dlq_recorded": (
        explain_events(make_history(*DEAD_LETTERED[:4]), dlq_id="d-1"),
        ["Its dead letter d-1 is written.", "It ends as failed shortly."],
    ),
    "failed": (
        explain_events(make_history(*DEAD_LETTERED), dlq_id="d-1", dead_letter_status="open"),
        [
            "It failed: ValueError: boom. Its dead letter d-1 is written.",
            (
                "This job will not run again. "
                "An operator can check the dead letter (`holdfast dlq show d-1`) and replay it."
            ),
        ],
    ),
    "failed and decided": (
        explain_events(make_history(*DEAD_LETTERED), dlq_id="d-1", dead_letter_status="replayed"),
        [
            "It failed: ValueError: boom. Its dead letter d-1 is written and is replayed.",
            "This job will not run again.",
        ],
    ),
    "cancelled": (
        explain_events(make_history(S.QUEUED, (S.CANCELLED, BY_ANN))),
        ["It was cancelled by ann (customer withdrew).", "It will not run again."],
    ),
    "the engine is ahead": (
        explain_events(make_history(S.QUEUED), live=make_info(S.RUNNING)),
        [
            "It has been queued for 1 min.",
            "The next free worker of its queue claims it.",
            "The engine is ahead of the ledger: there it is running. The ledger follows shortly.",
        ],
    ),
    "the engine lost the end": (
        explain_events(make_history(S.QUEUED, S.RUNNING, S.SUCCEEDED), live=make_info(S.QUEUED)),
        [
            "It has succeeded.",
            "Nothing more happens to it.",
            "The engine still has it as queued: it lost the end. A second end is not recorded.",
        ],
    ),
}


@pytest.mark.parametrize(("explanation", "sentences"), CURRENT.values(), ids=CURRENT.keys())
def test_the_current_state_and_the_next_steps_are_explained(explanation: Explanation, sentences: list[str]) -> None:
    assert explanation.reason + explanation.next_steps == sentences
    assert explanation.sentences[-len(sentences) :] == sentences


def test_every_state_is_explained() -> None:
    assert {state.value for state in State} <= CURRENT.keys()


def test_a_history_without_a_move_is_explained() -> None:
    assert explain_events([]).sentences == ["Its creation is not in the ledger."]
    assert explain_events(make_history(side_event(HEARTBEAT_EVENT))).history == ["Its worker sent 1 heartbeat."]


# Operators -----------------------------------------------------------------------------------------


def approval_row(**fields: Any) -> ApprovalRow:
    return ApprovalRow(
        **{
            "tenant_id": "default",
            "approval_id": "a-1",
            "job_id": "j",
            "queue": "default",
            "job_type": "pay",
            "status": ApprovalStatus.REQUESTED,
            "name": "",
            "payload_hash": "h",
            "policies": (),
            "reason": "",
            "details": None,
            "quorum": 1,
            "requested_by": "",
            "requested_at": to_datetime(START_MS),
            "deadline": None,
            "decided_by": None,
            "decided_at": None,
            "decision_reason": None,
            **fields,
        }
    )


def test_an_approval_request_is_explained() -> None:
    vote = VoteRow(voter="ann", approve=True, reason="", at=to_datetime(START_MS))
    row = approval_row(policies=("big", "night"), reason="5,000 EUR", quorum=2, votes=(vote,))
    explanation = explain_events(
        make_history(S.WAITING_APPROVAL), approvals=(approval_row(status=ApprovalStatus.WITHDRAWN), row)
    )
    assert explanation.reason == [
        "It has been waiting for approval since 2026-11-15 14:00:00 UTC.",
        "Approval is required by big and night: 5,000 EUR.",
        "It needs 2 different approvers; approved by ann.",
    ]
    assert explanation.next_steps == [
        (
            "`holdfast approvals show a-1` shows what would run. "
            "It needs a decision: when approved, it is queued; when rejected, it is cancelled."
        )
    ]


def test_an_approval_request_with_a_deadline_is_explained() -> None:
    explanation = explain_events(
        make_history(S.WAITING_APPROVAL), approvals=(approval_row(deadline=to_datetime(START_MS + 60_000), quorum=3),)
    )
    assert explanation.reason[1:] == ["It needs 3 different approvers; none so far."]
    assert explanation.next_steps[0].endswith("Without a decision it is cancelled at 2026-11-15 14:01:00 UTC.")


def test_operator_actions_are_listed_once_and_in_order() -> None:
    actions = (
        OperatorAction(type="operator.approve", actor="ann", reason="fine", at_ms=START_MS + 1_000),
        OperatorAction(type="operator.cancel", actor="ann", reason="", at_ms=START_MS + 3_000),
        OperatorAction(type="operator.dlq_replay", actor="bob", reason="", at_ms=START_MS + 60_000),
    )
    events = make_history(S.WAITING_APPROVAL, S.QUEUED, S.RUNNING, S.DLQ_PENDING, S.DLQ_RECORDED, S.FAILED)
    explanation = explain_events(
        events, operator_actions=actions, replayed_as="k", replay_of="i", dead_letter_status="replayed", dlq_id="d-1"
    )
    assert explanation.history[0] == "It is a replay of job i."
    assert explanation.history[2] == "ann voted to approve it at 2026-11-15 14:00:01 UTC (fine)."
    assert explanation.history[-1] == "bob replayed its dead letter at 2026-11-15 14:01:00 UTC."
    assert not any("cancel" in sentence for sentence in explanation.history)
    assert explanation.next_steps == ["This job will not run again. It was replayed as job k."]


def test_the_task_is_named_although_the_event_does_not_have_it() -> None:
    explanation = explain_events(make_history(S.QUEUED), task="shop.charge").history
    assert explanation == ["It was submitted at 2026-11-15 14:00:00 UTC to run shop.charge."]


def test_a_vote_is_listed_before_the_decision_of_the_same_millisecond() -> None:
    events = make_history(S.WAITING_APPROVAL, (S.QUEUED, {"data": {"actor": "ann"}}))
    action = OperatorAction(type="operator.approve", actor="ann", reason="", at_ms=events[-1].at_ms)
    assert explain_events(events, operator_actions=(action,)).history[1:] == [
        "ann voted to approve it at 2026-11-15 14:00:02 UTC.",
        "It was approved at 2026-11-15 14:00:02 UTC by ann.",
    ]
