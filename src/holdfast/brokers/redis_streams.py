"""Redis Streams consumer: a queue is a stream, a group starts at the first entry.

The pending list is the lease, as in holdfast's own engine: a consumer renews its messages in flight, and those of a
crashed consumer are reclaimed after the visibility timeout. Every script that ends a delivery checks first that the
delivery is still current, so a consumer that lost its messages cannot change them.
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
    RESERVED_FIELDS,
    RedisConfig,
    RedisPublisher,
    entry_position,
    next_entry_id,
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

#: How long a read blocks on the server. Expired messages of other consumers are reclaimed in between.
_BLOCK_S: Final = 2.0
#: Rows of the pending list per step.
_PAGE: Final = 500
#: A task that has not ended this long after its cancellation is cancelled again.
_CANCEL_AGAIN_S: Final = 1.0
#: Consumer name that holds the messages which closed consumers returned.
_RETURNED: Final = "returned"


class _PendingEntry(msgspec.Struct, eq=False):
    """One delivery in flight."""

    message: RawMessage
    #: Delivery count of the server, which a local requeue does not increase.
    deliveries: int
    #: After this time another consumer may have reclaimed it.
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
        #: Set by `connect`, because an adapter may be built before a fork.
        self._consumer = ""
        self._metadata: dict[str, str] = {}
        self._visibility_s = connection.visibility_timeout_s
        self._client = connection.client()
        self._scripts = {
            name: self._client.register_script(script(name))
            for name in ("reclaim", "renew", "ack", "dead_letter", "release_all")
        }
        self._in_flight: dict[RawMessage, _PendingEntry] = {}
        self._ready: deque[RawMessage] = deque()
        #: Acknowledgements to send, each with the future that `ack` awaits.
        self._done: list[tuple[_PendingEntry, asyncio.Future[None]]] = []
        #: Ids of messages whose acknowledgement Redis has not confirmed.
        self._acknowledging: set[str] = set()
        self._wakeup = asyncio.Event()
        self._has_capacity = asyncio.Event()
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
            raise BrokerUnavailable("closed while connecting")
        self._connected = True
        self._tasks = [asyncio.create_task(self._renew())]

    async def consume(self) -> AsyncIterator[RawMessage]:
        if not self._connected:
            raise BrokerUnavailable("not connected; call connect() first")
        fetching = asyncio.create_task(self._fetch())
        fetching.add_done_callback(lambda _: self._wakeup.set())
        self._tasks.append(fetching)
        try:
            while not self._closed:
                self._wakeup.clear()
                if self._ready and not self._paused:
                    message = self._ready.popleft()
                    if self.owns(message):
                        yield message
                elif fetching.done():
                    fetching.result()
                else:
                    await self._wakeup.wait()
        finally:
            # Keep it in `_tasks` until it has ended: `close` waits for it before `release_all` returns its messages.
            await _cancel_all(fetching)
            self._tasks.remove(fetching)

    async def ack(self, message: RawMessage) -> None:
        """Acknowledge the message. Returns once Redis has confirmed it, or its lease has expired."""
        entry = self._release(message)
        if entry is None:
            return
        confirmed = asyncio.get_running_loop().create_future()
        self._done.append((entry, confirmed))
        self._acknowledging.add(message.message_id)
        if self._settling is None:
            self._settling = asyncio.create_task(self._settle())
        await confirmed

    async def nack(self, message: RawMessage, requeue: bool = False) -> None:
        if not requeue:
            # Redis has no dead-letter queues.
            return await self.ack(message)
        entry = self._release(message)
        if entry is not None:
            # It stays in flight here and counts towards the prefetch; if this process crashes, others reclaim it.
            again = msgspec.structs.replace(message, deliveries=message.deliveries + 1)
            self._add([_PendingEntry(again, entry.deliveries, entry.until)])
        return None

    async def send_to_dlq(self, message: RawMessage, reason: str, history: Sequence[str] = ()) -> None:
        entry = self._in_flight.get(message)
        if entry is None or not self.owns(message):
            return
        headers = dead_letter_headers(message, self._stream, reason, history)
        for name in RESERVED_FIELDS:
            headers.pop(name, None)
        fields = to_fields(message.body or b"", headers, message.key)
        delete = int(self._connection.delete_acknowledged)
        await self._translate_errors(
            self._run(
                "dead_letter", delete, message.message_id, entry.deliveries, *fields, keys=(self._stream, self._dlq)
            )
        )
        self._release(message)

    def owns(self, message: RawMessage) -> bool:
        entry = self._in_flight.get(message)
        if entry is None or self._closed:
            return False
        if monotonic() < entry.until:
            return True
        # Drop it, so that the answer stays False: the message is delivered again, here or elsewhere.
        self._release(message)
        return False

    async def pause(self) -> None:
        self._paused = True

    async def resume(self) -> None:
        self._paused = False
        self._wakeup.set()
        self._has_capacity.set()

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
        self._wakeup.set()
        settling = [self._settling] if self._settling is not None else []
        await _cancel_all(*self._tasks, *settling)
        for _, confirmed in self._done:
            if not confirmed.done():
                confirmed.set_result(None)
        if self._connected:
            # If this fails, the messages are reclaimed after the visibility timeout.
            with suppress(BrokerUnavailable):
                await self._translate_errors(self._run("release_all", _RETURNED, round(self._visibility_s * 1000)))
        self._in_flight.clear()
        await self._client.aclose()

    # Fetching --------------------------------------------------------------------------------------

    async def _fetch(self) -> None:
        """Keep `prefetch` messages in flight, until cancelled."""
        backoff = Backoff()
        reclaim_at = 0.0
        while True:
            limit = await self._wait_for_capacity()
            try:
                if monotonic() >= reclaim_at:
                    self._add_deliveries(await self._reclaim(limit))
                    reclaim_at = monotonic() + min(_BLOCK_S, self._visibility_s / 2)
                    continue
                self._add_deliveries(await self._read(limit, reclaim_at - monotonic()))
            except REDIS_ERRORS as exc:
                reclaim_at = 0.0
                await self._recover(exc, backoff)
                continue
            if backoff.failures:
                _log.info("stream %r recovered", self._stream)
                backoff.reset()

    async def _wait_for_capacity(self) -> int:
        """Wait until messages may be fetched. Returns how many."""
        while self._paused or len(self._in_flight) >= self._prefetch:
            self._has_capacity.clear()
            await self._has_capacity.wait()
        return self._prefetch - len(self._in_flight)

    async def _read(self, limit: int, wait_s: float) -> list[tuple[RawMessage, int]]:
        block_ms = max(1, round(min(wait_s, self._connection.reply_timeout_s / 2) * 1000))
        reply = await self._client.xreadgroup(
            self._group, self._consumer, {self._stream: ">"}, count=limit, block=block_ms
        )
        entries = reply[0][1] if reply else []
        return [(to_message(entry, fields.items(), self._metadata, 1), 1) for entry, fields in entries]

    async def _reclaim(self, limit: int) -> list[tuple[RawMessage, int]]:
        """Reclaim messages of crashed consumers, returned ones, and own ones whose reply was lost."""
        # Include messages whose acknowledgement Redis has not confirmed: they are done.
        in_flight = {message.message_id for message in self._in_flight} | self._acknowledging
        expired: list[Any] = []
        start = "-"
        while len(expired) < 3 * limit:
            rows = await self._client.xpending_range(self._stream, self._group, start, "+", _PAGE)
            for row in rows:
                own = row["consumer"] == self._consumer.encode()
                if row["message_id"].decode() in in_flight:
                    continue
                if own or row["time_since_delivered"] >= self._visibility_s * 1000:
                    expired += [row["message_id"], row["consumer"], row["times_delivered"]]
            if len(rows) < _PAGE:
                break
            start = next_entry_id(rows[-1]["message_id"])
        if not expired:
            return []
        reclaimed = await self._run("reclaim", round(self._visibility_s * 1000), *expired[: 3 * limit])
        return [
            (to_message(entry, pairs(fields), self._metadata, deliveries), deliveries)
            for entry, fields, deliveries in reclaimed
        ]

    def _add_deliveries(self, deliveries: Iterable[tuple[RawMessage, int]]) -> None:
        # A read may have blocked, but the entry was delivered only when it existed: at most a round trip ago.
        until = monotonic() + self._visibility_s * 0.9
        self._add(_PendingEntry(message, count, until) for message, count in deliveries)

    def _add(self, entries: Iterable[_PendingEntry]) -> None:
        """Record deliveries and queue them in stream order: redelivered messages go before newer ones."""
        for entry in entries:
            self._in_flight[entry.message] = entry
            self._ready.append(entry.message)
        if any(entry_position(later) < entry_position(earlier) for earlier, later in pairwise(self._ready)):
            self._ready = deque(sorted(self._ready, key=entry_position))
        self._wakeup.set()

    async def _recover(self, exc: Exception, backoff: Backoff) -> None:
        """Wait after a failure; if Redis answered with an error, make sure that the group exists."""
        if not backoff.failures:
            _log.warning("cannot read stream %r, retrying: %s", self._stream, translate(exc))
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

    async def _renew(self) -> None:
        """Renew messages in flight, also while paused, and drop those that were lost."""
        while True:
            await asyncio.sleep(self._visibility_s / 4)
            in_flight = {
                entry.message.message_id: entry for entry in list(self._in_flight.values()) if self.owns(entry.message)
            }
            if not in_flight:
                continue
            until = monotonic() + self._visibility_s * 0.9
            args = [arg for entry in in_flight.values() for arg in (entry.message.message_id, entry.deliveries)]
            try:
                lost = await self._run("renew", *args)
            except REDIS_ERRORS as exc:
                _log.warning("messages of stream %r not renewed: %s", self._stream, translate(exc))
                continue
            for name in lost:
                self._release(in_flight.pop(name.decode()).message)
            for entry in in_flight.values():
                entry.until = until

    async def _settle(self) -> None:
        """Send pending acknowledgements in batches until none is left."""
        try:
            while self._done:
                batch, self._done = self._done[:_PAGE], self._done[_PAGE:]
                try:
                    await self._settle_batch([entry for entry, _ in batch])
                finally:
                    for entry, confirmed in batch:
                        self._acknowledging.discard(entry.message.message_id)
                        if not confirmed.done():
                            confirmed.set_result(None)
        finally:
            self._settling = None

    async def _settle_batch(self, batch: Sequence[_PendingEntry]) -> None:
        backoff = Backoff()
        args = [arg for entry in batch for arg in (entry.message.message_id, entry.deliveries)]
        while True:
            try:
                await self._run("ack", int(self._connection.delete_acknowledged), *args)
            except REDIS_ERRORS as exc:
                # Unknown whether it was applied; acknowledging twice is harmless.
                if monotonic() < max(entry.until for entry in batch):
                    await asyncio.sleep(backoff.next_s())
                    continue
                _log.warning("acknowledgements of stream %r lost: %s", self._stream, translate(exc))
            return

    def _release(self, message: RawMessage) -> _PendingEntry | None:
        """Remove and return the delivery; None if it is not in flight."""
        entry = self._in_flight.pop(message, None)
        self._has_capacity.set()
        return entry

    async def _run(self, name: str, *args: Any, keys: tuple[str, ...] = ()) -> Any:
        return await self._scripts[name](keys=keys or (self._stream,), args=(self._group, self._consumer, *args))

    async def _translate_errors(self, call: Awaitable[Any]) -> Any:
        try:
            return await call
        except REDIS_ERRORS as exc:
            raise translate(exc) from None


async def _cancel_all(*tasks: asyncio.Task[None]) -> None:
    """Cancel tasks and wait until they have ended, ignoring their results."""
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        # Cancel repeatedly: a timeout inside the client may swallow a cancellation.
        _, left = await asyncio.wait(left, timeout=_CANCEL_AGAIN_S)
    await asyncio.gather(*tasks, return_exceptions=True)
