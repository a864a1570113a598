"""survey, restore, remember_keys: what the ledger knows comes back into an engine that has lost it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from holdfast.core.job import JobView, new_job_ids
from holdfast.core.states import FINAL, RESTORED_EVENT, State
from holdfast.engine.port import MAX_BATCH, KnownKey, Survey
from holdfast.engine.sqlite.journal import Journal, notify_due
from holdfast.engine.sqlite.moves import error_columns
from holdfast.engine.sqlite.people import Question, ask
from holdfast.engine.sqlite.policy import Policy
from holdfast.engine.sqlite.reader import Reader
from holdfast.engine.sqlite.rows import IDS, encode_meta
from holdfast.engine.sqlite.statements import IN_MOTION, sources_of
from holdfast.engine.sqlite.transaction import Transaction, Value, expect, json_list
from holdfast.errors import InvalidOption


class Cut(msgspec.Struct, array_like=True, frozen=True):
    unknown: list[str]
    position: int | None
    nonce: str | None


_BURIED: Final = frozenset({State.DLQ_PENDING, State.DLQ_RECORDED})
_CUT: Final = msgspec.json.Decoder(Cut)


async def survey(reader: Reader, policy: Policy, queue: str, job_ids: Sequence[str]) -> Survey:
    """One statement sees one moment."""
    if len(job_ids) > MAX_BATCH:
        raise InvalidOption(f"a survey asks about at most {MAX_BATCH} jobs, got {len(job_ids)}")
    cut = await reader.rows("survey", _CUT, queue=queue, ids=json_list(list(job_ids)))
    position = "" if cut.position is None else str(cut.position)
    return Survey(cut.unknown, position, cut.nonce or "", policy.clock.now_ms())


def restore(transaction: Transaction, policy: Policy, queue: str, cut: Survey, jobs: Sequence[JobView]) -> list[bool]:
    """Whether each was put back: unknown ones, while the feed is still the one of the cut."""
    if not _is_same_feed(transaction, queue, cut):
        return [False] * len(jobs)
    answers: list[bool] = []
    for start in range(0, len(jobs), MAX_BATCH):
        answers += _restore_some(transaction, policy, queue, jobs[start : start + MAX_BATCH])
    return answers


def check_jobs(jobs: Sequence[JobView]) -> None:
    """What has ended is never restored."""
    ended = [job.job_id for job in jobs if job.state in FINAL]
    if ended:
        raise InvalidOption(f"job {ended[0]} has ended; only open jobs can be restored")


def _restore_some(transaction: Transaction, policy: Policy, queue: str, jobs: Sequence[JobView]) -> list[bool]:
    ids = json_list([job.job_id for job in jobs])
    unknown = set(transaction.rows("survey", _CUT, queue=queue, ids=ids).unknown)
    lost: dict[str, JobView] = {}
    answers: list[bool] = []
    for job in jobs:
        wanted = job.job_id in unknown and job.job_id not in lost
        answers.append(wanted)
        if wanted:
            lost[job.job_id] = job
    if lost:
        _write(transaction, policy, queue, list(lost.values()))
    return answers


def remember_keys(transaction: Transaction, queue: str, keys: Sequence[KnownKey]) -> None:
    """What is known already stays as it is."""
    rows = [(key.tenant_id, key.key, key.job_id, key.expires_at_ms) for key in keys]
    transaction.bulk("remember_keys", rows, before=(queue,))


def _is_same_feed(transaction: Transaction, queue: str, cut: Survey) -> bool:
    if not cut.position:
        return transaction.rows("survey", _CUT, queue=queue, ids="[]").position is None
    # Positions of other engines look different: such a cut is not of this feed.
    position = int(cut.position) if cut.position.isdecimal() else 0
    return bool(transaction.rows("same_feed", IDS, queue=queue, position=position, nonce=cut.nonce))


def _write(transaction: Transaction, policy: Policy, queue: str, jobs: Sequence[JobView]) -> None:
    now_ms = policy.clock.now_ms()
    pending = policy.waits_in_pending(queue)
    rows = [_row(job, now_ms, pending) for job in jobs]
    # Places start where no lease that somebody still holds from before the loss can have been.
    last, count = transaction.bulk("restore", rows, before=(now_ms, now_ms, queue))
    expect(count, len(rows), "restore")
    window_ms = policy.options.idempotency_window_ms
    keys = [
        KnownKey(
            job.tenant_id,
            job.idempotency_key,
            job.job_id,
            job.created_at_ms + (job.meta.key_window_ms or window_ms),
        )
        for job in jobs
        if job.idempotency_key and job.idempotency_key != job.job_id
    ]
    if keys:
        remember_keys(transaction, queue, keys)
    transaction.run("use_queue", queue=queue)
    journal = Journal(transaction, queue, policy.options)
    events = [_event(row_id, job, now_ms) for row_id, job in enumerate(jobs, last - count + 1)]
    journal.wrote(*transaction.bulk("events", events, before=(now_ms,)))
    journal.close()
    waiting = [job for job in jobs if job.state is State.WAITING_APPROVAL]
    asks = [Question(job.tenant_id, job.job_id, job.task, job.meta.ask) for job in waiting if job.meta.ask]
    ask(transaction, policy, queue, asks)
    transaction.effects.ready.add(queue)
    dues = [due for job in jobs if (due := _due_at(job, now_ms)) is not None]
    if dues:
        notify_due(transaction, queue, min(dues))


def _state(job: JobView) -> State:
    """A running job goes back in line: its lease is gone."""
    return State.QUEUED if job.state is State.RUNNING else job.state


def _due_at(job: JobView, now_ms: int) -> int | None:
    """When a job that waits is due; a retry waits even if its time has come meanwhile."""
    if job.state is State.RETRYING:
        return job.next_attempt_at_ms or now_ms
    return job.next_attempt_at_ms if job.state is State.QUEUED and job.next_attempt_at_ms > now_ms else None


def _row(job: JobView, now_ms: int, pending: bool) -> tuple[Value, ...]:
    state, due_at, meta = _state(job), _due_at(job, now_ms), job.meta
    parked_until = meta.run_at_ms or None if state not in IN_MOTION else None
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
        now_ms if state in IN_MOTION and due_at is None else None,
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


def _event(row_id: int, job: JobView, now_ms: int) -> tuple[Value, ...]:
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
