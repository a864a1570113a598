"""What callers, operators and processes do, step by step. Together the scenarios use nearly every verb of engine and
ledger; docs/explanation/crash-points.md names the others.

A step may run twice: a caller repeats a call that a store does not answer, and the next process repeats the step in
which the previous one crashed. What callers and other programs have observed is in `RunRecord`, which outlives every
process.
"""

from __future__ import annotations

from typing import Final

from tests.crash_points.scenarios.bulk import Bulk
from tests.crash_points.scenarios.incoming import Foreign, Triggers
from tests.crash_points.scenarios.jobs import Effects, Life, Pending, Poison
from tests.crash_points.scenarios.operators import Approvals, DeadLetters
from tests.crash_points.scenarios.outgoing import Outbox, Webhooks
from tests.crash_points.scenarios.recovery import EngineWipe
from tests.crash_points.scenarios.scenario import QUEUE, RunRecord, Scenario
from tests.crash_points.scenarios.upkeep import OperationsAndUpkeep
from tests.crash_points.scenarios.verbs import Verbs

__all__ = ["QUEUE", "SCENARIOS", "RunRecord", "Scenario"]

SCENARIOS: Final[dict[str, Scenario]] = {
    scenario.name: scenario
    for scenario in (
        Life(),
        Pending(),
        Poison(),
        Effects(),
        DeadLetters(),
        Approvals(),
        OperationsAndUpkeep(),
        Bulk(),
        Verbs(),
        EngineWipe(),
        Outbox(),
        Webhooks(),
        Triggers(),
        Foreign(),
    )
}
