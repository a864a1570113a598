"""Folding a batch of events: with and without a look at the ledger, and what becomes of what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.history import read_history
from holdfast.core.job import Event
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


# Without a look-up ---------------------------------------------------------------------------------


def test_a_life_in_one_batch_is_one_new_job_in_its_last_state(feed: Feed) -> None:
    draft = _only(fold_optimistic(feed.life("j1")))
    assert draft.new
    assert (draft.state, draft.attempt, draft.result, draft.worker) == (_S.SUCCEEDED, 1, "3", None)
    assert [event.type for event in draft.events] == ["task.created", "task.claimed", "task.succeeded"]


def test_a_job_from_before_is_expected_where_its_first_move_begins(feed: Feed) -> None:
    draft = _only(fold_optimistic([feed.claimed("j1", 2, 1, was=_S.RETRYING), feed.succeeded("j1", 2, 1)]))
    assert not draft.new
    assert (draft.previous_state, draft.state, len(draft.events)) == (_S.RETRYING, _S.SUCCEEDED, 2)


def test_notes_before_the_first_move_do_not_say_where_a_job_was(feed: Feed) -> None:
    beat = feed.event("j1", None, None, 1, type=HEARTBEAT_EVENT)
    draft = _only(fold_optimistic([beat]))
    assert (draft.previous_state, draft.state) == (None, None)
    draft = _only(fold_optimistic([beat, feed.succeeded("j1"), beat]))
    assert (draft.previous_state, draft.state, len(draft.events)) == (_S.RUNNING, _S.SUCCEEDED, 3)


def test_events_that_contradict_one_another_need_a_look(feed: Feed) -> None:
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


def test_tenants_are_apart(feed: Feed) -> None:
    folded = fold_optimistic([feed.created("j1", tenant_id="a"), feed.created("j1", tenant_id="b")])
    assert [(draft.tenant_id, draft.job_id) for draft in folded.drafts] == [("a", "j1"), ("b", "j1")]


# With what the ledger knows ------------------------------------------------------------------------


@pytest.mark.parametrize("state", sorted(State))
@pytest.mark.parametrize("was", sorted(State))
def test_an_event_is_written_forked_or_kept_aside(feed: Feed, state: State, was: State) -> None:
    """Every pair of where the ledger has a job and where an event comes from."""
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


def test_notes_are_written_on_any_job_that_is_known(feed: Feed) -> None:
    note = feed.event("j1", None, None, type="task.duplicate")
    draft = _only(fold_known([note], {("default", "j1"): RecordedJob(_S.SUCCEEDED, 3)}))
    assert (draft.state, draft.previous_state, draft.events) == (None, _S.SUCCEEDED, [note])
    folded = fold_known([note], {})
    assert (folded.drafts, [anomaly.reason for anomaly in folded.anomalies]) == ([], [UNKNOWN_JOB])


def test_a_job_nobody_told_of_gets_a_beginning(feed: Feed) -> None:
    folded = fold_known([feed.succeeded("j1", 3, 1)], {})
    draft = _only(folded)
    assert draft.new
    assert [event.type for event in draft.events] == ["task.created", FORKED_EVENT, "task.succeeded"]
    assert envelope_of(draft)[0] == "unknown"
    assert [anomaly.reason for anomaly in folded.anomalies] == [UNKNOWN_JOB]


def test_a_restored_job_keeps_its_errors(feed: Feed) -> None:
    back = feed.event("j1", _S.SUSPENDED, _S.SUSPENDED, 1, 1, type=RESTORED_EVENT)
    draft = _only(fold_known([back], {("default", "j1"): RecordedJob(_S.SUSPENDED, 3)}))
    assert draft.keeps_errors
    draft = _only(fold_optimistic([back]))
    assert (draft.previous_state, draft.state) == (_S.SUSPENDED, _S.SUSPENDED)


def test_an_earlier_attempt_in_the_same_state_is_a_fork(feed: Feed) -> None:
    told = [feed.created("j1")]
    for attempt in (1, 2):
        told.append(feed.claimed("j1", attempt, attempt - 1, was=told[-1].to_state or _S.QUEUED))
        told.append(feed.failed("j1", _S.RETRYING, attempt, attempt))
    # The replica knew it as retrying after the first attempt.
    again = [feed.claimed("j1", 2, 1, was=_S.RETRYING), feed.succeeded("j1", 2, 1)]
    folded = fold_known(again, {("default", "j1"): RecordedJob(_S.RETRYING, 5, 2, 2)})
    draft = _only(folded)
    fork = draft.events[0]
    assert (fork.type, fork.from_state, fork.to_state) == (FORKED_EVENT, _S.RETRYING, _S.RETRYING)
    assert (fork.attempt, draft.events[1:]) == (1, again)
    assert [anomaly.reason for anomaly in folded.anomalies] == [FORKED]
    assert read_history([*told, *draft.events]).faults == []


def test_retries_that_were_counted_anew_are_not_taken_back_in_silence(feed: Feed) -> None:
    """The ledger has the job resumed, with no retries; the replica had it queued with two."""
    known = {("default", "j1"): RecordedJob(_S.QUEUED, 9, 3, 0)}
    assert fold_known([feed.claimed("j1", 4, 2)], known).anomalies != []
    assert fold_known([feed.claimed("j1", 4, 0)], known).anomalies == []
    resumed = feed.event("j1", _S.SUSPENDED, _S.QUEUED, 3, 0)
    assert fold_known([resumed], {("default", "j1"): RecordedJob(_S.SUSPENDED, 8, 3, 2)}).anomalies == []


def test_after_a_fork_a_job_that_was_given_back_counts_as_the_engine_does(feed: Feed) -> None:
    told = [feed.created("j1")]
    for attempt in (1, 2):
        told.append(feed.claimed("j1", attempt, attempt - 1, was=told[-1].to_state or _S.QUEUED))
        told.append(feed.failed("j1", _S.RETRYING, attempt, attempt))
    told.append(feed.claimed("j1", 3, 2, was=_S.RETRYING))
    told.append(feed.event("j1", _S.RUNNING, _S.QUEUED, 3, 2, data={"started": True}))
    again = [
        feed.event("j1", _S.RETRYING, _S.SUSPENDED, 1, 1),
        feed.event("j1", _S.SUSPENDED, _S.QUEUED, 1, 0),
        feed.claimed("j1", 2, 0),
    ]
    draft = _only(fold_known(again, {("default", "j1"): RecordedJob(_S.QUEUED, 7, 3, 2)}))
    assert read_history([*told, *draft.events]).faults == []


class _Life:
    """A job in an engine that can wake up as it was some events ago, and its story in a ledger."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self._draw = draw
        self._feed = Feed()
        #: State, attempt, retries, and how they all were before.
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
        self._tell(event)

    def forget(self) -> None:
        """Wake up as it was earlier; ends are remembered by the ledger only."""
        if self._before:
            back = self._draw(st.integers(0, len(self._before) - 1))
            self.now = self._before[back]
            del self._before[back:]

    def _tell(self, event: Event) -> None:
        folded = fold_known([event], {("default", "j1"): self.known})
        fast = _only(fold_optimistic([event]))
        known = self.known
        # What the fast path's statement holds against the row.
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
def test_stale_replicas_make_no_illegal_story(data: st.DataObject) -> None:
    """Whatever an engine forgets, and however often: the ledger's story is legal, and goes where the engine goes."""
    life = _Life(data.draw)
    for _ in range(data.draw(st.integers(1, 4))):
        for _ in range(data.draw(st.integers(1, 8))):
            if life.now[0] in FINAL:
                break
            life.move()
        life.forget()
    assert read_history(life.written).faults == []


