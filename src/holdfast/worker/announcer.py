"""Announce the tasks of a worker in the engine. Upkeep copies announcements into a separate ledger.

Repeated every minute. A failure is logged once and does not affect the worker (requirement L3).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from holdfast.aio import raise_if_cancelled
from holdfast.core.announcement import ANNOUNCE_INTERVAL_S, AnnouncedTask

_log: Final = logging.getLogger("holdfast.worker")

_RETRY_S: Final = 5.0


class AnnouncementStore(Protocol):
    """A store of announcements."""

    async def announce_tasks(self, tasks: Sequence[AnnouncedTask]) -> None: ...


async def run_announcer(
    engine: AnnouncementStore, tasks: Sequence[AnnouncedTask], on_announced: Callable[[], None]
) -> None:
    """Announce until cancelled; `on_announced` is called after each time."""
    failing = False
    while tasks:
        try:
            await engine.announce_tasks(tasks)
            on_announced()
        except Exception as exc:  # noqa: BLE001 - top of a loop
            _log.log(
                logging.DEBUG if failing else logging.WARNING,
                "cannot announce the tasks of this worker, retrying: %s",
                exc,
            )
            failing = True
        else:
            failing = False
        # A driver may have turned the cancellation into another error.
        raise_if_cancelled()
        await asyncio.sleep(_RETRY_S if failing else ANNOUNCE_INTERVAL_S)
