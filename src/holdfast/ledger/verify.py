"""Verify that the ledger's histories are legal and consistent, for all jobs or recent ones.

For every job: its events are numbered 1 to n without a gap, every move is legal by the table, at most one event is
final, and the job's row agrees with its events (state, attempt, retry count, number of events, end). A failed job has
its dead letter; no event and no open dead letter is without its job. Forks and anomalies are not faults, because an
outage legally leaves them; they are counted.

Operators' decisions must agree too. An open approval request belongs to a job that waits for it. A decision delivered
to the engine agrees with the event by which its job left `waiting_approval`; one that another move preceded (the job
was cancelled meanwhile) is not a fault. A discarded dead letter names two different operators, a replayed one its new
job.

Everything is read from one snapshot. Memory is constant: jobs and events are read side by side, in job key order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, Final

import msgspec
from sqlalchemy import ColumnElement, Select, and_, func, or_, select

from holdfast.core.history import SHOWN_FAULTS, JobHistory
from holdfast.core.job import Event, JobKey
from holdfast.core.principal import fold_name
from holdfast.core.states import FINAL, State
from holdfast.ledger.port.operators import ApprovalStatus, DeadLetterStatus
from holdfast.ledger.queries.jobs import Queries, Snapshot
from holdfast.schema import anomalies, approvals, dlq_items, job_events, jobs

_WAITING: Final = State.WAITING_APPROVAL.value
_REQUESTED: Final = ApprovalStatus.REQUESTED.value
#: Events by which decisions reach a job.
_DECISIONS: Final = {
    ApprovalStatus.APPROVED: {"approval.approved"},
    ApprovalStatus.REJECTED: {"approval.rejected"},
    ApprovalStatus.EXPIRED: {"approval.expired"},
    # Also `approval.approved` without an approval: the job is queued, and its approval is requested again.
    ApprovalStatus.WITHDRAWN: {"approval.withdrawn", "approval.approved"},
}
_ALL_DECISIONS: Final = frozenset().union(*_DECISIONS.values())

Add = Callable[[JobKey, str], None]


async def check_approvals(snapshot: Snapshot, add: Add, since: datetime | None) -> None:
    """Find approval requests that contradict their jobs.

    Open requests whose jobs do not wait, and decisions that disagree with their jobs' events.
    """
    a = approvals.c
    of_job = and_(jobs.c.tenant_id == a.tenant_id, jobs.c.job_id == a.job_id, jobs.c.queue == a.queue)
    lost = (
        select(a.tenant_id, a.queue, a.job_id, a.approval_id, jobs.c.state)
        .select_from(approvals.outerjoin(jobs, of_job))
        .where(a.status == _REQUESTED, or_(jobs.c.state.is_(None), jobs.c.state != _WAITING))
    )
    async for row in snapshot.rows(lost if since is None else lost.where(a.requested_at >= since)):
        where = f"it is {row.state}" if row.state is not None else "it is not in the ledger"
        add(_key(row), f"approval {row.approval_id} is open, but {where}")
    await _check_delivered(snapshot, add, since)


async def _check_delivered(snapshot: Snapshot, add: Add, since: datetime | None) -> None:
    a, e = approvals.c, job_events.c
    of_job = and_(jobs.c.tenant_id == a.tenant_id, jobs.c.job_id == a.job_id, jobs.c.queue == a.queue)
    leaving = and_(
        *(e.tenant_id == a.tenant_id, e.job_id == a.job_id, e.queue == a.queue),
        *(e.from_state == _WAITING, e.at >= a.requested_at),
    )
    delivered = (
        select(a.tenant_id, a.queue, a.job_id, a.approval_id, a.status, e.type, jobs.c.state)
        .select_from(approvals.join(jobs, of_job).outerjoin(job_events, leaving))
        .where(a.status != _REQUESTED, a.acked_at.is_not(None))
        .order_by(a.tenant_id, a.approval_id, e.seq)
    )
    last: Any = None
    async for row in snapshot.rows(delivered if since is None else delivered.where(a.requested_at >= since)):
        # The first event after the request is the one that answers it.
        if last != (last := (row.tenant_id, row.approval_id)) and (fault := _disagreement(row)):
            add(_key(row), fault)


def _disagreement(row: Any) -> str | None:
    if row.type is None:
        return f"approval {row.approval_id} is {row.status} and delivered, but it still waits ({row.state})"
    if row.type in _ALL_DECISIONS and row.type not in _DECISIONS[ApprovalStatus(row.status)]:
        return f"approval {row.approval_id} is {row.status}, but its events say {row.type}"
    return None


async def check_dead_letters(snapshot: Snapshot, add: Add, since: datetime | None) -> None:
    """Find dead letters whose status disagrees with what operators did to them."""
    d = dlq_items.c
    touched = select(dlq_items).where(or_(d.status != DeadLetterStatus.OPEN.value, d.replay_pending == 1))
    async for row in snapshot.rows(touched if since is None else touched.where(d.failed_at >= since)):
        for fault in _dead_letter_faults(row):
            add(_key(row), f"dead letter {row.dlq_id} {fault}")


def _dead_letter_faults(row: Any) -> Iterator[str]:
    status = DeadLetterStatus(row.status)
    if row.replay_pending and status is not DeadLetterStatus.REPLAYED:
        yield f"is to be replayed, but is {status}"
    match status:
        case DeadLetterStatus.REPLAYED if not row.replayed_as or row.replay_count < 1:
            yield "is replayed, but has no new job"
        case DeadLetterStatus.DISCARD_REQUESTED if not row.requested_by or row.confirmed_by:
            yield "is to be discarded, but not by one operator"
        case DeadLetterStatus.DISCARDED if not row.requested_by or not row.confirmed_by:
            yield "is discarded, but not by two operators"
        case DeadLetterStatus.DISCARDED if fold_name(row.requested_by) == fold_name(row.confirmed_by):
            yield f"is discarded by {row.requested_by} alone"


def _key(row: Any) -> JobKey:
    return JobKey(row.tenant_id, row.queue, row.job_id)


#: Faults that are kept with their text; all are counted.
KEPT_FAULTS: Final = 100
#: Events between two calls of `progress`.
PROGRESS_EVERY: Final = 10_000

_WITH_DEAD_LETTER: Final = (State.DLQ_RECORDED.value, State.FAILED.value)
#: Dead letters that await a decision keep their job from being pruned.
_AWAITING_DECISION: Final = ("open", "discard_requested")


class LedgerFault(msgspec.Struct, frozen=True):
    """A fault of one job."""

    key: JobKey
    message: str

    def __str__(self) -> str:
        return f"{self.key.job_id} ({self.key.queue}, tenant {self.key.tenant_id}): {self.message}"


class LedgerReport(msgspec.Struct, kw_only=True):
    """What was read, and its faults."""

    jobs: int = 0
    open_jobs: int = 0
    events: int = 0
    #: Legal traces of outages.
    forks: int = 0
    restores: int = 0
    anomalies: int = 0
    dead_letters: int = 0
    approvals: int = 0
    fault_count: int = 0
    #: The first `KEPT_FAULTS` of them.
    faults: list[LedgerFault] = []

    @property
    def ok(self) -> bool:
        return not self.fault_count

    def add(self, key: JobKey, message: str) -> None:
        """Add a fault."""
        self.fault_count += 1
        if len(self.faults) < KEPT_FAULTS:
            self.faults.append(LedgerFault(key, message))

    def assert_valid(self, *, ended: bool = False) -> None:
        """For tests: raise `AssertionError` with the faults; with `ended`, also if jobs are open."""
        if ended and self.open_jobs:
            raise AssertionError(f"{self.open_jobs} of {self.jobs} jobs in the ledger have no final event")
        if not self.ok:
            shown = "\n".join(str(fault) for fault in self.faults[:SHOWN_FAULTS])
            raise AssertionError(f"the ledger is not sound, {self.fault_count} faults:\n{shown}")


Progress = Callable[[LedgerReport], None]


async def verify_ledger(
    queries: Queries, since: datetime | None = None, progress: Progress | None = None
) -> LedgerReport:
    """Check all jobs, or those created at `since` or later. Raises `LedgerUnavailable`."""
    report = LedgerReport()
    async with queries.snapshot() as snapshot:
        await _read_histories(snapshot, report, since, progress or (lambda _: None))
        await _find_lone_events(snapshot, report, since)
        await _find_missing_dead_letters(snapshot, report, since)
        await _find_lone_dead_letters(snapshot, report, since)
        await check_approvals(snapshot, report.add, since)
        await check_dead_letters(snapshot, report.add, since)
        report.anomalies = await snapshot.scalar(
            _recent(select(func.count()).select_from(anomalies), anomalies.c.at, since)
        )
        dead_letters = _recent(select(func.count()).select_from(dlq_items), dlq_items.c.failed_at, since)
        report.dead_letters = await snapshot.scalar(dead_letters)
        requested = _recent(select(func.count()).select_from(approvals), approvals.c.requested_at, since)
        report.approvals = await snapshot.scalar(requested)
    return report


# Histories -----------------------------------------------------------------------------------------


async def _read_histories(snapshot: Snapshot, report: LedgerReport, since: datetime | None, progress: Progress) -> None:
    reader: _JobReader | None = None
    async for row in snapshot.rows(_side_by_side(since)):
        if reader is None or not reader.is_about(row):
            if reader is not None:
                reader.close(report)
            reader = _JobReader(row)
        if row.seq is not None:
            reader.read(row, report)
            if report.events % PROGRESS_EVERY == 0:
                progress(report)
    if reader is not None:
        reader.close(report)


class _JobReader:
    """Follows one job through its events, then compares it with its row."""

    def __init__(self, row: Any) -> None:
        self._row = row
        self._key = JobKey(row.tenant_id, row.queue, row.job_id)
        self._history = JobHistory(row.job_id)
        #: The event of the last move.
        self._last: Any = None

    def is_about(self, row: Any) -> bool:
        key = self._key
        return bool(row.job_id == key.job_id and row.queue == key.queue and row.tenant_id == key.tenant_id)

    def read(self, row: Any, report: LedgerReport) -> None:
        report.events += 1
        event = Event(
            type=row.type,
            job_id=row.job_id,
            at_ms=0,
            from_state=_state(row.from_state),
            to_state=_state(row.to_state),
            attempt=row.event_attempt,
            retry_count=row.event_retry_count,
        )
        for fault in self._history.add(event, row.seq):
            report.add(self._key, fault)
        if row.to_state is not None:
            self._last = row

    def close(self, report: LedgerReport) -> None:
        history = self._history
        report.jobs += 1
        report.open_jobs += self._row.state not in FINAL
        report.forks += history.forks
        report.restores += history.restores
        if self._last is None:
            report.add(self._key, "has no creation event")
            return
        for name, in_row, in_events in self._compare():
            if in_row != in_events:
                report.add(self._key, f"its row says {name} {in_row}, its events say {in_events}")

    def _compare(self) -> list[tuple[str, Any, Any]]:
        row, last = self._row, self._last
        ended = last.at if last.to_state in FINAL else None
        return [
            ("state", row.state, last.to_state),
            ("attempt", row.attempt, last.event_attempt),
            ("retry count", row.retry_count, last.event_retry_count),
            ("last event", row.last_seq, self._history.events),
            ("end", row.finished_at, ended),
        ]


def _side_by_side(since: datetime | None) -> Select[Any]:
    event = job_events.c
    statement = select(
        jobs.c.tenant_id,
        jobs.c.queue,
        jobs.c.job_id,
        jobs.c.state,
        jobs.c.attempt,
        jobs.c.retry_count,
        jobs.c.last_seq,
        jobs.c.finished_at,
        event.seq,
        event.type,
        event.from_state,
        event.to_state,
        event.attempt.label("event_attempt"),
        event.retry_count.label("event_retry_count"),
        event.at,
    ).select_from(jobs.outerjoin(job_events, _same_job(job_events)))
    order = (jobs.c.tenant_id, jobs.c.job_id, jobs.c.queue, event.seq)
    return _recent(statement, jobs.c.created_at, since).order_by(*order)


# Rows without their counterpart ----------------------------------------------------------------------


async def _find_lone_events(snapshot: Snapshot, report: LedgerReport, since: datetime | None) -> None:
    # Counting is cheaper than searching, and nearly always enough.
    if since is None and report.events == await snapshot.scalar(select(func.count()).select_from(job_events)):
        return
    event = job_events.c
    alone = select(event.tenant_id, event.queue, event.job_id, func.count().label("events"))
    alone = _recent(alone, event.at, since).where(~select(jobs.c.job_id).where(_same_job(job_events)).exists())
    async for row in snapshot.rows(alone.group_by(event.tenant_id, event.queue, event.job_id)):
        report.add(JobKey(row.tenant_id, row.queue, row.job_id), f"has {row.events} events and no row")


async def _find_missing_dead_letters(snapshot: Snapshot, report: LedgerReport, since: datetime | None) -> None:
    dead_letter = and_(dlq_items.c.tenant_id == jobs.c.tenant_id, dlq_items.c.dlq_id == jobs.c.dlq_id)
    missing = (
        select(jobs.c.tenant_id, jobs.c.queue, jobs.c.job_id, jobs.c.state, jobs.c.dlq_id)
        # The second condition is implied, but the planner needs it to use the partial index.
        .where(jobs.c.state.in_(_WITH_DEAD_LETTER), jobs.c.state != State.SUCCEEDED.value)
        .where(~select(dlq_items.c.dlq_id).where(dead_letter, dlq_items.c.job_id == jobs.c.job_id).exists())
    )
    async for row in snapshot.rows(_recent(missing, jobs.c.created_at, since)):
        report.add(
            JobKey(row.tenant_id, row.queue, row.job_id), f"is {row.state}, but dead letter {row.dlq_id} is missing"
        )


async def _find_lone_dead_letters(snapshot: Snapshot, report: LedgerReport, since: datetime | None) -> None:
    item = dlq_items.c
    alone = select(item.tenant_id, item.queue, item.job_id, item.dlq_id).where(
        item.status.in_(_AWAITING_DECISION), ~select(jobs.c.job_id).where(_same_job(dlq_items)).exists()
    )
    async for row in snapshot.rows(_recent(alone, item.failed_at, since)):
        report.add(JobKey(row.tenant_id, row.queue, row.job_id), f"has dead letter {row.dlq_id} and no row")


def _same_job(table: Any) -> ColumnElement[bool]:
    return and_(table.c.tenant_id == jobs.c.tenant_id, table.c.job_id == jobs.c.job_id, table.c.queue == jobs.c.queue)


def _recent(statement: Select[Any], column: Any, since: datetime | None) -> Select[Any]:
    return statement if since is None else statement.where(column >= since)


def _state(value: str | None) -> State | None:
    return None if value is None else State(value)
