"""Upkeep on SQLite: promote, reclaim, prune, snapshot, restore, restore_keys.

`reclaim` dead-letters a job that has lost too many leases (requirement Q7). Pruning works in small batches, so that
other writers do not wait long. `snapshot`, `restore` and `restore_keys` bring back from the ledger what the engine has
lost: only unknown jobs in a state that is not final, and only while the feed is still the one of the snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from holdfast.core.job import MAX_BATCH, Claim, Failure, JobInfo, new_job_ids
from holdfast.core.states import FINAL, RESTORED_EVENT, State, event_for
from holdfast.core.verdict import POISON_PILL, DeadLetter, advance
from holdfast.engine.port.feed import EngineSnapshot, SubmissionKey
from holdfast.engine.port.jobs import Promotion
from holdfast.engine.sqlite.claims import lease_jobs
from holdfast.engine.sqlite.feed import FeedWriter, notify_due
from holdfast.engine.sqlite.moves import ApprovalRequestRow, JobMove, MoveBatch, error_columns, insert_approval_requests
from holdfast.engine.sqlite.rows import IDS, INSTANT, NAMES, WORK_ROWS, WorkRow, encode_meta
from holdfast.engine.sqlite.store import EngineContext
from holdfast.errors import InvalidOption
from holdfast.sqlite.connection import ReaderThread
from holdfast.sqlite.transaction import ACTIVE_STATES, Transaction, Value, json_list, require_rows, sources_of

_RECLAIMED: Final = event_for(State.RUNNING, State.RUNNING)


class ReclaimBatch(msgspec.Struct, frozen=True):
    """What a reclaim got, and how many it gave up as poison pills."""

    claims: list[Claim]
    reclaimed: int
    poisoned: int


def promote(transaction: Transaction, policy: EngineContext, queues: Sequence[str], limit: int) -> Promotion:
    """Put jobs that are due in line. Lazy."""
    now_ms = policy.clock.now_ms()
    asked = json_list(queues)
    (next_due,) = transaction.rows("next_due", INSTANT, queues=asked)
    count = 0
    if next_due is not None and next_due <= now_ms:
        transaction.begin()
        for queue in queues:
            promoted = transaction.run("promote", queue=queue, now=now_ms, limit=max(0, limit - count))
            if promoted:
                transaction.effects.ready.add(queue)
            count += promoted
        (next_due,) = transaction.rows("next_due", INSTANT, queues=asked)
    return Promotion(count, next_due or 0, now_ms)


def reclaim(
    transaction: Transaction, policy: EngineContext, worker: str, queues: Sequence[str], limit: int
) -> ReclaimBatch:
    """Take over lost leases and retries due in the pending list. Lazy."""
    now_ms = policy.clock.now_ms()
    taken = ReclaimBatch([], 0, 0)
    for queue in transaction.rows("any_lost", NAMES, queues=json_list(queues), now=now_ms):
        room = limit - len(taken.claims)
        if room > 0:
            transaction.begin()
            more = _reclaim_from(transaction, policy, worker, queue, room)
            taken = ReclaimBatch(
                taken.claims + more.claims, taken.reclaimed + more.reclaimed, taken.poisoned + more.poisoned
            )
    return taken


def _reclaim_from(transaction: Transaction, policy: EngineContext, worker: str, queue: str, limit: int) -> ReclaimBatch:
    now_ms = policy.clock.now_ms()
    rows = transaction.rows("lost", WORK_ROWS, queue=queue, now=now_ms, limit=limit)
    due = [row for row in rows if row.state is not State.RUNNING]
    lost = [row for row in rows if row.state is State.RUNNING]
    poison = [row for row in lost if _lost_leases(row, queue) >= policy.options.max_deliveries]
    lost = [row for row in lost if row not in poison]

    journal = FeedWriter(transaction, queue, policy.options)
    claims = _take_over(transaction, policy, journal, worker, queue, lost) if lost else []
    claims += lease_jobs(transaction, policy, journal, worker, queue, due) if due else []
    if poison:
        moves = MoveBatch(transaction, policy, queue)
        for row in poison:
            moves.add(_give_up(row, queue, now_ms))
        moves.write(journal)
    journal.close()
    return ReclaimBatch(claims, len(lost), len(poison))


def _take_over(
    transaction: Transaction,
    policy: EngineContext,
    journal: FeedWriter,
    worker: str,
    queue: str,
    rows: Sequence[WorkRow],
) -> list[Claim]:
    now_ms = policy.clock.now_ms()
    claims = [row.to_reclaimed_claim(queue, worker, now_ms) for row in rows]
    events = [_reclaimed(row, claim) for row, claim in zip(rows, claims, strict=True)]
    journal.add_events(*transaction.bulk("events", events, before=(now_ms,)))
    until = now_ms + policy.options.visibility_timeout_ms
    ids = json_list([row.id for row in rows])
    require_rows(transaction.run("reclaim", ids=ids, worker=worker, now=now_ms, until=until), len(rows), "reclaim")
    return claims


def _reclaimed(row: WorkRow, claim: Claim) -> tuple[Value, ...]:
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


def _lost_leases(row: WorkRow, queue: str) -> int:
    """How many leases this job has lost in its life, the present one included."""
    return row.to_claim(queue).meta.lost_leases + row.deliveries


def _give_up(row: WorkRow, queue: str, now_ms: int) -> JobMove:
    """A job that took its worker down too often (requirement Q7)."""
    claim = row.to_claim(queue)
    count = _lost_leases(row, queue)
    verdict = DeadLetter(
        Failure(POISON_PILL, f"{count} workers lost their lease on this job; the last was {row.worker}")
    )
    # The present lease is lost as well, which `advance` cannot know.
    claim = msgspec.structs.replace(claim, lease=msgspec.structs.replace(claim.lease, deliveries=row.deliveries + 1))
    return JobMove(
        job=row,
        to=State.DLQ_PENDING,
        meta=advance(claim, verdict, now_ms),
        attempt=row.attempt,
        worker=row.worker or "",
        failure=verdict.failure,
    )


#: Rows that go in one step: small, so that nobody waits long behind it.
PRUNE_BATCH: Final = 200
#: A worker that has not been seen for so many leases is gone.
_LEASES_TO_FORGET: Final = 4


async def expired_jobs(reader: ReaderThread, policy: EngineContext, queue: str) -> list[int]:
    """Some finished jobs that may go; fewer than `PRUNE_BATCH` are the last ones."""
    return await reader.rows("expired", IDS, queue=queue, before=_expired_ms(policy), limit=PRUNE_BATCH)


def prune_jobs(transaction: Transaction, policy: EngineContext, queue: str, found: list[int]) -> int:
    """Drop these finished jobs with all that belongs to them; how many went.

    One stays while somebody has yet to deal with its dead letter, or an effect of it is reserved or in doubt.
    """
    expired = transaction.rows("unneeded", IDS, queue=queue, before=_expired_ms(policy), ids=json_list(found))
    ids = json_list(expired)
    for step in ("events", "steps", "letters", "votes", "approvals", "anomalies"):
        transaction.run(f"prune_{step}", ids=ids)
    return transaction.run("prune_jobs", ids=ids)


def _expired_ms(policy: EngineContext) -> int:
    return policy.clock.now_ms() - policy.options.finished_ttl_ms


def prune_keys(transaction: Transaction, policy: EngineContext, queue: str) -> int:
    """Some idempotency keys past their window. Call again while it gives `PRUNE_BATCH`."""
    transaction.begin()
    return transaction.run("prune_keys", queue=queue, now=policy.clock.now_ms(), limit=PRUNE_BATCH)


def prune_effects(transaction: Transaction, policy: EngineContext) -> int:
    """Some keys of effects that may be used again. Call again while it gives `PRUNE_BATCH`."""
    transaction.begin()
    return transaction.run("prune_effects", now=policy.clock.now_ms(), limit=PRUNE_BATCH)


def prune_log(transaction: Transaction, policy: EngineContext) -> int:
    """Some of what operators did long ago. Call again while it gives `PRUNE_BATCH`."""
    transaction.begin()
    return transaction.run("prune_log", before=_expired_ms(policy), limit=PRUNE_BATCH)


def prune_messages(transaction: Transaction, policy: EngineContext) -> int:
    """Some of what was sent, and became of messages, long ago. Call again while it gives `PRUNE_BATCH`."""
    transaction.begin()
    before = _expired_ms(policy)
    gone = transaction.run("prune_outbox", before=before, limit=PRUNE_BATCH)
    return gone + transaction.run("prune_executions", before=before, limit=max(0, PRUNE_BATCH - gone))


def prune_audits(transaction: Transaction, policy: EngineContext, queue: str) -> int:
    """The same in the feed. Call again while it gives `PRUNE_BATCH`."""
    transaction.begin()
    return transaction.run("prune_audits", queue=queue, before=_expired_ms(policy), limit=PRUNE_BATCH)


def prune_rest(transaction: Transaction, policy: EngineContext, queue: str) -> int:
    """Workers that are gone, and entries of a feed that nobody reads."""
    before = policy.clock.now_ms() - _LEASES_TO_FORGET * policy.options.visibility_timeout_ms
    gone = transaction.run("forget_workers", queue=queue, before=before)
    gone += transaction.run("feed_trim", queue=queue, limit=policy.options.feed_limit)
    return gone + transaction.run("prune_feed", queue=queue)


class SnapshotRow(msgspec.Struct, array_like=True, frozen=True):
    unknown: list[str]
    position: int | None
    nonce: str | None


_BURIED: Final = frozenset({State.DLQ_PENDING, State.DLQ_RECORDED})
_CUT: Final = msgspec.json.Decoder(SnapshotRow)


async def snapshot(reader: ReaderThread, policy: EngineContext, queue: str, job_ids: Sequence[str]) -> EngineSnapshot:
    """One statement sees one moment."""
    if len(job_ids) > MAX_BATCH:
        raise InvalidOption(f"a survey asks about at most {MAX_BATCH} jobs, got {len(job_ids)}")
    cut = await reader.rows("survey", _CUT, queue=queue, ids=json_list(list(job_ids)))
    position = "" if cut.position is None else str(cut.position)
    return EngineSnapshot(cut.unknown, position, cut.nonce or "", policy.clock.now_ms())


def restore(
    transaction: Transaction, policy: EngineContext, queue: str, cut: EngineSnapshot, jobs: Sequence[JobInfo]
) -> list[bool]:
    """Whether each was put back: unknown ones, while the feed is still the one of the cut."""
    if not _is_same_feed(transaction, queue, cut):
        return [False] * len(jobs)
    answers: list[bool] = []
    for start in range(0, len(jobs), MAX_BATCH):
        answers += _restore_some(transaction, policy, queue, jobs[start : start + MAX_BATCH])
    return answers


def check_jobs(jobs: Sequence[JobInfo]) -> None:
    """What has ended is never restored."""
    ended = [job.job_id for job in jobs if job.state in FINAL]
    if ended:
        raise InvalidOption(f"job {ended[0]} has ended; only open jobs can be restored")


def _restore_some(transaction: Transaction, policy: EngineContext, queue: str, jobs: Sequence[JobInfo]) -> list[bool]:
    ids = json_list([job.job_id for job in jobs])
    unknown = set(transaction.rows("survey", _CUT, queue=queue, ids=ids).unknown)
    lost: dict[str, JobInfo] = {}
    answers: list[bool] = []
    for job in jobs:
        wanted = job.job_id in unknown and job.job_id not in lost
        answers.append(wanted)
        if wanted:
            lost[job.job_id] = job
    if lost:
        _write(transaction, policy, queue, list(lost.values()))
    return answers


def restore_keys(transaction: Transaction, queue: str, keys: Sequence[SubmissionKey]) -> None:
    """What is known already stays as it is."""
    rows = [(key.tenant_id, key.key, key.job_id, key.expires_at_ms) for key in keys]
    transaction.bulk("remember_keys", rows, before=(queue,))


def _is_same_feed(transaction: Transaction, queue: str, cut: EngineSnapshot) -> bool:
    if not cut.position:
        return transaction.rows("survey", _CUT, queue=queue, ids="[]").position is None
    # Positions of other engines look different: such a cut is not of this feed.
    position = int(cut.position) if cut.position.isdecimal() else 0
    return bool(transaction.rows("same_feed", IDS, queue=queue, position=position, nonce=cut.nonce))


def _write(transaction: Transaction, policy: EngineContext, queue: str, jobs: Sequence[JobInfo]) -> None:
    now_ms = policy.clock.now_ms()
    pending = policy.retries_in_pending(queue)
    rows = [_row(job, now_ms, pending) for job in jobs]
    # Places start where no lease that somebody still holds from before the loss can have been.
    last, count = transaction.bulk("restore", rows, before=(now_ms, now_ms, queue))
    require_rows(count, len(rows), "restore")
    window_ms = policy.options.idempotency_window_ms
    keys = [
        SubmissionKey(
            job.tenant_id,
            job.idempotency_key,
            job.job_id,
            job.created_at_ms + (job.meta.key_window_ms or window_ms),
        )
        for job in jobs
        if job.idempotency_key and job.idempotency_key != job.job_id
    ]
    if keys:
        restore_keys(transaction, queue, keys)
    transaction.run("use_queue", queue=queue)
    journal = FeedWriter(transaction, queue, policy.options)
    events = [_event(row_id, job, now_ms) for row_id, job in enumerate(jobs, last - count + 1)]
    journal.add_events(*transaction.bulk("events", events, before=(now_ms,)))
    journal.close()
    waiting = [job for job in jobs if job.state is State.WAITING_APPROVAL]
    asks = [ApprovalRequestRow(job.tenant_id, job.job_id, job.task, job.meta.ask) for job in waiting if job.meta.ask]
    insert_approval_requests(transaction, policy, queue, asks)
    transaction.effects.ready.add(queue)
    dues = [due for job in jobs if (due := _due_at(job, now_ms)) is not None]
    if dues:
        notify_due(transaction, queue, min(dues))


def _state(job: JobInfo) -> State:
    """A running job goes back in line: its lease is gone."""
    return State.QUEUED if job.state is State.RUNNING else job.state


def _due_at(job: JobInfo, now_ms: int) -> int | None:
    """When a job that waits is due; a retry waits even if its time has come meanwhile."""
    if job.state is State.RETRYING:
        return job.next_attempt_at_ms or now_ms
    return job.next_attempt_at_ms if job.state is State.QUEUED and job.next_attempt_at_ms > now_ms else None


def _row(job: JobInfo, now_ms: int, pending: bool) -> tuple[Value, ...]:
    state, due_at, meta = _state(job), _due_at(job, now_ms), job.meta
    parked_until = meta.run_at_ms or None if state not in ACTIVE_STATES else None
    in_pending = pending and state is State.RETRYING
    if state in _BURIED and not meta.dlq_id:
        meta = msgspec.structs.replace(meta, dlq_id=new_job_ids(1)[0])
    return (
        job.job_id,
        job.tenant_id,
        job.task,
        state.value,
        _came_from(state),
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


def _came_from(state: State) -> str | None:
    """A state before this one, for the table's check; which one it was is the ledger's to know."""
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
