"""Redis Streams as a broker: a queue is a stream, a group a consumer group that begins with the stream's first entry.

The pending list is the lease, as in holdfast's own engine: what a consumer has in hand it renews, what a dead one had
is taken over after the visibility time. Every step that ends a delivery is a script that looks first whether the
delivery still counts, so a consumer that was thought dead changes nothing any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from time import monotonic
from typing import Any, Final

import msgspec
from redis.exceptions import ResponseError

from holdfast.brokers.port import QueueAdapter, RawMessage, dead_letter_headers
from holdfast.brokers.redis_connection import (
    REDIS_ERRORS,
    TAKEN,
    RedisConfig,
    RedisPublisher,
    after,
    entry_position,
    pairs,
    script,
    to_fields,
    to_message,
    translate,
)
from holdfast.core.retry import Backoff
from holdfast.errors import BrokerUnavailable
from holdfast.identity import new_identity

__all__ = ["RedisAdapter", "RedisConfig", "RedisPublisher"]

_log: Final = logging.getLogger("holdfast.brokers")

#: How long a read waits on the server; afterwards others' leavings are looked for.
_BLOCK_S: Final = 2.0
#: How many rows of the pending list are looked at in one step.
_PAGE: Final = 500
#: A task that has not ended so long after its cancellation is cancelled again.
_AGAIN_S: Final = 1.0
#: Has what consumers gave back when they left.
_HEIR: Final = "returned"


class _PendingEntry(msgspec.Struct, eq=False):
    """One delivery that is ours."""

    message: RawMessage
    #: By the server's count, which a local requeue does not raise.
    deliveries: int
    #: After that somebody else may have taken it over.
    until: float


class RedisAdapter(QueueAdapter):
    """A consumer of one stream."""

    def __init__(
        self,
        connection: RedisConfig,
        queue_name: str,
        consumer_group: str,
        *,
        prefetch: int = 100,
        dlq_name: str | None = None,
    ) -> None:
        self._connection = connection
        self._stream = queue_name
        self._group = consumer_group
        self._prefetch = prefetch
        self._dlq = dlq_name or f"{queue_name}.dlq"
        #: Made by `connect`: an adapter may be built before a fork.
        self._consumer = ""
        self._metadata: dict[str, str] = {}
        self._visibility_s = connection.visibility_timeout_s
        self._client = connection.client()
        self._scripts = {
            name: self._client.register_script(script(name)) for name in ("take", "renew", "settle", "bury", "leave")
        }
        self._held: dict[RawMessage, _PendingEntry] = {}
        self._ready: deque[RawMessage] = deque()
        #: Acknowledged, and on its way to the server.
        self._done: list[tuple[_PendingEntry, asyncio.Future[None]]] = []
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._settling: asyncio.Task[None] | None = None
        self._connected = False
        self._paused = False
        self._closed = False

    def __repr__(self) -> str:
        return f"RedisAdapter({self._stream!r}, {self._group!r})"

    async def connect(self) -> None:
        self._consumer = new_identity()
        self._metadata = {"stream": self._stream, "group": self._group, "consumer": self._consumer}
        try:
            await self._client.ping()
            await self._create_group()
        except REDIS_ERRORS as exc:
            raise translate(exc) from None
        if self._closed:
            await self._client.aclose()
            raise BrokerUnavailable("closed while it was connecting")
        self._connected = True
        self._tasks = [asyncio.create_task(self._renewing())]

    async def consume(self) -> AsyncIterator[RawMessage]:
        if not self._connected:
            raise BrokerUnavailable("not connected yet: call connect() first")
        fetching = asyncio.create_task(self._fetching())
        fetching.add_done_callback(lambda _: self._news.set())
        self._tasks.append(fetching)
        try:
            while not self._closed:
                self._news.clear()
                if self._ready and not self._paused:
                    message = self._ready.popleft()
                    if self.owns(message):
                        yield message
                elif fetching.done():
                    fetching.result()
                else:
                    await self._news.wait()
        finally:
            # Known to `close` until it has ended: what it took after the farewell would be nobody's.
            await _ended(fetching)
            self._tasks.remove(fetching)

    async def ack(self, message: RawMessage) -> None:
        """Comes back once Redis has confirmed it, or once the message is not ours any more."""
        held = self._released(message)
        if held is None:
            return
        confirmed = asyncio.get_running_loop().create_future()
        self._done.append((held, confirmed))
        if self._settling is None:
            self._settling = asyncio.create_task(self._settle())
        await confirmed

    async def nack(self, message: RawMessage, requeue: bool = False) -> None:
        if not requeue:
            # Redis has no dead letters of its own.
            return await self.ack(message)
        held = self._released(message)
        if held is not None:
            # It stays with us, so it keeps its place in the prefetch; if we die, others take it over.
            again = msgspec.structs.replace(message, deliveries=message.deliveries + 1)
            self._hold([_PendingEntry(again, held.deliveries, held.until)])
        return None

    async def send_to_dlq(self, message: RawMessage, reason: str, history: Sequence[str] = ()) -> None:
        held = self._held.get(message)
        if held is None or not self.owns(message):
            return
        headers = dead_letter_headers(message, self._stream, reason, history)
        for name in TAKEN:
            headers.pop(name, None)
        fields = to_fields(message.body or b"", headers, message.key)
        delete = int(self._connection.delete_acknowledged)
        await self._answered(
            self._run("bury", delete, message.message_id, held.deliveries, *fields, keys=(self._stream, self._dlq))
        )
        self._released(message)

    def owns(self, message: RawMessage) -> bool:
        held = self._held.get(message)
        if held is None or self._closed:
            return False
        if monotonic() < held.until:
            return True
        # For good: it comes again, to us or to somebody else.
        self._released(message)
        return False

    async def pause(self) -> None:
        self._paused = True

    async def resume(self) -> None:
        self._paused = False
        self._news.set()
        self._room.set()

    async def lag(self) -> int | None:
        try:
            groups = await self._client.xinfo_groups(self._stream)
            row = next((row for row in groups if row["name"] == self._group.encode()), None)
            if row is None:
                return None
            if row.get("lag") is not None:
                return int(row["lag"])
            if self._connection.delete_acknowledged:
                return max(0, int(await self._client.xlen(self._stream)) - int(row["pending"]))
        except REDIS_ERRORS:
            return None
        return None

    async def health_check(self) -> bool:
        if not self._connected or self._closed:
            return False
        try:
            return bool(await self._client.ping())
        except REDIS_ERRORS:
            return False

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._news.set()
        settling = [self._settling] if self._settling is not None else []
        await _ended(*self._tasks, *settling)
        for _, confirmed in self._done:
            if not confirmed.done():
                confirmed.set_result(None)
        if self._connected:
            # The others wait for the visibility time if this fails.
            with suppress(BrokerUnavailable):
                await self._answered(self._run("leave", _HEIR, round(self._visibility_s * 1000)))
        self._held.clear()
        await self._client.aclose()

    # Fetching --------------------------------------------------------------------------------------

    async def _fetching(self) -> None:
        """Keep as many messages in hand as may be, for ever."""
        backoff = Backoff()
        look_at = 0.0
        while True:
            room = await self._wait_for_room()
            try:
                if monotonic() >= look_at:
                    self._received(await self._take_over(room))
                    look_at = monotonic() + min(_BLOCK_S, self._visibility_s / 2)
                    continue
                self._received(await self._read(room, look_at - monotonic()))
            except REDIS_ERRORS as exc:
                look_at = 0.0
                await self._mend(exc, backoff)
                continue
            if backoff.failures:
                _log.info("reading of stream %r goes on", self._stream)
                backoff.reset()

    async def _wait_for_room(self) -> int:
        """How many more messages may be fetched, once some may."""
        while self._paused or len(self._held) >= self._prefetch:
            self._room.clear()
            await self._room.wait()
        return self._prefetch - len(self._held)

    async def _read(self, room: int, wait_s: float) -> list[tuple[RawMessage, int]]:
        block_ms = max(1, round(min(wait_s, self._connection.reply_timeout_s / 2) * 1000))
        reply = await self._client.xreadgroup(
            self._group, self._consumer, {self._stream: ">"}, count=room, block=block_ms
        )
        entries = reply[0][1] if reply else []
        return [(to_message(entry, fields.items(), self._metadata, 1), 1) for entry, fields in entries]

    async def _take_over(self, room: int) -> list[tuple[RawMessage, int]]:
        """What dead consumers had, what living ones gave back, and what was sent to us and never arrived."""
        in_hand = {message.message_id for message in self._held}
        wanted: list[Any] = []
        start = "-"
        while len(wanted) < 3 * room:
            rows = await self._client.xpending_range(self._stream, self._group, start, "+", _PAGE)
            for row in rows:
                own = row["consumer"] == self._consumer.encode()
                if row["message_id"].decode() in in_hand:
                    continue
                if own or row["time_since_delivered"] >= self._visibility_s * 1000:
                    wanted += [row["message_id"], row["consumer"], row["times_delivered"]]
            if len(rows) < _PAGE:
                break
            start = after(rows[-1]["message_id"])
        if not wanted:
            return []
        taken = await self._run("take", round(self._visibility_s * 1000), *wanted[: 3 * room])
        return [
            (to_message(entry, pairs(fields), self._metadata, deliveries), deliveries)
            for entry, fields, deliveries in taken
        ]

    def _received(self, deliveries: Iterable[tuple[RawMessage, int]]) -> None:
        # A read may have waited, but an entry was given to us only when there was one: now, or a round trip ago.
        until = monotonic() + self._visibility_s * 0.9
        self._hold(_PendingEntry(message, count, until) for message, count in deliveries)

    def _hold(self, fresh: Iterable[_PendingEntry]) -> None:
        """These are ours, and to be delivered. What comes again is older than what waits, and goes first."""
        for held in fresh:
            self._held[held.message] = held
            self._ready.append(held.message)
        if any(entry_position(later) < entry_position(earlier) for earlier, later in pairwise(self._ready)):
            self._ready = deque(sorted(self._ready, key=entry_position))
        self._news.set()

    async def _mend(self, exc: Exception, backoff: Backoff) -> None:
        """After a failure: wait, and see that the group is there."""
        if not backoff.failures:
            _log.warning("stream %r cannot be read: %s; trying again", self._stream, translate(exc))
        await asyncio.sleep(backoff.next_s())
        if isinstance(exc, ResponseError):
            with suppress(*REDIS_ERRORS):
                await self._create_group()

    async def _create_group(self) -> None:
        try:
            await self._client.xgroup_create(self._stream, self._group, id="0", mkstream=True)
        except ResponseError as exc:
            if "BUSYGROUP" not in str(exc):
                raise

    # Keeping and ending ----------------------------------------------------------------------------

    async def _renewing(self) -> None:
        """What is in hand stays ours, paused or not; what is not ours any more is dropped."""
        while True:
            await asyncio.sleep(self._visibility_s / 4)
            in_hand = {held.message.message_id: held for held in list(self._held.values()) if self.owns(held.message)}
            if not in_hand:
                continue
            until = monotonic() + self._visibility_s * 0.9
            words = [word for held in in_hand.values() for word in (held.message.message_id, held.deliveries)]
            try:
                lost = await self._run("renew", *words)
            except REDIS_ERRORS as exc:
                _log.warning("messages of stream %r could not be kept: %s", self._stream, translate(exc))
                continue
            for name in lost:
                self._released(in_hand.pop(name.decode()).message)
            for held in in_hand.values():
                held.until = until

    async def _settle(self) -> None:
        """Tell the server what is done, all that has come together in one step, until nothing is left."""
        try:
            while self._done:
                batch, self._done = self._done[:_PAGE], self._done[_PAGE:]
                try:
                    await self._settle_batch([held for held, _ in batch])
                finally:
                    for _, confirmed in batch:
                        if not confirmed.done():
                            confirmed.set_result(None)
        finally:
            self._settling = None

    async def _settle_batch(self, batch: Sequence[_PendingEntry]) -> None:
        backoff = Backoff()
        words = [word for held in batch for word in (held.message.message_id, held.deliveries)]
        while True:
            try:
                await self._run("settle", int(self._connection.delete_acknowledged), *words)
            except REDIS_ERRORS as exc:
                # Nobody knows whether it came through; to say it twice does no harm.
                if monotonic() < max(held.until for held in batch):
                    await asyncio.sleep(backoff.next_s())
                    continue
                _log.warning("acknowledgements of stream %r are lost: %s", self._stream, translate(exc))
            return

    def _released(self, message: RawMessage) -> _PendingEntry | None:
        """The delivery is not in hand any more; None if it was not."""
        held = self._held.pop(message, None)
        self._room.set()
        return held

    async def _run(self, name: str, *words: Any, keys: tuple[str, ...] = ()) -> Any:
        return await self._scripts[name](keys=keys or (self._stream,), args=(self._group, self._consumer, *words))

    async def _answered(self, call: Awaitable[Any]) -> Any:
        try:
            return await call
        except REDIS_ERRORS as exc:
            raise translate(exc) from None


async def _ended(*tasks: asyncio.Task[None]) -> None:
    """Cancel them and wait until they have ended, however they do."""
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        # Again: a cancellation that meets a timeout inside of the client may be lost.
        _, left = await asyncio.wait(left, timeout=_AGAIN_S)
    await asyncio.gather(*tasks, return_exceptions=True)
