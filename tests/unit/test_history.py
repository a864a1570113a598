"""The history checker finds every kind of illegal history, and accepts legal ones."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.core.history import KEPT_MOVES, JobHistory, check_history, read_history
from holdfast.core.job import Event
from holdfast.core.states import FINAL, MOVES, State, event_for

Step = tuple[State, dict[str, Any]]
S = State


def make_events(*steps: Step | State, job_id: str = "j") -> list[Event]:
    """Make the events of a history. Attempts are numbered correctly unless a step overrides them."""
    events: list[Event] = []
    state: State | None = None
    attempt = 0
    for step in steps:
        to, fields = step if isinstance(step, tuple) else (step, {})
        attempt += to is S.RUNNING
        common = {"from_state": state, "attempt": attempt, "type": event_for(state, to), **fields}
        events.append(Event(job_id=job_id, at_ms=0, to_state=to, **common))
        state = to
    return events


FORKED = {"type": "ledger.forked"}
RESTORED = {"type": "task.restored"}

LEGAL: dict[str, list[Event]] = {
    "success": make_events(S.QUEUED, S.RUNNING, S.SUCCEEDED),
    "retry": make_events(S.QUEUED, S.RUNNING, (S.RETRYING, {"retry_count": 1}), (S.RUNNING, {"retry_count": 1})),
    "dead letter": make_events(S.QUEUED, S.RUNNING, S.DLQ_PENDING, S.DLQ_RECORDED, S.FAILED),
    "reclaimed": make_events(S.QUEUED, S.RUNNING, S.RUNNING, S.SUCCEEDED),
    "released": make_events(S.QUEUED, S.RUNNING, S.QUEUED, (S.RUNNING, {"attempt": 1}), (S.SUCCEEDED, {"attempt": 1})),
    "released for a sleep": make_events(S.QUEUED, S.RUNNING, S.QUEUED, S.RUNNING, S.SUCCEEDED),
    "released and cancelled": make_events(S.QUEUED, S.RUNNING, S.QUEUED, (S.CANCELLED, {"attempt": 0})),
    "resumed": make_events(
        S.QUEUED,
        S.RUNNING,
        (S.RETRYING, {"retry_count": 1}),
        (S.SUSPENDED, {"retry_count": 1}),
        S.QUEUED,
        S.RUNNING,
        S.SUCCEEDED,
    ),
    "approved": make_events(S.WAITING_APPROVAL, S.QUEUED, S.RUNNING, S.SUCCEEDED),
    "restored as queued": make_events(S.QUEUED, S.RUNNING, (S.QUEUED, RESTORED), S.RUNNING, S.SUCCEEDED),
    "restored in its state": make_events(S.WAITING_APPROVAL, (S.WAITING_APPROVAL, RESTORED), S.QUEUED, S.RUNNING),
    "forked": make_events(S.QUEUED, S.RUNNING, S.RETRYING, (S.QUEUED, FORKED), (S.RUNNING, {"attempt": 1})),
    "with an event that is not a move": [
        *make_events(S.QUEUED, S.RUNNING),
        Event(type="task.heartbeat", job_id="j", at_ms=0),
        *make_events(S.QUEUED, S.RUNNING, S.SUCCEEDED)[2:],
    ],
}

ILLEGAL: dict[str, tuple[list[Event], str]] = {
    "begins in the middle": (make_events(S.QUEUED, S.RUNNING, S.SUCCEEDED)[1:], "comes from queued, but it was None"),
    "a gap": (make_events(S.QUEUED, S.RUNNING, S.RETRYING, S.RUNNING)[::3], "but it was queued"),
    "two ends": (
        [*make_events(S.QUEUED, S.RUNNING, S.SUCCEEDED), *make_events(S.QUEUED, S.RUNNING, S.SUCCEEDED)[2:]],
        "after it ended",
    ),
    "not in the table": (make_events(S.QUEUED, S.SUCCEEDED), "not in the table"),
    "failed without a dead letter": (make_events(S.QUEUED, S.RUNNING, S.DLQ_PENDING, S.FAILED), "not in the table"),
    "wrong name": (make_events(S.QUEUED, (S.RUNNING, {"type": "task.succeeded"})), "is called"),
    "restored from a final state": (
        make_events(S.QUEUED, S.CANCELLED, (S.CANCELLED, RESTORED)),
        "cancelled → cancelled is not a restore",
    ),
    "restored into another state": (
        make_events(S.QUEUED, (S.SUSPENDED, RESTORED)),
        "queued → suspended is not a restore",
    ),
    "restored with its lease": (make_events(S.QUEUED, S.RUNNING, (S.RUNNING, RESTORED)), "is not a restore"),
    "restored with an attempt lost": (
        make_events(S.QUEUED, S.RUNNING, (S.QUEUED, RESTORED), (S.RUNNING, {"attempt": 1})),
        "expected [2]",
    ),
    "forked from a final state": (
        make_events(S.QUEUED, S.CANCELLED, (S.QUEUED, FORKED)),
        "cancelled → queued is not a fork",
    ),
    "forked to a final state": (
        make_events(S.QUEUED, S.RUNNING, (S.SUCCEEDED, FORKED)),
        "running → succeeded is not a fork",
    ),
    "forked out of nothing": (make_events((S.QUEUED, FORKED)), "None → queued is not a fork"),
    "a fork by another name": (make_events(S.QUEUED, S.RUNNING, S.RETRYING, S.QUEUED), "not in the table"),
    "an attempt twice": (make_events(S.QUEUED, S.RUNNING, S.RETRYING, (S.RUNNING, {"attempt": 1})), "expected [2]"),
    "an attempt skipped": (make_events(S.QUEUED, (S.RUNNING, {"attempt": 2})), "expected [1]"),
    "another worker's attempt": (
        make_events(S.QUEUED, S.RUNNING, S.RUNNING, (S.SUCCEEDED, {"attempt": 1})),
        "expected [2]",
    ),
    "a retry lost": (
        make_events(S.QUEUED, S.RUNNING, (S.RETRYING, {"retry_count": 1}), (S.RUNNING, {"retry_count": 0})),
        "loses retries",
    ),
    "a retry invented": (make_events(S.QUEUED, S.RUNNING, (S.RETRYING, {"retry_count": 2})), "skips retries"),
}


@pytest.mark.parametrize("events", LEGAL.values(), ids=LEGAL.keys())
def test_legal_histories_pass(events: list[Event]) -> None:
    assert read_history(events).faults == []


@pytest.mark.parametrize(("events", "fault"), ILLEGAL.values(), ids=ILLEGAL.keys())
def test_illegal_histories_are_found(events: list[Event], fault: str) -> None:
    with pytest.raises(AssertionError) as error:
        check_history(events)
    assert fault in str(error.value)


def test_every_pair_of_states_is_judged_by_the_table() -> None:
    for before in State:
        for after in State:
            events = [
                Event(type=event_for(None, before), job_id="j", at_ms=0, to_state=before, attempt=0),
                Event(type=event_for(before, after), job_id="j", at_ms=0, from_state=before, to_state=after, attempt=0),
            ]
            found = any("not in the table" in fault for fault in read_history(events[1:]).faults)
            reclaimed = before is after is State.RUNNING
            assert found is (after not in MOVES[before] and not reclaimed), (before, after)


def test_each_job_has_its_own_history() -> None:
    one, two = make_events(S.QUEUED, S.RUNNING, S.SUCCEEDED), make_events(S.QUEUED, S.RUNNING, job_id="k")
    history = check_history([event for pair in zip(one, [*two, two[0]], strict=True) for event in pair][:5])
    assert {job_id: job.state for job_id, job in history.histories.items()} == {"j": S.SUCCEEDED, "k": S.RUNNING}
    assert history.open_jobs == ["k"]


def test_an_open_job_is_a_fault_when_all_should_have_ended() -> None:
    events = make_events(S.QUEUED, S.RUNNING)
    assert check_history(events).open_jobs == ["j"]
    with pytest.raises(AssertionError, match="no final event"):
        check_history(events, ended=True)
    assert S.RUNNING not in FINAL


def test_forks_and_restores_are_counted() -> None:
    history = check_history([*LEGAL["forked"], *make_events(S.QUEUED, job_id="k")]).histories["j"]
    assert (history.forks, history.restores, history.state) == (1, 0, S.RUNNING)
    assert check_history(LEGAL["restored as queued"]).histories["j"].restores == 1


def test_gaps_in_event_numbers_are_found() -> None:
    created, claimed, succeeded = make_events(S.QUEUED, S.RUNNING, S.SUCCEEDED)
    heartbeat = Event(type="task.heartbeat", job_id="j", at_ms=0)
    history = JobHistory("j")
    assert [history.add(event, seq + 1) for seq, event in enumerate([created, claimed, heartbeat, succeeded])] == [
        []
    ] * 4
    assert history.events == 4
    for numbers, fault in {
        (2, 3, 4): "task.created has number 2 after 0",
        (1, 2, 4): "task.succeeded has number 4 after 2",
        (1, 2, 2): "task.succeeded has number 2 after 2",
    }.items():
        history = JobHistory("j")
        pairs = zip([created, claimed, succeeded], numbers, strict=True)
        faults = [fault for event, seq in pairs for fault in history.add(event, seq)]
        assert len(faults) == 1
        assert fault in faults[0]


def test_in_a_ledger_nothing_comes_before_the_creation() -> None:
    heartbeat = Event(type="task.heartbeat", job_id="j", at_ms=0)
    assert "before the creation" in JobHistory("j").add(heartbeat, 1)[0]
    assert read_history([heartbeat]).histories == {}


def test_a_long_history_is_read_in_constant_memory() -> None:
    history = JobHistory("j")
    events = make_events(S.QUEUED, *[S.RUNNING, S.RETRYING] * 500)
    assert not [fault for seq, event in enumerate(events) for fault in history.add(event, seq + 1)]
    assert (history.events, len(history.moves)) == (1001, KEPT_MOVES)
    assert "so far … [" in history.add(events[0], 1002)[0]
