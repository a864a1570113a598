"""Alerts for backlogs over their threshold (requirement H5).

An alert is raised once, and cleared once when the backlog is well below the threshold. It is an `alert.backlog` entry
in the audit log (sent from there to webhook subscribers), a warning in the log, and a metric. Any number of processes
may watch: the ledger lets one of them raise an alert, and one clear it. Without a ledger each process raises its own,
in its log and its metrics.
"""

from __future__ import annotations

import logging
import time
from random import Random
from typing import Final

from holdfast.core.principal import ALL_TENANTS, AuditEntry
from holdfast.engine.port.reads import ReadPort
from holdfast.errors import LedgerUnavailable
from holdfast.ledger.port.ledger import Ledger
from holdfast.settings import Settings
from holdfast.upkeep.loop import LogThrottle, QueueSelection, next_part, run_forever

_log: Final = logging.getLogger("holdfast.upkeep")

INTERVAL_S: Final = 2.0
#: Queues of one check; of more, each check takes the next ones by name.
_CHECKED: Final = 100
#: An alert is cleared when the backlog is below this share of its threshold; at the threshold itself it would flap.
CLEAR_BELOW: Final = 0.9
#: How often to confirm in the ledger that an alert is raised or cleared: the process that did it may have crashed.
_CONFIRM_S: Final = 60.0
_ACTOR: Final = "holdfast"

RAISED: Final = "alert.backlog"
CLEARED: Final = "alert.backlog_cleared"


class BacklogMonitor:
    """Watches the backlogs of some queues until cancelled."""

    def __init__(
        self,
        engine: ReadPort,
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
        self._failure_log = LogThrottle(_log)
        self._last = ""
        #: Whether a queue was over its threshold at the last check, and until when that need not be confirmed.
        self._confirmed: dict[str, tuple[bool, float]] = {}

    async def run(self) -> None:
        """Check repeatedly until cancelled."""
        await run_forever("backlog monitor", self.check)

    async def check(self) -> float:
        """Check all queues once; returns the seconds to the next check."""
        try:
            part = next_part(await self._queues.names(), self._last, _CHECKED)
            self._last = part[-1] if part else ""
            await self._engine.for_each_queue(part, self._check_queue)
            self._failure_log.reset()
        except LedgerUnavailable as exc:
            self._failure_log.log(logging.WARNING, "ledger unreachable, alerts are delayed: %s", exc)
        return self._interval_s * self._random.uniform(0.8, 1.2)

    async def _check_queue(self, queue: str) -> None:
        control = (await self._engine.get_control(queue)).backlog_alert
        threshold = self._default if control is None else control
        if threshold is None and self._is_confirmed(queue, over=False):
            return
        backlog = (await self._engine.stats(queue)).backlog
        if threshold is None:
            await self._clear(queue, None, backlog)
        elif backlog >= threshold:
            await self._raise(queue, threshold, backlog)
        elif backlog < threshold * CLEAR_BELOW:
            await self._clear(queue, threshold, backlog)

    async def _raise(self, queue: str, threshold: int, backlog: int) -> None:
        if self._is_confirmed(queue, over=True):
            return
        key, standing = _key(queue), self._engine.counters.alerts
        reason = f"the backlog is {backlog}, the threshold is {threshold}"
        entry = _audit_entry(RAISED, queue, threshold, backlog, reason)
        operators = None if self._ledger is None else self._ledger.operators
        if key not in standing if operators is None else await operators.raise_alert(key, entry):
            facts = {"alert": key, "queue": queue, "backlog": backlog, "threshold": threshold}
            _log.warning("backlog of queue %s is over its threshold: %s", queue, reason, extra=facts)
        standing.add(key)
        self._confirmed[queue] = (True, time.monotonic() + _CONFIRM_S)

    async def _clear(self, queue: str, threshold: int | None, backlog: int) -> None:
        if self._is_confirmed(queue, over=False):
            return
        key, standing = _key(queue), self._engine.counters.alerts
        limit = "there is no threshold" if threshold is None else f"the threshold is {threshold}"
        entry = _audit_entry(CLEARED, queue, threshold, backlog, f"the backlog is {backlog}, {limit}")
        operators = None if self._ledger is None else self._ledger.operators
        if key in standing if operators is None else await operators.clear_alert(key, entry):
            facts = {"alert": key, "queue": queue, "backlog": backlog, "threshold": threshold}
            _log.info("backlog of queue %s is below its threshold again", queue, extra=facts)
        standing.discard(key)
        self._confirmed[queue] = (False, time.monotonic() + _CONFIRM_S)

    def _is_confirmed(self, queue: str, *, over: bool) -> bool:
        known, until = self._confirmed.get(queue, (not over, 0.0))
        return known is over and until > time.monotonic()


def _key(queue: str) -> str:
    return f"backlog:{queue}"


def _audit_entry(kind: str, queue: str, threshold: int | None, backlog: int, reason: str) -> AuditEntry:
    return AuditEntry(
        type=kind,
        actor=_ACTOR,
        # A queue is shared by all tenants: only principals that see all tenants see this.
        tenant_id=ALL_TENANTS,
        target="queue",
        target_id=queue,
        queue=queue,
        reason=reason,
        after={"backlog": backlog, "threshold": threshold},
    )
