"""When expired leases may be reclaimed: not directly after an outage of the store, which workers may have survived.

A worker that could not reach the store is not dead, but its leases have expired. After an outage each process waits for
one heartbeat interval before it reclaims, and in that time surviving workers renew their leases (decision 0043). Leases
of workers that have certainly ended are not waited for.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from holdfast.core.job import Lease
from holdfast.engine.port.jobs import LeaseFilter

#: Ended workers that are kept in memory; their leases are reclaimed within seconds.
_MAX_ENDED: Final = 1_000
_NEVER: Final = object()

#: A lease that its own worker renews this many lease durations after the last renewal was not reclaimed meanwhile,
#: although it had expired: no process could reach the store.
OUTAGE_LEASES: Final = 1.25
#: Why such a lease, and others that expire within one lease from then, are released instead of counted.
LOST_IN_OUTAGE: Final = "its lease expired in an outage of the engine; the loss does not count"


class OutageWatch:
    """Decides, per queue, whether a process may reclaim. `settle_s` is how long it waits after an outage; 0: never."""

    def __init__(self, settle_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._settle_s = settle_s
        self._clock = clock
        self._contacts: dict[str, object] = {}
        self._settled_at: dict[str, float] = {}
        #: Whether the process that started this one has waited already.
        self.starts_settled = False
        #: A call that takes this much longer than expected counts as an interruption.
        self.late_s = settle_s / 2 or math.inf
        #: Failed and late calls, where the engine does not count them by server.
        self.interruptions = 0
        #: When the last outage of each queue ended, on the engine's clock, where the store does not keep it.
        self.outages_ms: dict[str, int] = {}
        #: Workers that have certainly ended. Clones of an engine share it.
        self.ended: deque[str] = deque(maxlen=_MAX_ENDED)

    def must_wait(self, queue: str, contact: object) -> bool:
        """Whether to wait; called after the store has answered.

        `contact` differs from the last one if calls to the store of this queue have failed since, or were answered
        late. A process that has just started waits as well: it cannot know.
        """
        now = self._clock()
        if (last := self._contacts.get(queue, _NEVER)) != contact:
            self._contacts[queue] = contact
            is_settled = last is _NEVER and self.starts_settled
            self._settled_at[queue] = now if is_settled else now + self._settle_s
        return now < self._settled_at[queue]

    def is_settling(self, queues: Sequence[str]) -> bool:
        """Whether the last answer about one of these queues was to wait, and the time has not passed yet."""
        now = self._clock()
        return any(now < self._settled_at.get(queue, now) for queue in queues)

    def only_ended(self, only: LeaseFilter | None) -> LeaseFilter:
        """A filter for leases of workers that have certainly ended, and that `only` allows."""
        return lambda lease: self.has_ended(lease) and (only is None or only(lease))

    def note_ended(self, worker: str) -> None:
        """Record that a worker has certainly ended."""
        if worker not in self.ended:
            self.ended.append(worker)

    def has_ended(self, lease: Lease) -> bool:
        """Whether the worker with this lease has certainly ended."""
        return lease.worker in self.ended
