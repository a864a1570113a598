"""The state table, move by move. The legal moves are listed here a second time, from the requirement."""

from __future__ import annotations

import itertools
import re

import pytest

from holdfast.core.states import (
    EVENTS,
    EVENTS_BY_MOVE,
    FINAL,
    MOVES,
    PARKED,
    State,
    check_move,
    event_for,
    is_legal,
    mermaid_diagram,
)
from holdfast.errors import TransitionInvalid

LEGAL = """
    new → queued | waiting_approval
    queued → running | waiting_approval | dlq_pending | suspended | cancelled
    waiting_approval → queued | cancelled
    running → succeeded | retrying | dlq_pending | suspended | waiting_approval | queued | cancelled
    retrying → running | dlq_pending | suspended | cancelled
    suspended → queued | cancelled
    dlq_pending → dlq_recorded
    dlq_recorded → failed
"""
PAIRS = {
    (None if source == "new" else State(source), State(target))
    for source, targets in re.findall(r"(\w+) → (.+)", LEGAL)
    for target in targets.split(" | ")
}
EVERY_PAIR = list(itertools.product([None, *State], State))


@pytest.mark.parametrize(("source", "target"), EVERY_PAIR)
def test_every_pair_of_states_is_legal_or_refused_as_required(source: State | None, target: State) -> None:
    assert is_legal(source, target) == ((source, target) in PAIRS)


@pytest.mark.parametrize(("source", "target"), [pair for pair in EVERY_PAIR if pair not in PAIRS])
def test_an_illegal_move_raises_with_the_stable_code(source: State | None, target: State) -> None:
    with pytest.raises(TransitionInvalid) as caught:
        check_move("j1", source, target)
    assert caught.value.code == "WF_STATE_TRANSITION_INVALID"
    assert (caught.value.job_id, caught.value.from_state, caught.value.to_state) == ("j1", source, target)


@pytest.mark.parametrize(("source", "target"), sorted(PAIRS, key=str))
def test_a_legal_move_passes_and_has_an_event(source: State | None, target: State) -> None:
    check_move("j1", source, target)
    assert event_for(source, target).partition(".")[0] in {"task", "approval"}


def test_the_table_has_every_state() -> None:
    assert set(MOVES) == {None, *State}
    assert set(EVENTS) == set(State)
    assert len(State) == 10


def test_final_states_have_no_moves() -> None:
    assert {State.SUCCEEDED, State.FAILED, State.CANCELLED} == FINAL
    assert not PARKED & FINAL


def test_failed_is_only_ever_reached_through_a_recorded_dead_letter() -> None:
    assert {source for source, targets in MOVES.items() if State.FAILED in targets} == {State.DLQ_RECORDED}
    assert {source for source, targets in MOVES.items() if State.DLQ_RECORDED in targets} == {State.DLQ_PENDING}


@pytest.mark.parametrize("state", [state for state in State if state not in FINAL])
def test_every_open_state_can_reach_a_final_state(state: State) -> None:
    reached: set[State] = set()
    frontier = {state}
    while frontier:
        reached |= frontier
        frontier = {target for source in frontier for target in MOVES[source]} - reached
    assert reached & FINAL


def test_moves_with_a_special_meaning_have_their_own_events() -> None:
    assert event_for(None, State.QUEUED) == "task.created"
    assert event_for(State.RUNNING, State.QUEUED) == "task.released"
    assert event_for(State.SUSPENDED, State.QUEUED) == "task.resumed"
    assert event_for(State.WAITING_APPROVAL, State.QUEUED) == "approval.approved"
    assert event_for(State.RUNNING, State.RUNNING) == "task.reclaimed"
    assert event_for(State.DLQ_PENDING, State.DLQ_RECORDED) == "task.dlq"
    assert all(source != target or source is State.RUNNING for source, target in EVENTS_BY_MOVE)


def test_the_diagram_draws_each_legal_move_once_and_nothing_else() -> None:
    drawn = re.findall(r"^    (\S+) --> (\S+)$", mermaid_diagram(), re.MULTILINE)
    expected = [(source or "[*]", target) for source, target in PAIRS] + [(state, "[*]") for state in FINAL]
    assert sorted(drawn) == sorted(expected)
