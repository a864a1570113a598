"""Puts back what the engine has lost: open jobs of the ledger that the engine no longer knows.

A wipe, a cut AOF or a fail-over to a stale replica takes jobs out of the engine's memory; the ledger still has them.
But a job that the engine does not know may just as well have *ended*: its record expires, and its end may still be on
its way to the ledger. Comparing the two as they are would run such jobs again. So nothing is restored except on a
cut:

1. Read a page of open jobs from the ledger.
2. `survey`: in one atomic step, which of them the engine does not know, and the end of its feed (the cut). Whatever
   made a job unknown has happened by now: if it ended, its last event is in the feed, at or before the cut.
3. Wait until the ledger has the cut's own entry (position *and* nonce; positions of two feeds cannot be compared).
   Now it has everything before it, too.
4. Note the ledger's position, and read what the feed has after it, to its end: jobs that are spoken of there are left
   alone. Then read the others once more from the ledger: still open, same state, same number of events = lost.
5. `restore` in the state that the story tells; the engine does so only for jobs that are still unknown, and only
   while its feed still has the entry that was its end in step 4.

The races, one by one:

- *The job ends between 1 and 2, and its record has expired*: the end is at or before the cut; 4 sees it.
- *Two reconcilers*: the first to restore makes the job known; the second's `restore` passes it over. If the restored
  job has run, ended and expired meanwhile, it is unknown once more: so cuts are thrown away at a tenth of the
  lifetime of finished records, long before a record made after the cut can expire.
- *The engine is wiped (again), or replaced by a stale replica, between 2 and 5*: the ledger's position is not in the
  new feed, or the end that was read is not; nothing is restored. If the projector has gone over to the new feed by
  step 4, what that feed has beyond the position is read there: the cut of the old one proves nothing about it.
- *The projector is faster than we are and trims what we hold on to*: nothing is restored; step 4 is repeated. (To
  hold on to the cut's own entry would fail on every busy queue.)
- *The feed is empty* (just wiped, and nothing has happened since): then there is nothing to wait for but the
  projector, which may have read the end of a job before the wipe and not yet written it. It has, or never will, once
  it has seen that its feed is gone and begun again: the position is empty then. `restore` asks for a feed that is
  still empty.
- *The job moved on, although unknown* (its next events were on their way): skipped; the next pass looks at it afresh.
- *A worker still runs the job from before the wipe*: its lease is gone, its settle is stale. The job runs again;
  effects are once-only by their keys, and the ledger takes one end.
- *The end of the job was in the feed when the feed was wiped*: nobody knows of it any more. The job runs again (L4).
- *The ledger goes down in between*: nothing is written there; the pass ends and the next one begins anew.
- *The job is created while we look*: it is in the ledger only because the engine's feed told of it, so the engine has
  it.

Restoring leaves `task.restored` in the feed, from the ledger's state to the same one (`running` → `queued`), so that
the ledger's story goes on legally. A job in `dlq_pending` is moved on by whoever keeps the dead letters.
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
from holdfast.ledger.intake_recovery import reopen_intake
from holdfast.upkeep.loop import run_forever

if TYPE_CHECKING:
    from holdfast.ledger.port.ledger import FeedPosition, Ledger, OpenJob, Projection


_log: Final = logging.getLogger("holdfast.reconciler")

#: A cut is worth nothing after this share of the lifetime of finished records.
_CUT_SHARE: Final = 0.1
#: How long a page waits for the ledger to reach its cut; a ledger that is further behind is for the next pass.
_REACH_S: Final = 30.0
#: Queues whose part of the engine did not answer are looked at again after this.
_AWAY_S: Final = 30.0
#: Tries to find the feed's end and to use it before the projector has trimmed it; the pause between them.
_TRIES: Final = 40
_PAUSE_MS: Final = 50
#: Feed entries read at a time, and how many times at most: a projector that is further behind is waited for.
_PAGE: Final = 500
_PAGES: Final = 20
#: Stories read at a time: a job that has waited out an outage has thousands of events.
_STORIES: Final = 100
#: Jobs that a report names; it counts all.
_NAMED: Final = 1_000

# Why a job that looked lost was left alone.
MOVED_ON: Final = "its next events were on their way to the ledger"
RESTORED_ELSEWHERE: Final = "somebody else put it back"
LEDGER_BEHIND: Final = "the ledger has not caught up with the feed; is a worker or `holdfast upkeep` running?"
TOO_OLD: Final = "it took too long to find out; the next pass looks again"
FEED_MOVED: Final = "the feed changed faster than it could be compared; the next pass looks again"
INCOMPLETE: Final = "its story in the ledger has no beginning"


class LostJob(msgspec.Struct, frozen=True):
    """A job that the engine had lost, and where it is put back."""

    key: JobKey
    task: str
    state: State
    attempt: int
    retry_count: int


class ReconcileReport(msgspec.Struct):
    """What a pass found and did."""

    #: Open jobs of the ledger that were looked at.
    checked: int = 0
    #: Those that the engine has lost.
    lost: int = 0
    #: Those that were put back.
    restored: int = 0
    #: Those that were left alone, by reason.
    skipped: dict[str, int] = msgspec.field(default_factory=dict)
    #: The lost ones by name, up to a thousand.
    jobs: list[LostJob] = msgspec.field(default_factory=list)
    #: Queues that could not be looked at, because the engine did not answer for them, and why.
    away: dict[str, EngineUnavailable] = msgspec.field(default_factory=dict)

    def skip(self, reason: str, count: int) -> None:
        if count:
            self.skipped[reason] = self.skipped.get(reason, 0) + count


class Reconciler:
    """Compares the two and restores, now and then or when asked. Any number may run at once."""

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
        """Without queues named: all that the ledger or the engine has heard of."""
        self._engine = engine
        self._ledger = ledger
        self._queues = tuple(queues)
        self._interval_s = interval_s
        self._reach_s = reach_s
        self._random = random or Random()
        self._monotonic = monotonic
        self._cut_s = _CUT_SHARE * engine.options.finished_ttl_ms / 1000
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        """A pass at once, then one every interval, or when woken; until cancelled. Without an interval, never."""
        if self._ledger.projection is not None and self._interval_s > 0:
            await run_forever("reconciler", self._turn, self._wake)

    def wake(self, queue: str = "") -> None:
        """The feed of a queue has forked: look now. May be called from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._wake.set)
        except RuntimeError:
            _log.debug("woken after its event loop has ended")

    async def reconcile(self, *, dry_run: bool = False) -> ReconcileReport:
        """One pass over all queues. Raises `LedgerUnavailable`, or `EngineUnavailable` if no queue could be looked at;
        what was restored stays."""
        report = ReconcileReport()
        projection = self._ledger.projection
        if projection is None:
            # Engine and ledger are one file: neither can lose what the other has.
            return report

        async def look(queue: str) -> None:
            async for page in self._ledger.recovery.open_jobs(queue, MAX_BATCH):
                await self._compare(projection, queue, page, report, dry_run)
                report.checked += len(page)

        _, report.away = await self._engine.for_each_queue(await self._names(), look)
        return report

    async def _turn(self) -> float:
        self._wake.clear()
        try:
            report = await self.reconcile()
        except LedgerUnavailable as exc:
            _log.info("the ledger does not answer, reconciling later: %s", exc)
        else:
            if report.lost or report.skipped:
                _log.warning(
                    "%d of %d open jobs were lost by the engine, %d are put back; left alone: %s",
                    report.lost,
                    report.checked,
                    report.restored,
                    report.skipped or "none",
                )
            if report.away:
                return min(_AWAY_S, self._interval_s) * self._random.uniform(0.8, 1.2)
        return self._interval_s * self._random.uniform(0.8, 1.2)

    async def _names(self) -> list[str]:
        if self._queues:
            return list(self._queues)
        names = set(await self._ledger.recovery.queues())
        try:
            names.update(await self._engine.queues())
        except EngineUnavailable:
            # On a Cluster the list is on a node of its own: those that the ledger has heard of can do without it.
            if not names:
                raise
        return sorted(names)

    # One page --------------------------------------------------------------------------------------

    async def _compare(
        self, projection: Projection, queue: str, page: Sequence[OpenJob], report: ReconcileReport, dry_run: bool
    ) -> None:
        began = self._monotonic()
        cut = await self._survey(queue, page)
        unknown = set(cut.unknown)
        suspects = {job.key: job for job in page if job.key.job_id in unknown}
        if not suspects:
            return
        if not await self._reached(projection, queue, cut, began):
            report.skip(LEDGER_BEHIND, len(suspects))
            return
        lost = await self._still_lost(suspects)
        report.skip(MOVED_ON, len(suspects) - len(lost))
        views = await self._views(queue, list(lost), report)
        report.lost += len(views)
        report.jobs += [_named(key, view) for key, view in views.items()][: _NAMED - len(report.jobs)]
        if views and not dry_run:
            await self._restore(projection, queue, cut, suspects, views, began, report)

    async def _survey(self, queue: str, page: Sequence[OpenJob]) -> EngineSnapshot:
        return await self._engine.snapshot(queue, [job.key.job_id for job in page])

    async def _reached(self, projection: Projection, queue: str, cut: EngineSnapshot, began: float) -> bool:
        """Wait until the ledger has everything up to the cut."""
        deadline = began + min(self._reach_s, self._cut_s)
        while True:
            position = await projection.position(queue)
            if await _has(projection, queue, cut, position):
                return True
            left_s = deadline - self._monotonic()
            if left_s <= 0:
                return False
            await projection.wait_position_change(queue, position, max(1, round(left_s * 1000)))

    async def _still_lost(self, suspects: dict[JobKey, OpenJob]) -> set[JobKey]:
        """Those that the ledger still has as it had them before the cut."""
        now = await self._ledger.recovery.still_open(list(suspects))
        return {job.key for job in now if job == suspects[job.key]}

    async def _views(self, queue: str, keys: Sequence[JobKey], report: ReconcileReport) -> dict[JobKey, JobInfo]:
        views: dict[JobKey, JobInfo] = {}
        for start in range(0, len(keys), _STORIES):
            stories = await self._ledger.recovery.histories(keys[start : start + _STORIES])
            for key, events in stories.items():
                try:
                    views[key] = rebuild_job(queue, events)
                except IncompleteHistory as exc:
                    _log.error("job %s of queue %s cannot be put back: %s", key.job_id, queue, exc)
                    report.skip(INCOMPLETE, 1)
        return views

    async def _restore(
        self,
        projection: Projection,
        queue: str,
        cut: EngineSnapshot,
        suspects: dict[JobKey, OpenJob],
        views: dict[JobKey, JobInfo],
        began: float,
        report: ReconcileReport,
    ) -> None:
        if not cut.position:
            # Wiped, and nobody has submitted since: its keys first, and a reader, so that nothing unread is dropped.
            await reopen_intake(self._engine, self._ledger, queue, insist=True)
        left = dict(views)
        for _ in range(_TRIES):
            # In this order: what the ledger says of the jobs is no older than the position that we noted.
            position = await projection.position(queue)
            rest = await self._rest(queue, position)
            if rest is not None:
                end, touched = rest
                still = await self._still_lost({key: suspects[key] for key in left if key.job_id not in touched})
                report.skip(MOVED_ON, len(left) - len(still))
                left = {key: view for key, view in left.items() if key in still}
                if self._monotonic() - began > self._cut_s:
                    report.skip(TOO_OLD, len(left))
                    return
                left = await self._put_back(queue, end, left, report)
            if not left:
                return
            # Trimmed, forked or too far behind: in each case the projector will move.
            await projection.wait_position_change(queue, position, _PAUSE_MS)
        report.skip(FEED_MOVED, len(left))

    async def _rest(self, queue: str, position: FeedPosition) -> tuple[EngineSnapshot, set[str]] | None:
        """The feed's end, and the jobs spoken of after the ledger's position; None if that is not in this feed."""
        touched = set[str]()
        start, nonce = position.position, position.nonce
        for _ in range(_PAGES):
            entries = await self._engine.read_feed(queue, start, _PAGE)
            if start:
                if not entries or (entries[0].position, entries[0].nonce) != (start, nonce):
                    return None
                # Seen before: by the ledger, or on the last page.
                del entries[0]
            touched.update(event.job_id for entry in entries for event in entry.events)
            if entries:
                start, nonce = entries[-1].position, entries[-1].nonce
            if len(entries) < _PAGE - 1:
                return EngineSnapshot([], start, nonce, 0), touched
        return None

    async def _put_back(
        self, queue: str, end: EngineSnapshot, left: dict[JobKey, JobInfo], report: ReconcileReport
    ) -> dict[JobKey, JobInfo]:
        """Those that were not, although the engine does not know them."""
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


async def _has(projection: Projection, queue: str, cut: EngineSnapshot, position: FeedPosition) -> bool:
    if (position.position, position.nonce) == (cut.position, cut.nonce):
        return True
    if not cut.position:
        return False
    return bool(await projection.already_written(queue, [FeedEntry(cut.position, cut.nonce, [])]))


def _named(key: JobKey, view: JobInfo) -> LostJob:
    state = State.QUEUED if view.state is State.RUNNING else view.state
    return LostJob(key, view.task, state, view.attempt, view.meta.retry_count)
