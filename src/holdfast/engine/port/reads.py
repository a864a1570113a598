"""`ReadPort`: live state, notices and findings; nothing here changes a job."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import Final, Protocol, TypeVar

import msgspec

from holdfast.core.job import JobInfo
from holdfast.core.states import State
from holdfast.engine.port.operators import QueueControl
from holdfast.errors import EngineUnavailable

#: A feed that is this full is worth a warning.
FEED_WARNING: Final = 0.8


class CancelledNotice(msgspec.Struct, frozen=True):
    """A running job was taken from its worker by `move`: stop it, its lease is gone."""

    queue: str
    job_id: str


class DueNotice(msgspec.Struct, frozen=True):
    """A job waits that is due earlier than all others."""

    queue: str
    at_ms: int


class ControlNotice(msgspec.Struct, frozen=True):
    """An operator changed a queue's controls; read them with `control`."""

    queue: str


Notice = CancelledNotice | DueNotice | ControlNotice


class QueueStats(msgspec.Struct, frozen=True, kw_only=True):
    """A queue at one moment. `states` counts open jobs; `delayed` is the part of `queued` that is not due yet."""

    queue: str
    states: dict[State, int]
    delayed: int
    control: QueueControl
    workers: int
    feed_entries: int
    #: How full the feed is, from 0 to 1; 0 without a reader, when it is bounded by itself.
    feed_share: float = 0.0
    dead_letters: int
    #: Jobs in line or running: what intake limits and backlog alerts are about.
    backlog: int = 0
    #: Leases that are held, and retries in the pending list.
    pending: int = 0
    #: The same by tenant, as far as the engine keeps tenants apart; for those who may see all of them.
    tenants: dict[str, int] = {}


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that claims from a queue, as the engine last saw it."""

    worker: str
    queue: str
    seen_at_ms: int
    #: Leases that it holds.
    pending: int


class Finding(msgspec.Struct, frozen=True):
    """One line of `holdfast doctor`."""

    check: str
    ok: bool
    message: str
    advice: str = ""
    #: A finding that is not ok but does not endanger jobs.
    warning: bool = False


def feed_finding(stats: QueueStats) -> Finding:
    """Whether a queue's feed has room left."""
    good = stats.feed_share < FEED_WARNING
    return Finding(
        f"feed of {stats.queue}",
        good,
        f"{stats.feed_entries:,} entries, {stats.feed_share:.0%} of its limit",
        "" if good else "its reader is behind: at the limit new jobs are refused; bring the ledger back",
    )


T = TypeVar("T")


class ReadPort(Protocol):
    """Live state, read only."""

    async def get(self, queue: str, job_ids: Sequence[str]) -> list[JobInfo | None]:
        """Live state, one answer each; None for unknown or expired ones."""
        ...

    async def find(self, queue: str, states: Collection[State], limit: int) -> list[JobInfo]:
        """Some jobs in these states, newest first as far as the store can tell. For people, not for logic."""
        ...

    async def wait_final(self, queue: str, job_id: str, wait_ms: int) -> JobInfo | None:
        """The job once it is final, or as it is after `wait_ms`; None if unknown."""
        ...

    async def stats(self, queue: str) -> QueueStats:
        """Counts of open jobs and the queue's controls."""
        ...

    async def workers(self, queues: Sequence[str]) -> list[WorkerInfo]:
        """Workers that claim from these queues, by name."""
        ...

    async def queues(self) -> list[str]:
        """Queues that ever had a job, sorted."""
        ...

    async def for_each_queue(
        self, queues: Iterable[str], step: Callable[[str], Awaitable[T]]
    ) -> tuple[dict[str, T], dict[str, EngineUnavailable]]:
        """Take a step for each queue, in order: what came of it, and which of them did not answer while others did, and
        why: queues may be on several servers, and one may be damaged. Raises if none did."""
        return {queue: await step(queue) for queue in queues}, {}

    async def listen(self, queues: Sequence[str], wait_ms: int) -> list[Notice]:
        """What happened since the last call on this instance; waits up to `wait_ms` for the first."""
        ...

    async def now_ms(self) -> int:
        """The engine's clock."""
        ...

    async def diagnose(self, queues: Sequence[str]) -> list[Finding]:
        """Whether this store can be trusted with jobs, and what to do if not."""
        ...
