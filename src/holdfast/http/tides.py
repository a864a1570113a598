"""Waiting for the ledger to follow the feeds: however many wait, one of us per queue asks how far it is, and only when
it has moved. Nothing is polled.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final, Protocol

from holdfast.core.backoff import Backoff
from holdfast.http.places import NOWHERE, Position, parsed
from holdfast.ledger.port import Position as Mark
from holdfast.ledger.port import Projection

_log: Final = logging.getLogger("holdfast.http")

_WAIT_MS: Final = 30_000


class Waiter(Protocol):
    """Somebody who looks at the ledger when told to. Being told for nothing is allowed."""

    def ring(self) -> None: ...


#: The first and the last position that somebody waits for: what is between them comes with one of the two.
_Span = tuple[Position, Position]


class Tides:
    """Of one ledger, on one event loop. Without a projection the ledger is the engine's own, and never behind."""

    def __init__(self, projection: Projection | None) -> None:
        self._projection = projection
        self._waiting: dict[str, dict[Waiter, _Span]] = {}
        self._watching: dict[str, asyncio.Task[None]] = {}

    def when(self, queue: str, at: Position, waiter: Waiter) -> None:
        """Ring once the ledger has this feed up to there."""
        if self._projection is None or at == NOWHERE:
            waiter.ring()
            return
        waiting = self._waiting.setdefault(queue, {})
        first, last = waiting.get(waiter, (at, at))
        waiting[waiter] = min(first, at), max(last, at)
        if queue not in self._watching:
            watching = self._watch(queue, waiting, self._projection)
            self._watching[queue] = asyncio.create_task(watching, name="holdfast-http-tide")

    def forget(self, queue: str, waiter: Waiter) -> None:
        """It waits no longer."""
        self._waiting.get(queue, {}).pop(waiter, None)

    async def close(self) -> None:
        """Nobody waits any longer."""
        watching = list(self._watching.values())
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)

    async def _watch(self, queue: str, waiting: dict[Waiter, _Span], projection: Projection) -> None:
        backoff, mark = Backoff(), Mark()
        try:
            while waiting:
                try:
                    mark = await projection.wait_moved(queue, mark, _WAIT_MS)
                    backoff.reset()
                except Exception as exc:  # noqa: BLE001 - the ledger may be away; those who wait are told later
                    _log.info("event streams wait for the ledger: %s", exc)
                    await asyncio.sleep(backoff.next_s())
                else:
                    _ring(waiting, parsed(mark.position) if mark.position else NOWHERE)
        finally:
            del self._watching[queue]


def _ring(waiting: dict[Waiter, _Span], tide: Position) -> None:
    for waiter, (first, last) in list(waiting.items()):
        if first > tide:
            continue
        if last > tide:
            waiting[waiter] = last, last
        else:
            del waiting[waiter]
        waiter.ring()
