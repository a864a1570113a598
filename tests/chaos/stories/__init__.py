"""What users and processes do, step by step. Together the stories use nearly every verb of engine and
ledger; docs/explanation/crash-points.md names the others.

A step may be taken twice: whoever is told that a store does not answer asks again, and whoever was in the middle of a
step when the process died takes it once more in the next one. What the world outside has seen is in `World`, which
outlives every process.
"""

from __future__ import annotations

from typing import Final

from tests.chaos.stories.arriving import Foreign, Triggered
from tests.chaos.stories.jobs import Acting, Life, Pending, Poison
from tests.chaos.stories.leaving import Publishing, Telling
from tests.chaos.stories.many import Many
from tests.chaos.stories.office import Minding
from tests.chaos.stories.people import Deciding, Letters
from tests.chaos.stories.recovery import Durable
from tests.chaos.stories.story import QUEUE, Story, World
from tests.chaos.stories.verbs import Verbs

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
