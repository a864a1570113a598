"""`SqliteEngine`: the engine port on one SQLite file.

Each call is split into steps (one queue, at most `MAX_BATCH` jobs). A step is a function of this package that runs in
the writer's transaction; its result returns to this event loop after the commit. Waiting calls do not poll: the writer
wakes them after a commit with new work, in this process or in another.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from os import PathLike, fspath
from typing import Final, TypeVar, cast

from holdfast.clock import Clock, SystemClock
from holdfast.core.announcement import AnnouncedTask
from holdfast.core.job import MAX_BATCH, Approval, Claim, Envelope, JobInfo, Lease, Receipt
from holdfast.core.states import State
from holdfast.core.verdict import Release, Settlement, SettleResult
from holdfast.engine.outage_watch import LOST_IN_OUTAGE, OutageWatch
from holdfast.engine.port import Engine
from holdfast.engine.port.feed import EngineSnapshot, FeedEntry, SubmissionKey
from holdfast.engine.port.jobs import EngineOptions, JobRefused, LeaseFilter, Promotion
from holdfast.engine.port.operators import QueueControl, check_control
from holdfast.engine.port.reads import QueueGate
from holdfast.engine.port.verification import JobName
from holdfast.engine.port.worker_ids import WorkerIdStatus, WorkerStart
from holdfast.engine.sqlite import claims, feed, intake, operators, upkeep, worker_ids
from holdfast.engine.sqlite import settlement as settling
from holdfast.engine.sqlite.reads import SqliteReads
from holdfast.engine.sqlite.rows import INSTANT
from holdfast.engine.sqlite.store import EngineContext, SqliteEngineStore, gather_all, restore_order, split_batches
from holdfast.errors import IntakeLimited, IntakeRefused, TransitionInvalid
from holdfast.observe.counters import Counters, count_settlements
from holdfast.sqlite.connection import DatabaseFile
from holdfast.sqlite.transaction import Transaction

T = TypeVar("T")

#: How often to read the engine's clock while a job is about to fall due: it may be a test's clock.
_TICK_S: Final = 0.05


class SqliteEngine(SqliteReads, Engine):
    """The engine on one SQLite file. `":memory:"` is a temporary file, deleted with the engine."""

    def __init__(
        self, path: str | PathLike[str], options: EngineOptions, clock: Clock | None = None, stream_dlq: bool = True
    ) -> None:
        self._set_up(DatabaseFile(fspath(path)), _context(options, clock, stream_dlq))

    def _set_up(self, file: DatabaseFile, policy: EngineContext) -> None:
        self.options = policy.options
        self.counters = Counters()
        self._policy = policy
        self._store = SqliteEngineStore(file, policy.watch)
        self._claim_count = 0
        #: When a worker was last registered in a queue.
        self._registered_at: dict[tuple[str, str], int] = {}
        self._last_notices = {}
        self._first_notice = 0

    # Opening and closing ---------------------------------------------------------------------------

    async def open(self) -> None:
        if self._store.is_open:
            return
        await self._store.open()
        (last,) = await self._store.reader.rows("last_notice", INSTANT)
        self._first_notice = last or 0

    async def close(self) -> None:
        await self._store.close()

    def clone(self) -> SqliteEngine:
        twin = SqliteEngine.__new__(SqliteEngine)
        twin._set_up(self._store.file, self._policy)
        # Counters are per process.
        twin.counters = self.counters
        return twin

    @property
    def file(self) -> DatabaseFile:
        """The database file; a temporary one exists as long as this object is referenced."""
        return self._store.file

    async def write(self, work: Callable[[Transaction], T], *, lazy: bool = False) -> T:
        """Run the caller's SQL in the writer's transaction; returns its result after the commit."""
        return await self._store.write(work, lazy=lazy)

    # Jobs ------------------------------------------------------------------------------------------

    async def submit(self, envelopes: Sequence[Envelope]) -> list[Receipt]:
        return cast("list[Receipt]", await self._submit(envelopes, whole=True))

    async def submit_each(self, envelopes: Sequence[Envelope]) -> list[Receipt | JobRefused]:
        return await self._submit(envelopes, whole=False)

    async def _submit(self, envelopes: Sequence[Envelope], *, whole: bool) -> list[Receipt | JobRefused]:
        fingerprint = self.options.fingerprint
        prepared = [intake.prepare(envelope, fingerprint) for envelope in envelopes]
        steps = split_batches([envelope.queue for envelope in prepared])
        calls = (self._submit_step(queue, [prepared[at] for at in indexes], whole) for queue, indexes in steps)
        return restore_order(steps, await gather_all(calls))

    async def _submit_step(self, queue: str, envelopes: Sequence[Envelope], whole: bool) -> list[Receipt | JobRefused]:
        try:
            receipts = await self._store.write(intake.submit, self._policy, queue, envelopes, whole)
        except IntakeRefused:
            self.counters.intake_refused += len(envelopes)
            raise
        for receipt in receipts:
            if type(receipt) is Receipt:
                if receipt.duplicate:
                    self.counters.duplicates += 1
                else:
                    self.counters.submitted += 1
            elif isinstance(receipt, IntakeLimited):
                self.counters.intake_refused += 1
        return receipts

    async def claim(
        self,
        worker: str,
        queues: Sequence[str],
        limit: int,
        wait_ms: int,
        in_flight: Callable[[], Collection[Lease]] | None = None,
    ) -> list[Claim]:
        limit = min(limit, MAX_BATCH)
        if limit <= 0 or not queues:
            return []
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_ms / 1000
        with self._store.waiters.for_work(queues) as wake:
            while True:
                wake.clear()
                # Set during the claim as well: a lease may end between the claim and the wait.
                wake.on_freed = True
                found = await self._claim_now(worker, queues, limit)
                wake.on_freed = found.capped
                if found.claims or loop.time() >= deadline:
                    return found.claims
                while not wake.is_set and loop.time() < deadline and not self._is_due(found.next_due_at_ms):
                    left_s = deadline - loop.time()
                    await wake.wait(min(left_s, _TICK_S) if found.next_due_at_ms else left_s)

    async def _claim_now(self, worker: str, queues: Sequence[str], limit: int) -> claims.ClaimBatch:
        self._claim_count += 1
        # The first queue rotates, so that a busy one does not starve the others.
        start = self._claim_count % len(queues)
        order = [*queues[start:], *queues[:start]]
        unseen = self._unseen(worker, queues)
        found = await self._store.write(
            claims.claim, self._policy, worker, order, limit, self._claim_count - 1, unseen, lazy=True
        )
        now_ms = self._policy.clock.now_ms()
        self._registered_at |= {(worker, queue): now_ms for queue in unseen}
        self.counters.claimed += len(found.claims)
        self.counters.promoted += found.promoted
        return found

    def _unseen(self, worker: str, queues: Sequence[str]) -> list[str]:
        """Queues in which this worker is to be registered (again)."""
        since = self._policy.clock.now_ms() - self.options.visibility_timeout_ms
        return [queue for queue in queues if self._registered_at.get((worker, queue), since) <= since]

    def _is_due(self, at_ms: int) -> bool:
        return 0 < at_ms <= self._policy.clock.now_ms()

    async def recover_claims(self, worker: str, queues: Sequence[str], in_flight: Collection[Lease]) -> list[Claim]:
        # Through the writer: a claim whose caller was cancelled may still be running, and commits before this.
        return await self._store.write(claims.recover_claims, worker, list(queues), in_flight, lazy=True)

    async def settle(self, settlements: Sequence[Settlement]) -> list[SettleResult]:
        steps = split_batches([settlement.claim.queue for settlement in settlements])
        answers = restore_order(
            steps,
            await gather_all(
                self._store.write(settling.settle, self._policy, queue, [settlements[at] for at in indexes])
                for queue, indexes in steps
            ),
        )
        count_settlements(self.counters, settlements, answers)
        return answers

    async def renew(self, leases: Sequence[Lease], heartbeats: Collection[Lease] = ()) -> list[Lease]:
        lost: list[Lease] = []
        for start in range(0, len(leases), MAX_BATCH):
            some = leases[start : start + MAX_BATCH]
            lost += await self._store.write(claims.renew, self._policy, some, heartbeats)
        return lost

    async def promote(self, queues: Sequence[str], limit: int) -> Promotion:
        promotion = await self._store.write(
            upkeep.promote, self._policy, list(queues), min(limit, MAX_BATCH), lazy=True
        )
        self.counters.promoted += promotion.count
        return promotion

    async def reclaim(
        self,
        worker: str,
        queues: Sequence[str],
        limit: int,
        only: LeaseFilter | None = None,
        retries: int | None = None,
    ) -> list[Claim]:
        began = time.monotonic()
        batch = await self._store.write(
            upkeep.reclaim, self._policy, worker, list(queues), min(limit, MAX_BATCH), only, retries, began, lazy=True
        )
        if batch.survived:
            release = Release(LOST_IN_OUTAGE)
            await self.settle([Settlement(claim, release, claim.claimed_at_ms) for claim in batch.survived])
        self.counters.reclaimed += batch.reclaimed
        self.counters.claimed += len(batch.claims) - batch.reclaimed
        self.counters.poisoned += len(batch.poisoned)
        self.counters.dead += len(batch.poisoned)
        for tenant in batch.poisoned:
            self.counters.tenant_failures.add(tenant, "dead")
        return batch.claims

    def skip_first_wait(self) -> None:
        self._policy.watch.starts_settled = True

    def is_settling(self, queues: Sequence[str]) -> bool:
        return self._policy.watch.is_settling(queues)

    async def expire_leases(self, worker: str, queues: Sequence[str]) -> int:
        self._policy.watch.note_ended(worker)
        return await self._store.write(upkeep.expire_leases, self._policy, worker, list(queues), lazy=True)

    async def deregister_worker(self, worker: str, queues: Sequence[str]) -> None:
        await self._store.write(claims.deregister_worker, worker, list(queues))
        for queue in queues:
            self._registered_at.pop((worker, queue), None)

    async def announce_tasks(self, tasks: Sequence[AnnouncedTask]) -> None:
        if tasks:
            await self._store.write(claims.announce_tasks, self._policy, list(tasks))

    # Identities of workers -------------------------------------------------------------------------

    async def next_generation(self, worker_id: str, queues: Sequence[str]) -> int:
        return await self._store.write(worker_ids.next_generation, self._policy, worker_id, queues, lazy=True)

    async def keep_worker_id(self, start: WorkerStart, queues: Sequence[str]) -> WorkerIdStatus:
        return await self._store.write(worker_ids.keep, self._policy, start, queues)

    # Operators -------------------------------------------------------------------------------------

    async def move(
        self,
        queue: str,
        job_id: str,
        to: State,
        *,
        actor: str,
        reason: str,
        expected: State | None = None,
        event: str = "",
        approval: Approval | None = None,
        approval_id: str = "",
        audit: str = "",
    ) -> State:
        command = operators.OperatorCommand(
            actor=actor,
            reason=reason,
            expected=expected,
            event=event,
            approval=approval,
            approval_id=approval_id,
            audit=audit,
        )
        before = await self._operate(operators.move, queue, job_id, to, command)
        self.counters.moved_to_dlq += to is State.DLQ_PENDING
        return before

    async def set_control(
        self,
        queue: str,
        control: QueueControl,
        *,
        expected: QueueControl | None = None,
        actor: str = "",
        reason: str = "",
        audit: str = "",
    ) -> None:
        check_control(control)
        command = operators.OperatorCommand(actor=actor, reason=reason, audit=audit)
        await self._store.write(operators.set_control, self._policy, queue, control, expected, command)

    async def expedite(self, queue: str, job_id: str, *, actor: str, reason: str, audit: str = "") -> None:
        command = operators.OperatorCommand(actor=actor, reason=reason, audit=audit)
        await self._operate(operators.expedite, queue, job_id, command)

    async def claim_job(self, worker: str, queue: str, job_id: str) -> Claim:
        claim = await self._operate(operators.claim_job, worker, queue, job_id)
        self.counters.claimed += 1
        return claim

    async def _operate(self, step: Callable[..., T], *arguments: object) -> T:
        try:
            return await self._store.write(step, self._policy, *arguments)
        except TransitionInvalid:
            self.counters.illegal_moves += 1
            raise

    # Feed and recovery -----------------------------------------------------------------------------

    async def epoch(self, queue: str) -> str:
        # A file has no replicas and loses no committed data.
        return ""

    async def attach_reader(self, queue: str, epoch: str = "", *, keys_restored: bool = False) -> None:
        await self._store.write(feed.attach_reader, self._policy, queue)

    async def read_feed(self, queue: str, start: str, limit: int) -> list[FeedEntry]:
        return await feed.read_feed(self._store, queue, start, limit)

    async def wait_feed(self, positions: Mapping[str, str], wait_ms: int) -> list[str]:
        return await feed.wait_feed(self._store, positions, wait_ms)

    async def seek_feeds(self, at_ms: int) -> str:
        return await feed.seek_feeds(self._store, at_ms)

    async def is_feed_whole(self, queue: str, position: str) -> bool:
        return await feed.is_feed_whole(self._store, queue, position)

    async def trim_feed(self, queue: str, position: str) -> None:
        await self._store.write(feed.trim_feed, self._policy, queue, position)

    async def snapshot(self, queue: str, job_ids: Sequence[str]) -> EngineSnapshot:
        return await upkeep.snapshot(self._store.reader, self._policy, queue, job_ids)

    async def restore(self, queue: str, snapshot: EngineSnapshot, jobs: Sequence[JobInfo]) -> list[bool]:
        upkeep.check_jobs(jobs)
        return await self._store.write(upkeep.restore, self._policy, queue, snapshot, jobs)

    # Engine and ledger are one file: there is nothing to compare.

    def on_unverified(self, verify: Callable[[str], asyncio.Task[None]]) -> None:
        pass

    async def gate(self, queue: str) -> QueueGate:
        return QueueGate("", is_open=True)

    async def job_names(self, queue: str, cursor: str, limit: int) -> tuple[list[JobName], str]:
        return [], ""

    async def correct(self, queue: str, epoch: str, jobs: Sequence[JobInfo]) -> list[bool] | None:
        return None

    async def open_gate(self, queue: str, epoch: str, *, verified: bool = True, corrected: bool = False) -> bool:
        return True

    async def restore_keys(self, queue: str, keys: Sequence[SubmissionKey]) -> None:
        for start in range(0, len(keys), MAX_BATCH):
            await self._store.write(upkeep.restore_keys, queue, keys[start : start + MAX_BATCH])

    async def prune(self, queues: Sequence[str]) -> int:
        count = await self._prune_all(upkeep.prune_effects) + await self._prune_all(upkeep.prune_log)
        count += await self._prune_all(upkeep.prune_messages)
        for queue in queues:
            count += await self._prune_jobs(queue)
            count += await self._prune_all(upkeep.prune_keys, queue)
            count += await self._prune_all(upkeep.prune_audits, queue)
            count += await self._store.write(upkeep.prune_rest, self._policy, queue)
        return count

    async def _prune_jobs(self, queue: str) -> int:
        count = 0
        while found := await upkeep.expired_jobs(self._store.reader, self._policy, queue):
            gone = await self._store.write(upkeep.prune_jobs, self._policy, queue, found)
            count += gone
            if gone < upkeep.PRUNE_BATCH:
                break
        return count

    async def _prune_all(self, step: Callable[..., int], *arguments: str) -> int:
        """Repeat a step in small transactions, between which other operations run."""
        count = 0
        while gone := await self._store.write(step, self._policy, *arguments, lazy=True):
            count += gone
            if gone < upkeep.PRUNE_BATCH:
                break
        return count


def _context(options: EngineOptions, clock: Clock | None, stream_dlq: bool) -> EngineContext:
    return EngineContext(options, clock or SystemClock(), OutageWatch(options.settle_ms / 1000), stream_dlq)
