"""Events and the feed entry that packs one step of one queue, and notices for those who listen."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from holdfast.engine.port import EngineOptions
from holdfast.engine.sqlite.transaction import Transaction

if TYPE_CHECKING:
    from holdfast.ledger.publishing import Publishing

#: What an event counts towards the limit of an unread feed, beside its payload.
EVENT_BYTES: Final = 200
#: Listeners that are further behind than this have missed something; notices only ever save waiting.
_NOTICES_KEPT: Final = 10_000
_TRIM_SHARE: Final = 8


class Journal:
    """The events of one step, which are consecutive; `close` makes them one entry of the feed."""

    def __init__(self, transaction: Transaction, queue: str, options: EngineOptions, *, hurry: bool = False) -> None:
        self._transaction = transaction
        self._hurry = hurry
        self._queue = queue
        self._feed_limit = options.feed_limit
        self._publishing = options.publishing
        self._last = 0
        self._count = 0
        self._bytes = 0

    def wrote(self, last: int, count: int, extra_bytes: int = 0) -> None:
        """So many more events, up to this id."""
        self._last = last
        self._count += count
        self._bytes += count * EVENT_BYTES + extra_bytes

    def close(self) -> None:
        """The step is over. One that changed nothing leaves no entry."""
        if not self._count:
            return
        self._transaction.run(
            "feed_entry",
            queue=self._queue,
            first=self._last - self._count + 1,
            last=self._last,
            nonce=os.urandom(6).hex(),
            bytes=self._bytes,
            hurry=int(self._hurry),
        )
        self._transaction.effects.fed.add(self._queue)
        if self._publishing is not None:
            self._publish(self._publishing)
        self._trim()

    def _publish(self, publishing: Publishing) -> None:
        # Imported here: most engines publish nothing.
        from holdfast.engine.sqlite.publishing import publish

        publish(self._transaction, publishing, self._queue, self._last - self._count + 1, self._last)

    def _trim(self) -> None:
        # Now and then: counting the entries costs more than writing one.
        untrimmed = self._transaction.untrimmed.get(self._queue, 0) + 1
        if untrimmed * _TRIM_SHARE >= self._feed_limit:
            self._transaction.run("feed_trim", queue=self._queue, limit=self._feed_limit)
            untrimmed = 0
        self._transaction.untrimmed[self._queue] = untrimmed


def notify(transaction: Transaction, queue: str, kind: str, job_id: str = "") -> None:
    """Tell whoever listens to this queue, here and in other processes."""
    transaction.run("notify", queue=queue, kind=kind, job_id=job_id, at=0)
    transaction.run("prune_notices", keep=_NOTICES_KEPT)
    transaction.effects.noticed.add(queue)


def notify_due(transaction: Transaction, queue: str, at_ms: int) -> None:
    """Tell them of a waiting job, if it is due before all others. Call it once the job waits."""
    if transaction.run("notify_due", queue=queue, at=at_ms):
        transaction.effects.noticed.add(queue)
    # Whoever waits to claim must not sleep past it.
    transaction.effects.ready.add(queue)
