"""Consume messages from an adapter, keep order per key, and wait out outages.

`Consumer` fills a `KeyedQueue` and restarts with backoff when consuming fails or ends.

`KeyedQueue` gives out one message per key at a time; later ones of the key wait for `done` (T6.7). A message that waits
for a retry keeps its key but occupies no worker, so a slow key does not delay others. Messages without a key do not
wait for each other.

`OutageHold` keeps messages while a dependency is down: none is passed to the runtime, none is lost, no retry is used up
(T5). They wait for the same moment, with a growing delay, and are then tried together. The trigger holds until the last
of them has succeeded or ended otherwise.
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
from holdfast.triggers.config import TriggerConfig
from holdfast.triggers.state import InFlightMessage, TriggerCounters


class Keyed(Protocol):
    """What stands in a line."""

    @property
    def key(self) -> str: ...


T = TypeVar("T", bound=Keyed)


class KeyedQueue(Generic[T]):
    """Filled by one consumer, emptied by any number of workers. One event loop."""

    def __init__(self, limit: int) -> None:
        """`limit`: so many may be in hand before `room` makes the consumer wait."""
        self._limit = limit
        self._ready: deque[T] = deque()
        #: By key, those behind the one that is out.
        self._behind: dict[str, deque[T]] = {}
        self._takers: deque[asyncio.Future[None]] = deque()
        self._room: asyncio.Future[None] | None = None
        self._shut: set[str] = set()
        self._closed = False
        #: Everything that has been put and is not done.
        self.size = 0

    def put(self, item: T) -> None:
        """A new one, behind all others of its key."""
        self.size += 1
        if item.key:
            behind = self._behind.get(item.key)
            if behind is not None:
                behind.append(item)
                return
            self._behind[item.key] = deque()
        self._ready.append(item)
        self._wake()

    async def wait_for_room(self) -> None:
        """Until fewer than the limit are in hand."""
        while self.size >= self._limit:
            self._room = asyncio.get_running_loop().create_future()
            await self._room

    async def take(self) -> T | None:
        """The next one whose turn it is; None once the lines are closed."""
        while not self._closed:
            if self._ready and not self._shut:
                return self._ready.popleft()
            taker: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._takers.append(taker)
            try:
                await taker
            except asyncio.CancelledError:
                if taker.done() and not taker.cancelled():
                    # Woken and cancelled in one moment: somebody else must see to it.
                    self._wake()
                raise
        return None

    def requeue(self, item: T) -> None:
        """One that was out, again: it still has its key, and comes before those that have not begun."""
        self._ready.appendleft(item)
        self._wake()

    def done(self, item: T) -> None:
        """It is off: the next of its key may go."""
        self.size -= 1
        if item.key:
            behind = self._behind[item.key]
            if behind:
                self._ready.append(behind.popleft())
                self._wake()
            else:
                del self._behind[item.key]
        if self._room is not None and self.size < self._limit and not self._room.done():
            self._room.set_result(None)

    def ready(self) -> list[T]:
        """Those whose turn it is, and that nobody has taken."""
        return list(self._ready)

    def block(self, why: str) -> None:
        """Nothing is taken until `open` says that this reason is gone."""
        self._shut.add(why)

    def unblock(self, why: str) -> None:
        self._shut.discard(why)
        if not self._shut:
            for _ in range(len(self._ready)):
                self._wake()

    def close(self) -> None:
        """Nothing is taken any more."""
        self._closed = True
        while self._takers:
            self._wake()

    def _wake(self) -> None:
        while self._takers:
            taker = self._takers.popleft()
            if not taker.done():
                taker.set_result(None)
                return


_log: Final = logging.getLogger("holdfast.trigger")

_REASON_LIMIT: Final = 500


class Consumer:
    """Fills the lines until it is cancelled. A consumer that fails or ends is begun again, with backoff."""

    def __init__(
        self,
        config: TriggerConfig,
        adapter: QueueAdapter,
        lines: KeyedQueue[InFlightMessage],
        counts: TriggerCounters,
        activity: Activity,
        clock: Clock,
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._config = config
        self._adapter = adapter
        self._lines = lines
        self._counts = counts
        self._activity = activity
        self._clock = clock
        self._sleep = sleep
        #: Whether messages are waited for now.
        self.feeding = False

    async def run(self) -> None:
        backoff = Backoff()
        try:
            while True:
                reason = await self._consume(backoff)
                self.feeding = False
                name, queue = self._config.name, self._config.queue_name
                _log.error(
                    "trigger %s: consuming is begun again: %s", name, reason, extra={"trigger": name, "queue": queue}
                )
                await self._sleep(backoff.next_s())
        finally:
            self.feeding = False

    async def watch(self) -> None:
        """Look at how many wait at the broker, now and then."""
        while True:
            try:
                self._counts.lag = await self._adapter.lag()
            except Exception as exc:  # noqa: BLE001 - a broker that is away has no lag to tell of
                self._counts.lag = None
                _log.debug("trigger %s: no lag: %s", self._config.name, type(exc).__name__)
            await asyncio.sleep(self._config.metrics.export_interval)

    async def _consume(self, backoff: Backoff) -> str:
        """Until it fails or ends: why."""
        try:
            messages = self._adapter.consume()
            self.feeding = True
            try:
                async for raw in messages:
                    backoff.reset()
                    self._receive(raw)
                    await self._lines.wait_for_room()
            finally:
                close = getattr(messages, "aclose", None)
                if close is not None:
                    await close()
        except (Exception, asyncio.CancelledError) as exc:
            if is_own_cancellation(exc):
                raise
            # A broker's library may cancel what is under way when a connection goes: that is no end of ours.
            return f"{type(exc).__name__}: {redact_and_truncate(str(exc), _REASON_LIMIT)}"
        return "it ended"

    def _receive(self, raw: RawMessage) -> None:
        self._counts.delays.add_one(max(0.0, self._clock.now_ms() / 1000 - raw.timestamp.timestamp()))
        item = InFlightMessage(raw)
        self._activity.receive(item)
        self._lines.put(item)
        self._counts.in_flight = self._lines.size


_WHY: Final = "holding"


class OutageHold:
    """Messages that wait because something is down. One event loop."""

    def __init__(
        self,
        name: str,
        lines: KeyedQueue[InFlightMessage],
        sleep: Callable[[float], Awaitable[None]],
        changed: Callable[[], None],
    ) -> None:
        """`changed` is told when holding begins and when it ends."""
        self._name = name
        self._lines = lines
        self._sleep = sleep
        self._changed = changed
        self._backoff = Backoff()
        #: All that have not got through; and those of them that wait for the next round.
        self._held: set[InFlightMessage] = set()
        self._waiting: list[InFlightMessage] = []
        self._round: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._held)

    def add(self, item: InFlightMessage, reason: str) -> None:
        """Keep it until the next round."""
        began = not self._held
        self._held.add(item)
        self._waiting.append(item)
        if self._round is None:
            # Nothing else is taken meanwhile: it would fail as well.
            self._lines.block(_WHY)
            self._round = asyncio.create_task(self._try_later(), name="holdfast-trigger-holding")
        if began:
            _log.warning(
                "trigger %s holds, and takes no more messages until it can hand them over: %s",
                self._name,
                reason,
                extra={"trigger": self._name, "trace_id": item.trace_id, "stage": "held"},
            )
            self._changed()

    def release(self, item: InFlightMessage) -> None:
        """It has got through, or is off in another way."""
        if item not in self._held:
            return
        self._held.discard(item)
        if not self._held:
            self._backoff.reset()
            _log.warning("trigger %s goes on", self._name, extra={"trigger": self._name, "stage": "resumed"})
            self._changed()

    async def stop(self) -> list[InFlightMessage]:
        """No more rounds; those that waited for one."""
        if self._round is not None:
            self._round.cancel()
            await asyncio.wait({self._round})
        left, self._waiting = self._waiting, []
        self._held.clear()
        return left

    async def _try_later(self) -> None:
        await self._sleep(self._backoff.next_s())
        waiting, self._waiting = self._waiting, []
        self._round = None
        # The last one first: each goes to the head of the line.
        for item in reversed(waiting):
            self._lines.requeue(item)
        self._lines.unblock(_WHY)
