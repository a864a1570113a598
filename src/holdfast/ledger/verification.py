"""Compare engine and ledger before the jobs of a queue are claimed in a new epoch of the engine.

A restart or a fail-over begins a new epoch, and the engine may have gone back in time: Redis was restored from an
older snapshot, or a stale replica took over. It would run jobs again that the ledger knows as ended. So the gate of a
queue is closed in a new epoch, until any process has verified the queue:

1. The ledger refuses batches of earlier epochs from now on, and says how far it has read the feed.
2. If the feed has that entry, nothing went back: moves and feed entries are written in one step, and every replica and
   snapshot has a prefix of the steps.
3. Otherwise every open job of the engine is compared. Jobs that ended in the ledger end in the engine with the ledger's
   outcome, and open ones get the ledger's state: no job moved since, so the ledger is ahead of each that differs.
4. The gate opens. Jobs that only the ledger has are restored by the reconciler.

Any number of processes may do this at once: once the gate is open, the engine refuses corrections.

If the ledger does not answer (requirement L3), a projector that knows how far the feed was read opens the gate
(`vouch`) if the feed still has that entry; otherwise it opens after a while, or stays closed (`on_unverified_epoch`). A
queue that was opened without the ledger is verified when the ledger answers: jobs that ended in it are then ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.core.job import MAX_BATCH, JobInfo, JobKey
from holdfast.core.rebuild import IncompleteHistory, rebuild_job
from holdfast.core.retry import Backoff
from holdfast.core.states import FINAL, State
from holdfast.engine.port import Engine
from holdfast.engine.port.verification import JobName
from holdfast.errors import HoldfastError, Unavailable
from holdfast.ledger.reopen_intake import has_what_was_read, is_in_feed

if TYPE_CHECKING:
    from holdfast.ledger.port.ledger import FeedPosition, Ledger, Projection


_log: Final = logging.getLogger("holdfast.ledger")

#: How long claims wait for a ledger that does not answer.
OPENS_AFTER_S: Final = 60.0
#: Verifications that another one has overtaken, before the call fails.
_TRIES: Final = 20


class Verifier:
    """Verifies queues of one engine. Serves one event loop."""

    def __init__(self, engine: Engine, ledger: Ledger, opens_after_s: float | None = OPENS_AFTER_S) -> None:
        """`opens_after_s`: how long to wait for a ledger that does not answer; None: until it does."""
        assert ledger.projection is not None
        self._engine = engine
        self._ledger = ledger
        self._projection: Projection = ledger.projection
        self._opens_after_s = opens_after_s
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def request(self, queue: str) -> asyncio.Task[None]:
        """Verify the queue in the background, unless that is under way; return the task."""
        task = self._tasks.get(queue)
        if task is None:
            task = asyncio.create_task(self._verify_with_retries(queue), name="holdfast-verification")
            self._tasks[queue] = task
            task.add_done_callback(lambda _: self._tasks.pop(queue, None))
        return task

    async def ensure(self, queue: str) -> str:
        """Verify the queue in the present epoch, unless it is verified; return the epoch.

        Raises `Unavailable` if a store does not answer; nothing is opened then.
        """
        for _ in range(_TRIES):
            known = await self._projection.engine_epoch(queue)
            gate = await self._engine.gate(queue)
            if gate.is_open and not gate.unverified_since_ms and known == gate.epoch:
                return gate.epoch
            position = await self._projection.begin_epoch(queue, gate.epoch, known)
            if position is not None and await self._compare(queue, gate.epoch, position):
                return gate.epoch
        raise Unavailable(f"engine or ledger changed too often during the verification of queue {queue!r}; retry")

    async def vouch(self, queue: str, position: FeedPosition) -> bool:
        """Open the gate without the ledger, if the feed has the entry that the ledger certainly read last."""
        gate = await self._engine.gate(queue)
        if gate.is_open:
            return True
        if position.position and not await is_in_feed(self._engine, queue, position):
            return False
        return await self._engine.open_gate(queue, gate.epoch, verified=False)

    async def close(self) -> None:
        """Cancel all verifications."""
        for task in (tasks := list(self._tasks.values())):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Private ---------------------------------------------------------------------------------------

    async def _verify_with_retries(self, queue: str) -> None:
        backoff, began = Backoff(), time.monotonic()
        while True:
            try:
                await self.ensure(queue)
                return
            except HoldfastError as exc:
                # A ledger without tables, or of another namespace, counts as down.
                reason = exc
            except Exception:  # noqa: BLE001 - top of a task
                _log.exception("verifying queue %s failed unexpectedly", queue)
                return
            limit_s = self._opens_after_s
            is_over = limit_s is not None and time.monotonic() - began >= limit_s
            try:
                if await self._is_open(queue, reason, opens=is_over):
                    return
            except Unavailable as exc:
                _log.debug("cannot open queue %s either: %s", queue, exc)
            _log.info("cannot compare engine and ledger, the jobs of queue %s wait: %s", queue, reason)
            await asyncio.sleep(backoff.next_s())

    async def _is_open(self, queue: str, reason: HoldfastError, *, opens: bool) -> bool:
        """Whether the gate is open, since another process may have opened it; `opens`: open it without the ledger."""
        gate = await self._engine.gate(queue)
        if gate.is_open or not opens:
            return gate.is_open
        opened = await self._engine.open_gate(queue, gate.epoch, verified=False)
        if opened:
            _log.error(
                "the jobs of queue %s run although engine and ledger could not be compared for %g s; if the engine was "
                "restored from an older state, jobs that had ended may run again: %s",
                queue,
                self._opens_after_s,
                reason,
            )
        return opened

    async def _compare(self, queue: str, epoch: str, position: FeedPosition) -> bool:
        """Correct the engine if it went back, and open the gate; False if another verification was faster."""
        went_back = bool(position.position) and not await has_what_was_read(self._engine, self._projection, queue)
        if went_back:
            corrected = await self._correct(queue, epoch)
            if corrected is None:
                return False
            ended, moved = corrected
            _log.error(
                "the engine went back in time: the feed of queue %s does not have entry %s, the last one the ledger "
                "read; %d jobs that had ended were ended again with the ledger's outcome, %d were moved to its state",
                queue,
                position.position,
                ended,
                moved,
            )
        return await self._engine.open_gate(queue, epoch, corrected=went_back)

    async def _correct(self, queue: str, epoch: str) -> tuple[int, int] | None:
        """Correct all open jobs of the engine; return how many ended and how many moved, None if it is too late."""
        ended = moved = 0
        cursor, corrected = "", set[str]()
        while True:
            names, cursor = await self._engine.job_names(queue, cursor, MAX_BATCH)
            for start in range(0, len(names), MAX_BATCH):
                # One that became ready is at the end of its stream, where it is found again.
                fresh = [name for name in names[start : start + MAX_BATCH] if name.job_id not in corrected]
                jobs = await self._differing(queue, fresh)
                corrected.update(job.job_id for job in jobs)
                done = await self._engine.correct(queue, epoch, jobs) if jobs else []
                if done is None:
                    return None
                written = [job for job, was in zip(jobs, done, strict=True) if was]
                self._engine.counters.corrected += len(written)
                ended += sum(job.state in FINAL for job in written)
                moved += sum(job.state not in FINAL for job in written)
            if not cursor:
                return ended, moved

    async def _differing(self, queue: str, names: Sequence[JobName]) -> list[JobInfo]:
        """Those of the jobs that the ledger has in another state than the engine, as the ledger has them."""
        keys = {JobKey(name.tenant_id, queue, name.job_id): name.job_id for name in names}
        recorded = await self._ledger.recovery.recorded(list(keys))
        if not recorded:
            return []
        ids = [keys[key] for key in recorded]
        present = dict(zip(recorded, await self._engine.get(queue, ids), strict=True))
        suspects = [
            key
            for key, known in recorded.items()
            if _knows_better(known.state, known.attempt, known.retry_count, present[key])
        ]
        histories = await self._ledger.recovery.histories(suspects) if suspects else {}
        differing: list[JobInfo] = []
        for key, events in histories.items():
            try:
                job = rebuild_job(queue, events)
            except IncompleteHistory as exc:
                _log.error("cannot compare job %s of queue %s: %s", key.job_id, queue, exc)
                continue
            if _knows_better(job.state, job.attempt, job.meta.retry_count, present[key]):
                result = recorded[key].result
                differing.append(job if result is None else msgspec.structs.replace(job, result=result.encode()))
        return differing


def _knows_better(state: State, attempt: int, retry_count: int, job: JobInfo | None) -> bool:
    """Whether the ledger, with these values, is ahead of the engine, which has the job like this."""
    if job is None or state in FINAL:
        return True
    if attempt < job.attempt:
        # The ledger itself is behind.
        return False
    # A job whose lease is lost is ready again.
    is_same = job.state is state or (job.state is State.QUEUED and state is State.RUNNING)
    return not is_same or (attempt, retry_count) != (job.attempt, job.meta.retry_count)
