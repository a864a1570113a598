"""Run suspects alone: jobs whose code ran when their lease was lost, and which may be what ended their worker.

    Fetcher finds suspects ──► Isolation ──► IsolatedProcesses: a worker process with a `SuspectFetcher`
                                        └──► IdleIsolation: this worker, while it runs nothing else

A suspect that has run alone for one lease is cleared: other jobs may start again, or another process for the next
suspect, while it continues. The verdict on a suspect is settled before the next one starts, so that only one job can
be lost with its process.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any, Final

from holdfast.core.job import Claim
from holdfast.worker.fetcher import Fetcher

#: After a suspect, other jobs have the worker for this many times as long.
_REST: Final = 4


class IdleIsolation:
    """The worker itself runs suspects while it is idle, for apps that no other process can load.

    If it is not idle for a lease, it claims nothing until it is, but for one lease at most; if that is too short for
    the jobs that run, for twice as long the next time, and so on.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        #: How long it may claim nothing.
        self._stop_s = lease_s
        #: Since when suspects wait, and until when other jobs have the worker.
        self._since = math.inf
        self._rest_until = -math.inf

    async def run_suspects(self, fetcher: Fetcher) -> float:
        """Run one suspect if it is time to; return after how many seconds to call it again."""
        began = time.monotonic()
        if began < self._rest_until:
            return self._rest_until - began
        self._since = min(self._since, began)
        if not fetcher.is_idle and began < self._since + self._lease_s:
            return self._lease_s
        if await fetcher.wait_idle(self._stop_s):
            await fetcher.run_suspect(self._lease_s)
            self._stop_s = self._lease_s
        else:
            self._stop_s *= 2
        self._since = math.inf
        rest_s = _REST * (time.monotonic() - began)
        self._rest_until = time.monotonic() + rest_s
        return rest_s


class SuspectFetcher(Fetcher):
    """Supplies the runner with one suspect at a time, and ends its worker when there are no more."""

    def __init__(self, *arguments: Any, on_cleared: Callable[[], None], on_end: Callable[[], None], **options: Any):
        super().__init__(*arguments, **options)
        self._on_cleared = on_cleared
        self._on_end = on_end
        self._found_none = False

    async def _run_once(self) -> None:
        await self.wait_idle(math.inf)
        if await self.run_suspect(self._settings.visibility_timeout_s):
            self._found_none = False
            if self.is_idle:
                return
            # The next suspect belongs to another process: this one has released its lock.
            self._on_cleared()
            await self.wait_idle(math.inf)
        elif self._engine.is_settling(self._queues):
            # After an outage, there may be suspects that are not reclaimed yet.
            await asyncio.sleep(self._reclaim_pause())
            return
        elif not self._found_none:
            # Again: the engine may have been settling at the time of the search.
            self._found_none = True
            return
        self._on_end()
        await asyncio.Event().wait()

    async def _without_lost(self, claims: list[Claim]) -> list[Claim]:
        # One at most, and it runs alone here.
        return claims