def test_both_ways_agree_on_what_fits(feed: Feed) -> None:
    events = [*feed.life("j1"), feed.claimed("j2"), feed.failed("j2", _S.RETRYING), feed.succeeded("j3")]
    known = {("default", "j2"): RecordedJob(_S.QUEUED, 1), ("default", "j3"): RecordedJob(_S.RUNNING, 2, 1)}
    fast, slow = fold_optimistic(events), fold_known(events, known)
    assert slow.anomalies == []
    for one, other in zip(fast.drafts, slow.drafts, strict=True):
        fields = [name for name in JobDraft.__struct_fields__ if name != "seq"]
        assert [getattr(one, name) for name in fields] == [getattr(other, name) for name in fields]


# Columns -------------------------------------------------------------------------------------------


def test_an_attempt_that_never_started_is_numbered_again(feed: Feed) -> None:
    given_back = feed.event("j1", _S.RUNNING, _S.QUEUED, 3, 1, data={"message": "busy", "started": False})
    assert _only(fold_optimistic([given_back])).attempt == 2


def test_a_cancelled_job_says_who_and_why(feed: Feed) -> None:
    event = feed.event("j1", _S.QUEUED, _S.CANCELLED, data={"actor": "ann", "reason": "typo"})
    draft = _only(fold_optimistic([event]))
    assert (draft.error_code, draft.last_error, draft.ended) == ("CANCELLED", "typo (by ann)", True)


