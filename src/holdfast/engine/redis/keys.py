"""Key names of a queue in Redis, and a cache of the lanes in use.

All keys of one queue share a hash slot, so that one script can touch them all. How namespace and queue are written is
in `core/key_names.py`.

`LaneCache` is only a hint that lets a script's keys be declared. Redis holds the actual assignment, and a script that
needs an undeclared lane reports it before it writes anything. The cache is reduced when it holds far more lanes than
are in use.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from holdfast.core.job import Priority
from holdfast.core.key_names import check_key_names, configured_key, former_key, queue_prefix, queues_key
from holdfast.engine.port.jobs import MAX_TENANTS

#: Consumer that owns the retries in the pending list.
RETRY_CONSUMER: Final = "~waiting"
#: Second group on every stream, with which idle workers wait.
WAKE_GROUP: Final = "wake"
#: Before the name of a queue in the hash of owners; `tenant:` is before that of a tenant.
OWNED_QUEUE: Final = b"queue:"
#: One stream per priority, and one for jobs claimed by id.
STREAMS_PER_LANE: Final = len(Priority) + 1


@dataclass(frozen=True, slots=True)
class KeyNames:
    """Configurable names of keys (requirement Q1)."""

    namespace: str = ""
    stream_task: str = "stream:task"
    stream_result: str = "stream:result"
    stream_dlq: str = "stream:dlq"
    group: str = "cg:workers"
    queue_retry: str = "queue:retry"
    queue_suspended: str = "queue:suspended"
    cluster: bool = False

    def __post_init__(self) -> None:
        """Raise `InvalidOption` for names that cannot be distinguished."""
        check_key_names(self.namespace, self._configured, tagged=self.cluster)

    @property
    def _configured(self) -> dict[str, str]:
        return {
            "stream_task": self.stream_task,
            "stream_result": self.stream_result,
            "stream_dlq": self.stream_dlq or "stream:dlq",
            "queue_retry": self.queue_retry,
            "queue_suspended": self.queue_suspended,
        }

    def configured(self, queue: str, name: str) -> str:
        """The key of a queue with a configured name."""
        return configured_key(self.namespace, queue, name, tagged=self.cluster)

    def prefix(self, queue: str) -> str:
        """The prefix of all keys of a queue."""
        return queue_prefix(self.namespace, queue, tagged=self.cluster)

    def former(self, queue: str) -> list[str]:
        """Keys of a queue that earlier versions wrote under another name than this one."""
        names = ("queue:control", *self._configured.values())
        now = {self.configured(queue, name) for name in names}
        written = (former_key(self.namespace, queue, name, tagged=self.cluster) for name in names)
        return [key for key in written if key not in now]

    @property
    def queues(self) -> str:
        """The set of all queues of the namespace. This, `owners` and `tasks` do not belong to a queue."""
        return queues_key(self.namespace)

    @property
    def owners(self) -> str:
        """The hash of the queues' owners, and of their numbers of queues. In the slot of `queues`."""
        return f"{{{self.queues}}}:owners"

    @property
    def tasks(self) -> str:
        """The hash of announced tasks of the namespace."""
        return f"{self.namespace}:announced:tasks" if self.namespace else "announced:tasks"


