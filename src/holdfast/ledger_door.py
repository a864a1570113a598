"""`app.ledger`: the user's door to the ledger of the running event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from holdfast.core.retry import Duration, duration_ms
from holdfast.engine.port import Engine, FeedEntry, Survey
from holdfast.errors import InvalidOption, LedgerUnavailable

if TYPE_CHECKING:
    # SQLAlchemy, which many programs never need.
    from holdfast.ledger.port import Ledger, Position, Projection
    from holdfast.ledger.queries import Queries

_WAIT_MS: Final = 1_000
_CAUGHT_UP_S: Final = 30.0


class LedgerDoor:
    """Asks the ledger, and waits for it. Every method raises `InvalidOption` if the app has none."""

    def __init__(self, engine: Callable[[], Engine], ledger: Callable[[], Ledger | None]) -> None:
        self._engine = engine
        self._ledger = ledger

    @property
    def queries(self) -> Queries:
        """Jobs, stories and counts: what the ledger remembers."""
        return self._there().queries

    async def caught_up(self, timeout: Duration = _CAUGHT_UP_S) -> None:
        """Wait until everything that is in the engine's feeds now is in the ledger.

        Embedded it returns at once. Raises `LedgerUnavailable` if it takes longer than `timeout`, and says why.
        """
        deadline = time.monotonic() + duration_ms(timeout, "timeout") / 1000
        engine, ledger = self._engine(), self._there()
        projection = ledger.projection
        if projection is None:
            return
        for queue in await engine.queues():
            await _wait(projection, queue, await engine.survey(queue, []), deadline)

    def _there(self) -> Ledger:
        ledger = self._ledger()
        if ledger is None:
            raise InvalidOption(
                "this app has no ledger: Redis keeps none; set HOLDFAST_LEDGER to postgresql://… or sqlite:///ledger.db"
            )
        return ledger


async def _wait(projection: Projection, queue: str, end: Survey, deadline: float) -> None:
    """Until the ledger has the feed's last entry: that very entry, since positions of two feeds cannot be compared."""
    if not end.position:
        return
    last = FeedEntry(end.position, end.nonce, [])
    at: Position | None = None
    trouble: LedgerUnavailable | None = None
    while True:
        left_ms = round((deadline - time.monotonic()) * 1000)
        try:
            # The position is read before the entry is looked for: a move in between ends the wait at once.
            at = await projection.position(queue)
            if (at.position, at.nonce) == (end.position, end.nonce):
                # An entry that tells of nothing is not kept, only passed.
                return
            if end.position in await projection.written(queue, [last]):
                return
            if left_ms <= 0:
                raise _behind(queue, at, end)
            trouble = None
            await projection.wait_moved(queue, at, min(left_ms, _WAIT_MS))
        except LedgerUnavailable as exc:
            if left_ms <= 0:
                raise trouble or exc from None
            trouble = exc
            await asyncio.sleep(min(left_ms / 1000, 0.1))


def _behind(queue: str, at: Position, end: Survey) -> LedgerUnavailable:
    reached = f"is at {at.position}" if at.position else "has nothing"
    return LedgerUnavailable(
        f"the ledger answers, but {reached} of queue {queue}'s feed, which ends at {end.position}; "
        "does a worker of that queue or `holdfast upkeep` run?"
    )
