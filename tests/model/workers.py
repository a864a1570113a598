"""Submission of jobs, and workers that run them.

A run claims its job; if the job has an effect, it reserves the key, marks the reservation in the engine, executes the
effect and records it; then it ends or suspends the job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

from tests.model.rules import Process, Rule, Scenario
from tests.model.state import (
    ABSENT,
    ACCEPTED,
    ACTS,
    BORN,
    BUDGET,
    CHANCE,
    CLEARED,
    DONE,
    END_RECORDED,
    ENGINE_EPOCH,
    ENGINE_GENERATION,
    EXECUTED,
    FINAL,
    GENERATION,
    IDLE,
    IN_DOUBT,
    KEY,
    KILLS,
    LEDGER_EPOCH,
    MAX_RUNS,
    QUEUED,
    RECONCILER,
    RECORDS,
    RECOVERIES,
    RESERVATIONS,
    RESERVED,
    ROWS,
    RUNNING,
    RUNS,
    SUSPENDED,
    UNKNOWN,
    VERIFIED_LEDGER,
    WITNESS,
    WORK,
    WORKERS,
    Draft,
    Record,
    State,
    Step,
    Violation,
    append_entry,
    draft_fault,
    kind,
    replace,
)

#: Job, deliveries, number of the run, phase; and of its reservation the ledger epoch and the number.
Run: TypeAlias = tuple[int, int, int, int, int, int]

#: What a run does next.
RESERVE: Final = 0
MARK_ACT: Final = 1
EXECUTE: Final = 2
RECORD_EFFECT: Final = 3
END: Final = 4
SUSPEND: Final = 5

MAX_DELIVERIES: Final = 2


class Submitter(Process):
    """Submits each job once. Records of ended jobs expire."""

    def steps(self, state: State) -> Iterator[Step]:
        for job, record in enumerate(state[RECORDS]):
            if not state[ACCEPTED][job] and self.can_move(state, "gate-claims"):
                yield f"job {job} is submitted", _submit(state, job), CHANCE
            # A snapshot of the reconciler is dropped long before a record that was made after it can expire.
            if kind(record) == FINAL and not (state[RECONCILER] and state[RECONCILER][1] == job):
                draft = list(state)
                draft[RECORDS] = replace(state[RECORDS], job, UNKNOWN)
                yield f"the record of job {job} expires", tuple(draft), CHANCE


def _submit(state: State, job: int) -> State:
    draft = list(state)
    draft[ACCEPTED] = replace(state[ACCEPTED], job, 1 + state[RECOVERIES])
    draft[BORN] = replace(state[BORN], job, state[ENGINE_GENERATION])
    draft[RECORDS] = replace(state[RECORDS], job, QUEUED)
    append_entry(draft, "created", job)
    return tuple(draft)


class Workers(Process):
    """Each worker has one slot."""

    def __init__(self, scenario: Scenario, rules: frozenset[Rule]) -> None:
        super().__init__(scenario, rules)
        mark_act = self._mark_act if "act-mark" in rules else self._execute
        #: By phase.
        self._actions: Final[tuple[Callable[[State, int, Run], Step | None], ...]] = (
            self._reserve,
            mark_act,
            self._execute,
            self._record_effect,
            self._settle,
            self._settle,
        )

    def steps(self, state: State) -> Iterator[Step]:
        for worker, run in enumerate(state[WORKERS]):
            if run == IDLE:
                yield from self._claim(state, worker)
                continue
            step = self._actions[run[3]](state, worker, run)
            if step is not None:
                yield step
            if state[BUDGET][KILLS]:
                draft = draft_fault(state, KILLS)
                draft[WORKERS] = replace(state[WORKERS], worker, IDLE)
                yield f"worker {worker} is killed", tuple(draft), CHANCE

    # Claim ---------------------------------------------------------------------------------------------------------

    def _claim(self, state: State, worker: int) -> Iterator[Step]:
        for job, record in enumerate(state[RECORDS]):
            if not self.can_move(state, "gate-claims", job):
                continue
            verb, deliveries = _find_claim(record, worker)
            if not verb or deliveries > MAX_DELIVERIES:
                continue
            number = min(state[RUNS][job] + 1, MAX_RUNS)
            name = f"worker {worker} {verb} job {job} (run {number})"
            if state[END_RECORDED][job]:
                yield name, Violation("I1", f"{name}, which had ended in the ledger"), WORK
                continue
            draft = list(state)
            draft[RECORDS] = replace(state[RECORDS], job, (RUNNING, worker, deliveries))
            draft[RUNS] = replace(state[RUNS], job, number)
            phase = RESERVE if self.scenario.effects[job] else END
            # While the ledger's gate is closed, its epoch is negative.
            run = (job, deliveries, number, phase, max(0, state[VERIFIED_LEDGER]), 0)
            draft[WORKERS] = replace(state[WORKERS], worker, run)
            # In a calm run, no lease expires while its worker runs.
            yield name, tuple(draft), verb == "reclaims" and state[WORKERS][record[1]] != IDLE

    # Effect --------------------------------------------------------------------------------------------------------

    def _reserve(self, state: State, worker: int, run: Run) -> Step | None:
        job, epoch = run[0], run[4]
        if "reserve-gate" in self.rules and epoch != state[LEDGER_EPOCH]:
            if state[CLEARED] == state[ENGINE_EPOCH] and state[VERIFIED_LEDGER] == state[LEDGER_EPOCH]:
                after = _continue(list(state), worker, run, RESERVE, state[LEDGER_EPOCH])
                return f"worker {worker} reads the verified ledger epoch", after, WORK
            return None
        key = state[KEY]
        if key == ABSENT:
            return self._reserve_absent(state, worker, run)
        if key == DONE:
            return f"worker {worker} gets the recorded result", _continue(list(state), worker, run, END), WORK
        if kind(key) == RESERVED and key[3] != job and state[RECORDS][key[3]] == (RUNNING, key[1], key[4]):
            return None  # another run is about to execute the effect
        draft = list(state)
        if kind(key) == RESERVED:
            draft[KEY] = (IN_DOUBT, *key[1:])
        return f"worker {worker} finds the key in doubt", _continue(draft, worker, run, SUSPEND), WORK

    def _reserve_absent(self, state: State, worker: int, run: Run) -> Step:
        draft = list(state)
        if "doubt" in self.rules and state[BORN][run[0]] < state[GENERATION]:
            draft[KEY] = IN_DOUBT
            name = f"worker {worker} does not find the key of a job from before a recovery: in doubt"
            return name, _continue(draft, worker, run, SUSPEND), WORK
        count = state[RESERVATIONS][worker] + 1
        draft[KEY] = _reservation(worker, run)
        draft[RESERVATIONS] = replace(state[RESERVATIONS], worker, count)
        after = _continue(draft, worker, run, MARK_ACT, state[LEDGER_EPOCH], count)
        return f"worker {worker} reserves the key", after, WORK

    def _mark_act(self, state: State, worker: int, run: Run) -> Step | None:
        epoch, count = run[4:]
        if self.can_move(state, "gate-claims") and ("act-gate" not in self.rules or state[VERIFIED_LEDGER] == epoch):
            draft = list(state)
            draft[ACTS] = replace(state[ACTS], worker, count)
            if self.scenario.has_witness:
                position, acts = state[WITNESS]
                draft[WITNESS] = (position, replace(acts, worker, count))
            return f"worker {worker} marks its reservation", _continue(draft, worker, run, EXECUTE), WORK
        if state[KEY] != _reservation(worker, run):
            after = _continue(list(state), worker, run, RESERVE, epoch)
            return f"worker {worker} reads its reservation again: missing", after, WORK
        present = (state[LEDGER_EPOCH], state[RESERVATIONS][worker])
        if (epoch, count) == present:
            return None
        after = _continue(list(state), worker, run, MARK_ACT, *present)
        return f"worker {worker} reads its reservation again: still there", after, WORK

    def _execute(self, state: State, worker: int, run: Run) -> Step:
        accepted = state[ACCEPTED][run[0]]
        name = f"worker {worker} executes the effect in job {run[0]}"
        # A job that was submitted after a recovery may execute a key from before it: `ledger recover` says so.
        if state[EXECUTED] and accepted <= state[EXECUTED]:
            return name, Violation("I2", f"{name}, a second time"), WORK
        draft = list(state)
        draft[EXECUTED] = accepted
        return name, _continue(draft, worker, run, RECORD_EFFECT), WORK

    def _record_effect(self, state: State, worker: int, run: Run) -> Step:
        draft = list(state)
        reservation = _reservation(worker, run)
        if state[KEY] in (reservation, (IN_DOUBT, *reservation[1:])):
            draft[KEY] = DONE
        result = "" if draft[KEY] == DONE else ": refused"
        return f"worker {worker} records the effect{result}", _continue(draft, worker, run, END), WORK

    # End -----------------------------------------------------------------------------------------------------------

    def _settle(self, state: State, worker: int, run: Run) -> Step | None:
        job, deliveries, number, phase = run[:4]
        if not self.can_move(state, "gate-ends", job):
            return None
        draft = list(state)
        draft[WORKERS] = replace(state[WORKERS], worker, IDLE)
        if state[RECORDS][job] != (RUNNING, worker, deliveries):
            return f"worker {worker} settles job {job}: stale", tuple(draft), WORK
        if phase == SUSPEND:
            draft[RECORDS] = replace(state[RECORDS], job, SUSPENDED)
            append_entry(draft, "suspended", job)
            return f"worker {worker} suspends job {job}", tuple(draft), WORK
        name = f"worker {worker} ends job {job} (outcome {number})"
        row = state[ROWS][job]
        if kind(row) == FINAL and row[1] != number:
            return name, Violation("I1", f"{name}, the ledger has outcome {row[1]}"), WORK
        draft[RECORDS] = replace(state[RECORDS], job, (FINAL, number))
        append_entry(draft, "ended", job, number)
        return name, tuple(draft), WORK


def _find_claim(record: Record, worker: int) -> tuple[str, int]:
    """How a worker can claim a job, or "", and the deliveries after that."""
    if record == QUEUED:
        return "claims", 1
    if kind(record) != RUNNING:
        return "", 0
    if record[1] == worker:
        return "resumes", record[2]
    return "reclaims", record[2] + 1


def _reservation(worker: int, run: Run) -> tuple[int, ...]:
    job, deliveries, number = run[:3]
    return (RESERVED, worker, number, job, deliveries)


def _continue(draft: Draft, worker: int, run: Run, phase: int, epoch: int = 0, count: int = 0) -> State:
    """The next state, in which the run is in this phase."""
    draft[WORKERS] = replace(draft[WORKERS], worker, (*run[:3], phase, epoch, count))
    return tuple(draft)
