"""Key names of a queue in Redis, and a cache of the lanes in use.

All keys of one queue share a hash slot, so that one script can touch them all. On a single server the default queue's
names are plain (`stream:task`, `stream:result`, …), so that any Redis client finds them; a namespace is put in front.
Other queues, and every queue on Cluster, carry a hash tag: `{namespace:queue}:stream:task`.

`LaneCache` is only a hint that lets a script's keys be declared. Redis holds the actual assignment, and a script that
needs an undeclared lane reports it before it writes anything. The cache is reduced when it holds far more lanes than
are in use.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from holdfast.core.job import Priority
from holdfast.core.text import queue_prefix

#: Consumer under which retries rest that wait in the pending list.
RETRY_CONSUMER: Final = "~waiting"
#: The second group on every stream, through which idle workers wait.
WAKE_GROUP: Final = "wake"
#: Lines a lane: one a priority, and one for jobs that are taken out of their turn.
STREAMS_PER_LANE: Final = len(Priority) + 1


@dataclass(frozen=True, slots=True)
class KeyNames:
    """Every name can be set (requirement Q1)."""

    namespace: str = ""
    stream_task: str = "stream:task"
    stream_result: str = "stream:result"
    stream_dlq: str = "stream:dlq"
    group: str = "cg:workers"
    queue_retry: str = "queue:retry"
    queue_suspended: str = "queue:suspended"
    cluster: bool = False

    def prefix(self, queue: str) -> str:
        """What goes before each of a queue's names."""
        return queue_prefix(self.namespace, queue, tagged=self.cluster)

    @property
    def queues(self) -> str:
        """The set of all queues of the namespace; the only name outside of a queue."""
        return f"{self.namespace}:queues" if self.namespace else "queues"


