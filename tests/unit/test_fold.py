"""Folding a batch of events: with and without reading the ledger, and events that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.history import read_history
from holdfast.core.job import Event, Failure
from holdfast.core.rebuild import rebuild_job
from holdfast.core.states import EXPEDITED_EVENT, FINAL, FORKED_EVENT, HEARTBEAT_EVENT, MOVES, RESTORED_EVENT, State
from holdfast.ledger.fold import (
    AFTER_THE_END,
    CREATED_AGAIN,
    FORKED,
    UNKNOWN_JOB,
    BatchMismatch,
    FoldedBatch,
    JobDraft,
    RecordedJob,
    fold_known,
    fold_optimistic,
    split_batch,
)
from holdfast.ledger.fold_events import attempts_of, data_of, envelope_of, sanitize_event
from holdfast.ledger.fold_rows import event_rows, job_row
from tests.ledger.projection_rig import Feed, decode

_S = State


@pytest.fixture
def feed() -> Feed:
    return Feed()


def _only(folded: FoldedBatch) -> JobDraft:
    (draft,) = folded.drafts
    return draft


# Without reading -----------------------------------------------------------------------------------


def test_a_whole_history_in_one_batch_is_one_new_job_in_its_last_state(feed: Feed) -> None:
    draft = _only(fold_optimistic(feed.life("j1")))
    assert draft.new
    assert (draft.state, draft.attempt, draft.result, draft.worker) == (_S.SUCCEEDED, 1, "3", None)
    assert [event.type for event in draft.events] == ["task.created", "task.claimed", "task.succeeded"]


def test_an_existing_job_is_expected_in_the_state_of_its_first_move(feed: Feed) -> None:
    draft = _only(fold_optimistic([feed.claimed("j1", 2, 1, was=_S.RETRYING), feed.succeeded("j1", 2, 1)]))
    assert not draft.new
    assert (draft.previous_state, draft.state, len(draft.events)) == (_S.RETRYING, _S.SUCCEEDED, 2)


def test_events_without_a_move_do_not_set_the_previous_state(feed: Feed) -> None:
    heartbeat = feed.event("j1", None, None, 1, type=HEARTBEAT_EVENT)
    draft = _only(fold_optimistic([heartbeat]))
    assert (draft.previous_state, draft.state) == (None, None)
    draft = _only(fold_optimistic([heartbeat, feed.succeeded("j1"), heartbeat]))
    assert (draft.previous_state, draft.state, len(draft.events)) == (_S.RUNNING, _S.SUCCEEDED, 3)


def test_contradictory_events_need_a_read_of_the_ledger(feed: Feed) -> None:
    with pytest.raises(BatchMismatch):
        fold_optimistic([feed.created("j1"), feed.succeeded("j1")])
    with pytest.raises(BatchMismatch):
        fold_optimistic([feed.created("j1"), feed.created("j1")])
    with pytest.raises(BatchMismatch):
        fold_optimistic([*feed.life("j1"), feed.claimed("j1", 2)])
    with pytest.raises(BatchMismatch):
        fold_optimistic([*feed.life("j1"), feed.event("j1", _S.SUCCEEDED, _S.QUEUED, 1)])
    with pytest.raises(BatchMismatch):
        fold_optimistic([feed.event("j1", _S.FAILED, _S.QUEUED, 1)])


def test_equal_job_ids_of_two_tenants_are_separate(feed: Feed) -> None:
    folded = fold_optimistic([feed.created("j1", tenant_id="a"), feed.created("j1", tenant_id="b")])
    assert [(draft.tenant_id, draft.job_id) for draft in folded.drafts] == [("a", "j1"), ("b", "j1")]


# With recorded jobs --------------------------------------------------------------------------------


@pytest.mark.parametrize("state", sorted(State))
@pytest.mark.parametrize("was", sorted(State))
def test_an_event_is_recorded_or_forked_or_an_anomaly(feed: Feed, state: State, was: State) -> None:
    """Every pair of the job's state in the ledger and the event's previous state."""
    for to in [_S.RUNNING, *MOVES[was]]:
        event = feed.event("j1", was, to, 1, 0, type="x")
        folded = fold_known([event], {("default", "j1"): RecordedJob(state, 7)})
        if state in FINAL or was in FINAL:
            assert folded.drafts == []
            assert [anomaly.reason for anomaly in folded.anomalies] == [AFTER_THE_END]
        elif state is was:
            draft = _only(folded)
            assert (draft.previous_state, draft.state, draft.seq) == (state, to, 7)
            assert (draft.events, folded.anomalies) == ([event], [])
        else:
            draft = _only(folded)
            first, second = draft.events
            assert (first.type, first.from_state, first.to_state) == (FORKED_EVENT, state, was)
            assert (second, draft.state) == (event, to)
            assert [anomaly.reason for anomaly in folded.anomalies] == [FORKED]


@pytest.mark.parametrize("state", sorted(State))
def test_a_creation_of_a_known_job_changes_nothing(feed: Feed, state: State) -> None:
    folded = fold_known([feed.created("j1")], {("default", "j1"): RecordedJob(state, 1)})
    assert folded.drafts == []
    assert [anomaly.reason for anomaly in folded.anomalies] == [CREATED_AGAIN]


def test_events_without_a_move_are_recorded_for_any_known_job(feed: Feed) -> None:
    note = feed.event("j1", None, None, type="task.duplicate")
    draft = _only(fold_known([note], {("default", "j1"): RecordedJob(_S.SUCCEEDED, 3)}))
    assert (draft.state, draft.previous_state, draft.events) == (None, _S.SUCCEEDED, [note])
    folded = fold_known([note], {})
    assert (folded.drafts, [anomaly.reason for anomaly in folded.anomalies]) == ([], [UNKNOWN_JOB])


def test_an_unknown_job_gets_a_creation_event(feed: Feed) -> None:
    folded = fold_known([feed.succeeded("j1", 3, 1)], {})
    draft = _only(folded)
    assert draft.new
    assert [event.type for event in draft.events] == ["task.created", FORKED_EVENT, "task.succeeded"]
    assert envelope_of(draft)[0] == "unknown"
    assert [anomaly.reason for anomaly in folded.anomalies] == [UNKNOWN_JOB]


def test_a_restored_job_keeps_its_errors(feed: Feed) -> None:
    restored = feed.event("j1", _S.SUSPENDED, _S.SUSPENDED, 1, 1, type=RESTORED_EVENT)
    draft = _only(fold_known([restored], {("default", "j1"): RecordedJob(_S.SUSPENDED, 3)}))
    assert draft.keeps_errors
    draft = _only(fold_optimistic([restored]))
    assert (draft.previous_state, draft.state) == (_S.SUSPENDED, _S.SUSPENDED)


def test_an_earlier_attempt_in_the_same_state_is_a_fork(feed: Feed) -> None:
    recorded = [feed.created("j1")]
    for attempt in (1, 2):
        recorded.append(feed.claimed("j1", attempt, attempt - 1, was=recorded[-1].to_state or _S.QUEUED))
        recorded.append(feed.failed("j1", _S.RETRYING, attempt, attempt))
    # The replica had it as retrying after the first attempt.
    replayed = [feed.claimed("j1", 2, 1, was=_S.RETRYING), feed.succeeded("j1", 2, 1)]
    folded = fold_known(replayed, {("default", "j1"): RecordedJob(_S.RETRYING, 5, 2, 2)})
    draft = _only(folded)
    fork = draft.events[0]
    assert (fork.type, fork.from_state, fork.to_state) == (FORKED_EVENT, _S.RETRYING, _S.RETRYING)
    assert (fork.attempt, draft.events[1:]) == (1, replayed)
    assert [anomaly.reason for anomaly in folded.anomalies] == [FORKED]
    assert read_history([*recorded, *draft.events]).faults == []


def test_a_reset_retry_count_that_returns_is_an_anomaly(feed: Feed) -> None:
    """The ledger has the job resumed without retries; the replica had it queued with two."""
    known = {("default", "j1"): RecordedJob(_S.QUEUED, 9, 3, 0)}
    assert fold_known([feed.claimed("j1", 4, 2)], known).anomalies != []
    assert fold_known([feed.claimed("j1", 4, 0)], known).anomalies == []
    resumed = feed.event("j1", _S.SUSPENDED, _S.QUEUED, 3, 0)
    assert fold_known([resumed], {("default", "j1"): RecordedJob(_S.SUSPENDED, 8, 3, 2)}).anomalies == []


def test_after_a_fork_a_released_job_counts_as_in_the_engine(feed: Feed) -> None:
    recorded = [feed.created("j1")]
    for attempt in (1, 2):
        recorded.append(feed.claimed("j1", attempt, attempt - 1, was=recorded[-1].to_state or _S.QUEUED))
        recorded.append(feed.failed("j1", _S.RETRYING, attempt, attempt))
    recorded.append(feed.claimed("j1", 3, 2, was=_S.RETRYING))
    recorded.append(feed.event("j1", _S.RUNNING, _S.QUEUED, 3, 2, data={"started": True}))
    replayed = [
        feed.event("j1", _S.RETRYING, _S.SUSPENDED, 1, 1),
        feed.event("j1", _S.SUSPENDED, _S.QUEUED, 1, 0),
        feed.claimed("j1", 2, 0),
    ]
    draft = _only(fold_known(replayed, {("default", "j1"): RecordedJob(_S.QUEUED, 7, 3, 2)}))
    assert read_history([*recorded, *draft.events]).faults == []


class _JobOnReplica:
    """A job in an engine that can lose its latest events, and its history in a ledger."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self._draw = draw
        self._feed = Feed()
        #: State, attempt and retries; and all their previous values.
        self.now: tuple[State, int, int] = (_S.QUEUED, 0, 0)
        self._before: list[tuple[State, int, int]] = []
        self.written = fold_known([self._feed.created("j1")], {}).drafts[0].events
        self.known = RecordedJob(_S.QUEUED, 1)

    def move(self) -> None:
        state, attempt, retries = self.now
        choices = sorted(MOVES[state] | ({_S.RUNNING} if state is _S.RUNNING else set()))
        to = self._draw(st.sampled_from(choices))
        data: dict[str, Any] = {"dlq_id": "d1"} if to in (_S.DLQ_PENDING, _S.DLQ_RECORDED, _S.FAILED) else {}
        attempt += to is _S.RUNNING
        retries += to is _S.RETRYING and self._draw(st.booleans())
        if (state, to) == (_S.SUSPENDED, _S.QUEUED):
            retries = 0
        if (state, to) == (_S.RUNNING, _S.QUEUED):
            data["started"] = self._draw(st.booleans())
        event = self._feed.event("j1", state, to, attempt, retries, data=data or None)
        self._before.append(self.now)
        self.now = (to, attempt - (data.get("started") is False), retries)
        self._record(event)

    def lose_events(self) -> None:
        """Go back to an earlier state, as a stale replica does. Only the ledger keeps final states."""
        if self._before:
            restored = self._draw(st.integers(0, len(self._before) - 1))
            self.now = self._before[restored]
            del self._before[restored:]

    def _record(self, event: Event) -> None:
        folded = fold_known([event], {("default", "j1"): self.known})
        fast = _only(fold_optimistic([event]))
        known = self.known
        # The condition that the fast path's statement checks against the row.
        fits = (
            (known.state, fast.new) == (fast.previous_state, False)
            and known.attempt <= fast.previous_attempt
            and (fast.previous_retries is None or 0 <= fast.previous_retries - known.retry_count <= 1)
        )
        assert fits == (not folded.anomalies)
        for draft in folded.drafts:
            self.written = [*self.written, *draft.events]
            assert draft.state is not None
            self.known = RecordedJob(draft.state, len(self.written), draft.attempt, draft.retry_count)
        if self.known.state not in FINAL:
            assert (self.known.state, self.known.attempt, self.known.retry_count) == self.now


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_stale_replicas_make_no_illegal_history(data: st.DataObject) -> None:
    """Whatever an engine loses, and however often: the ledger's history is legal and follows the engine."""
    job = _JobOnReplica(data.draw)
    for _ in range(data.draw(st.integers(1, 4))):
        for _ in range(data.draw(st.integers(1, 8))):
            if job.now[0] in FINAL:
                break
            job.move()
        job.lose_events()
    assert read_history(job.written).faults == []


