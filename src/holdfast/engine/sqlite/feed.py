"""Feed entries, notices and published events on SQLite; feed readers and trimming.

`FeedWriter` packs the events of one step of one queue into one feed entry. Where the engine's file is also the ledger,
it writes the published events to the outbox in the same transaction. Notices only save waiting; old ones are dropped.
"""

from __future__ import annotations

import os
from typing import Any, Final

import msgspec

from holdfast.core.job import Event
from holdfast.core.publishing import OUTBOX_CHANGED, EventPublishing
from holdfast.core.states import State
from holdfast.engine.port.jobs import EngineOptions
from holdfast.engine.sqlite.store import EngineContext
from holdfast.errors import InvalidOption
from holdfast.sqlite.transaction import Transaction, json_list

#: What an event counts towards the limit of an unread feed, beside its payload.
EVENT_BYTES: Final = 200
#: Listeners that are further behind than this have missed something; notices only ever save waiting.
_NOTICES_KEPT: Final = 10_000
_TRIM_SHARE: Final = 8


class FeedWriter:
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

    def add_events(self, last: int, count: int, extra_bytes: int = 0) -> None:
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
        self._transaction.effects.feeds.add(self._queue)
        if self._publishing is not None:
            self._publish(self._publishing)
        self._trim()

    def _publish(self, publishing: EventPublishing) -> None:

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
    transaction.effects.notices.add(queue)


def notify_due(transaction: Transaction, queue: str, at_ms: int) -> None:
    """Tell them of a waiting job, if it is due before all others. Call it once the job waits."""
    if transaction.run("notify_due", queue=queue, at=at_ms):
        transaction.effects.notices.add(queue)
    # Whoever waits to claim must not sleep past it.
    transaction.effects.ready.add(queue)


_decoder: Final = msgspec.json.Decoder(list[tuple[Any, ...]])


def publish(transaction: Transaction, publishing: EventPublishing, queue: str, first: int, last: int) -> None:
    """Those of the events with these ids that are wanted."""
    rows = [
        publishing.row(queue, seq, _event(*told), _as_it_is)
        for seq, *told in transaction.rows("told", _decoder, first=first, last=last)
        if publishing.includes(told[0])
    ]
    if rows:
        transaction.run("publish", rows=json_list(rows))
        transaction.effects.recorded.add(OUTBOX_CHANGED)


def _as_it_is(ms: int) -> int:
    return ms


def _event(kind: str, job_id: str, tenant_id: str, at_ms: int, *rest: Any) -> Event:
    from_state, to_state, attempt, retry_count, worker, message, data = rest
    return Event(
        type=kind,
        job_id=job_id,
        tenant_id=tenant_id,
        at_ms=at_ms,
        from_state=State(from_state) if from_state else None,
        to_state=State(to_state) if to_state else None,
        attempt=attempt,
        retry_count=retry_count,
        worker=worker or "",
        message=message or "",
        data=msgspec.json.decode(data) if data else None,
    )


def attach_reader(transaction: Transaction, policy: EngineContext, queue: str) -> None:
    transaction.run("register_reader", queue=queue, now=policy.clock.now_ms())


def trim_feed(transaction: Transaction, policy: EngineContext, queue: str, position: str) -> None:
    """The reader has everything before this position; a tail of it is kept for those who look over its shoulder."""
    at = parse_position(position)
    transaction.run("forget", queue=queue, position=at, tail=policy.options.feed_tail)
    transaction.run("read_to", queue=queue, position=at)


def parse_position(position: str) -> int:
    """A position in the feed; empty is before the first."""
    if not position:
        return 0
    if not position.isdecimal():
        raise InvalidOption(f"{position!r} is no position in this feed")
    return int(position)
