"""The feed on SQLite: its reader, reading and waiting, trimming; also notices and published events.

`FeedWriter` packs the events of one step of one queue into one feed entry. Where the engine's file is also the ledger,
it writes the published events to the outbox in the same transaction. Notices only shorten waits; old ones are dropped.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from holdfast.core.job import Event
from holdfast.core.publishing import OUTBOX_CHANGED, EventPublishing
from holdfast.core.states import State
from holdfast.engine.port.feed import FeedEntry
from holdfast.engine.port.jobs import EngineOptions
from holdfast.engine.sqlite.rows import EVENT_ROWS, IDS, NAMES, group_entries
from holdfast.engine.sqlite.store import EngineContext, SqliteEngineStore
from holdfast.errors import InvalidOption
from holdfast.sqlite.transaction import Transaction, json_list

#: What an event counts towards the limit of an unread feed, besides its payload.
EVENT_BYTES: Final = 200
#: Listeners further behind than this miss notices, which only shorten waits.
_NOTICES_KEPT: Final = 10_000
_TRIM_SHARE: Final = 8
#: Digits of the largest integer in SQLite.
_POSITION_DIGITS: Final = 19
#: Latest events among which a time is sought; before them, the position is the start.
_SOUGHT: Final = 50_000


class FeedWriter:
    """Collects the events of one step, which are consecutive; `close` makes them one feed entry."""

    def __init__(self, transaction: Transaction, queue: str, options: EngineOptions, *, urgent: bool = False) -> None:
        self._transaction = transaction
        self._urgent = urgent
        self._queue = queue
        self._feed_limit = options.feed_limit
        self._publishing = options.publishing
        self._last = 0
        self._count = 0
        self._bytes = 0

    def add_events(self, last: int, count: int, extra_bytes: int = 0) -> None:
        """Add `count` events that were inserted, the last one with this id."""
        self._last = last
        self._count += count
        self._bytes += count * EVENT_BYTES + extra_bytes

    def close(self) -> None:
        """Write the entry, unless the step changed nothing."""
        if not self._count:
            return
        self._transaction.run(
            "insert_feed_entry",
            queue=self._queue,
            first=self._last - self._count + 1,
            last=self._last,
            nonce=os.urandom(6).hex(),
            bytes=self._bytes,
            urgent=int(self._urgent),
        )
        self._transaction.effects.feeds.add(self._queue)
        if self._publishing is not None:
            self._publish(self._publishing)
        self._trim()

    def _publish(self, publishing: EventPublishing) -> None:
        publish(self._transaction, publishing, self._queue, self._last - self._count + 1, self._last)

    def _trim(self) -> None:
        # Only sometimes: counting the entries costs more than writing one.
        untrimmed = self._transaction.untrimmed.get(self._queue, 0) + 1
        if untrimmed * _TRIM_SHARE >= self._feed_limit:
            self._transaction.run("trim_detached_feed", queue=self._queue, limit=self._feed_limit)
            untrimmed = 0
        self._transaction.untrimmed[self._queue] = untrimmed


def notify(transaction: Transaction, queue: str, kind: str, job_id: str = "") -> None:
    """Notify listeners of this queue, in this and other processes."""
    transaction.run("insert_notice", queue=queue, kind=kind, job_id=job_id, at=0)
    transaction.run("prune_notices", keep=_NOTICES_KEPT)
    transaction.effects.notices.add(queue)


def notify_due(transaction: Transaction, queue: str, at_ms: int) -> None:
    """Notify listeners of a delayed job, if it is due before all others.

    Call it after the job was written.
    """
    if transaction.run("insert_due_notice", queue=queue, at=at_ms):
        transaction.effects.notices.add(queue)
    # A waiting claim must not sleep past it.
    transaction.effects.ready.add(queue)


_decoder: Final = msgspec.json.Decoder(list[tuple[Any, ...]])


def publish(transaction: Transaction, publishing: EventPublishing, queue: str, first: int, last: int) -> None:
    """Write the events with these ids to the outbox, if they are to be published."""
    rows = [
        publishing.row(queue, seq, _event(*fields), _identity)
        for seq, *fields in transaction.rows("events_by_id", _decoder, first=first, last=last)
        if publishing.includes(fields[0])
    ]
    if rows:
        transaction.run("insert_outbox_events", rows=json_list(rows))
        transaction.effects.recorded.add(OUTBOX_CHANGED)


def _identity(ms: int) -> int:
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


async def read_feed(store: SqliteEngineStore, queue: str, start: str, limit: int) -> list[FeedEntry]:
    position = parse_position(start)
    rows = await store.reader.rows("read_feed", EVENT_ROWS, queue=queue, start=position, limit=max(0, limit))
    return group_entries(rows)


async def wait_feed(store: SqliteEngineStore, positions: Mapping[str, str], wait_ms: int) -> list[str]:
    """Wait for entries without polling: the writer wakes waiters after a commit."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_ms / 1000
    pairs = json_list([(queue, parse_position(position)) for queue, position in positions.items()])
    with store.waiters.for_feeds(list(positions)) as wake:
        while True:
            wake.clear()
            queues = await store.reader.rows("feeds_after", NAMES, positions=pairs)
            if queues or loop.time() >= deadline:
                return queues
            await wake.wait(deadline - loop.time())


async def seek_feeds(store: SqliteEngineStore, at_ms: int) -> str:
    position = (await store.reader.rows("seek_feeds", IDS, at=at_ms, limit=_SOUGHT))[0]
    return str(position) if position else ""


async def is_feed_whole(store: SqliteEngineStore, queue: str, position: str) -> bool:
    return not await store.reader.rows("dropped_feed_entries", IDS, queue=queue, position=parse_position(position))


def attach_reader(transaction: Transaction, policy: EngineContext, queue: str) -> None:
    transaction.run("attach_reader", queue=queue, now=policy.clock.now_ms())


def trim_feed(transaction: Transaction, policy: EngineContext, queue: str, position: str) -> None:
    """Drop entries before the reader's position, keeping a tail for event streams."""
    at = parse_position(position)
    transaction.run("trim_feed", queue=queue, position=at, tail=policy.options.feed_tail)
    transaction.run("save_reader_position", queue=queue, position=at)


def parse_position(position: str) -> int:
    """Parse a position in the feed; empty is before the first entry."""
    if not position:
        return 0
    if not position.isdecimal() or len(position) > _POSITION_DIGITS:
        raise InvalidOption(f"{position!r} is not a position in this feed")
    return int(position)
