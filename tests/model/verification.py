"""Verification opens the gates after a store has a new epoch. Recovery opens them after the ledger lost data.

Both go from one store to the other in stages. A stage is one step of one store, and begins again if that store has
another epoch by then: no step can read both stores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, TypeAlias

from tests.model.rules import Process, Rule, Scenario
from tests.model.state import (
    ACTS,
    CLEARED,
    COMPARED,
    EFFECT_LOST,
    END_RECORDED,
    ENGINE_EPOCH,
    ENGINE_GENERATION,
    ENTRIES,
    FEED,
    FENCE,
    FINAL,
    GENERATION,
    IDLE,
    LEDGER_EPOCH,
    MARK,
    OPEN,
    POSITION,
    PROJECTED,
    PROJECTED_SERVER,
    QUEUED,
    REACHED,
    RECORDS,
    RECOVERIES,
    RESERVATIONS,
    ROWS,
    SERVER,
    SUSPENDED,
    UNKNOWN,
    VERIFICATIONS,
    VERIFIED_LEDGER,
    WENT_BACK,
    WITNESS,
    WORK,
    Draft,
    Numbers,
    Rows,
    State,
    Step,
    Violation,
    append_entry,
    describe_batch,
    find_loss,
    kind,
    replace,
    retire_jobs,
    write_batch,
)
from tests.model.upkeep import find_unwritten

#: Of engine and ledger, as a verification has read them; 0 for the ledger's until it is read.
Epochs: TypeAlias = tuple[int, int]
#: Takes the state, the number of the verifier, the epochs, and what earlier stages have read.
StageAction: TypeAlias = Callable[..., Step]

#: Stages that call the engine, and stages that call a ledger whose epoch an earlier stage has read.
_ENGINE_STAGES: Final = ("read", "open", "compare", "open retired", "report", "catch up", "finish")
_LEDGER_STAGES: Final = ("judge", "catch up")
#: From these on, a recovery has begun.
RECOVERY_STAGES: Final = ("report", "catch up", "finish")

#: What is new since the ledger wrote the last batch, as bits.
_NEW_ENGINE: Final = 1
_NEW_LEDGER: Final = 2


class Verification(Process):
    """One or more verifiers. Each is IDLE or in a stage: its name, the engine's epoch, and what it has read."""

    def __init__(self, scenario: Scenario, rules: frozenset[Rule], *, reports_losses: bool) -> None:
        super().__init__(scenario, rules)
        self._reports_losses = reports_losses
        recovery = Recovery(scenario, rules)
        self._actions: Final[dict[str, StageAction]] = {
            "begin": self._begin,
            "read": self._read,
            "judge": self._judge,
            "compare": self._compare,
            "open": partial(self._open, corrected=False),
            "open retired": partial(self._open, corrected=True),
            "stopped": recovery.begin,
            "report": recovery.report,
            "catch up": recovery.catch_up,
            "finish": recovery.finish,
        }

    def steps(self, state: State) -> Iterator[Step]:
        for verifier, stage in enumerate(state[VERIFICATIONS]):
            step = self._find_step(state, verifier, stage)
            if step is not None:
                yield step

    def _find_step(self, state: State, verifier: int, stage: Any) -> Step | None:
        if stage == IDLE:
            if state[CLEARED] == state[ENGINE_EPOCH] and state[VERIFIED_LEDGER] == state[LEDGER_EPOCH]:
                return None
            after = _enter(list(state), verifier, "begin", (state[ENGINE_EPOCH], 0), state[FENCE])
            return "verification begins", after, WORK
        name, (engine_epoch, ledger_epoch) = stage[:2]
        if name in _ENGINE_STAGES and engine_epoch != state[ENGINE_EPOCH]:
            return "verification begins again: another engine epoch", _leave(list(state), verifier), WORK
        if name in _LEDGER_STAGES and ledger_epoch != state[LEDGER_EPOCH]:
            return "verification begins again: another ledger epoch", _leave(list(state), verifier), WORK
        return self._actions[name](state, verifier, *stage[1:])

    def _begin(self, state: State, verifier: int, epochs: Epochs, fence: int) -> Step:
        """Ledger: set the fence if it is still the one that was read; read epoch, position and identity."""
        name = "verification: fence in the ledger, its position"
        if state[FENCE] != fence:
            return name, _leave(list(state), verifier), WORK
        engine_epoch = epochs[0]
        draft = list(state)
        if "fence" in self.rules:
            draft[FENCE] = engine_epoch
        new = _NEW_ENGINE * (state[PROJECTED] != engine_epoch) + _NEW_LEDGER * (
            state[PROJECTED_SERVER] != state[SERVER]
        )
        after = _enter(draft, verifier, "read", (engine_epoch, state[LEDGER_EPOCH]), state[POSITION], new)
        return name, after, WORK

    def _read(self, state: State, verifier: int, epochs: Epochs, position: int, new: int) -> Step:
        """Engine: close the ledger's gate; read the marks, and whether the feed has the position."""
        draft = list(state)
        if "close" in self.rules:
            draft[VERIFIED_LEDGER] = -epochs[1]
        has_position = any(entry[0] == position for entry in state[FEED])
        after = _enter(draft, verifier, "judge", epochs, position, new, has_position, state[MARK], state[ACTS])
        return "verification: marks of the engine", after, WORK

    def _judge(
        self,
        state: State,
        verifier: int,
        epochs: Epochs,
        position: int,
        new: int,
        has_position: bool,
        mark: int,
        acts: Numbers,
    ) -> Step:
        """Ledger: compare it with the marks."""
        draft = list(state)
        if state[POSITION] != position:
            return "verification begins again: the position has moved", _leave(draft, verifier), WORK
        if self._must_stop(state, new, mark, acts):
            if not state[WENT_BACK][1]:
                return "", Violation("I4", "a verification finds the ledger older, and it is not"), WORK
            return "verification: stopped", _enter(draft, verifier, "stopped", epochs), WORK
        if has_position or (not position and not any(state[ROWS])):
            return "verification: open", _enter(draft, verifier, "open", epochs), WORK
        if state[WENT_BACK] == (0, 0):
            return "", Violation("I4", "a verification finds the engine older, and it is not"), WORK
        return "verification: compare", _enter(draft, verifier, "compare", epochs, state[ROWS], 0), WORK

    def _must_stop(self, state: State, new: int, mark: int, acts: Numbers) -> bool:
        if state[PROJECTED] < 0 or (new == _NEW_ENGINE + _NEW_LEDGER and "identity" in self.rules):
            return True
        if self._lacks(state, mark, acts):
            return True
        return self.scenario.has_witness and bool(new & _NEW_ENGINE) and self._lacks(state, *state[WITNESS])

    def _lacks(self, state: State, mark: int, acts: Numbers) -> bool:
        """Whether the ledger does not have what these marks say it confirmed."""
        if "mark" in self.rules and mark and not state[ENTRIES] >> mark & 1:
            return True
        return "act-mark" in self.rules and any(
            act > reserved for act, reserved in zip(acts, state[RESERVATIONS], strict=True)
        )

    def _compare(self, state: State, verifier: int, epochs: Epochs, rows: Rows, job: int) -> Step:
        """Engine: end the next job if it has ended in the ledger. From then on it may be claimed."""
        draft = list(state)
        engine_epoch = epochs[0]
        if state[CLEARED] == engine_epoch:
            # Another verification has compared all jobs since, and they move: their rows may be out of date.
            return "verification: all jobs were compared", _enter(draft, verifier, "open retired", epochs), WORK
        if "retire" in self.rules:
            retire_jobs(draft, tuple(row if each == job else UNKNOWN for each, row in enumerate(rows)))
        epoch, compared = state[COMPARED]
        draft[COMPARED] = (engine_epoch, (compared if epoch == engine_epoch else 0) | 1 << job)
        is_last = job + 1 == len(rows)
        stage = ("open retired", epochs) if is_last else ("compare", epochs, rows, job + 1)
        return f"verification compares job {job}", _enter(draft, verifier, *stage), WORK

    def _open(self, state: State, verifier: int, epochs: Epochs, *, corrected: bool) -> Step:
        """Engine: open the gates unless another verification has closed or opened them since."""
        engine_epoch, ledger_epoch = epochs
        draft = list(state)
        if "close" in self.rules and state[VERIFIED_LEDGER] != -ledger_epoch:
            return "verification: another one was faster", _leave(draft, verifier), WORK
        draft[CLEARED], draft[VERIFIED_LEDGER] = engine_epoch, ledger_epoch
        draft[ENGINE_GENERATION] = max(state[ENGINE_GENERATION], state[GENERATION])
        if corrected and "closing-entry" in self.rules:
            append_entry(draft, "empty")
        name = "verification opens the gates"
        # A ledger that has another epoch by now is still behind a closed gate.
        if self._reports_losses and ledger_epoch == state[LEDGER_EPOCH]:
            loss = find_loss(state)
            if loss:
                return name, Violation("I6", f"{name}, although the ledger has lost {loss}"), WORK
        return name, _leave(draft, verifier), WORK


