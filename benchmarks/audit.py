"""Redis with its ledger in PostgreSQL, as the stages see the pair: fresh for every probe, caught up at the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from benchmarks.children import Child, ProbeFailed
from benchmarks.contest import Contestant
from benchmarks.stages.stage import Hall
from holdfast.ledger.migrate import migration_store, up

MODULE: Final = "benchmarks.sides.audited"
QUEUE: Final = "default"
#: The flavour of a worker that leaves projecting to others.
NO_UPKEEP: Final = "no-upkeep"
_TEMPLATE: Final = "bench_template"
_FEED: Final = "stream:feed"
_POLL_S: Final = 0.005
#: The projector has failed if its position does not move for this time.
_STUCK_S: Final = 60.0
#: A queued no-op has these: created, claimed, succeeded.
EVENTS_PER_JOB: Final = 3


class Audit:
    """The hall's Redis, and one database."""

    def __init__(self, hall: Hall, database: str) -> None:
        self._hall = hall
        self._template = hall.postgres.database(_TEMPLATE)
        self.database = hall.postgres.database(database, template=_TEMPLATE)

    def prepare(self) -> None:
        """Start PostgreSQL and make the tables once; every fresh database is a copy."""
        self._hall.postgres.start()
        self._hall.results.settings.setdefault("PostgreSQL", self._hall.postgres.description)
        if not self._hall.postgres.has(_TEMPLATE):
            self._template.reset()
            asyncio.run(migrate(self._template.url))

    def reset(self) -> None:
        """Empty, both."""
        self._hall.redis.reset()
        self.database.reset()

    def side(self, name: str, flavour: str = "", **settings: Any) -> Contestant:
        """Our processes on this pair."""
        given = {"ledger": self.database.url, **settings}
        return Contestant(name, MODULE, self._hall.redis, self._hall.scratch, flavour, given)

    @property
    def position(self) -> str:
        """How far the ledger is; nothing before its first entry."""
        return str(self.database.value("SELECT position FROM feed_positions WHERE feed = $1", QUEUE) or "")

    @property
    def feed_end(self) -> str:
        """Where the feed ends now."""
        entries: Any = self._hall.redis.client.xrevrange(_FEED, count=1)
        return entries[0][0].decode() if entries else ""

    def until_caught_up(self) -> None:
        """Wait until the ledger has the whole feed. No process may write to it."""
        end, position, moved_at = self.feed_end, "", time.monotonic()
        while (now := self.position) != end:
            if now != position:
                position, moved_at = now, time.monotonic()
            elif time.monotonic() - moved_at > _STUCK_S:
                raise ProbeFailed(f"stuck: the ledger is at {now or 'the beginning'}, the feed ends at {end}")
            time.sleep(_POLL_S)

    def check(self, jobs: int, before: tuple[int, int] = (0, 0)) -> None:
        """Raise unless every job has a final row and all its events: otherwise the measurement is invalid."""
        rows, events = self.count()
        found = (rows - before[0], events - before[1])
        if found != (jobs, jobs * EVENTS_PER_JOB):
            raise ProbeFailed(f"{found[0]:,} finished jobs and {found[1]:,} events in the ledger, of {jobs:,} jobs")

    def count(self) -> tuple[int, int]:
        """Succeeded jobs, and events of all."""
        rows = self.database.value("SELECT count(*) FROM jobs WHERE state = 'succeeded'")
        return int(rows), int(self.database.value("SELECT count(*) FROM job_events"))


@contextmanager
def keeper(side: Contestant) -> Iterator[Child]:
    """`holdfast upkeep` in a separate process, connected, not yet started."""
    with side.child("keep") as child:
        yield child


async def migrate(url: str) -> None:
    """Make the ledger's tables."""
    store = migration_store(url)
    try:
        await up(store)
    finally:
        await store.close()
