"""`ReadPort`: live state, notices and findings. None of its methods changes a job."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import Final, Protocol, TypeVar

import msgspec

from holdfast.core.announcement import AnnouncedTask
from holdfast.core.job import JobInfo
from holdfast.core.states import State
from holdfast.engine.port.jobs import EnginePart
from holdfast.engine.port.operators import QueueControl
from holdfast.errors import EngineUnavailable

#: Share of its limit at which a feed gets a warning.
FEED_WARNING: Final = 0.8


class CancelledNotice(msgspec.Struct, frozen=True):
    """A running job was moved with `move`: stop its run, the lease is lost."""

    queue: str
    job_id: str


class DueNotice(msgspec.Struct, frozen=True):
    """A waiting job became the first to fall due."""

    queue: str
    at_ms: int


class ControlNotice(msgspec.Struct, frozen=True):
    """An operator changed a queue's controls; read them with `get_control`."""

    queue: str


Notice = CancelledNotice | DueNotice | ControlNotice


_REMEDY: Final = "check that the ledger answers, and that a worker or `holdfast upkeep` runs, which compares them"


class QueueGate(msgspec.Struct, frozen=True):
    """Whether the jobs of a queue are claimed and moved: with a ledger, once both were compared in this epoch."""

    #: The present epoch of the engine.
    epoch: str
    is_open: bool
    #: Since when (by the engine's clock) it is open without a comparison, as the ledger did not answer; 0: it is not.
    unverified_since_ms: int = 0


def gate_finding(queue: str, gate: QueueGate) -> Finding:
    """The finding of `holdfast doctor` about a queue's gate."""
    check = f"comparison with the ledger, queue {queue}"
    if not gate.is_open:
        message = "jobs wait: the engine was started or replaced, and has not been compared with the ledger since"
        return Finding(check, ok=False, message=message, remedy=_REMEDY)
    if gate.unverified_since_ms:
        message = (
            "jobs run although the engine, which was started or replaced, has not been compared with the ledger since"
        )
        return Finding(check, ok=False, message=message, remedy=_REMEDY, warning=True)
    return Finding(check, ok=True, message="the engine has everything that the ledger has read")


class QueueStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges of a queue.

    `states` counts open jobs; `delayed` is the part of `queued` that is not due yet.
    """

    queue: str
    states: dict[State, int]
    delayed: int
    control: QueueControl
    workers: int
    feed_entries: int
    #: How full the feed is, from 0 to 1; 0 without a reader, because such a feed is trimmed to its limit.
    feed_share: float = 0.0
    dead_letters: int
    #: Ready and running jobs, to which intake limits and backlog alerts apply.
    backlog: int = 0
    #: Leases, and retries in the pending list.
    pending: int = 0
    #: Backlog by tenant, as far as the engine separates tenants. Only for principals that may see all tenants.
    tenants: dict[str, int] = {}
    gate: QueueGate = QueueGate("", is_open=True)


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that claims from a queue, as of its last call."""

    worker: str
    queue: str
    seen_at_ms: int
    #: Its leases.
    pending: int


class Finding(msgspec.Struct, frozen=True):
    """One result of `holdfast doctor`."""

    check: str
    ok: bool
    message: str
    remedy: str = ""
    #: The finding is not ok, but jobs are not at risk.
    warning: bool = False


def feed_finding(stats: QueueStats) -> Finding:
    """Check whether a queue's feed is near its limit."""
    good = stats.feed_share < FEED_WARNING
    return Finding(
        f"feed of {stats.queue}",
        good,
        f"{stats.feed_entries:,} entries, {stats.feed_share:.0%} of its limit",
        "" if good else "its reader is behind, and at the limit new jobs are refused; restore the ledger",
    )


T = TypeVar("T")


class ReadPort(EnginePart, Protocol):
    """Live state and controls, read-only."""

    async def get(self, queue: str, job_ids: Sequence[str]) -> list[JobInfo | None]:
        """Return the live state of each job; None for an unknown or expired one."""
        ...

    async def find(self, queue: str, states: Collection[State], limit: int) -> list[JobInfo]:
        """Return some jobs in these states, roughly newest first. For display, not for logic."""
        ...

    async def wait_final(self, queue: str, job_id: str, wait_ms: int) -> JobInfo | None:
        """Return the job once it is final, or as it is after `wait_ms`; None if unknown."""
        ...

    async def stats(self, queue: str) -> QueueStats:
        """Return counts of open jobs and the queue's controls."""
        ...

    async def get_control(self, queue: str) -> QueueControl:
        """Return the queue's controls."""
        ...

    async def workers(self, queues: Sequence[str]) -> list[WorkerInfo]:
        """Return the workers that claim from these queues, by name."""
        ...

    async def announced_tasks(self) -> list[AnnouncedTask]:
        """Return the tasks that workers have announced, by name; of each its schemas, the latest first."""
        ...

    async def queues(self) -> list[str]:
        """Return all queues that ever had a job, sorted."""
        ...

    async def queue_owners(self) -> dict[str, str]:
        """Return the tenant that owns each queue; queues that all tenants share have none."""
        ...

    async def for_each_queue(
        self, queues: Iterable[str], step: Callable[[str], Awaitable[T]], *, together: int = 1
    ) -> tuple[dict[str, T], dict[str, EngineUnavailable]]:
        """Run `step` for each queue; return results in order, and errors of queues without an answer.

        Up to `together` steps may run at a time, where that saves round trips.

        Queues may be on several servers, and one may be damaged. Raises if no queue answered.
        """
        return {queue: await step(queue) for queue in queues}, {}

    async def listen(self, queues: Sequence[str], wait_ms: int) -> list[Notice]:
        """Return the notices since the last call on this instance; wait up to `wait_ms` for the first."""
        ...

    async def now_ms(self) -> int:
        """Return the time of the engine's clock."""
        ...

    async def diagnose(self, queues: Sequence[str]) -> list[Finding]:
        """Check whether this store is safe for jobs; findings say what to do if it is not."""
        ...