class QueueKeys:
    """The keys of one queue, as bytes ready to send.

    A *lane* has the streams of one tenant: one per priority, and one for jobs claimed by id. The index of a stream is
    its offset in the lane plus `STREAMS_PER_LANE` for each lane before it. Lane 0 belongs to the default tenant and to
    programs that submit with `XADD`.
    """

    def __init__(self, queue: str, names: KeyNames) -> None:
        self.queue = queue
        self._prefix = names.prefix(queue)
        self._task = names.configured(queue, names.stream_task)
        self._lanes: dict[int, tuple[bytes, ...]] = {}
        #: Lane 0.
        self.streams: tuple[bytes, ...] = self.lane(0)
        #: Streams on which idle workers wait: those of lane 0, by priority.
        self.wake_streams = self.streams[: len(Priority)]
        self.result = names.configured(queue, names.stream_result).encode()
        self.dlq = names.configured(queue, names.stream_dlq or "stream:dlq").encode()
        self.retry = names.configured(queue, names.queue_retry).encode()
        self.suspended = names.configured(queue, names.queue_suspended).encode()
        self._job = self._key("job:")
        self._idempotency = self._key("idempotency:")

    def _key(self, name: str) -> bytes:
        return f"{self._prefix}{name}".encode()

    def lane(self, number: int) -> tuple[bytes, ...]:
        """The streams of one lane."""
        streams = self._lanes.get(number)
        if streams is None:
            task = f"{self._task}:lane:{number}" if number else self._task
            by_priority = {Priority.HIGH: f"{task}:high", Priority.NORMAL: task, Priority.LOW: f"{task}:low"}
            names = [*(by_priority[priority] for priority in Priority), f"{task}:direct"]
            streams = self._lanes[number] = tuple(name.encode() for name in names)
        return streams

    def stream(self, index: int) -> bytes:
        """The stream with this index."""
        return self.lane(index // STREAMS_PER_LANE)[index % STREAMS_PER_LANE]

    @cached_property
    def of_submission(self) -> tuple[bytes, ...]:
        """The first keys of the script `submit`."""
        return (
            *self.streams,
            self.feed,
            self.delayed,
            self.waiting_approval,
            self.control,
            self.notices,
            self.wake,
            self.lanes,
        )

    @cached_property
    def feed(self) -> bytes:
        """All moves of this queue, one entry per atomic step."""
        return self._key("stream:feed")

    @cached_property
    def wake(self) -> bytes:
        """Entries that wake idle workers."""
        return self._key("stream:wake")

    @cached_property
    def notices(self) -> bytes:
        """Notices, read by `listen`."""
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
        """Jobs whose dead letter is not yet recorded or not yet acknowledged."""
        return self._key("queue:dead")

    @cached_property
    def control(self) -> bytes:
        """The queue's controls, and values that scripts keep with them."""
        return self._key("queue:control")

    @cached_property
    def lanes(self) -> bytes:
        """Tenant → number of its lane."""
        return self._key("queue:lanes")

    @cached_property
    def workers(self) -> bytes:
        """Workers that claim from this queue, ordered by their last claim."""
        return self._key("queue:workers")

    @cached_property
    def worker_ids(self) -> bytes:
        """Worker id → the start of a worker that has it."""
        return self._key("queue:ids")

    @cached_property
    def replaced_workers(self) -> bytes:
        """Starts of workers that were replaced while they ran, by time."""
        return self._key("queue:replaced")

    @cached_property
    def waiters(self) -> bytes:
        """Job id → channel on which its end is published."""
        return self._key("queue:waiters")

    def job(self, job_id: str) -> bytes:
        """A job's record."""
        return self._job + job_id.encode()

    def member_job(self, member: bytes) -> bytes:
        """The record of a member of a set. Other programs can add any bytes."""
        return self._job + member

    def idempotency(self, tenant_id: str, key: str) -> bytes:
        """The first job with this idempotency key.

        The tenant's length distinguishes `a` + `b:c` from `a:b` + `c`.
        """
        return self._idempotency + f"{len(tenant_id)}:{tenant_id}:{key}".encode()


#: Unused lanes that stay in the cache. Declaring them saves a second call when a tenant returns.
_SPARE: Final = 8
#: Tenants in the cache; far more than have a lane at a time.
_MAX_TENANTS: Final = 1_000
#: Further lanes are only for tenants that operators named.
_MAX_LANE: Final = 2 * MAX_TENANTS
_LANE_DIGITS: Final = 20
_numbers: Final = re.compile(rb"\d+").findall
#: After a submission needed more than the lanes of its tenants, all lanes are declared for this long.
_ALL_S: Final = 60.0


class LaneCache:
    """The known lanes of one queue."""

    def __init__(self) -> None:
        self._in_use: set[int] = set()
        self._by_tenant: dict[str, int] = {}
        self._all_until = 0.0

    def all(self) -> tuple[int, ...]:
        """All lanes that may have jobs."""
        return tuple(self._in_use)

    def find_lanes(self, tenants: Iterable[str]) -> set[int]:
        """The known lanes of these tenants."""
        known = self._by_tenant
        return {known[tenant] for tenant in tenants if tenant in known} if known else set()

    def find_submission_lanes(self, tenants: Iterable[str]) -> Collection[int]:
        """The lanes of these tenants; all lanes while submissions need the backlog of the whole queue."""
        return self._in_use if self._all_until > time.monotonic() else self.find_lanes(tenants)

    def set_in_use(self, in_use: bytes) -> None:
        """Record the lanes in use; the cache is reduced to them when it has more than `_SPARE` others."""
        lanes = set(parse_lanes(in_use))
        self._in_use = lanes if len(self._in_use) > len(lanes) + _SPARE else self._in_use | lanes

    def add(self, missing: Sequence[Any]) -> set[int]:
        """Add the lanes that a script reported as undeclared, as `tenant, lane, …`; return their numbers."""
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


def parse_lanes(in_use: bytes) -> list[int]:
    """The lanes besides lane 0 in a list of the controls, without what is not one, as scripts read it."""
    found = {int(lane) for lane in _numbers(in_use) if len(lane) <= _LANE_DIGITS}
    return sorted(lane for lane in found if 0 < lane <= _MAX_LANE)


def lanes_of(positions: Iterable[str]) -> set[int]:
    """The lanes of leases, without lane 0, which is always declared."""
    lanes = {int(index) // STREAMS_PER_LANE for index in {position.partition(":")[0] for position in positions}}
    lanes.discard(0)
    return lanes