def test_both_ways_fold_valid_events_alike(feed: Feed) -> None:
    events = [*feed.life("j1"), feed.claimed("j2"), feed.failed("j2", _S.RETRYING), feed.succeeded("j3")]
    known = {("default", "j2"): RecordedJob(_S.QUEUED, 1), ("default", "j3"): RecordedJob(_S.RUNNING, 2, 1)}
    fast, slow = fold_optimistic(events), fold_known(events, known)
    assert slow.anomalies == []
    for one, other in zip(fast.drafts, slow.drafts, strict=True):
        fields = [name for name in JobDraft.__struct_fields__ if name != "seq"]
        assert [getattr(one, name) for name in fields] == [getattr(other, name) for name in fields]


# Columns -------------------------------------------------------------------------------------------


def test_an_attempt_that_never_started_is_numbered_again(feed: Feed) -> None:
    released = feed.event("j1", _S.RUNNING, _S.QUEUED, 3, 1, data={"message": "busy", "started": False})
    assert _only(fold_optimistic([released])).attempt == 2


def test_a_cancelled_job_has_actor_and_reason(feed: Feed) -> None:
    event = feed.event("j1", _S.QUEUED, _S.CANCELLED, data={"actor": "ann", "reason": "typo"})
    draft = _only(fold_optimistic([event]))
    assert (draft.error_code, draft.last_error, draft.ended) == ("CANCELLED", "typo (by ann)", True)


