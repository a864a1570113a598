"""The scenarios that are explored.

Each has one or two jobs and workers, one idempotency key and a budget of faults; when faults happen is left open.
"""

from __future__ import annotations

from typing import Final

from tests.model.rules import Rule, Scenario
from tests.model.state import Budget

_NO_EFFECT: Final = (False,)
_ALL_SCENARIOS: Final = (
    Scenario(
        name="restarts",
        about="restarts and a killed worker; nothing is lost",
        budget=Budget(engine_restarts=1, ledger_restarts=1, kills=1),
        states=65_711,
    ),
    Scenario(
        name="engine",
        about="a job with an effect; the engine goes back",
        budget=Budget(snapshots=1, engine_losses=1),
        states=6_525,
    ),
    Scenario(
        name="engine-restart",
        about="the engine goes back and restarts; a worker is killed",
        budget=Budget(snapshots=1, engine_losses=1, engine_restarts=1, kills=1),
        effects=_NO_EFFECT,
        states=104_054,
    ),
    Scenario(
        name="engine-twice",
        about="the engine goes back twice",
        budget=Budget(snapshots=2, engine_losses=2),
        effects=_NO_EFFECT,
        states=72_104,
    ),
    Scenario(
        name="engine-late",
        about="the engine goes back; one of two workers is late",
        budget=Budget(snapshots=1, engine_losses=1),
        workers=2,
        effects=_NO_EFFECT,
        states=20_533,
    ),
    Scenario(
        name="engine-two-jobs",
        about="the engine is wiped while it has two jobs",
        budget=Budget(engine_losses=1),
        jobs=2,
        effects=_NO_EFFECT * 2,
        states=27_384,
    ),
    Scenario(
        name="engine-partly",
        about="the engine goes back while it has two jobs",
        budget=Budget(snapshots=1, engine_losses=1),
        jobs=2,
        effects=_NO_EFFECT * 2,
        states=814_169,
    ),
    Scenario(
        name="two-verifiers",
        about="the engine is wiped, and two processes verify concurrently",
        budget=Budget(engine_losses=1),
        verifiers=2,
        effects=_NO_EFFECT,
        states=0,
    ),
    Scenario(
        name="ledger",
        about="a job with an effect; the ledger goes back; a worker is killed",
        budget=Budget(backups=1, ledger_losses=1, kills=1),
        states=119_964,
    ),
    Scenario(
        name="ledger-restart",
        about="the ledger goes back and restarts",
        budget=Budget(backups=1, ledger_losses=1, ledger_restarts=1),
        states=65_079,
    ),
    Scenario(
        name="ledger-twice",
        about="the ledger goes back twice",
        budget=Budget(backups=1, ledger_losses=2),
        states=125_241,
    ),
    Scenario(
        name="ledger-late",
        about="the ledger is wiped; one of two workers is late",
        budget=Budget(ledger_losses=1),
        workers=2,
        states=186_615,
    ),
    Scenario(
        name="ledger-two-jobs",
        about="the ledger goes back; two jobs, and the feed is trimmed to nothing",
        budget=Budget(backups=1, ledger_losses=1),
        jobs=2,
        effects=_NO_EFFECT * 2,
        tail=0,
        states=193_382,
    ),
    Scenario(
        name="shared-key",
        about="the ledger is wiped; two jobs share an idempotency key",
        budget=Budget(ledger_losses=1),
        jobs=2,
        effects=(True, True),
        states=335_686,
    ),
    Scenario(
        name="both",
        about="engine and ledger go back, each to any time",
        budget=Budget(snapshots=1, backups=1, engine_losses=1, ledger_losses=1),
        effects=_NO_EFFECT,
        states=461_701,
    ),
    Scenario(
        name="both-effect",
        about="a job with an effect; the engine is wiped, the ledger goes back",
        budget=Budget(backups=1, engine_losses=1, ledger_losses=1),
        states=181_432,
    ),
    Scenario(
        name="recovery",
        about="the ledger starts from a disk image; the engine is wiped during the recovery",
        budget=Budget(backups=1, engine_losses=1, ledger_losses=1),
        identity_changes=False,
        only_during_recovery=True,
        states=24_418,
    ),
    Scenario(
        name="images",
        about="engine and ledger start from disk images; a known limit",
        budget=Budget(snapshots=1, backups=1, engine_losses=1, ledger_losses=1),
        effects=_NO_EFFECT,
        identity_changes=False,
        states=0,
    ),
    Scenario(
        name="images-witness",
        about="engine and ledger start from disk images; one process survives",
        budget=Budget(snapshots=1, backups=1, engine_losses=1, ledger_losses=1),
        effects=_NO_EFFECT,
        identity_changes=False,
        has_witness=True,
        states=452_248,
    ),
)
SCENARIOS: Final = {scenario.name: scenario for scenario in _ALL_SCENARIOS}
#: Its violation is expected: no rule inside the stores can prevent it.
KNOWN_LIMIT: Final = "images"

#: Without the rule, this scenario has a violation after the fewest steps.
NEEDED_IN: Final[dict[Rule, str]] = {
    "gate-claims": "engine",
    "gate-ends": "engine-late",
    "retire": "engine",
    "compared": "engine-partly",
    "closing-entry": "engine-twice",
    "fence": "engine",
    "mark": "ledger-two-jobs",
    "act-mark": "ledger",
    "reserve-gate": "ledger",
    "act-gate": "ledger-late",
    "close": "ledger-late",
    "project-gate": "ledger-two-jobs",
    "trim-gate": "ledger-two-jobs",
    "restore-gate": "ledger-two-jobs",
    "identity": "both",
    "doubt": "ledger",
    "suspend-lost": "ledger-two-jobs",
    "unfinished": "recovery",
    "report": "ledger-two-jobs",
}
