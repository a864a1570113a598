"""The feed on Redis: attach its reader, read, wait, trim."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from holdfast.engine.port.feed import FeedEntry
from holdfast.engine.redis.feed_entry import parse_feed_entry
from holdfast.engine.redis.net.client import Purpose
from holdfast.engine.redis.net.errors import ScriptError
from holdfast.engine.redis.store import RedisStore

#: A feed tail up to this length is trimmed on every call.
_SMALL_TAIL: Final = 100


class Feed:
    """The feeds of one Redis."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        #: Length of each feed after it was last trimmed.
        self._kept: dict[str, int] = {}

    async def read(self, queue: str, start: str, limit: int) -> list[FeedEntry]:
        command = (b"XRANGE", self._store.keys(queue).feed, start or b"-", b"+", b"COUNT", limit)
        return [parse_feed_entry(entry) for entry in await self._store.client.call(Purpose.OTHER, *command)]

    async def wait(self, positions: Mapping[str, str], wait_ms: int) -> list[str]:
        if not positions:
            return []
        wait_ms = min(wait_ms, self._store.client.max_block_ms)
        queues = {self._store.keys(queue).feed: queue for queue in positions}
        # BLOCK 0 would block for ever.
        block = (b"BLOCK", wait_ms) if wait_ms > 0 else ()
        after = {stream: positions[queue] or "0-0" for stream, queue in queues.items()}
        head = (b"XREAD", b"COUNT", 1, *block)
        try:
            reply = await self._store.client.read(None, head, after, max(0, wait_ms) / 1000)
        except ScriptError as exc:
            if not exc.is_wrong_type:
                raise
            # Wait for the others.
            readable = await self._store.outages.for_each(queues.values(), self._is_readable)
            after = {stream: position for stream, position in after.items() if queues[stream] in readable}
            reply = await self._store.client.read(None, head, after, max(0, wait_ms) / 1000)
        return [queues[stream] for stream, _ in reply]

    async def _is_readable(self, queue: str) -> bool:
        await self._store.client.call(Purpose.OTHER, b"XLEN", self._store.keys(queue).feed)
        return True

    async def is_whole(self, queue: str, position: str) -> bool:
        feed, call = self._store.keys(queue).feed, self._store.client.call
        if position and await call(Purpose.OTHER, b"XRANGE", feed, b"-", position, b"COUNT", 1):
            return True
        # A trimmed feed keeps its tail and the entry at the reader's position; one without a reader keeps the limit.
        options = self._store.options
        length: int = await call(Purpose.OTHER, b"XLEN", feed)
        return length <= (options.feed_tail if options.ledger else options.feed_limit - 1)

    async def epoch(self, queue: str) -> str:
        return (await self._store.client.epoch(Purpose.OTHER, self._store.keys(queue).control)).decode()

    async def attach_reader(self, queue: str, epoch: str, *, keys_restored: bool) -> None:
        keys = self._store.keys(queue)
        # `again`: a wipe may have removed the queue from the list.
        await self._store.register_queue(queue, again=True)
        names = [*keys.streams, keys.control, keys.feed, keys.wake]
        arguments = [epoch or await self.epoch(queue), self._store.nonce(), int(keys_restored)]
        await self._store.run(Purpose.OTHER, "attach_reader", queue, names, arguments)

    async def trim(self, queue: str, position: str) -> None:
        keys, tail = self._store.keys(queue), self._store.options.feed_tail
        kept = self._kept.get(queue)
        if kept is not None and tail > _SMALL_TAIL:
            # Finding the start of a long tail costs as much as reading it, so trim only after it has grown by a tenth.
            # `kept` leaves out entries unread at the last trim, so that they count as growth and cannot fill the feed.
            length = await self._store.client.call(Purpose.OTHER, b"XLEN", keys.feed)
            if kept <= length < kept + tail // 10:
                return
        arguments = [position, tail, int(self._store.has_autoclaim)]
        self._kept[queue] = await self._store.run(
            Purpose.OTHER, "trim_feed", queue, [keys.feed, keys.control], arguments
        )
