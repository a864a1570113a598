"""Restore jobs that the engine has lost: open jobs of the ledger that the engine does not know.

A wipe, a truncated AOF or a fail-over to a stale replica removes jobs from the engine; the ledger still has them. But a
job that the engine does not know may also have *ended*: its record expires, and its last event may not be in the ledger
yet. A plain comparison would run such jobs again. So a job is restored only on the evidence of a snapshot:

1. Read a page of open jobs from the ledger.
2. `snapshot`: in one atomic step, which of them the engine does not know, and the end of its feed. Whatever made a job
   unknown has happened by now: if it ended, its last event is in the feed, at or before the snapshot's position.
3. Wait until the ledger has the entry at that position (position *and* nonce; positions of two feeds cannot be
   compared). It then has every entry before it as well.
4. Note the ledger's position, and read the feed from there to its end: jobs with events there are skipped. Then read
   the others again from the ledger: still open, same state, same number of events = lost.
5. `restore` in the state of the job's history. The engine restores only jobs that are still unknown, and only while its
   feed still has the entry that was its end in step 4.

The races:

- *The job ends between 1 and 2, and its record has expired*: the end is at or before the snapshot; step 4 finds it.
- *Two reconcilers*: the first to restore makes the job known; the second's `restore` skips it. If the restored job has
  run, ended and expired meanwhile, it is unknown again: so snapshots are discarded at a tenth of the lifetime of
  finished records, long before a record made after the snapshot can expire.
- *The engine is wiped (again), or replaced by a stale replica, between 2 and 5*: the ledger's position is not in the
  new feed, or the end that was read is not; nothing is restored. If the projector has moved to the new feed by step 4,
  the entries of that feed after the position are read there: a snapshot of the old feed proves nothing about the new.
- *The projector trims the entry that step 5 needs*: nothing is restored; step 4 is repeated. (Requiring the snapshot's
  own entry would fail on every busy queue.)
- *The feed is empty* (wiped, and without events since): the projector may have read the end of a job before the wipe
  and not yet written it. It has written it, or never will, once it has detected the fork and started again: the
  position is empty then. `restore` requires a feed that is still empty.
- *The job moved on, although unknown* (its next events were not in the ledger yet): skipped; the next pass checks it.
- *A worker still runs the job from before the wipe*: its lease is gone, its settle is stale. The job runs again;
  effects happen once by their keys, and the ledger accepts one end.
- *The end of the job was in the feed when the feed was wiped*: no record of it remains. The job runs again (L4).
- *The ledger becomes unreachable in between*: nothing is written there; the pass ends and the next one starts over.
- *The job is created during the pass*: it is in the ledger only because the engine's feed had its event, so the engine
  has it.

Restoring writes `task.restored` to the feed, from the ledger's state to the same one (`running` → `queued`), so that
the ledger's history continues with a legal move. A job in `dlq_pending` is finished by the dead-letter confirmer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.core.job import MAX_BATCH, JobInfo, JobKey
from holdfast.core.rebuild import IncompleteHistory, rebuild_job
from holdfast.core.states import State
from holdfast.engine.port import Engine
from holdfast.engine.port.feed import EngineSnapshot, FeedEntry
from holdfast.errors import EngineUnavailable, LedgerUnavailable
from holdfast.ledger.reopen_intake import reopen_intake
from holdfast.upkeep.loop import run_forever

if TYPE_CHECKING:
    from holdfast.ledger.port.ledger import FeedPosition, Ledger, OpenJob, ProjectionReadPort


_log: Final = logging.getLogger("holdfast.reconciler")

#: A snapshot is discarded after this share of the lifetime of finished records.
_SNAPSHOT_SHARE: Final = 0.1
#: How long a page waits for the ledger to reach its snapshot; if the ledger is further behind, the next pass retries.
_REACH_S: Final = 30.0
#: Queues whose part of the engine did not answer are checked again after this.
_UNREACHABLE_S: Final = 30.0
#: Attempts to read the feed's end and use it before the projector trims it; the pause between them.
_TRIES: Final = 40
_PAUSE_MS: Final = 50
#: Feed entries read at a time, and the limit of reads: a projector that is further behind is waited for.
_PAGE: Final = 500
_PAGES: Final = 20
#: Histories read at a time: a job that waited during an outage has thousands of events.
_HISTORIES: Final = 100
#: Jobs that a report lists; it counts all.
_LISTED: Final = 1_000

# Why a job that seemed lost was skipped.
MOVED_ON: Final = "its next events were not in the ledger yet"
RESTORED_ELSEWHERE: Final = "another process restored it"
LEDGER_BEHIND: Final = "the ledger has not caught up with the feed; check that a worker or `holdfast upkeep` runs"
TOO_OLD: Final = "the comparison took too long; the next pass repeats it"
FEED_MOVED: Final = "the feed changed too often during the comparison; the next pass repeats it"
INCOMPLETE: Final = "its history in the ledger has no beginning"


class LostJob(msgspec.Struct, frozen=True):
    """A job that the engine had lost, and the state it is restored in."""

    key: JobKey
    task: str
    state: State
    attempt: int
    retry_count: int


class ReconcileReport(msgspec.Struct):
    """Result of one pass."""

    #: Open jobs of the ledger that were checked.
    checked: int = 0
    #: Jobs that the engine has lost.
    lost: int = 0
    #: Jobs that were restored.
    restored: int = 0
    #: Number of jobs skipped, by reason.
    skipped: dict[str, int] = msgspec.field(default_factory=dict)
    #: The lost jobs, up to a thousand.
    jobs: list[LostJob] = msgspec.field(default_factory=list)
    #: Queues that could not be checked because the engine did not answer for them, with the error.
    unreachable: dict[str, EngineUnavailable] = msgspec.field(default_factory=dict)

    def skip(self, reason: str, count: int) -> None:
        if count:
            self.skipped[reason] = self.skipped.get(reason, 0) + count


class Reconciler:
    """Restores lost jobs, at intervals or on request. Any number may run at once."""

    def __init__(
        self,
        engine: Engine,
        ledger: Ledger,
        queues: Sequence[str] = (),
        *,
        interval_s: float = 300.0,
        reach_s: float = _REACH_S,
        random: Random | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """No `queues`: all that the ledger or the engine has."""
        self._engine = engine
        self._ledger = ledger
        self._queues = tuple(queues)
        self._interval_s = interval_s
        self._reach_s = reach_s
        self._random = random or Random()
        self._monotonic = monotonic
        self._snapshot_ttl_s = _SNAPSHOT_SHARE * engine.options.finished_ttl_ms / 1000
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        """Run a pass now, then one per interval or when woken, until cancelled. An interval of 0 disables it."""
        if self._ledger.projection is not None and self._interval_s > 0:
            await run_forever("reconciler", self._run_once, self._wake)

    def wake(self, queue: str = "") -> None:
        """Start a pass now, because a feed has forked. May be called from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._wake.set)
        except RuntimeError:
            _log.debug("woken after its event loop was closed")

    async def reconcile(self, *, dry_run: bool = False) -> ReconcileReport:
        """Run one pass over all queues. Can be repeated.

        Raises `LedgerUnavailable`, or `EngineUnavailable` if no queue could be checked; restored jobs stay restored.
        """
        report = ReconcileReport()
        projection = self._ledger.projection
        if projection is None:
            # Engine and ledger are one file: neither can lose what the other has.
            return report

        async def check(queue: str) -> None:
            async for page in self._ledger.recovery.open_jobs(queue, MAX_BATCH):
                await self._compare(projection, queue, page, report, dry_run)
                report.checked += len(page)

        _, report.unreachable = await self._engine.for_each_queue(await self._names(), check)
        return report

    async def _run_once(self) -> float:
        self._wake.clear()
        try:
            report = await self.reconcile()
        except LedgerUnavailable as exc:
            _log.info("ledger unreachable, reconciling later: %s", exc)
        else:
            if report.lost or report.skipped:
                _log.warning(
                    "engine lost %d of %d open jobs, restored %d; skipped: %s",
                    report.lost,
                    report.checked,
                    report.restored,
                    report.skipped or "none",
                )
            if report.unreachable:
                return min(_UNREACHABLE_S, self._interval_s) * self._random.uniform(0.8, 1.2)
        return self._interval_s * self._random.uniform(0.8, 1.2)

    async def _names(self) -> list[str]:
        if self._queues:
            return list(self._queues)
        names = set(await self._ledger.recovery.queues())
        try:
            names.update(await self._engine.queues())
        except EngineUnavailable:
            # On a Cluster another node may have the list; the queues that the ledger has can be checked without it.
            if not names:
                raise
        return sorted(names)

    # One page --------------------------------------------------------------------------------------

    async def _compare(
        self,
        projection: ProjectionReadPort,
        queue: str,
        page: Sequence[OpenJob],
        report: ReconcileReport,
        dry_run: bool,
    ) -> None:
        began = self._monotonic()
        snapshot = await self._take_snapshot(queue, page)
        unknown = set(snapshot.unknown)
        suspects = {job.key: job for job in page if job.key.job_id in unknown}
        if not suspects:
            return
        if not await self._wait_reached(projection, queue, snapshot, began):
            report.skip(LEDGER_BEHIND, len(suspects))
            return
        lost = await self._still_lost(suspects)
        report.skip(MOVED_ON, len(suspects) - len(lost))
        views = await self._views(queue, list(lost), report)
        report.lost += len(views)
        report.jobs += [_lost_job(key, view) for key, view in views.items()][: _LISTED - len(report.jobs)]
        if views and not dry_run:
            await self._restore(projection, queue, snapshot, suspects, views, began, report)

    async def _take_snapshot(self, queue: str, page: Sequence[OpenJob]) -> EngineSnapshot:
        return await self._engine.snapshot(queue, [job.key.job_id for job in page])

    async def _wait_reached(
        self, projection: ProjectionReadPort, queue: str, snapshot: EngineSnapshot, began: float
    ) -> bool:
        """Wait until the ledger has everything up to the snapshot; returns whether it has."""
        deadline = began + min(self._reach_s, self._snapshot_ttl_s)
        while True:
            position = await projection.position(queue)
            if await _has(projection, queue, snapshot, position):
                return True
            left_s = deadline - self._monotonic()
            if left_s <= 0:
                return False
            await projection.wait_position_change(queue, position, max(1, round(left_s * 1000)))

    async def _still_lost(self, suspects: dict[JobKey, OpenJob]) -> set[JobKey]:
        """Jobs that the ledger still has exactly as before the snapshot."""
        now = await self._ledger.recovery.still_open(list(suspects))
        return {job.key for job in now if job == suspects[job.key]}

    async def _views(self, queue: str, keys: Sequence[JobKey], report: ReconcileReport) -> dict[JobKey, JobInfo]:
        views: dict[JobKey, JobInfo] = {}
        for start in range(0, len(keys), _HISTORIES):
            histories = await self._ledger.recovery.histories(keys[start : start + _HISTORIES])
            for key, events in histories.items():
                try:
                    views[key] = rebuild_job(queue, events)
                except IncompleteHistory as exc:
                    _log.error("cannot restore job %s of queue %s: %s", key.job_id, queue, exc)
                    report.skip(INCOMPLETE, 1)
        return views

    async def _restore(
        self,
        projection: ProjectionReadPort,
        queue: str,
        snapshot: EngineSnapshot,
        suspects: dict[JobKey, OpenJob],
        views: dict[JobKey, JobInfo],
        began: float,
        report: ReconcileReport,
    ) -> None:
        if not snapshot.position:
            # Wiped, no submission since: restore its keys and attach a reader, so that nothing unread is dropped.
            await reopen_intake(self._engine, self._ledger, queue, insist=True)
        left = dict(views)
        for _ in range(_TRIES):
            # In this order: the ledger's rows of the jobs are not older than the position noted here.
            position = await projection.position(queue)
            rest = await self._read_rest(queue, position)
            if rest is not None:
                end, touched = rest
                still = await self._still_lost({key: suspects[key] for key in left if key.job_id not in touched})
                report.skip(MOVED_ON, len(left) - len(still))
                left = {key: view for key, view in left.items() if key in still}
                if self._monotonic() - began > self._snapshot_ttl_s:
                    report.skip(TOO_OLD, len(left))
                    return
                left = await self._restore_batch(queue, end, left, report)
            if not left:
                return
            # Trimmed, forked or too far behind: in each case the projector will move the position.
            await projection.wait_position_change(queue, position, _PAUSE_MS)
        report.skip(FEED_MOVED, len(left))

    async def _read_rest(self, queue: str, position: FeedPosition) -> tuple[EngineSnapshot, set[str]] | None:
        """The feed's end, and the jobs with events after the ledger's position.

        None if the position is not in this feed, or too far behind its end.
        """
        touched = set[str]()
        start, nonce = position.position, position.nonce
        for _ in range(_PAGES):
            entries = await self._engine.read_feed(queue, start, _PAGE)
            if start:
                if not entries or (entries[0].position, entries[0].nonce) != (start, nonce):
                    return None
                # Already read: by the ledger, or on the previous page.
                del entries[0]
            touched.update(event.job_id for entry in entries for event in entry.events)
            if entries:
                start, nonce = entries[-1].position, entries[-1].nonce
            if len(entries) < _PAGE - 1:
                return EngineSnapshot([], start, nonce, 0), touched
        return None

    async def _restore_batch(
        self, queue: str, end: EngineSnapshot, left: dict[JobKey, JobInfo], report: ReconcileReport
    ) -> dict[JobKey, JobInfo]:
        """Restore jobs; returns those that the engine still does not know."""
        if not left:
            return left
        answers = await self._engine.restore(queue, end, list(left.values()))
        report.restored += sum(answers)
        left = {key: view for (key, view), done in zip(left.items(), answers, strict=True) if not done}
        return await self._without_known(queue, left, report)

    async def _without_known(
        self, queue: str, left: dict[JobKey, JobInfo], report: ReconcileReport
    ) -> dict[JobKey, JobInfo]:
        if not left:
            return left
        unknown = set((await self._engine.snapshot(queue, [key.job_id for key in left])).unknown)
        report.skip(RESTORED_ELSEWHERE, sum(key.job_id not in unknown for key in left))
        return {key: view for key, view in left.items() if key.job_id in unknown}


async def _has(projection: ProjectionReadPort, queue: str, snapshot: EngineSnapshot, position: FeedPosition) -> bool:
    if (position.position, position.nonce) == (snapshot.position, snapshot.nonce):
        return True
    if not snapshot.position:
        return False
    return bool(await projection.already_written(queue, [FeedEntry(snapshot.position, snapshot.nonce, [])]))


def _lost_job(key: JobKey, view: JobInfo) -> LostJob:
    state = State.QUEUED if view.state is State.RUNNING else view.state
    return LostJob(key, view.task, state, view.attempt, view.meta.retry_count)
