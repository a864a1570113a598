"""Who waits in one engine, and for what: work in a queue, the end of a job, notices, entries of a feed.

All of it lives on the engine's event loop. Whoever waits registers first and looks then, so that nothing that is
committed in between is missed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from holdfast.engine.sqlite.transaction import Effects


class Bell:
    """Rung by a commit; may be rung before anyone waits."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()
        #: Whoever waits for work has seen some that only a tenant's own limit holds back.
        self.wants_places = False

    @property
    def is_rung(self) -> bool:
        return self._rung.is_set()

    def ring(self) -> None:
        self._rung.set()

    def clear(self) -> None:
        self._rung.clear()

    async def wait(self, seconds: float) -> None:
        """Until it rings, or the time is up."""
        if seconds <= 0 or self._rung.is_set():
            return
        try:
            async with asyncio.timeout(seconds):
                await self._rung.wait()
        except TimeoutError:
            return


class Waiters:
    """The bells of one engine. `watch(+1 | -1)` is called as they come and go."""

    def __init__(self, watch: Callable[[int], None]) -> None:
        self._watch = watch
        self._for_work: dict[Bell, frozenset[str]] = {}
        self._for_notices: dict[Bell, frozenset[str]] = {}
        self._for_feeds: dict[Bell, frozenset[str]] = {}
        self._for_ends: dict[tuple[str, str], set[Bell]] = {}

    def tell(self, effects: Effects) -> None:
        """A commit has happened."""
        for bells, queues in (
            (self._for_work, effects.ready),
            (self._for_notices, effects.noticed),
            (self._for_feeds, effects.fed),
        ):
            for bell, wanted in bells.items():
                if effects.foreign or not wanted.isdisjoint(queues):
                    bell.ring()
        for bell, wanted in self._for_work.items() if effects.freed else ():
            if bell.wants_places and not wanted.isdisjoint(effects.freed):
                bell.ring()
        for job in effects.ended if self._for_ends else ():
            for bell in self._for_ends.get(job, ()):
                bell.ring()

    def wake_all(self) -> None:
        """The engine closes; each looks once more, and is told so."""
        for bell in [
            *self._for_work,
            *self._for_notices,
            *self._for_feeds,
            *(bell for bells in self._for_ends.values() for bell in bells),
        ]:
            bell.ring()

    def jobs(self) -> list[tuple[str, str]]:
        """Those whose end somebody waits for."""
        return list(self._for_ends)

    @contextmanager
    def for_work(self, queues: Sequence[str]) -> Iterator[Bell]:
        with self._among(self._for_work, queues) as bell:
            yield bell

    @contextmanager
    def for_notices(self, queues: Sequence[str]) -> Iterator[Bell]:
        with self._among(self._for_notices, queues) as bell:
            yield bell

    @contextmanager
    def for_feeds(self, queues: Sequence[str]) -> Iterator[Bell]:
        with self._among(self._for_feeds, queues) as bell:
            yield bell

    @contextmanager
    def for_end(self, queue: str, job_id: str) -> Iterator[Bell]:
        bell = Bell()
        bells = self._for_ends.setdefault((queue, job_id), set())
        bells.add(bell)
        self._watch(1)
        try:
            yield bell
        finally:
            self._watch(-1)
            bells.discard(bell)
            if not bells:
                self._for_ends.pop((queue, job_id), None)

    @contextmanager
    def _among(self, bells: dict[Bell, frozenset[str]], queues: Sequence[str]) -> Iterator[Bell]:
        bell = Bell()
        bells[bell] = frozenset(queues)
        self._watch(1)
        try:
            yield bell
        finally:
            self._watch(-1)
            del bells[bell]
