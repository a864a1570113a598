"""Upkeep on SQLite: promote, reclaim, prune, snapshot, restore, restore_keys.

`reclaim` dead-letters a job that has lost too many leases (requirement Q7). Pruning works in small batches, so that
other writers do not wait long. `snapshot`, `restore` and `restore_keys` restore from the ledger what the engine has
lost: only unknown jobs in a state that is not final, and only while the feed is still the one of the snapshot.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import msgspec

from holdfast.core.job import MAX_BATCH, Claim, JobInfo, Lease, new_job_ids
from holdfast.core.states import FINAL, RESTORED_EVENT, State, event_for
from holdfast.core.verdict import DeadLetter, advance, poison_pill
from holdfast.engine.port.feed import EngineSnapshot, SubmissionKey
from holdfast.engine.port.jobs import EXPIRY_BATCH, LeaseFilter, Promotion
from holdfast.engine.sqlite.claims import lease_jobs
from holdfast.engine.sqlite.feed import FeedWriter, notify_due
from holdfast.engine.sqlite.moves import ApprovalRequestRow, JobMove, MoveBatch, error_columns, insert_approval_requests
from holdfast.engine.sqlite.rows import CONTROL, IDS, INSTANT, LEASES, NAMES, WORK_ROWS, WorkRow, encode_meta
from holdfast.engine.sqlite.store import EngineContext
from holdfast.errors import InvalidOption
from holdfast.sqlite.connection import ReaderThread
from holdfast.sqlite.transaction import ACTIVE_STATES, Transaction, Value, json_list, require_rows, sources_of

_RECLAIMED: Final = event_for(State.RUNNING, State.RUNNING)
_COUNTS: Final = msgspec.json.Decoder(list[tuple[str, int]])


class ReclaimBatch(msgspec.Struct, frozen=True):
    """Reclaimed jobs, and the tenants of those that were dead-lettered as poison pills."""

    claims: list[Claim]
    reclaimed: int
    poisoned: list[str]
    #: Reclaimed jobs whose leases expired in an outage: to be released, so that the loss does not count.
    survived: list[Claim]

    @property
    def retries(self) -> int:
        """How many of the claims are retries."""
        return len(self.claims) - self.reclaimed

    def __add__(self, more: ReclaimBatch) -> ReclaimBatch:
        return ReclaimBatch(
            self.claims + more.claims,
            self.reclaimed + more.reclaimed,
            self.poisoned + more.poisoned,
            self.survived + more.survived,
        )


def promote(transaction: Transaction, policy: EngineContext, queues: Sequence[str], limit: int) -> Promotion:
    """Make due jobs ready. Lazy."""
    now_ms = policy.clock.now_ms()
    names = json_list(queues)
    (next_due,) = transaction.rows("next_due", INSTANT, queues=names)
    count = 0
    if next_due is not None and next_due <= now_ms:
        transaction.begin()
        for queue in queues:
            promoted = transaction.run("promote", queue=queue, now=now_ms, limit=max(0, limit - count))
            if promoted:
                transaction.effects.ready.add(queue)
            count += promoted
        (next_due,) = transaction.rows("next_due", INSTANT, queues=names)
    return Promotion(count, next_due or 0, now_ms)


def reclaim(
    transaction: Transaction,
    policy: EngineContext,
    worker: str,
    queues: Sequence[str],
    limit: int,
    only: LeaseFilter | None,
    retries: int | None,
    began: float,
) -> ReclaimBatch:
    """Claim jobs with expired leases, and due retries in the pending list. Lazy.

    A retry without a free slot (of its tenant, or of the queue) becomes ready instead, so that it waits with other
    ready jobs for one: at the next call they may have taken all slots again. `began` is when this was called: after a
    long wait for the file, as after any outage, only leases of workers that have certainly ended are reclaimed.
    """
    now_ms = policy.clock.now_ms()
    batch = ReclaimBatch([], 0, [], [])
    for queue in transaction.rows("queues_with_expired_leases", NAMES, queues=json_list(queues), now=now_ms):
        free = limit - len(batch.claims)
        if free <= 0:
            break
        chosen = _choose_leases(transaction, policy, queue, now_ms, free, only)
        free_retries = min(free, limit if retries is None else retries) - batch.retries
        if chosen or (free_retries > 0 and _due_retries(transaction, queue, now_ms, 0, 1)):
            transaction.begin()
            is_late = time.monotonic() - began > policy.watch.late_s
            waits = policy.watch.must_wait(queue, policy.watch.interruptions + is_late)
            batch += _reclaim_from(transaction, policy, worker, queue, chosen, free, free_retries, waits=waits)
    return batch


def expire_leases(transaction: Transaction, policy: EngineContext, worker: str, queues: Sequence[str]) -> int:
    """Let leases of a worker that has certainly ended expire now. Lazy."""
    names, now_ms = json_list(queues), policy.clock.now_ms()
    if not transaction.rows("leases_of", IDS, queues=names, worker=worker, now=now_ms, limit=1):
        return 0
    transaction.begin()
    ids = transaction.rows("leases_of", IDS, queues=names, worker=worker, now=now_ms, limit=EXPIRY_BATCH)
    return transaction.run("expire_leases", ids=json_list(ids), now=now_ms)


def _choose_leases(
    transaction: Transaction, policy: EngineContext, queue: str, now_ms: int, limit: int, only: LeaseFilter | None
) -> list[int]:
    """Rows of the first expired leases that `only` allows, or that were lost in an outage.

    What is chosen outside of a transaction may be outdated.
    """
    chosen: list[int] = []
    skip = 0
    while len(chosen) < limit:
        rows = transaction.rows("expired_leases", LEASES, queue=queue, now=now_ms, skip=skip, limit=MAX_BATCH)
        for row, job_id, claim, deliveries, worker in rows:
            lease = Lease(queue, job_id, f"{row}.{claim}", deliveries, worker)
            if only is None or policy.lost_in_outage(lease) or only(lease):
                chosen.append(row)
        skip += len(rows)
        if len(rows) < MAX_BATCH:
            break
    return chosen[:limit]


def _reclaim_from(
    transaction: Transaction,
    policy: EngineContext,
    worker: str,
    queue: str,
    chosen: Sequence[int],
    limit: int,
    retries: int,
    *,
    waits: bool,
) -> ReclaimBatch:
    now_ms = policy.clock.now_ms()
    lost = transaction.rows("lost_jobs", WORK_ROWS, queue=queue, now=now_ms, ids=json_list(chosen))
    if waits:
        lost = [row for row in lost if policy.watch.has_ended(row.to_claim(queue).lease)]
    survived = [row for row in lost if policy.lost_in_outage(row.to_claim(queue).lease)]
    lost = [row for row in lost if row not in survived]
    poison = [row for row in lost if _lost_alone(row, queue) >= policy.options.max_deliveries]
    lost = [row for row in lost if row not in poison]
    due = _choose_due_retries(transaction, queue, now_ms, min(retries, limit - len(lost)))

    journal = FeedWriter(transaction, queue, policy.options)
    claims = _reclaim_leases(transaction, policy, journal, worker, queue, lost) if lost else []
    released = _reclaim_leases(transaction, policy, journal, worker, queue, survived) if survived else []
    claims += lease_jobs(transaction, policy, journal, worker, queue, due) if due else []
    if poison:
        moves = MoveBatch(transaction, policy, queue)
        for row in poison:
            moves.add(_dead_letter(row, queue, now_ms))
        moves.write(journal)
    journal.close()
    return ReclaimBatch(claims, len(lost), [row.tenant_id for row in poison], released)


def _choose_due_retries(transaction: Transaction, queue: str, now_ms: int, limit: int) -> list[WorkRow]:
    """Due retries that may run, up to the limit. Those without a free slot become ready."""
    slots, chosen, blocked, skip = _Slots(transaction, queue), list[WorkRow](), list[int](), 0
    while len(chosen) < limit:
        rows = _due_retries(transaction, queue, now_ms, skip, MAX_BATCH)
        skip += len(rows)
        for row in rows:
            if len(chosen) == limit:
                break
            if slots.reserve(row.tenant_id):
                chosen.append(row)
            else:
                blocked.append(row.id)
        if len(rows) < MAX_BATCH:
            break
    if blocked:
        transaction.run("requeue_retries", ids=json_list(blocked), now=now_ms)
        transaction.effects.ready.add(queue)
    return chosen


def _due_retries(transaction: Transaction, queue: str, now_ms: int, skip: int, limit: int) -> list[WorkRow]:
    return transaction.rows("due_retries", WORK_ROWS, queue=queue, now=now_ms, skip=skip, limit=limit)


class _Slots:
    """How many more jobs may run, by the limits of a queue and of its tenants."""

    def __init__(self, transaction: Transaction, queue: str) -> None:
        control = transaction.rows("get_control", CONTROL, queue=queue).as_control()
        counts = transaction.rows("running_by_tenant", _COUNTS, queue=queue)
        running = dict(counts)
        self._free: dict[str | None, int] = {
            tenant: each.concurrency - running.get(tenant, 0)
            for tenant, each in control.tenants.items()
            if each.concurrency is not None
        }
        if control.concurrency is not None:
            self._free[None] = control.concurrency - sum(running.values())

    def reserve(self, tenant: str) -> bool:
        """Use one slot of the tenant and the queue; False if one of them has none."""
        limited = [name for name in (None, tenant) if name in self._free]
        if any(self._free[name] <= 0 for name in limited):
            return False
        for name in limited:
            self._free[name] -= 1
        return True


def _reclaim_leases(
    transaction: Transaction,
    policy: EngineContext,
    journal: FeedWriter,
    worker: str,
    queue: str,
    rows: Sequence[WorkRow],
) -> list[Claim]:
    now_ms = policy.clock.now_ms()
    claims = [row.to_reclaimed_claim(queue, worker, now_ms) for row in rows]
    events = [_reclaim_event(row, claim) for row, claim in zip(rows, claims, strict=True)]
    journal.add_events(*transaction.bulk("insert_events", events, before=(now_ms,)))
    until = now_ms + policy.options.visibility_timeout_ms
    ids = json_list([row.id for row in rows])
    require_rows(transaction.run("reclaim", ids=ids, worker=worker, now=now_ms, until=until), len(rows), "reclaim")
    return claims


def _reclaim_event(row: WorkRow, claim: Claim) -> tuple[Value, ...]:
    data = {"old_worker": row.worker, "new_worker": claim.lease.worker, "message_id": claim.lease.position}
    return (
        row.id,
        row.last_seq + 1,
        _RECLAIMED,
        row.state.value,
        row.state.value,
        claim.attempt,
        claim.meta.retry_count,
        claim.lease.worker,
        f"the lease of {row.worker} was lost",
        msgspec.json.encode(data).decode(),
    )


def _lost_alone(row: WorkRow, queue: str) -> int:
    """How many leases this job has lost while it ran alone, including the current one."""
    return row.to_reclaimed_claim(queue, "", 0).lost_alone


def _dead_letter(row: WorkRow, queue: str, now_ms: int) -> JobMove:
    """The move of a poison pill (requirement Q7)."""
    verdict = DeadLetter(poison_pill(_lost_alone(row, queue)))
    claim = row.to_claim(queue)
    # The current lease is lost as well, which `advance` does not count.
    claim = msgspec.structs.replace(claim, lease=msgspec.structs.replace(claim.lease, deliveries=row.deliveries + 1))
    return JobMove(
        job=row,
        to=State.DLQ_PENDING,
        meta=advance(claim, verdict, now_ms),
        attempt=row.attempt,
        worker=row.worker or "",
        failure=verdict.failure,
    )


#: Rows deleted in one step: few, so that other writers do not wait long.
PRUNE_BATCH: Final = 200
#: A worker that was not seen for this many lease durations is deregistered.
_LEASES_UNTIL_GONE: Final = 4


async def expired_jobs(reader: ReaderThread, policy: EngineContext, queue: str) -> list[int]:
    """Some finished jobs that may be deleted; fewer than `PRUNE_BATCH` means that no more are left."""
    return await reader.rows("expired_jobs", IDS, queue=queue, before=_expired_ms(policy), limit=PRUNE_BATCH)


def prune_jobs(transaction: Transaction, policy: EngineContext, queue: str, found: list[int]) -> int:
    """Delete these finished jobs with all their rows; returns how many were deleted.

    A job is kept while its dead letter is still to be handled, or an effect of it is reserved or in doubt.
    """
    expired = transaction.rows("prunable_jobs", IDS, queue=queue, before=_expired_ms(policy), ids=json_list(found))
    ids = json_list(expired)
    for step in ("events", "steps", "dead_letters", "votes", "approvals", "anomalies"):
        transaction.run(f"prune_{step}", ids=ids)
    return transaction.run("prune_jobs", ids=ids)


def _expired_ms(policy: EngineContext) -> int:
    return policy.clock.now_ms() - policy.options.finished_ttl_ms


def prune_keys(transaction: Transaction, policy: EngineContext, queue: str) -> int:
    """Delete some idempotency keys past their window. Call again while it returns `PRUNE_BATCH`."""
    transaction.begin()
    return transaction.run("prune_keys", queue=queue, now=policy.clock.now_ms(), limit=PRUNE_BATCH)


def prune_effects(transaction: Transaction, policy: EngineContext) -> int:
    """Delete some expired keys of effects. Call again while it returns `PRUNE_BATCH`."""
    transaction.begin()
    return transaction.run("prune_effects", now=policy.clock.now_ms(), limit=PRUNE_BATCH)


def prune_log(transaction: Transaction, policy: EngineContext) -> int:
    """Delete some expired audit entries. Call again while it returns `PRUNE_BATCH`."""
    transaction.begin()
    return transaction.run("prune_audit_entries", before=_expired_ms(policy), limit=PRUNE_BATCH)


def prune_messages(transaction: Transaction, policy: EngineContext) -> int:
    """Delete some expired outbox events and executions. Call again while it returns `PRUNE_BATCH`."""
    transaction.begin()
    before = _expired_ms(policy)
    gone = transaction.run("prune_outbox", before=before, limit=PRUNE_BATCH)
    return gone + transaction.run("prune_executions", before=before, limit=max(0, PRUNE_BATCH - gone))


def prune_audits(transaction: Transaction, policy: EngineContext, queue: str) -> int:
    """Delete some expired audit events of the feed. Call again while it returns `PRUNE_BATCH`."""
    transaction.begin()
    return transaction.run("prune_audit_events", queue=queue, before=_expired_ms(policy), limit=PRUNE_BATCH)


def prune_rest(transaction: Transaction, policy: EngineContext, queue: str) -> int:
    """Deregister workers that were not seen for long, and drop feed entries that no reader needs."""
    before = policy.clock.now_ms() - _LEASES_UNTIL_GONE * policy.options.visibility_timeout_ms
    gone = transaction.run("delete_idle_workers", queue=queue, before=before)
    gone += transaction.run("trim_detached_feed", queue=queue, limit=policy.options.feed_limit)
    return gone + transaction.run("prune_feed", queue=queue)


class SnapshotRow(msgspec.Struct, array_like=True, frozen=True):
    unknown: list[str]
    position: int | None
    nonce: str | None


_WITH_DEAD_LETTER: Final = frozenset({State.DLQ_PENDING, State.DLQ_RECORDED})
_SNAPSHOT: Final = msgspec.json.Decoder(SnapshotRow)


async def snapshot(reader: ReaderThread, policy: EngineContext, queue: str, job_ids: Sequence[str]) -> EngineSnapshot:
    """Which of these jobs are unknown, and where the feed ends. Atomic: one statement."""
    if len(job_ids) > MAX_BATCH:
        raise InvalidOption(f"a snapshot takes at most {MAX_BATCH} jobs, got {len(job_ids)}")
    row = await reader.rows("snapshot", _SNAPSHOT, queue=queue, ids=json_list(list(job_ids)))
    position = "" if row.position is None else str(row.position)
    return EngineSnapshot(row.unknown, position, row.nonce or "", policy.clock.now_ms())


def restore(
    transaction: Transaction, policy: EngineContext, queue: str, snapshot: EngineSnapshot, jobs: Sequence[JobInfo]
) -> list[bool]:
    """Restore unknown jobs; returns whether each was restored.

    Restores nothing unless the feed is still the one of the snapshot.
    """
    if not _is_same_feed(transaction, queue, snapshot):
        return [False] * len(jobs)
    answers: list[bool] = []
    for start in range(0, len(jobs), MAX_BATCH):
        answers += _restore_some(transaction, policy, queue, jobs[start : start + MAX_BATCH])
    return answers


def check_jobs(jobs: Sequence[JobInfo]) -> None:
    """Raise `InvalidOption` for a job that has ended: it is never restored."""
    ended = [job.job_id for job in jobs if job.state in FINAL]
    if ended:
        raise InvalidOption(f"job {ended[0]} has ended; only open jobs can be restored")


def _restore_some(transaction: Transaction, policy: EngineContext, queue: str, jobs: Sequence[JobInfo]) -> list[bool]:
    ids = json_list([job.job_id for job in jobs])
    unknown = set(transaction.rows("snapshot", _SNAPSHOT, queue=queue, ids=ids).unknown)
    lost: dict[str, JobInfo] = {}
    answers: list[bool] = []
    for job in jobs:
        is_lost = job.job_id in unknown and job.job_id not in lost
        answers.append(is_lost)
        if is_lost:
            lost[job.job_id] = job
    if lost:
        _write(transaction, policy, queue, list(lost.values()))
    return answers


def restore_keys(transaction: Transaction, queue: str, keys: Sequence[SubmissionKey]) -> None:
    """Restore idempotency keys; known ones are not changed."""
    rows = [(key.tenant_id, key.key, key.job_id, key.expires_at_ms, key.fingerprint) for key in keys]
    transaction.bulk("restore_keys", rows, before=(queue,))


def _is_same_feed(transaction: Transaction, queue: str, snapshot: EngineSnapshot) -> bool:
    if not snapshot.position:
        return transaction.rows("snapshot", _SNAPSHOT, queue=queue, ids="[]").position is None
    # Other engines' positions have another format: such a snapshot is not of this feed.
    position = int(snapshot.position) if snapshot.position.isdecimal() else 0
    return bool(transaction.rows("has_feed_entry", IDS, queue=queue, position=position, nonce=snapshot.nonce))


def _write(transaction: Transaction, policy: EngineContext, queue: str, jobs: Sequence[JobInfo]) -> None:
    now_ms = policy.clock.now_ms()
    pending = policy.retries_in_pending(queue)
    rows = [_row(job, now_ms, pending) for job in jobs]
    # Claim numbers start at the current time, so that no lease from before the loss matches.
    last, count = transaction.bulk("insert_restored_jobs", rows, before=(now_ms, now_ms, queue))
    require_rows(count, len(rows), "restore")
    window_ms = policy.options.idempotency_window_ms
    keys = [
        SubmissionKey(
            job.tenant_id,
            job.idempotency_key,
            job.job_id,
            job.created_at_ms + (job.meta.key_window_ms or window_ms),
            job.meta.key_fingerprint,
        )
        for job in jobs
        if job.idempotency_key and job.idempotency_key != job.job_id
    ]
    if keys:
        restore_keys(transaction, queue, keys)
    transaction.run("mark_queue_used", queue=queue)
    journal = FeedWriter(transaction, queue, policy.options)
    events = [_event(row_id, job, now_ms) for row_id, job in enumerate(jobs, last - count + 1)]
    journal.add_events(*transaction.bulk("insert_events", events, before=(now_ms,)))
    journal.close()
    waiting = [job for job in jobs if job.state is State.WAITING_APPROVAL]
    requests = [
        ApprovalRequestRow(job.tenant_id, job.job_id, job.task, job.meta.approval_request)
        for job in waiting
        if job.meta.approval_request
    ]
    insert_approval_requests(transaction, policy, queue, requests)
    transaction.effects.ready.add(queue)
    dues = [due for job in jobs if (due := _due_at(job, now_ms)) is not None]
    if dues:
        notify_due(transaction, queue, min(dues))


def _state(job: JobInfo) -> State:
    """The restored state: a running job is queued again, because its lease is lost."""
    return State.QUEUED if job.state is State.RUNNING else job.state


def _due_at(job: JobInfo, now_ms: int) -> int | None:
    """When the job is due; None if it waits for no time. A retry waits even if that time has passed."""
    if job.state is State.RETRYING:
        return job.next_attempt_at_ms or now_ms
    return job.next_attempt_at_ms if job.state is State.QUEUED and job.next_attempt_at_ms > now_ms else None


def _row(job: JobInfo, now_ms: int, pending: bool) -> tuple[Value, ...]:
    state, due_at, meta = _state(job), _due_at(job, now_ms), job.meta
    parked_until = meta.run_at_ms or None if state not in ACTIVE_STATES else None
    in_pending = pending and state is State.RETRYING
    if state in _WITH_DEAD_LETTER and not meta.dlq_id:
        meta = msgspec.structs.replace(meta, dlq_id=new_job_ids(1)[0])
    return (
        job.job_id,
        job.tenant_id,
        job.task,
        state.value,
        _previous_state(state),
        int(meta.priority),
        job.attempt,
        "" if job.idempotency_key == job.job_id else job.idempotency_key,
        job.trace_id,
        meta.dlq_id or None,
        due_at or parked_until,
        now_ms if state in ACTIVE_STATES and due_at is None else None,
        None if in_pending else due_at,
        due_at if in_pending else None,
        due_at if state is State.RETRYING else None,
        *error_columns(job.failure),
        job.created_at_ms,
        encode_meta(meta),
        job.payload.decode(),
    )


def _previous_state(state: State) -> str | None:
    """A possible previous state, for the table's CHECK; only the ledger has the real one."""
    sources = sources_of(state)
    return None if state in (State.QUEUED, State.WAITING_APPROVAL) else sources[0].value


def _event(row_id: int, job: JobInfo, now_ms: int) -> tuple[Value, ...]:
    due_at = _due_at(job, now_ms)
    data = None if due_at is None else msgspec.json.encode({"next_attempt_at_ms": due_at}).decode()
    return (
        row_id,
        1,
        RESTORED_EVENT,
        job.state.value,
        _state(job).value,
        job.attempt,
        job.meta.retry_count,
        "",
        "",
        data,
    )