@pytest.mark.parametrize(
    ("name", "code"), [("approval.rejected", "APPROVAL_REJECTED"), ("approval.expired", "APPROVAL_EXPIRED")]
)
def test_a_job_that_was_not_approved_has_its_own_code(feed: Feed, name: str, code: str) -> None:
    """Also if the event does not state it, as those of earlier releases on Redis."""
    data = {"actor": "ann", "reason": "no"}
    event = feed.event("j1", _S.WAITING_APPROVAL, _S.CANCELLED, data=data, type=name)
    draft = _only(fold_optimistic([event]))
    assert (draft.error_code, draft.last_error) == (code, "no (by ann)")
    rebuilt = rebuild_job("q", [feed.created("j1"), event])
    assert rebuilt.failure == Failure(code, "no (by ann)")


def test_a_dead_letter_without_an_id_gets_the_same_one_each_time(feed: Feed) -> None:
    dead_lettered = feed.failed("j1", _S.DLQ_PENDING)
    first, second = _only(fold_optimistic([dead_lettered])), _only(fold_optimistic([dead_lettered]))
    assert first.dlq_id
    assert first.dlq_id == second.dlq_id
    assert first.dead_letter is dead_lettered


def test_data_of_the_jobs_row_is_not_repeated_in_events(feed: Feed) -> None:
    created, _, succeeded = feed.life("j1")
    assert data_of(created) is None
    assert data_of(succeeded) is None
    delayed = msgspec.structs.replace(created, data={**(created.data or {}), "run_at_ms": 7})
    assert decode(data_of(delayed) or "") == {"run_at_ms": 7}
    expedited = feed.event("j1", None, None, type=EXPEDITED_EVENT, data={"actor": "ann"})
    assert decode(data_of(expedited) or "") == {"actor": "ann"}
    dead_lettered = feed.failed("j1", _S.DLQ_PENDING, dlq_id="d", history=[1, 2])
    assert decode(data_of(dead_lettered) or "") == {
        "code": "TASK_ERROR",
        "message": "boom 1",
        "type": "ValueError",
        "stack": "at x",
        "dlq_id": "d",
    }


