"""Backlogs over their threshold (requirement H5): told once when they cross it, and once when they are well below.

Told is an `alert.backlog` event in the operators' log (and from there whoever has subscribed by webhook), a warning in
the log, and a metric. Any number of processes watch: the ledger lets one of them raise an alert, and one clear it.
Without a ledger each process tells for itself, in its log and its metrics.
"""

from __future__ import annotations

import logging
import time
from random import Random
from typing import Final

from holdfast.core.principal import ALL_TENANTS, AuditEntry
from holdfast.engine.port import Engine
from holdfast.errors import LedgerUnavailable
from holdfast.ledger.port.ledger import Ledger
from holdfast.settings import Settings
from holdfast.upkeep.loop import LogThrottle, QueueSelection, run_forever

_log: Final = logging.getLogger("holdfast.alarm")

INTERVAL_S: Final = 2.0
#: An alert is over when the backlog is below this part of its threshold: at the threshold itself it would flutter.
CLEAR_BELOW: Final = 0.9
#: How often to make sure, in the ledger, that an alert stands or does not: who raised or cleared it may have died.
_SURE_S: Final = 60.0
_ACTOR: Final = "holdfast"

RAISED: Final = "alert.backlog"
CLEARED: Final = "alert.backlog_cleared"


class BacklogMonitor:
    """Watches the backlogs of some queues, until cancelled."""

    def __init__(
        self,
        engine: Engine,
        queues: QueueSelection,
        settings: Settings,
        ledger: Ledger | None,
        *,
        interval_s: float = INTERVAL_S,
        random: Random | None = None,
    ) -> None:
        self._engine = engine
        self._queues = queues
        self._default = settings.backlog_alert
        self._ledger = ledger
        self._interval_s = interval_s
        self._random = random or Random()
        self._complaint = LogThrottle(_log)
        #: Whether a queue was over its threshold at the last look, and until when that need not be made sure of.
        self._sure: dict[str, tuple[bool, float]] = {}

    async def run(self) -> None:
        """Look, again and again."""
        await run_forever("alarm", self.check)

    async def check(self) -> float:
        """One look at all queues; returns the seconds to the next."""
        try:
            await self._engine.for_each_queue(await self._queues.names(), self._look_at)
            self._complaint.reset()
        except LedgerUnavailable as exc:
            self._complaint.log(logging.WARNING, "alerts wait for the ledger: %s", exc)
        return self._interval_s * self._random.uniform(0.8, 1.2)

    async def _look_at(self, queue: str) -> None:
        asked = (await self._engine.get_control(queue)).backlog_alert
        threshold = self._default if asked is None else asked
        if threshold is None and self._is_sure(queue, over=False):
            return
        backlog = (await self._engine.stats(queue)).backlog
        if threshold is None:
            await self._is_below(queue, None, backlog)
        elif backlog >= threshold:
            await self._is_over(queue, threshold, backlog)
        elif backlog < threshold * CLEAR_BELOW:
            await self._is_below(queue, threshold, backlog)

    async def _is_over(self, queue: str, threshold: int, backlog: int) -> None:
        if self._is_sure(queue, over=True):
            return
        key, standing = _key(queue), self._engine.counts.alerts
        reason = f"{backlog} jobs are in line or running, the threshold is {threshold}"
        action = _action(RAISED, queue, threshold, backlog, reason)
        people = None if self._ledger is None else self._ledger.operators
        if key not in standing if people is None else await people.raise_alert(key, action):
            facts = {"alert": key, "queue": queue, "backlog": backlog, "threshold": threshold}
            _log.warning("the backlog of queue %s is over its threshold: %s", queue, reason, extra=facts)
        standing.add(key)
        self._sure[queue] = (True, time.monotonic() + _SURE_S)

    async def _is_below(self, queue: str, threshold: int | None, backlog: int) -> None:
        if self._is_sure(queue, over=False):
            return
        key, standing = _key(queue), self._engine.counts.alerts
        limit = "there is no threshold any more" if threshold is None else f"the threshold is {threshold}"
        action = _action(CLEARED, queue, threshold, backlog, f"{backlog} jobs are in line or running, {limit}")
        people = None if self._ledger is None else self._ledger.operators
        if key in standing if people is None else await people.clear_alert(key, action):
            facts = {"alert": key, "queue": queue, "backlog": backlog, "threshold": threshold}
            _log.info("the backlog of queue %s is below its threshold again", queue, extra=facts)
        standing.discard(key)
        self._sure[queue] = (False, time.monotonic() + _SURE_S)

    def _is_sure(self, queue: str, *, over: bool) -> bool:
        known, until = self._sure.get(queue, (not over, 0.0))
        return known is over and until > time.monotonic()


def _key(queue: str) -> str:
    return f"backlog:{queue}"


def _action(kind: str, queue: str, threshold: int | None, backlog: int, reason: str) -> AuditEntry:
    return AuditEntry(
        type=kind,
        actor=_ACTOR,
        # A queue is everybody's: only who sees all tenants sees this.
        tenant_id=ALL_TENANTS,
        target="queue",
        target_id=queue,
        queue=queue,
        reason=reason,
        after={"backlog": backlog, "threshold": threshold},
    )
