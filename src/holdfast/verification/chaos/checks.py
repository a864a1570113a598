"""Check the ledger against the submission journal, the external effects and itself.

After any number of faults these must hold: no accepted job is lost, each has one final event, histories are legal and
gapless, there is one job for each idempotency key, effects happen at most once, jobs end as expected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
from sqlalchemy import func, select

from holdfast.core.states import FINAL, State
from holdfast.core.verdict import POISON_PILL
from holdfast.ledger.port.effects import EffectState
from holdfast.ledger.queries.jobs import Queries, Snapshot
from holdfast.ledger.verify import LedgerReport, verify_ledger
from holdfast.schema import anomalies, dlq_items, feed_positions, idempotency_keys, job_events, jobs
from holdfast.verification.chaos.load import SubmissionJournal
from holdfast.verification.chaos.parts import FaultResult
from holdfast.verification.chaos.workload import PILLS, WorkItem, crashes, external_effects, item_of

#: Defects listed one by one; all are counted.
KEPT: Final = 200
_REPLAY_PREFIX: Final = "dlq:"
_RECLAIMED: Final = "task.reclaimed"
#: Margin around a fault: writes not yet replicated when it starts are younger, and receipts are not later.
_NEAR_S: Final = 5.0


class Findings(msgspec.Struct, kw_only=True):
    """Counts and defects of a run."""

    #: Accepted work items, without probes, and replayed jobs.
    accepted: int = 0
    replayed: int = 0
    #: Submissions without a clear answer, which were repeated.
    submissions_in_doubt: int = 0
    receipts: int = 0
    #: Runs of jobs: the number of claims.
    executions: int = 0
    #: Runs reclaimed from an unresponsive worker.
    repeated_executions: int = 0
    #: Dead letters of jobs that end their workers, and the processes that these jobs have ended.
    poison_pills: int = 0
    crashes: int = 0
    #: Workers that other processes have found dead, so that their leases expired at once.
    deaths: int = 0
    effects: int = 0
    #: Effects in doubt that were checked and resolved.
    effects_in_doubt: int = 0
    ended: dict[str, int] = {}
    #: Events that did not fit their job's history, by reason.
    anomalies: dict[str, int] = {}
    ledger: LedgerReport = msgspec.field(default_factory=LedgerReport)
    #: Whether the engine may have lost writes.
    forgetful: bool = False
    #: Jobs that were accepted, not `durable`, and lost with such writes.
    forgotten: int = 0
    forgotten_jobs: list[str] = []
    #: Fault that they are attributed to → number of jobs.
    forgotten_by: dict[str, int] = {}
    #: Accepted jobs that are not in the ledger, or have no end there.
    lost: int = 0
    defect_count: int = 0
    defects: list[str] = []

    @property
    def ok(self) -> bool:
        return not self.defect_count

    def add(self, defect: str) -> None:
        """Count a defect, and list it unless `KEPT` are listed."""
        self.defect_count += 1
        if len(self.defects) < KEPT:
            self.defects.append(defect)


class LedgerRow(msgspec.Struct, frozen=True):
    """A job in the ledger."""

    tenant_id: str
    job_id: str
    queue: str
    job_type: str
    state: str
    idempotency_key: str
    attempt: int
    error_code: str | None
    last_error: str | None


async def check_run(
    queries: Queries, journal: SubmissionJournal, folder: Path, count: int, *, forgetful: bool = False
) -> Findings:
    """Check the stores after a run of `count` work items. Raises `LedgerUnavailable`.

    `forgetful`: fail-overs may have lost the newest writes of the engine, since replication is asynchronous. Then a job
    that was not `durable` may be missing; jobs in the ledger are checked the same.
    """
    findings = Findings(forgetful=forgetful)
    findings.ledger = await verify_ledger(queries)
    for fault in findings.ledger.faults:
        findings.add(f"the ledger has a fault: {fault}")
    findings.defect_count += findings.ledger.fault_count - len(findings.ledger.faults)
    async with queries.snapshot() as snapshot:
        rows = await _rows(snapshot)
        _check_answers(findings, journal, count)
        _check_journal(findings, journal, rows, folder)
        await _check_others(findings, journal, snapshot, rows)
        await _check_ends(findings, snapshot, rows)
        _check_poison(findings, rows, folder)
        await _check_effects(findings, journal, snapshot, rows, folder)
        await _count(findings, snapshot)
    _explain(findings)
    findings.ended = dict(Counter(row.state for row in rows.values()))
    findings.executions = sum(row.attempt for row in rows.values())
    return findings


def check_recoveries(results: Sequence[FaultResult], within_s: float) -> list[str]:
    """Faults without a recovery in time."""
    return [
        f"no job ended within {within_s:g} s after fault {each.fault.number}, {each.fault.kind} {each.fault.target}"
        for each in results
        if not each.skipped and each.recovered_s < 0
    ]


def check_forgotten(findings: Findings, journal: SubmissionJournal, results: Sequence[FaultResult]) -> None:
    """Check that Redis lost only jobs that it accepted around one of its faults (`results`)."""
    near = [(each.began_at - _NEAR_S, each.ended_at + _NEAR_S) for each in results]
    for job_id in list(findings.forgotten_jobs):
        at = journal.accepted_at[job_id]
        if not any(begin <= at <= end for begin, end in near):
            findings.forgotten_jobs.remove(job_id)
            findings.forgotten -= 1
            findings.lost += 1
            findings.add(f"job {job_id} is lost, though Redis had no fault when it was accepted")


async def lagging(queries: Queries, ends: Mapping[str, str]) -> list[str]:
    """Feeds that the ledger has not read to their ends. `ends`: queue → last entry of its feed."""
    async with queries.snapshot() as snapshot:
        positions = {row.feed: row.position async for row in snapshot.rows(select(*feed_positions.c))}
    return [
        f"it has read the feed of {queue} to {positions.get(queue)}, which ends at {end}"
        for queue, end in ends.items()
        if _parse_position(positions.get(queue, "0-0")) < _parse_position(end)
    ]


def _parse_position(position: str) -> tuple[int, int]:
    milliseconds, _, number = position.partition("-")
    return int(milliseconds), int(number or 0)


async def _rows(snapshot: Snapshot) -> dict[str, LedgerRow]:
    statement = select(*(jobs.c[name] for name in LedgerRow.__struct_fields__))
    return {row.job_id: LedgerRow(**row._mapping) async for row in snapshot.rows(statement)}


def work_item_of(journal: SubmissionJournal, number: int, folder: Path) -> WorkItem:
    """The work item of this number."""
    return item_of(journal.seed, number, folder)


def _check_answers(findings: Findings, journal: SubmissionJournal, count: int) -> None:
    """Check that every submission was finally accepted or refused."""
    unknown = [number for number in range(count) if number not in journal.accepted and number not in journal.refused]
    if unknown:
        findings.add(f"{len(unknown)} jobs were neither accepted nor refused, the first is number {unknown[0]}")


def _check_journal(findings: Findings, journal: SubmissionJournal, rows: dict[str, LedgerRow], folder: Path) -> None:
    findings.accepted, findings.receipts = journal.work_items, journal.receipts
    findings.submissions_in_doubt = journal.doubts
    for number, reason in journal.refused.items():
        findings.add(f"job {number} was refused: {reason}")
    for number, job_ids in journal.accepted.items():
        # A key that was lost with its job can be used again.
        kept = job_ids & rows.keys() if findings.forgetful else job_ids
        if len(kept) > 1:
            findings.add(f"one idempotency key, several jobs: number {number} is {', '.join(sorted(job_ids))}")
        item = work_item_of(journal, number, folder)
        for job_id in job_ids:
            _check_one(findings, journal, item, job_id, rows.get(job_id))


def _check_one(
    findings: Findings, journal: SubmissionJournal, item: WorkItem, job_id: str, row: LedgerRow | None
) -> None:
    what = f"job {item.number} ({item.kind}, {job_id})"
    if row is None and findings.forgetful and not item.durable:
        findings.forgotten += 1
        findings.forgotten_jobs.append(job_id)
        return
    if row is None:
        findings.lost += 1
        findings.add(f"{what} is lost: it was accepted, but is not in the ledger")
        return
    if (row.tenant_id, row.queue, row.job_type) != (item.tenant_id, item.queue, item.task):
        findings.add(f"{what} differs in the ledger: {row.job_type} of {row.tenant_id} in {row.queue}")
    if row.state not in FINAL:
        findings.lost += 1
        findings.add(f"{what} has no end: it is {row.state}: {row.last_error or 'no error'}")
    elif State(row.state) not in item.may_end:
        expected = " or ".join(sorted(item.may_end))
        findings.add(f"{what} is {row.state} instead of {expected}: {row.error_code}: {row.last_error}")
    elif job_id in journal.cancelled and row.state != State.CANCELLED and not findings.forgetful:
        findings.add(f"{what} is {row.state}, though its cancellation was confirmed")


async def _check_others(
    findings: Findings, journal: SubmissionJournal, snapshot: Snapshot, rows: dict[str, LedgerRow]
) -> None:
    """Check that every job was submitted or replayed, no key has several jobs, and no replay is lost."""
    dead_letters = {row.dlq_id async for row in snapshot.rows(select(dlq_items.c.dlq_id))}
    keys: Counter[tuple[str, str, str]] = Counter()
    for row in rows.values():
        keys[row.tenant_id, row.queue, row.idempotency_key] += 1
        if row.job_id in journal.numbers:
            continue
        key = row.idempotency_key
        if not (key.startswith(_REPLAY_PREFIX) and key.removeprefix(_REPLAY_PREFIX).rpartition(":")[0] in dead_letters):
            findings.add(f"job {row.job_id} ({row.job_type}, key {key}) was never submitted")
            continue
        findings.replayed += 1
        if row.state not in FINAL:
            findings.lost += 1
            findings.add(f"replayed job {row.job_id} has no end: it is {row.state}")
        elif row.state != State.FAILED:
            findings.add(f"replayed job {row.job_id} is {row.state} instead of failed")
    for (tenant_id, queue, key), count in keys.items():
        if count > 1:
            findings.add(f"one idempotency key, several jobs: {key} of {tenant_id} in {queue} has {count}")
    for replayed in journal.replayed.values():
        if replayed not in rows:
            findings.lost += 1
            findings.add(f"job {replayed} is lost: it was confirmed as the replay of a dead letter")


async def _check_ends(findings: Findings, snapshot: Snapshot, rows: dict[str, LedgerRow]) -> None:
    """Check that each job in a final state has one final event, and each other job none."""
    event = job_events.c
    ends = select(event.job_id, func.count().label("ends")).where(event.to_state.in_([*FINAL])).group_by(event.job_id)
    counted = {row.job_id: row.ends async for row in snapshot.rows(ends)}
    for job_id, row in rows.items():
        count = counted.get(job_id, 0)
        if count != (row.state in FINAL):
            findings.add(f"job {job_id} is {row.state} and has {count} final events")


def _check_poison(findings: Findings, rows: dict[str, LedgerRow], folder: Path) -> None:
    """Check that the jobs that end their workers are dead letters for that reason, and no other job is."""
    for row in rows.values():
        is_pill, code = row.job_type in PILLS, row.error_code
        findings.poison_pills += code == POISON_PILL
        if code == POISON_PILL and not is_pill:
            findings.add(f"job {row.job_id} ({row.job_type}) is a dead letter with {code}, though it ends no process")
        elif is_pill and row.state == State.FAILED and code != POISON_PILL:
            findings.add(f"job {row.job_id} ({row.job_type}) ends its workers, and failed with {code}")
    ended = Counter(crash.job_id for crash in crashes(folder))
    findings.crashes = ended.total()
    if too_few := [job_id for job_id, row in rows.items() if row.error_code == POISON_PILL and ended[job_id] < 2]:
        findings.add(f"{len(too_few)} jobs are poison pills after less than two lost workers: {too_few[0]}")


async def _check_effects(
    findings: Findings, journal: SubmissionJournal, snapshot: Snapshot, rows: dict[str, LedgerRow], folder: Path
) -> None:
    """Check that each effect happened at most once, and exactly once if its job succeeded."""
    done = Counter(external_effects(folder))
    findings.effects = done.total()
    findings.effects_in_doubt = len(journal.resolved)
    for effect, count in done.items():
        if count > 1:
            findings.add(f"effect {effect} happened {count} times")
    for number, job_ids in journal.accepted.items():
        key = work_item_of(journal, number, folder).arguments.get("key")
        if key is None:
            continue
        ends = {rows[job_id].state for job_id in job_ids if job_id in rows}
        if State.SUCCEEDED in ends and not done[key]:
            findings.add(f"effect {key} never happened, though its job succeeded")
    open_keys = select(idempotency_keys.c.key, idempotency_keys.c.state).where(
        idempotency_keys.c.state != EffectState.DONE.value
    )
    async for row in snapshot.rows(open_keys):
        findings.add(f"effect {row.key} is still {row.state}, though every job has ended")


async def _count(findings: Findings, snapshot: Snapshot) -> None:
    reclaimed = select(func.count()).select_from(job_events).where(job_events.c.type == _RECLAIMED)
    findings.repeated_executions = await snapshot.scalar(reclaimed)
    reasons: Counter[str] = Counter()
    async for row in snapshot.rows(select(anomalies.c.reason)):
        reasons[row.reason] += 1
    findings.anomalies = dict(reasons)


def _explain(findings: Findings) -> None:
    """Count forks, restored jobs and anomalies as defects, unless the engine may have lost writes."""
    if findings.forgetful:
        return
    for reason, count in findings.anomalies.items():
        findings.add(f"{count} anomalies in the ledger, though no store lost a write: {reason}")
    for what, count in (("forked", findings.ledger.forks), ("restored", findings.ledger.restores)):
        if count:
            findings.add(f"{count} jobs were {what}, though no store lost a write")
