"""Names in Redis. All keys of one queue share a hash slot, so that one script may touch them all.

On a single server the default queue's names are plain (`stream:task`, `stream:result`, …), so that any
Redis client finds them; a namespace goes in front. Other queues, and every queue on Cluster, carry a
hash tag: `{namespace:queue}:stream:task`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from holdfast.core.job import Priority
from holdfast.core.names import queue_prefix

#: Consumer under which retries rest that wait in the pending list.
PARKING: Final = "~waiting"
#: The second group on every stream, through which idle workers wait.
WAKE_GROUP: Final = "wake"
#: Lines a lane: one a priority, and one for jobs that are taken out of their turn.
WIDTH: Final = len(Priority) + 1


@dataclass(frozen=True, slots=True)
class Names:
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


class Keys:
    """The keys of one queue, as bytes ready to send.

    A *line* is one stream, a *lane* the lines of one tenant: one for each priority, and one for jobs that are taken
    out of their turn. A line's index is its place in the lane, plus `WIDTH` for each lane before it. Lane 0 is the
    default tenant's, and that of every program that submits by `XADD`.
    """

    def __init__(self, queue: str, names: Names) -> None:
        self.queue = queue
        self._prefix = names.prefix(queue)
        self._task = names.stream_task
        self._lanes: dict[int, tuple[bytes, ...]] = {}
        #: Lane 0.
        self.streams: tuple[bytes, ...] = self.lane(0)
        #: Those on which idle workers wait: lane 0's by priority.
        self.awaited = self.streams[: len(Priority)]
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
        return self.lane(line // WIDTH)[line % WIDTH]

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
    def waiting(self) -> bytes:
        """Retries that wait in the pending list, by due time."""
        return self._key("queue:waiting")

    @cached_property
    def held(self) -> bytes:
        """Jobs that wait for approval."""
        return self._key("queue:held")

    @cached_property
    def dead(self) -> bytes:
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
