"""Copy announced tasks from the engine into a separate ledger, which survives a wipe of the engine.

Workers announce in the engine only: a worker without upkeep does not write to the ledger. A SQLite ledger is locked for
all processes while one writes, also while that one is stopped.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from holdfast.core.announcement import ANNOUNCE_INTERVAL_S
from holdfast.engine.port.reads import ReadPort
from holdfast.errors import LedgerUnavailable
from holdfast.ledger.port.ledger import Ledger
from holdfast.upkeep.loop import LogThrottle, run_forever

_log: Final = logging.getLogger("holdfast.upkeep")

_RETRY_S: Final = 5.0


class AnnouncementCopier:
    """Copies what is new, every minute until cancelled."""

    def __init__(self, engine: ReadPort, ledger: Ledger) -> None:
        self._engine = engine
        self._ledger = ledger
        self._wake = asyncio.Event()
        self._log_throttle = LogThrottle(_log)
        #: When each announcement was made that this process has copied, by task and fingerprint.
        self._copied: dict[tuple[str, str], int] = {}

    async def run(self) -> None:
        """Repeat `run_once` until cancelled."""
        await run_forever("copy of announcements", self.run_once, self._wake)

    def wake(self) -> None:
        """Copy now: a worker of this process has announced its tasks."""
        self._wake.set()

    async def run_once(self) -> float:
        """Copy the announcements that were made since the last call; returns the seconds to pause."""
        self._wake.clear()
        found = {(each.task, each.fingerprint): each for each in await self._engine.announced_tasks()}
        new = [each for key, each in found.items() if self._copied.get(key) != each.seen_at_ms]
        try:
            await self._ledger.operators.announce_tasks(new)
        except LedgerUnavailable as exc:
            self._log_throttle.log(logging.WARNING, "cannot copy announced tasks to the ledger, retrying: %s", exc)
            return _RETRY_S
        self._log_throttle.reset()
        self._copied = {key: each.seen_at_ms for key, each in found.items()}
        return ANNOUNCE_INTERVAL_S
