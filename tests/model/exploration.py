"""Exploration of every state that a model can reach, breadth first.

The first violation that is found of an invariant is one of its shortest. I3 and I5 are about ends: from each state, one
calm run continues until it is at rest. That shows that a way out exists, not that every order of steps leads to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tests.model.epochs import Model
from tests.model.state import INVARIANTS, RECORDS, ROWS, Invariant, State, Violation

#: An exploration with more states is cut off.
MAX_STATES: Final = 1_000_000
NEVER: Final[frozenset[Invariant]] = frozenset()


class Finding(NamedTuple):
    """A violation, and the steps that lead to it."""

    violation: Violation
    trace: list[str]

    @property
    def length(self) -> int:
        """The number of steps, with the one that breaks the invariant."""
        return len(self.trace)

    def describe(self) -> str:
        invariant = self.violation.invariant
        heading = f"{invariant} after {self.length} steps ({INVARIANTS[invariant]}):"
        return "\n  - ".join([heading, *self.trace])


@dataclass(slots=True)
class Result:
    states: int = 0
    steps: int = 0
    depth: int = 0
    #: Every reachable state was explored.
    is_complete: bool = False
    seconds: float = 0.0
    findings: dict[Invariant, Finding] = field(default_factory=dict)

    @property
    def lengths(self) -> dict[str, int]:
        """How many steps lead to the first violation of each invariant."""
        return {invariant: finding.length for invariant, finding in sorted(self.findings.items())}


def explore(
    model: Model,
    *,
    stop_at: frozenset[Invariant] = NEVER,
    max_states: int = MAX_STATES,
    on_level: Callable[[Result], None] | None = None,
) -> Result:
    """Explore the model until a violation of `stop_at` is found or there are too many states.

    `on_level` is called whenever all states of a depth are known.
    """
    exploration = Exploration(model, stop_at)
    began = time.process_time()
    level = [model.initial()]
    while level and not exploration.is_done and exploration.result.states < max_states:
        level = exploration.explore_level(level)
        if on_level is not None:
            on_level(exploration.result)
    exploration.result.is_complete = not level
    if not exploration.is_done:
        exploration.check_ends()
    exploration.result.seconds = time.process_time() - began
    return exploration.result


class Exploration:
    """The states that were reached so far, and what was found."""

    def __init__(self, model: Model, stop_at: frozenset[Invariant]) -> None:
        self.result: Final = Result(states=1)
        self._model = model
        self._stop_at = stop_at
        #: By state: the state from which it was reached first, and the name of that step.
        self._reached: dict[State, tuple[State | None, str]] = {model.initial(): (None, "")}
        #: By state: the jobs that have ended after a calm run, as bits; or the violation on the way.
        self._ends: dict[State, int | Violation] = {}

    @property
    def is_done(self) -> bool:
        return not self._stop_at.isdisjoint(self.result.findings)

    def explore_level(self, level: list[State]) -> list[State]:
        """Take every step from these states; return the new states."""
        reached, find_steps = self._reached, self._model.steps
        new, steps = [], 0
        for state in level:
            for name, after, _ in find_steps(state):
                steps += 1
                if isinstance(after, Violation):
                    self._add_finding(state, after)
                elif after not in reached:
                    reached[after] = (state, name)
                    new.append(after)
        result = self.result
        result.states, result.steps, result.depth = len(reached), result.steps + steps, result.depth + bool(new)
        return new

    def check_ends(self) -> None:
        """Continue from every state with a calm run."""
        for state in self._reached:
            end = self._find_end(state)
            if not isinstance(end, Violation):
                self._check_jobs(state, end)
            elif end.invariant == "I5":
                # The exploration itself finds the others, after fewer steps.
                self._add_finding(state, end)
            if self.is_done:
                return

    def _find_end(self, state: State) -> int | Violation:
        """Follow a calm run until its end is known, and note the end for all states on the way."""
        path: dict[State, None] = {}
        present, end = state, self._ends.get(state)
        while end is None:
            path[present] = None
            after = self._model.next_calm(present)
            if after is None:
                end = self._model.ended_jobs(present)
            elif isinstance(after, Violation):
                end = after
            elif after in path:
                end = Violation("I5", "a calm run repeats the same steps for ever")
            else:
                present, end = after, self._ends.get(after)
        self._ends.update(dict.fromkeys(path, end))
        return end

    def _check_jobs(self, state: State, ended: int) -> None:
        for job in range(self._model.scenario.jobs):
            if (state[RECORDS][job] or state[ROWS][job]) and not ended >> job & 1:
                self._add_finding(state, Violation("I3", f"job {job} never ends in the ledger"))

    def _add_finding(self, state: State, violation: Violation) -> None:
        if violation.invariant not in self.result.findings:
            trace = [*self._trace(state), violation.text]
            self.result.findings[violation.invariant] = Finding(violation, trace)

    def _trace(self, state: State) -> list[str]:
        """The names of the steps that lead to a state."""
        names: list[str] = []
        before, name = self._reached[state]
        while before is not None:
            names.append(name)
            before, name = self._reached[before]
        return names[::-1]
