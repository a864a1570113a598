"""What users and processes do, step by step. Together the stories use nearly every verb of engine and
ledger; docs/explanation/crash-points.md names the others.

A step may be taken twice: whoever is told that a store does not answer asks again, and whoever was in the middle of a
step when the process died takes it once more in the next one. What the world outside has seen is in `World`, which
outlives every process.
"""

from __future__ import annotations

from typing import Final

from tests.crash_points.scenarios.bulk import Many
from tests.crash_points.scenarios.incoming import Foreign, Triggered
from tests.crash_points.scenarios.jobs import Acting, Life, Pending, Poison
from tests.crash_points.scenarios.operators import Deciding, Letters
from tests.crash_points.scenarios.outgoing import Publishing, Telling
from tests.crash_points.scenarios.recovery import Durable
from tests.crash_points.scenarios.scenario import QUEUE, Story, World
from tests.crash_points.scenarios.upkeep import Minding
from tests.crash_points.scenarios.verbs import Verbs

__all__ = ["QUEUE", "STORIES", "Story", "World"]

STORIES: Final[dict[str, Story]] = {
    story.name: story
    for story in (
        Life(),
        Pending(),
        Poison(),
        Acting(),
        Letters(),
        Deciding(),
        Minding(),
        Many(),
        Verbs(),
        Durable(),
        Publishing(),
        Telling(),
        Triggered(),
        Foreign(),
    )
}
