"""Receive messages from an adapter, keep order per key, and hold messages during outages.

`message_handler` decides what happens to each message.

`Receiver` fills a `KeyedQueue` and restarts with backoff when consuming fails or ends.

`KeyedQueue` gives out one message per key at a time; later ones of the key wait for `done` (T6.7). A message that waits
for a retry keeps its key but occupies no worker, so a slow key does not delay others. Messages without a key do not
wait for each other.

`OutageHold` keeps messages while a dependency is down: none is passed to the runtime, none is lost, no retry is used up
(T5). After a delay, which grows from round to round, they are retried together. Holding ends when none of them fails
because of an outage any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, Generic, Protocol, TypeVar

from holdfast.aio import is_own_cancellation
from holdfast.brokers.port import QueueAdapter, RawMessage
from holdfast.clock import Clock
from holdfast.core.retry import Backoff
from holdfast.observe.redact import redact_and_truncate
from holdfast.triggers.activity_log import Activity
from holdfast.triggers.config import QueueTriggerConfig
from holdfast.triggers.state import InFlightMessage, TriggerCounters


class Keyed(Protocol):
    """An item of a `KeyedQueue`."""

    @property
    def key(self) -> str: ...


T = TypeVar("T", bound=Keyed)


class KeyedQueue(Generic[T]):
    """Queue with order per key: one consumer fills it, any number of workers empty it.

    Use it in one event loop.
    """

    def __init__(self, limit: int) -> None:
        """`limit`: number of items in flight at which `wait_for_capacity` blocks."""
        self._limit = limit
        self._ready: deque[T] = deque()
        #: Waiting items by key, behind the one that is ready or taken.
        self._waiting_by_key: dict[str, deque[T]] = {}
        self._takers: deque[asyncio.Future[None]] = deque()
        self._capacity: asyncio.Future[None] | None = None
        self._blocked_by: set[str] = set()
        self._closed = False
        #: Items put and not yet done.
        self.size = 0

    def put(self, item: T) -> None:
        """Add an item behind all others of its key."""
        self.size += 1
        if item.key:
            behind = self._waiting_by_key.get(item.key)
            if behind is not None:
                behind.append(item)
                return
            self._waiting_by_key[item.key] = deque()
        self._ready.append(item)
        self._wake()

    async def wait_for_capacity(self) -> None:
        """Wait until fewer than `limit` items are in flight."""
        while self.size >= self._limit:
            self._capacity = asyncio.get_running_loop().create_future()
            await self._capacity

    async def next_item(self) -> T | None:
        """Wait for the next ready item; None once the queue is closed."""
        while not self._closed:
            if self._ready and not self._blocked_by:
                return self._ready.popleft()
            taker: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._takers.append(taker)
            try:
                await taker
            except asyncio.CancelledError:
                if taker.done() and not taker.cancelled():
                    # Woken and cancelled at the same time: wake another taker instead.
                    self._wake()
                raise
        return None

    def requeue(self, item: T) -> None:
        """Put a taken item back. It keeps its key and goes before items that were not taken yet."""
        self._ready.appendleft(item)
        self._wake()

    def done(self, item: T) -> None:
        """Remove a taken item; the next one of its key becomes ready."""
        self.size -= 1
        if item.key:
            behind = self._waiting_by_key[item.key]
            if behind:
                self._ready.append(behind.popleft())
                self._wake()
            else:
                del self._waiting_by_key[item.key]
        if self._capacity is not None and self.size < self._limit and not self._capacity.done():
            self._capacity.set_result(None)

    def ready(self) -> list[T]:
        """Ready items that are not taken."""
        return list(self._ready)

    def block(self, reason: str) -> None:
        """Give out nothing until `unblock` with the same reason."""
        self._blocked_by.add(reason)

    def unblock(self, reason: str) -> None:
        self._blocked_by.discard(reason)
        if not self._blocked_by:
            for _ in range(len(self._ready)):
                self._wake()

    def close(self) -> None:
        """Give out nothing more; waiting `next_item` calls return None."""
        self._closed = True
        while self._takers:
            self._wake()

    def _wake(self) -> None:
        while self._takers:
            taker = self._takers.popleft()
            if not taker.done():
                taker.set_result(None)
                return


_log: Final = logging.getLogger("holdfast.triggers")

_REASON_LIMIT: Final = 500


class Receiver:
    """Fills the queue until it is cancelled. Restarts with backoff if consuming fails or ends."""

    def __init__(
        self,
        config: QueueTriggerConfig,
        adapter: QueueAdapter,
        queue: KeyedQueue[InFlightMessage],
        counts: TriggerCounters,
        activity: Activity,
        clock: Clock,
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._config = config
        self._adapter = adapter
        self._queue = queue
        self._counts = counts
        self._activity = activity
        self._clock = clock
        self._sleep = sleep
        #: Whether it is consuming now.
        self.feeding = False

    async def run(self) -> None:
        backoff = Backoff()
        try:
            while True:
                reason = await self._consume(backoff)
                self.feeding = False
                name, queue = self._config.name, self._config.queue_name
                _log.error(
                    "trigger %s: consuming failed, restarting: %s",
                    name,
                    reason,
                    extra={"trigger": name, "queue": queue},
                )
                await self._sleep(backoff.next_s())
        finally:
            self.feeding = False

    async def watch(self) -> None:
        """Read the lag from the broker at the metrics interval."""
        while True:
            try:
                self._counts.lag = await self._adapter.lag()
            except Exception as exc:  # noqa: BLE001 - an unreachable broker has no lag
                self._counts.lag = None
                _log.debug("trigger %s: lag unknown: %s", self._config.name, type(exc).__name__)
            await asyncio.sleep(self._config.metrics.export_interval)

    async def _consume(self, backoff: Backoff) -> str:
        """Consume until it fails or ends. Returns the reason."""
        try:
            messages = self._adapter.consume()
            self.feeding = True
            try:
                async for raw in messages:
                    backoff.reset()
                    self._receive(raw)
                    await self._queue.wait_for_capacity()
            finally:
                close = getattr(messages, "aclose", None)
                if close is not None:
                    await close()
        except (Exception, asyncio.CancelledError) as exc:
            if is_own_cancellation(exc):
                raise
            # A client library may cancel calls when a connection is lost; that does not cancel this task.
            return f"{type(exc).__name__}: {redact_and_truncate(str(exc), _REASON_LIMIT)}"
        return "the consumer ended"

    def _receive(self, raw: RawMessage) -> None:
        self._counts.delays.add_one(max(0.0, self._clock.now_ms() / 1000 - raw.timestamp.timestamp()))
        item = InFlightMessage(raw)
        self._activity.receive(item)
        self._queue.put(item)
        self._counts.in_flight = self._queue.size


_HOLDING: Final = "holding"


class OutageHold:
    """Messages that wait because a dependency is down. Use it in one event loop."""

    def __init__(
        self,
        name: str,
        queue: KeyedQueue[InFlightMessage],
        sleep: Callable[[float], Awaitable[None]],
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` is called when holding begins and when it ends."""
        self._name = name
        self._queue = queue
        self._sleep = sleep
        self._on_change = on_change
        self._backoff = Backoff()
        #: All held messages, and those of them that wait for the next round.
        self._on_hold: set[InFlightMessage] = set()
        self._waiting: list[InFlightMessage] = []
        self._round: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._on_hold)

    def add(self, item: InFlightMessage, reason: str) -> None:
        """Hold a message until the next round."""
        began = not self._on_hold
        self._on_hold.add(item)
        self._waiting.append(item)
        if self._round is None:
            # Other messages would fail as well.
            self._queue.block(_HOLDING)
            self._round = asyncio.create_task(self._try_later(), name="holdfast-trigger-holding")
        if began:
            _log.warning(
                "trigger %s holds its messages until the outage ends: %s",
                self._name,
                reason,
                extra={"trigger": self._name, "trace_id": item.trace_id, "stage": "held"},
            )
            self._on_change()

    def release(self, item: InFlightMessage) -> None:
        """Release a message that is finished or retried for another reason. Holding ends with the last one."""
        if item not in self._on_hold:
            return
        self._on_hold.discard(item)
        if not self._on_hold:
            self._backoff.reset()
            _log.warning("trigger %s recovered", self._name, extra={"trigger": self._name, "stage": "resumed"})
            self._on_change()

    async def stop(self) -> list[InFlightMessage]:
        """Stop retrying. Returns the messages that waited for the next round."""
        if self._round is not None:
            self._round.cancel()
            await asyncio.wait({self._round})
        left, self._waiting = self._waiting, []
        self._on_hold.clear()
        return left

    async def _try_later(self) -> None:
        await self._sleep(self._backoff.next_s())
        waiting, self._waiting = self._waiting, []
        self._round = None
        # In reverse, because each goes to the head of the queue.
        for item in reversed(waiting):
            self._queue.requeue(item)
        self._queue.unblock(_HOLDING)
