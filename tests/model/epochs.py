"""The model: engine, ledger and feed when either store goes back in time.

Its steps are those of all processes, of operators, and faults. A process may pause for any time between two steps, so
"stopped during the restore" needs no separate step. Without rules there is no verification: that is the behaviour
of stores that do not detect that the other one has gone back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tests.model.rules import NO_RULES, Process, Rule, Scenario
from tests.model.state import (
    ABSENT,
    BACKUP,
    BACKUPS,
    BUDGET,
    CHANCE,
    CLEARED,
    DONE,
    EFFECT_LOST,
    END_RECORDED,
    ENGINE,
    ENGINE_EPOCH,
    ENGINE_LOSSES,
    ENGINE_RESTARTS,
    EXECUTED,
    FIELDS,
    FINAL,
    IDLE,
    IN_DOUBT,
    KEY,
    LEDGER,
    LEDGER_EPOCH,
    LEDGER_LOSSES,
    LEDGER_RESTARTS,
    QUEUED,
    RECORDS,
    ROWS,
    SERVER,
    SNAPSHOT,
    SNAPSHOTS,
    SUSPENDED,
    VERIFICATIONS,
    VERIFIED_LEDGER,
    WENT_BACK,
    WORK,
    State,
    Step,
    Violation,
    append_entry,
    draft_fault,
    kind,
    replace,
)
from tests.model.upkeep import Projector, Reconciler
from tests.model.verification import RECOVERY_STAGES, Verification
from tests.model.workers import Submitter, Workers


class Operator(Process):
    """Resumes suspended jobs, after resolving the effect that is in doubt."""

    def steps(self, state: State) -> Iterator[Step]:
        if SUSPENDED not in state[RECORDS] or not self.can_move(state, "gate-ends"):
            return
        for job, record in enumerate(state[RECORDS]):
            if record != SUSPENDED:
                continue
            draft = list(state)
            if kind(state[KEY]) == IN_DOUBT and self.scenario.effects[job]:
                draft[KEY] = DONE
                yield "operator: the effect in doubt has happened", tuple(draft), WORK
                continue
            draft[RECORDS] = replace(state[RECORDS], job, QUEUED)
            draft[END_RECORDED] = replace(state[END_RECORDED], job, 0)
            append_entry(draft, "resumed", job)
            yield f"operator resumes job {job}", tuple(draft), WORK


class Faults(Process):
    """Copies of the stores, restarts, and stores that go back to their copies."""

    def steps(self, state: State) -> Iterator[Step]:
        budget = state[BUDGET]
        if budget[SNAPSHOTS] and state[SNAPSHOT] != state[ENGINE]:
            draft = draft_fault(state, SNAPSHOTS)
            draft[SNAPSHOT] = state[ENGINE]
            yield "a snapshot of the engine is taken", tuple(draft), CHANCE
        if budget[BACKUPS] and state[BACKUP] != state[LEDGER]:
            draft = draft_fault(state, BACKUPS)
            draft[BACKUP] = state[LEDGER]
            yield "a backup of the ledger is taken", tuple(draft), CHANCE
        if budget[ENGINE_RESTARTS]:
            draft = draft_fault(state, ENGINE_RESTARTS)
            draft[ENGINE_EPOCH] += 1
            yield "fault: the engine restarts, nothing is lost", tuple(draft), CHANCE
        if budget[LEDGER_RESTARTS]:
            draft = draft_fault(state, LEDGER_RESTARTS)
            draft[LEDGER_EPOCH] += 1
            yield "fault: the ledger restarts, nothing is lost", tuple(draft), CHANCE
        if budget[ENGINE_LOSSES] and state[SNAPSHOT] != state[ENGINE] and self._may_lose_engine(state):
            yield "fault: the engine goes back", self._lose_engine(state), CHANCE
        if budget[LEDGER_LOSSES] and state[BACKUP] != state[LEDGER]:
            yield "fault: the ledger goes back", self._lose_ledger(state), CHANCE

    def _may_lose_engine(self, state: State) -> bool:
        if not self.scenario.only_during_recovery:
            return True
        return any(stage != IDLE and stage[0] in RECOVERY_STAGES for stage in state[VERIFICATIONS])

    def _lose_engine(self, state: State) -> State:
        draft = draft_fault(state, ENGINE_LOSSES)
        draft[ENGINE] = state[SNAPSHOT]
        draft[ENGINE_EPOCH] += 1
        draft[WENT_BACK] = (1, state[WENT_BACK][1])
        return tuple(draft)

    def _lose_ledger(self, state: State) -> State:
        draft = draft_fault(state, LEDGER_LOSSES)
        draft[LEDGER] = state[BACKUP]
        draft[LEDGER_EPOCH] += 1
        draft[WENT_BACK] = (state[WENT_BACK][0], 1)
        if self.scenario.identity_changes:
            draft[SERVER] += 1
        if state[EXECUTED] and state[KEY] != ABSENT and draft[KEY] == ABSENT:
            draft[EFFECT_LOST] = 1
        return tuple(draft)


class Model:
    """A scenario under some of the rules."""

    def __init__(self, scenario: Scenario, rules: frozenset[Rule], *, reports_losses: bool = True) -> None:
        """With `reports_losses=False`, the model continues where it would report I6."""
        self.scenario: Final = scenario
        self._has_gates: Final = rules != NO_RULES
        verification = [Verification(scenario, rules, reports_losses=reports_losses)] if self._has_gates else []
        work = [
            Workers(scenario, rules),
            Projector(scenario, rules, reports_losses=reports_losses),
            Reconciler(scenario, rules),
        ]
        operator = Operator(scenario, rules)
        self._processes: Final[list[Process]] = [
            Submitter(scenario, rules),
            *work,
            *verification,
            operator,
            Faults(scenario, rules),
        ]
        #: In the order in which they act in a calm run.
        self._calm_order: Final[list[Process]] = [*verification, *work, operator]

    def initial(self) -> State:
        """Empty stores, verified. The first copies are an engine that was wiped and a ledger as it was installed."""
        scenario = self.scenario
        # In the order of the fields.
        jobs, workers = (0,) * scenario.jobs, (0,) * scenario.workers
        engine = (jobs, (), 0, 1, 1, 0, workers, 0, (0, 0))
        wiped = (jobs, (), 0, 0, 0, 0, workers, 0, (0, 0))
        ledger = (jobs, 0, 0, ABSENT, workers, 1, 1, 1, 0)
        processes = (1, 1, 1, (IDLE,) * scenario.workers, IDLE, IDLE, (IDLE,) * scenario.verifiers, wiped, ledger)
        facts = (jobs, jobs, jobs, jobs, jobs, 0, 0, (0, 0), 0, (0, workers), tuple(scenario.budget))
        state = (*engine, *ledger, *processes, *facts)
        assert len(state) == FIELDS
        return state

    def steps(self, state: State) -> Iterator[Step]:
        """Every step that is possible in this state."""
        for process in self._processes:
            yield from process.steps(state)

    def next_calm(self, state: State) -> State | Violation | None:
        """The next state of a calm run, in which processes act in a fixed order; None at rest."""
        for process in self._calm_order:
            for _, after, is_chance in process.steps(state):
                if not is_chance:
                    return after
        return None

    def ended_jobs(self, state: State) -> int | Violation:
        """At rest: the jobs that have ended in the ledger, as bits; or a gate that is closed."""
        if self._has_gates and (state[CLEARED] != state[ENGINE_EPOCH] or state[VERIFIED_LEDGER] != state[LEDGER_EPOCH]):
            return Violation("I5", "at rest, with a gate closed")
        return sum(1 << job for job, row in enumerate(state[ROWS]) if kind(row) == FINAL)