class QueueKeys:
    """The keys of one queue, as bytes ready to send.

    A *line* is one stream, a *lane* the lines of one tenant: one for each priority, and one for jobs that are taken
    out of their turn. A line's index is its place in the lane, plus `WIDTH` for each lane before it. Lane 0 is the
    default tenant's, and that of every program that submits by `XADD`.
    """

    def __init__(self, queue: str, names: KeyNames) -> None:
        self.queue = queue
        self._prefix = names.prefix(queue)
        self._task = names.stream_task
        self._lanes: dict[int, tuple[bytes, ...]] = {}
        #: Lane 0.
        self.streams: tuple[bytes, ...] = self.lane(0)
        #: Those on which idle workers wait: lane 0's by priority.
        self.wake_streams = self.streams[: len(Priority)]
        self.result = self._key(names.stream_result)
        self.dlq = self._key(names.stream_dlq or "stream:dlq")
        self.retry = self._key(names.queue_retry)
        self.suspended = self._key(names.queue_suspended)
        self._job = self._key("job:")
        self._idempotency = self._key("idempotency:")

    def _key(self, name: str) -> bytes:
        return f"{self._prefix}{name}".encode()

    def lane(self, number: int) -> tuple[bytes, ...]:
        """The streams of one lane."""
        streams = self._lanes.get(number)
        if streams is None:
            task = f"{self._task}:lane:{number}" if number else self._task
            lines = {Priority.HIGH: f"{task}:high", Priority.NORMAL: task, Priority.LOW: f"{task}:low"}
            names = [*(lines[priority] for priority in Priority), f"{task}:direct"]
            streams = self._lanes[number] = tuple(self._key(name) for name in names)
        return streams

    def stream(self, line: int) -> bytes:
        """The stream of one line."""
        return self.lane(line // STREAMS_PER_LANE)[line % STREAMS_PER_LANE]

    @cached_property
    def feed(self) -> bytes:
        """Every move of this queue, one entry per atomic step."""
        return self._key("stream:feed")

    @cached_property
    def wake(self) -> bytes:
        """Nudges for idle workers."""
        return self._key("stream:wake")

    @cached_property
    def notices(self) -> bytes:
        """What `listen` reads."""
        return self._key("stream:notices")

    @cached_property
    def delayed(self) -> bytes:
        """Queued jobs that are not due yet, by due time."""
        return self._key("queue:delayed")

    @cached_property
    def pending_retries(self) -> bytes:
        """Retries that wait in the pending list, by due time."""
        return self._key("queue:waiting")

    @cached_property
    def waiting_approval(self) -> bytes:
        """Jobs that wait for approval."""
        return self._key("queue:held")

    @cached_property
    def dlq_pending(self) -> bytes:
        """Jobs whose dead letter is not recorded, or not acknowledged, yet."""
        return self._key("queue:dead")

    @cached_property
    def control(self) -> bytes:
        """An operator's hand on the queue."""
        return self._key("queue:control")

    @cached_property
    def lanes(self) -> bytes:
        """Tenant → the number of its lane."""
        return self._key("queue:lanes")

    @cached_property
    def workers(self) -> bytes:
        """Workers that claim from this queue, by when they last did."""
        return self._key("queue:workers")

    @cached_property
    def waiters(self) -> bytes:
        """Job id → channel of whoever waits for its end."""
        return self._key("queue:waiters")

    def job(self, job_id: str) -> bytes:
        """A job's record."""
        return self._job + job_id.encode()

    def idempotency(self, tenant_id: str, key: str) -> bytes:
        """Who was first with this key. The tenant's length keeps `a` + `b:c` and `a:b` + `c` apart."""
        return self._idempotency + f"{len(tenant_id)}:{tenant_id}:{key}".encode()


#: So many lanes more than are in use may be declared; knowing them saves asking again for tenants that come and go.
_SPARE: Final = 8
#: Tenants that are remembered; far more than have a lane at a time.
_MAX_TENANTS: Final = 1_000
#: A script that had to see more than the lanes of its tenants is given all of them for so long.
_ALL_S: Final = 60.0


class LaneCache:
    """One queue's lanes, as far as they were heard of."""

    def __init__(self) -> None:
        self._in_use: set[int] = set()
        self._by_tenant: dict[str, int] = {}
        self._all_until = 0.0

    def all(self) -> tuple[int, ...]:
        """Every lane that may have jobs."""
        return tuple(self._in_use)

    def of_tenants(self, tenants: Iterable[str]) -> set[int]:
        """Where the next jobs of these tenants may go."""
        known = self._by_tenant
        return {known[tenant] for tenant in tenants if tenant in known} if known else set()

    def for_submission(self, tenants: Iterable[str]) -> Collection[int]:
        """Those of the tenants; all of them while the queue's whole backlog has to be looked at."""
        return self._in_use if self._all_until > time.monotonic() else self.of_tenants(tenants)

    def set_in_use(self, in_use: bytes) -> None:
        """These, and no others, are in use."""
        lanes = {int(lane) for lane in in_use.split()}
        self._in_use = lanes if len(self._in_use) > len(lanes) + _SPARE else self._in_use | lanes

    def add(self, missing: Sequence[Any]) -> set[int]:
        """From a script's answer, `tenant, lane, …`: the lanes that it needs beside those that were declared."""
        needed: set[int] = set()
        for tenant, lane in zip(missing[::2], missing[1::2], strict=True):
            needed.add(int(lane))
            if tenant:
                if len(self._by_tenant) >= _MAX_TENANTS:
                    self._by_tenant.clear()
                self._by_tenant[tenant.decode("utf-8", "replace")] = int(lane)
            else:
                self._all_until = time.monotonic() + _ALL_S
        self._in_use |= needed
        return needed


def lanes_of(places: Iterable[str]) -> set[int]:
    """The lanes of leases, without lane 0, which need not be declared."""
    lanes = {int(line) // STREAMS_PER_LANE for line in {place.partition(":")[0] for place in places}}
    lanes.discard(0)
    return lanes
