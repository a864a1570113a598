"""Under all rules, stores that go back in time break no invariant, each rule is needed, and one limit is known.

The tests explore scenarios below 150,000 states. `python -m tests.model` explores all of them.
"""

from __future__ import annotations

from typing import Final

import pytest

from tests.model.__main__ import main
from tests.model.epochs import Model
from tests.model.exploration import explore
from tests.model.rules import ALL_RULES, NO_RULES, RULES, Rule
from tests.model.scenarios import KNOWN_LIMIT, NEEDED_IN, SCENARIOS
from tests.model.state import Invariant, State, Violation

pytestmark = pytest.mark.search

SMALL_SCENARIOS: Final = [name for name, scenario in SCENARIOS.items() if scenario.is_small]
#: All but I4: a false alarm does no damage.
DAMAGE: Final[frozenset[Invariant]] = frozenset({"I1", "I2", "I3", "I5", "I6"})
MAX_STEPS: Final = 24


@pytest.mark.parametrize("name", SMALL_SCENARIOS)
def test_rules_hold(name: str) -> None:
    result = explore(Model(SCENARIOS[name], ALL_RULES))
    assert not result.findings, "\n".join(finding.describe() for finding in result.findings.values())
    assert result.is_complete
    # A change that makes the model smaller by mistake is found here.
    assert result.states == SCENARIOS[name].states


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_needed(rule: Rule) -> None:
    result = explore(Model(SCENARIOS[NEEDED_IN[rule]], ALL_RULES - {rule}), stop_at=DAMAGE)
    lengths = [finding.length for invariant, finding in result.findings.items() if invariant in DAMAGE]
    assert lengths, "no invariant is broken"
    assert min(lengths) <= MAX_STEPS


@pytest.mark.parametrize(
    ("name", "reports_losses", "lengths"),
    [
        # A job that ended after a snapshot is resumed.
        pytest.param("engine", True, {"I1": 11}, id="engine"),
        # An effect is executed twice; the projector continues in a ledger that lost it.
        pytest.param("ledger", True, {"I2": 9, "I6": 7}, id="ledger"),
        # The feed was trimmed, and an accepted job is in no store.
        pytest.param("ledger-two-jobs", True, {"I6": 8}, id="ledger-two-jobs"),
        # If that is not reported: a job never ends in the ledger; the reconciler restores a job that had ended.
        pytest.param("ledger-two-jobs", False, {"I1": 19, "I3": 8}, id="losses-not-reported"),
    ],
)
def test_violations_without_rules(name: str, reports_losses: bool, lengths: dict[str, int]) -> None:
    result = explore(Model(SCENARIOS[name], NO_RULES, reports_losses=reports_losses))
    assert result.is_complete
    assert result.lengths == lengths


def test_two_disk_images_are_not_detected() -> None:
    # No rule can prevent it: after a power cycle, the stores can contain the same.
    result = explore(Model(SCENARIOS[KNOWN_LIMIT], ALL_RULES), stop_at=DAMAGE)
    assert result.lengths == {"I6": 10}


def test_a_surviving_process_detects_two_disk_images() -> None:
    trace = explore(Model(SCENARIOS[KNOWN_LIMIT], ALL_RULES), stop_at=DAMAGE).findings["I6"].trace
    decision = trace.index("verification: open")
    witnessed = Model(SCENARIOS["images-witness"], ALL_RULES)
    state = follow(witnessed, trace[:decision])
    assert [name for name, _, _ in witnessed.steps(state) if name.startswith("verification")] == [
        "verification: stopped"
    ]
    # Nor is there another way that is as short. `python -m tests.model images-witness` explores all of them.
    result = explore(witnessed, max_states=10_000)
    assert result.depth > len(trace)
    assert not result.findings


def test_a_trace_can_be_repeated() -> None:
    model = Model(SCENARIOS["ledger"], NO_RULES)
    finding = explore(model).findings["I2"]
    state = follow(model, finding.trace[:-1])
    assert finding.violation in [after for _, after, _ in model.steps(state)]


def follow(model: Model, names: list[str]) -> State:
    """The state after the steps with these names."""
    state = model.initial()
    for name in names:
        (state,) = (after for step, after, _ in model.steps(state) if step == name and not isinstance(after, Violation))
    return state


def test_an_exploration_that_is_cut_off_is_not_complete() -> None:
    levels: list[int] = []
    model = Model(SCENARIOS["engine"], ALL_RULES)
    result = explore(model, max_states=1_000, on_level=lambda result: levels.append(result.states))
    assert not result.is_complete
    assert levels[-2] < 1_000 <= levels[-1] == result.states < SCENARIOS["engine"].states


def test_the_command_fails_if_an_invariant_is_broken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["engine"]) == 0
    assert "6,525 states" in capsys.readouterr().out
    assert main(["engine", "--without", "fence"]) == 0
    assert "fault: the engine goes back" in capsys.readouterr().out
    monkeypatch.setattr("tests.model.__main__.KNOWN_LIMIT", "")
    assert main([KNOWN_LIMIT, "--states", "3000"]) == 1
    assert "violations in: images" in capsys.readouterr().out
