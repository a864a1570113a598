"""INFO log of a trigger: a summary of counts per interval.

The first message of an interval is logged step by step. A line per message would cost more than handling the message.
DEBUG has a line for each step of each message.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import msgspec

from holdfast.ledger.port.messages import ExecutionStatus
from holdfast.triggers.config import QueueTriggerConfig
from holdfast.triggers.state import InFlightMessage, TriggerCounters

_log: Final = logging.getLogger("holdfast.triggers")

INTERVAL_S: Final = 10.0


class _Totals(msgspec.Struct, frozen=True):
    received: int
    submitted: int
    acknowledged: int
    duplicate: int
    rejected: int
    unparsable: int
    failed: int
    retries: int
    dead_letters: int


class Activity:
    """INFO log of one trigger. Use it in one event loop."""

    def __init__(self, config: QueueTriggerConfig, counts: TriggerCounters, *, interval_s: float = INTERVAL_S) -> None:
        self._about = {"trigger": config.name, "queue": config.queue_name}
        self._counts = counts
        self._interval_s = interval_s
        #: Set when something happened since the last summary.
        self._changed = asyncio.Event()
        self._has_first = False
        self._logged = _totals(counts)

    def receive(self, item: InFlightMessage) -> None:
        """Count a message. The first one of an interval is logged step by step."""
        self._counts.received += 1
        self._changed.set()
        if not self._has_first:
            self._has_first = True
            item.level = logging.INFO

    def end(self) -> None:
        """Record that a message is finished."""
        self._changed.set()

    async def run(self) -> None:
        """Log a summary for each interval in which something happened, until cancelled."""
        while True:
            await self._changed.wait()
            await asyncio.sleep(self._interval_s)
            self.summarize()

    def summarize(self) -> None:
        """Log what happened since the last summary, if anything did."""
        now, before = _totals(self._counts), self._logged
        self._logged = now
        self._changed.clear()
        self._has_first = False
        changes = {
            name: getattr(now, name) - getattr(before, name)
            for name in _Totals.__struct_fields__
            if getattr(now, name) != getattr(before, name)
        }
        if changes:
            words = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in changes.items())
            _log.info("trigger %s: %s", self._about["trigger"], words, extra={**self._about, **changes})


def _totals(counts: TriggerCounters) -> _Totals:
    consumed = counts.consumed
    return _Totals(
        received=counts.received,
        submitted=consumed[ExecutionStatus.SUCCESS],
        acknowledged=counts.acknowledged,
        duplicate=consumed[ExecutionStatus.DUPLICATE],
        rejected=consumed[ExecutionStatus.REJECTED],
        unparsable=consumed[ExecutionStatus.UNPARSABLE],
        failed=consumed[ExecutionStatus.FAILED],
        retries=counts.retries,
        dead_letters=counts.dead_letters,
    )