def test_rows_have_the_order_of_their_columns(feed: Feed) -> None:
    draft = _only(fold_optimistic(feed.life("j1")))
    row = job_row(draft, "q", lambda ms: ms or None)
    assert row[:7] == ("default", "j1", "q", "succeeded", 1, 0, 3)
    assert row[18:] == ("add", 1, "j1", "t-1", '{"a": 1, "b":2.0}', None, None, None)
    draft.seq = 4
    assert [row[3] for row in event_rows([draft], "q", lambda ms: ms)] == [5, 6, 7]


def test_attempts_are_taken_from_events_or_else_from_the_engine(feed: Feed) -> None:
    events = [
        feed.created("j1"),
        feed.claimed("j1"),
        feed.event("j1", None, None, 1, type=HEARTBEAT_EVENT),
        feed.failed("j1", _S.RETRYING),
        feed.claimed("j1", 2, 1, was=_S.RETRYING),
        feed.failed("j1", _S.DLQ_PENDING, 2, 1),
    ]
    attempts = decode(attempts_of(events))
    assert [(attempt["number"], attempt["outcome"], attempt["failure"]["message"]) for attempt in attempts] == [
        (1, "retrying", "boom 1"),
        (2, "dlq_pending", "boom 2"),
    ]
    assert attempts[0]["started_at_ms"] == events[1].at_ms
    assert attempts[0]["finished_at_ms"] == events[3].at_ms
    assert decode(attempts_of(events[5:], [{"number": 1}, {"number": 2}])) == [{"number": 1}, {"number": 2}]


# Bad text ------------------------------------------------------------------------------------------


def test_a_valid_event_is_unchanged_and_an_invalid_one_is_sanitized(feed: Feed) -> None:
    good = feed.created("j1")
    assert sanitize_event(good) is good
    bad = Event(type="x", job_id="a\x00", at_ms=1, worker="\ud800", message="\x00", data={"payload": "\x00", "n": 1})
    assert sanitize_event(bad) == Event(
        type="x", job_id="a\ufffd", at_ms=1, worker="\ufffd", message="\ufffd", data={"payload": "\ufffd", "n": 1}
    )


def test_a_split_batch_loses_nothing_and_keeps_each_jobs_order(feed: Feed) -> None:
    events = [*feed.life("j1"), *feed.life("j2"), *feed.life("j3")]
    first, second = split_batch(events)
    assert sorted(event.at_ms for event in first + second) == [event.at_ms for event in events]
    assert not {event.job_id for event in first} & {event.job_id for event in second}
    assert list(split_batch(feed.life("j1")[:2])) != [[], []]
    one, two = split_batch(events[:3])
    assert one + two == events[:3]
    assert one
    assert two
