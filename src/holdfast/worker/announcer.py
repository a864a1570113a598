"""Announce the tasks of a worker: in the engine, and in a separate ledger, which survives a wipe of the engine.

Repeated every minute. A failure is logged once and does not affect the worker (requirement L3).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol

from holdfast.aio import raise_if_cancelled
from holdfast.core.announcement import ANNOUNCE_INTERVAL_S, AnnouncedTask
from holdfast.ledger.port.ledger import Ledger

_log: Final = logging.getLogger("holdfast.worker")

_RETRY_S: Final = 5.0


class AnnouncementStore(Protocol):
    """A store of announcements."""

    async def announce_tasks(self, tasks: Sequence[AnnouncedTask]) -> None: ...


async def run_announcer(engine: AnnouncementStore, ledger: Ledger | None, tasks: Sequence[AnnouncedTask]) -> None:
    """Announce until cancelled."""
    stores: dict[str, Callable[[], Awaitable[None]]] = {"engine": lambda: engine.announce_tasks(tasks)}
    # An embedded ledger is the engine's own file.
    if ledger is not None and ledger.projection is not None:
        stores["ledger"] = lambda: ledger.operators.announce_tasks(tasks)
    if tasks:
        await asyncio.gather(*(_repeat(name, announce) for name, announce in stores.items()))


async def _repeat(store: str, announce: Callable[[], Awaitable[None]]) -> None:
    failing = False
    while True:
        try:
            await announce()
        except Exception as exc:  # noqa: BLE001 - top of a loop
            _log.log(
                logging.DEBUG if failing else logging.WARNING,
                "cannot announce the tasks of this worker in the %s, retrying: %s",
                store,
                exc,
            )
            failing = True
        else:
            failing = False
        # A driver may have turned the cancellation into another error.
        raise_if_cancelled()
        await asyncio.sleep(_RETRY_S if failing else ANNOUNCE_INTERVAL_S)