def test_a_dead_letter_without_an_id_gets_the_same_one_each_time(feed: Feed) -> None:
    dies = feed.failed("j1", _S.DLQ_PENDING)
    first, second = _only(fold_optimistic([dies])), _only(fold_optimistic([dies]))
    assert first.dlq_id
    assert first.dlq_id == second.dlq_id
    assert first.dead_letter is dies


def test_what_the_jobs_row_says_is_not_said_again(feed: Feed) -> None:
    created, _, succeeded = feed.life("j1")
    assert data_of(created) is None
    assert data_of(succeeded) is None
    later = msgspec.structs.replace(created, data={**(created.data or {}), "run_at_ms": 7})
    assert decode(data_of(later) or "") == {"run_at_ms": 7}
    hurried = feed.event("j1", None, None, type=EXPEDITED_EVENT, data={"actor": "ann"})
    assert decode(data_of(hurried) or "") == {"actor": "ann"}
    dies = feed.failed("j1", _S.DLQ_PENDING, dlq_id="d", history=[1, 2])
    assert decode(data_of(dies) or "") == {
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


def test_the_history_has_every_attempt_and_falls_back_on_the_engines(feed: Feed) -> None:
    story = [
        feed.created("j1"),
        feed.claimed("j1"),
        feed.event("j1", None, None, 1, type=HEARTBEAT_EVENT),
        feed.failed("j1", _S.RETRYING),
        feed.claimed("j1", 2, 1, was=_S.RETRYING),
        feed.failed("j1", _S.DLQ_PENDING, 2, 1),
    ]
    told = decode(attempts_of(story))
    assert [(one["number"], one["outcome"], one["failure"]["message"]) for one in told] == [
        (1, "retrying", "boom 1"),
        (2, "dlq_pending", "boom 2"),
    ]
    assert told[0]["started_at_ms"] == story[1].at_ms
    assert told[0]["finished_at_ms"] == story[3].at_ms
    assert decode(attempts_of(story[5:], [{"number": 1}, {"number": 2}])) == [{"number": 1}, {"number": 2}]


# Garbage -------------------------------------------------------------------------------------------


def test_a_clean_event_is_itself_and_a_bad_one_is_cleaned(feed: Feed) -> None:
    good = feed.created("j1")
    assert sanitize_event(good) is good
    bad = Event(type="x", job_id="a\x00", at_ms=1, worker="\ud800", message="\x00", data={"payload": "\x00", "n": 1})
    assert sanitize_event(bad) == Event(
        type="x", job_id="a\ufffd", at_ms=1, worker="\ufffd", message="\ufffd", data={"payload": "\ufffd", "n": 1}
    )


def test_halves_lose_nothing_and_keep_each_jobs_order(feed: Feed) -> None:
    events = [*feed.life("j1"), *feed.life("j2"), *feed.life("j3")]
    first, second = split_batch(events)
    assert sorted(event.at_ms for event in first + second) == [event.at_ms for event in events]
    assert not {event.job_id for event in first} & {event.job_id for event in second}
    assert list(split_batch(feed.life("j1")[:2])) != [[], []]
    one, two = split_batch(events[:3])
    assert one + two == events[:3]
    assert one
    assert two