class Recovery:
    """The command `holdfast ledger recover`: the stages that follow a verification that stopped."""

    def __init__(self, scenario: Scenario, rules: frozenset[Rule]) -> None:
        self._scenario = scenario
        self._rules = rules

    def begin(self, state: State, verifier: int, epochs: Epochs) -> Step:
        """Ledger: a new generation, unfinished; the fence. Only while the stores are still the ones that stopped."""
        draft = list(state)
        present = (state[ENGINE_EPOCH], state[LEDGER_EPOCH])
        if epochs != present or state[VERIFIED_LEDGER] == state[LEDGER_EPOCH]:
            return "verification begins again: no longer stopped", _leave(draft, verifier), WORK
        draft[GENERATION] = max(state[GENERATION], state[ENGINE_GENERATION]) + 1
        draft[FENCE] = epochs[0]
        if "unfinished" in self._rules:
            draft[PROJECTED] = -1  # until the projector writes a batch
        return "operator: ledger recover", _enter(draft, verifier, "report", epochs, state[ROWS]), WORK

    def report(self, state: State, verifier: int, epochs: Epochs, rows: Rows) -> Step:
        """Engine: close the ledger's gate, end the jobs that have ended in the ledger, report all jobs."""
        draft = list(state)
        draft[VERIFIED_LEDGER] = -epochs[1]
        retire_jobs(draft, rows)
        for job, record in enumerate(draft[RECORDS]):
            if record and "report" in self._rules:
                append_entry(draft, "reported", job, record)
        append_entry(draft, "empty")
        return "recovery: the engine reports its jobs", _enter(draft, verifier, "catch up", epochs), WORK

    def catch_up(self, state: State, verifier: int, epochs: Epochs) -> Step:
        """Ledger: write what the feed has and the ledger has not; find the jobs that are open then."""
        draft = list(state)
        batch = find_unwritten(state)
        name = f"recovery: the ledger reads {describe_batch(batch)}"
        violation = write_batch(draft, batch, state[FEED][-1][0])
        if violation is not None:
            return name, violation, WORK
        open_jobs = tuple(job for job, row in enumerate(draft[ROWS]) if kind(row) in (OPEN, SUSPENDED))
        after = _enter(draft, verifier, "finish", epochs, draft[POSITION], state[GENERATION], open_jobs)
        return name, after, WORK

    def finish(
        self, state: State, verifier: int, epochs: Epochs, position: int, generation: int, open_jobs: Numbers
    ) -> Step:
        """Engine: suspend the jobs that only the ledger has; set the mark; open the gates."""
        draft = list(state)
        engine_epoch, ledger_epoch = epochs
        if state[VERIFIED_LEDGER] != -ledger_epoch:
            return "recovery: another one was faster", _leave(draft, verifier), WORK
        for job in open_jobs:
            self._recover_job(draft, job, position)
        no_acts = (0,) * self._scenario.workers
        draft[MARK], draft[ACTS] = position, no_acts
        draft[CLEARED], draft[VERIFIED_LEDGER], draft[ENGINE_GENERATION] = engine_epoch, ledger_epoch, generation
        if self._scenario.has_witness:
            draft[WITNESS] = (position, no_acts)
        # Otherwise the ledger has gone back again since.
        if state[ENTRIES] >> position & 1:
            _accept_losses(draft)
        append_entry(draft, "empty")
        return "recovery opens the gates", _leave(draft, verifier), WORK

    def _recover_job(self, draft: Draft, job: int, position: int) -> None:
        if draft[RECORDS][job]:
            # Both stores have lost its end; the command says so.
            draft[END_RECORDED] = replace(draft[END_RECORDED], job, 0)
        elif not any(entry[0] > position and entry[2] == job for entry in draft[FEED]):
            is_suspended = "suspend-lost" in self._rules
            draft[RECORDS] = replace(draft[RECORDS], job, SUSPENDED if is_suspended else QUEUED)
            append_entry(draft, "suspended" if is_suspended else "restored", job)


def _accept_losses(draft: Draft) -> None:
    """From now on, the ledger is compared with what it has after the recovery."""
    draft[EFFECT_LOST] = 0
    draft[RECOVERIES] += 1
    draft[REACHED] = tuple(2 if kind(row) == FINAL else min(1, kind(row)) for row in draft[ROWS])


def _enter(draft: Draft, verifier: int, *stage: Any) -> State:
    """The next state, in which the verifier is in this stage."""
    draft[VERIFICATIONS] = replace(draft[VERIFICATIONS], verifier, stage)
    return tuple(draft)


def _leave(draft: Draft, verifier: int) -> State:
    draft[VERIFICATIONS] = replace(draft[VERIFICATIONS], verifier, IDLE)
    return tuple(draft)
