"""The rules that can be taken out of the model, and what each process has: a scenario, the rules and the gates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from tests.model.state import CLEARED, COMPARED, ENGINE_EPOCH, VERIFIED_LEDGER, Budget, State, Step

Rule: TypeAlias = Literal[
    "gate-claims",
    "gate-ends",
    "retire",
    "compared",
    "closing-entry",
    "fence",
    "mark",
    "act-mark",
    "reserve-gate",
    "act-gate",
    "close",
    "project-gate",
    "trim-gate",
    "restore-gate",
    "identity",
    "doubt",
    "suspend-lost",
    "unfinished",
    "report",
]

RULES: Final[dict[Rule, str]] = {
    "gate-claims": "claim, reclaim and resume work only while `cleared` is the engine's epoch",
    "gate-ends": "so do settle, suspend, cancel and the moves of operators",
    "retire": "after the engine went back, jobs that ended in the ledger are ended in it before the gates open",
    "compared": "during the comparison, only jobs that were compared are claimed and ended",
    "closing-entry": "an empty feed entry ends a comparison: a position behind it includes what was corrected",
    "fence": "a verification first writes the engine's epoch to the ledger; batches of another epoch are refused",
    "mark": "trimming writes what the ledger confirmed; a verification checks that the ledger still has it",
    "act-mark": "before an effect is executed, the engine gets the number of its reservation; a verification checks it",
    "reserve-gate": "a reservation names the verified ledger epoch; a server with another epoch refuses it",
    "act-gate": "the act mark is refused unless the reservation's ledger epoch is the verified one",
    "close": "a verification closes the ledger's gate before it reads the marks",
    "project-gate": "batches are read and written only under a verified ledger epoch",
    "trim-gate": "the feed is trimmed and the mark moved only under a verified ledger epoch",
    "restore-gate": "jobs are restored only under a verified ledger epoch",
    "identity": "if both servers are new since the last verification, an operator decides",
    "doubt": "after a recovery, unknown keys of jobs from before it are in doubt",
    "suspend-lost": "a recovery suspends jobs that are open in the ledger and unknown to the engine",
    "unfinished": "until a recovery is finished, every verification stops",
    "report": "in a recovery, the engine reports all of its jobs to the ledger",
}
ALL_RULES: Final = frozenset(RULES)
NO_RULES: Final[frozenset[Rule]] = frozenset()

#: The tests explore scenarios with fewer states.
SMALL: Final = 150_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    name: str
    about: str
    budget: Budget
    #: How many states it has under all rules; 0 if they are not counted.
    states: int
    jobs: int = 1
    workers: int = 1
    verifiers: int = 1
    #: Of each job, whether it executes an effect. All of them have the same key.
    effects: tuple[bool, ...] = (True,)
    #: How many read entries stay in the feed when it is trimmed.
    tail: int = 1
    #: A ledger that went back has another identity. Otherwise it was started from a disk image.
    identity_changes: bool = True
    #: A process that survives has the last position and the reservations that it saw confirmed.
    has_witness: bool = False
    #: The engine goes back only during a recovery.
    only_during_recovery: bool = False

    @property
    def is_small(self) -> bool:
        return 0 < self.states < SMALL


class Process(ABC):
    """One kind of process. A step is one atomic step of one store, or of the process itself."""

    def __init__(self, scenario: Scenario, rules: frozenset[Rule]) -> None:
        self.scenario = scenario
        self.rules = rules

    @abstractmethod
    def steps(self, state: State) -> Iterator[Step]:
        """Every step that is possible in this state."""

    def can_move(self, state: State, gate: Rule, job: int | None = None) -> bool:
        """Whether the engine's gate for moves is open, for all jobs or for this one, or the rule taken out."""
        if gate not in self.rules or state[CLEARED] == state[ENGINE_EPOCH]:
            return True
        epoch, compared = state[COMPARED]
        if job is None or epoch != state[ENGINE_EPOCH]:
            return False
        return "compared" not in self.rules or bool(compared >> job & 1)

    def is_verified(self, state: State, gate: Rule, ledger_epoch: int) -> bool:
        """Whether the ledger's gate is open for this epoch of the ledger, or the rule taken out."""
        is_open: bool = gate not in self.rules or (
            state[CLEARED] == state[ENGINE_EPOCH] and state[VERIFIED_LEDGER] == ledger_epoch
        )
        return is_open
