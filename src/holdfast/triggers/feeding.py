"""The consuming end of a trigger: from the adapter into the lines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from holdfast.brokers.port import QueueAdapter, RawMessage
from holdfast.cancelling import was_cancelled
from holdfast.clock import Clock
from holdfast.core.backoff import Backoff
from holdfast.observe.redact import bounded
from holdfast.triggers.activity import Activity
from holdfast.triggers.config import TriggerConfig
from holdfast.triggers.counts import TriggerCounts
from holdfast.triggers.item import Item
from holdfast.triggers.lines import Lines

_log: Final = logging.getLogger("holdfast.trigger")

_REASON_LIMIT: Final = 500


class Feeder:
    """Fills the lines until it is cancelled. A consumer that fails or ends is begun again, with backoff."""

    def __init__(
        self,
        config: TriggerConfig,
        adapter: QueueAdapter,
        lines: Lines[Item],
        counts: TriggerCounts,
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
                    await self._lines.room()
            finally:
                close = getattr(messages, "aclose", None)
                if close is not None:
                    await close()
        except (Exception, asyncio.CancelledError) as exc:
            if was_cancelled(exc):
                raise
            # A broker's library may cancel what is under way when a connection goes: that is no end of ours.
            return f"{type(exc).__name__}: {bounded(str(exc), _REASON_LIMIT)}"
        return "it ended"

    def _receive(self, raw: RawMessage) -> None:
        self._counts.delays.add_one(max(0.0, self._clock.now_ms() / 1000 - raw.timestamp.timestamp()))
        item = Item(raw)
        self._activity.receive(item)
        self._lines.put(item)
        self._counts.in_hand = self._lines.size
