"""Acceptance criteria for servers, ledger, wire protocol and operators.

`SERVER_CRITERIA`: the run's sandbox, and the ledger's tables and permissions. `diagnosed` adds one criterion per
finding of `holdfast doctor`.
`LEDGER_CRITERIA`: durable submissions are recorded, and jobs that the engine lost are restored (L3, L4).
`WIRE_CRITERIA`: foreign messages and results, as any Redis client sees them (Q3, Q13, Q15).
`OPERATOR_CRITERIA`: suspended jobs, approvals and backlog limits (X2.3, X2.5, A2).
`LAST`: every history is complete and legal, and nothing is pending (L2, Q2). Run after all others.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from holdfast.client.job import Job
from holdfast.core.job import Priority, new_job_ids
from holdfast.core.states import FINAL, State
from holdfast.engine.port.reads import Finding
from holdfast.errors import IntakeRefused, JobCancelled, UnknownJob
from holdfast.operations.suspended import SuspendedFilter
from holdfast.upkeep.backlog_monitor import RAISED, BacklogMonitor
from holdfast.upkeep.loop import QueueSelection
from holdfast.verification.acceptance.criteria_jobs import LATER_S
from holdfast.verification.acceptance.fixture import (
    APPROVER,
    OPERATOR,
    PATIENCE_S,
    AcceptanceFixture,
    Criterion,
    CriterionFailed,
    NotApplicable,
    check,
    check_equal,
)
from holdfast.verification.acceptance.sandbox import BACKLOG, MAIN, QUEUES

if TYPE_CHECKING:
    from holdfast.ledger.port.operators import ApprovalRow
    from holdfast.verification.acceptance.sandbox_redis import RedisSandbox


async def durable(stage: AcceptanceFixture) -> str:
    stage.need_ledger()
    job = await stage.app.tasks["add"].options(queue=MAIN, durable=True).submit(left=1, right=2)
    try:
        row = await stage.app.ledger.queries.job(job.id, queue=MAIN)
    except UnknownJob:
        check(False, "`submit` had returned, and the ledger did not have the job")
        raise
    first = (await stage.app.ledger.queries.events(row.key))[0]
    check_equal("its first event in the ledger", first.type, "task.created")
    check_equal("the result", await job.result(PATIENCE_S), 3)
    return "in the ledger when `submit` returned"


async def lost(stage: AcceptanceFixture) -> str:
    stage.need_redis()
    stage.need_ledger()
    from holdfast.upkeep.reconciler import Reconciler

    redis, ledger, engine = stage.room.redis, stage.app.ledger_backend, stage.app.engine
    assert redis is not None
    assert ledger is not None
    options = stage.app.tasks["act"].options(queue=MAIN, durable=True, delay=LATER_S, idempotency_key="verify-lost")
    job = await options.submit(key="lost")
    before = await job.info()
    await redis.lose(MAIN, job.id)
    check_equal("the job in the engine after it was removed", (await engine.get(MAIN, [job.id]))[0], None)
    report = await Reconciler(engine, ledger, [MAIN]).reconcile()
    check_equal("jobs that were put back", [found.key.job_id for found in report.jobs], [job.id])
    after = await job.info()
    check_equal(
        "its state and due time", (after.state, after.next_attempt_at_ms), (State.QUEUED, before.next_attempt_at_ms)
    )
    check_equal("the job of its key", (await options.submit(key="lost")).id, job.id)
    await stage.operations.operating.expedite(OPERATOR, job.id, queue=MAIN, reason="holdfast verify")
    await job.result(PATIENCE_S)
    check_equal("how often it ran", stage.outside.happened.count("lost"), 1)
    wanted = ["created", "restored", "expedited", "claimed", "succeeded"]
    check_equal("the job's events", await stage.types(job), wanted)
    return "removed from Redis, put back from the ledger under its id, key and due time, run once"


async def whole_stories(stage: AcceptanceFixture) -> str:
    stage.need_ledger()
    from holdfast.ledger.verify import verify_ledger

    await stage.app.ledger.wait_caught_up(PATIENCE_S)
    report = await verify_ledger(stage.app.ledger.queries)
    check(report.ok, f"{report.fault_count} faults, the first: {report.faults[0] if report.faults else ''}")
    check_equal("jobs without an end", report.open_jobs, 0)
    check_equal("events that did not fit their job's story", report.anomalies, 0)
    check_equal("forks of the feed", report.forks, 0)
    return f"{report.jobs} jobs, {report.events} events: no gap, only legal moves, one end each"


async def nothing_left(stage: AcceptanceFixture) -> str:
    for queue in QUEUES:
        await stage.nothing_pending(queue, of="all jobs")
    return f"{len(QUEUES)} queues: no open job, no message, nothing unacknowledged"


LEDGER_CRITERIA: Final = (
    Criterion("L4.1", "a durable submission is in the ledger when it returns", "one durable job", durable),
    Criterion("L4.2", "a job that the engine lost comes back", "a job removed from Redis, then `reconcile`", lost),
)
LAST: Final = (
    Criterion(
        "L2", "the ledger's stories are gapless and legal", "`holdfast verify` of all jobs of the run", whole_stories
    ),
    Criterion("Q2", "nothing is pending in the end", "a look at every queue of the run", nothing_left),
)


async def diagnosed(stage: AcceptanceFixture) -> list[Criterion]:
    """A criterion for each thing that `holdfast doctor` looks at here: on one server, on each master, in a file."""
    found = [("engine", finding) for finding in await stage.app.engine.diagnose([])]
    port = stage.app.ledger_backend
    if port is not None and port.projection is not None:
        found += [("ledger", finding) for finding in await port.diagnose()]
    return [_criterion(part, finding) for part, finding in found]


def _criterion(part: str, finding: Finding) -> Criterion:
    check = "server" if finding.check == part else finding.check.removeprefix(f"{part} ")
    return Criterion(
        f"{part}.{check.replace(' ', '-')}",
        f"the {part}'s {check} endangers no job",
        "what `holdfast doctor` asks",
        partial(_judged, finding=finding),
    )


async def _judged(_stage: AcceptanceFixture, *, finding: Finding) -> str:
    said = f"{finding.message}; {finding.advice}" if finding.advice and not finding.ok else finding.message
    if finding.ok or finding.warning:
        return said if finding.ok else f"a warning, no danger: {said}"
    raise CriterionFailed(said)


async def place(stage: AcceptanceFixture) -> str:
    if stage.room.no_ledger:
        raise CriterionFailed(stage.room.no_ledger)
    return f"under the name {stage.room.name}"


async def tables(stage: AcceptanceFixture) -> str:
    if stage.room.postgres is None:
        raise NotApplicable("there is no ledger in PostgreSQL (HOLDFAST_LEDGER)")
    if wrong := await stage.room.postgres.table_problem():
        raise CriterionFailed(wrong)
    return "of this release, and its user may read and write them"


SERVER_CRITERIA: Final = (
    Criterion("place", "the check has a place of its own", "a namespace, and a schema or a file", place),
    Criterion("ledger.tables", "the ledger's tables and rights on them", "a look at the deployment's own", tables),
)


async def foreign(stage: AcceptanceFixture) -> str:
    job = await _added(stage, {"type": "add", "payload": '{"left": 20, "right": 22}', "trace_id": "foreign"})
    check_equal("the result", await job.result(PATIENCE_S), 42)
    check_equal("the job's events", await stage.types(job), ["created", "claimed", "succeeded"])
    check_equal("the trace_id", (await job.info()).trace_id, "foreign")
    await stage.nothing_pending(MAIN)
    return "XADD by hand, adopted and run"


async def duplicate(stage: AcceptanceFixture) -> str:
    fields = {"type": "act", "payload": '{"key": "foreign-once"}', "idempotency_key": "verify-foreign"}
    job = await _added(stage, fields)
    await job.result(PATIENCE_S)
    await _redis(stage).add(_line(stage), {"task_id": new_job_ids(1)[0], **fields})
    # Whatever is in line before this one has been looked at when it has ended.
    await (await stage.submit("add", left=0, right=0)).result(PATIENCE_S)
    check_equal("how often it ran", stage.outside.happened.count("foreign-once"), 1)
    check_equal("the job's events", await stage.types(job), ["created", "claimed", "succeeded", "duplicate"])
    await stage.nothing_pending(MAIN)
    return "two messages with one idempotency key: one job, the second is dropped and recorded"


async def malformed(stage: AcceptanceFixture) -> str:
    job = await _added(stage, {"type": "add", "payload": "{no JSON"})
    view = await stage.until(lambda: _ended(stage, job), "the malformed message to become a dead letter")
    check_equal("the job", (view.state, view.failure.code if view.failure else ""), (State.FAILED, "MESSAGE_MALFORMED"))
    check_equal("the job's events", await stage.types(job), ["created", "dlq_pending", "dlq", "failed"])
    await stage.nothing_pending(MAIN)
    return "a dead letter at once, with MESSAGE_MALFORMED"


async def result(stage: AcceptanceFixture) -> str:
    stage.need_redis()
    job = await stage.submit("add", left=3, right=4)
    await job.result(PATIENCE_S)
    entries = await _redis(stage).entries(_redis(stage).keys(MAIN).result)
    found = [
        (entry["status"], entry["result"], entry["retry_count"]) for entry in entries if entry["task_id"] == job.id
    ]
    check_equal("entries of the job in stream:result", found, [("succeeded", "7", "0")])
    return "one plain entry with status, result and retry_count"


async def _added(stage: AcceptanceFixture, fields: dict[str, str]) -> Job[Any]:
    """A job that another program has submitted."""
    stage.need_redis()
    (job_id,) = new_job_ids(1)
    await _redis(stage).add(_line(stage), {"task_id": job_id, **fields})
    job = stage.app.job(job_id, MAIN)
    await stage.until(lambda: _known(stage, job_id), "a worker to adopt the message")
    return job


async def _known(stage: AcceptanceFixture, job_id: str) -> bool:
    return (await stage.app.engine.get(MAIN, [job_id]))[0] is not None


async def _ended(stage: AcceptanceFixture, job: Job[Any]) -> Any:
    view = await job.info()
    return view if view.state in FINAL else None


def _line(stage: AcceptanceFixture) -> bytes:
    return _redis(stage).keys(MAIN).streams[Priority.NORMAL]


def _redis(stage: AcceptanceFixture) -> RedisSandbox:
    assert stage.room.redis is not None
    return stage.room.redis


WIRE_CRITERIA: Final = (
    Criterion("Q3.1", "another program's message is adopted", "a plain XADD", foreign),
    Criterion("Q3.2", "the same key by XADD is one job", "two XADDs with one idempotency key", duplicate),
    Criterion("Q15", "a malformed message is a dead letter", "an XADD whose payload is no JSON", malformed),
    Criterion("Q13", "results can be read by any client", "one job, then XRANGE of stream:result", result),
)


_REASON: Final = "holdfast verify"
_LIMIT: Final = 5


async def suspended(stage: AcceptanceFixture) -> str:
    jobs = [await stage.submit("fail_and_suspend", mended="mended") for _ in range(2)]
    for job in jobs:
        await stage.until(partial(_is_suspended, stage, job), "the job to be suspended")
    resumed, dropped = jobs
    office = stage.operations.suspended
    seen = await office.list(OPERATOR, SuspendedFilter(queues=frozenset({MAIN})))
    check_equal("suspended jobs that an operator sees", {job.job_id for job in seen.jobs}, {job.id for job in jobs})
    stage.outside.happened.append("mended")
    await office.resume(OPERATOR, [resumed.id], reason=_REASON)
    await office.discard(OPERATOR, [dropped.id], reason=_REASON)
    check_equal("the result after `resume`", await resumed.result(PATIENCE_S), "succeeded")
    check_equal("the state after `discard`", await dropped.state(), State.CANCELLED)
    beginning = ["created", *["claimed", "retrying"] * 3, "claimed", "suspended"]
    check_equal("the resumed job's events", await stage.types(resumed), [*beginning, "resumed", "claimed", "succeeded"])
    check_equal("the dropped job's events", await stage.types(dropped), [*beginning, "cancelled"])
    await stage.nothing_pending(MAIN)
    return "suspended after 3 retries, seen by an operator; one resumed and done, one dropped"


async def _is_suspended(stage: AcceptanceFixture, job: Job[Any]) -> bool:
    if await job.state() is not State.SUSPENDED:
        return False
    if stage.has_ledger:
        # Lists of operators come from there.
        await stage.app.ledger.wait_caught_up(PATIENCE_S)
    return True


async def approved(stage: AcceptanceFixture) -> str:
    job, approval = await _asked(stage, "grant")
    await stage.operations.approvals.vote(APPROVER, approval.approval_id, approve=True, reason=_REASON)
    check_equal("the result", await job.result(PATIENCE_S), f"grant, approved by {APPROVER.name}")
    wanted = ["created", "claimed", "approval.requested", "approval.approved", "claimed", "succeeded"]
    check_equal("the job's events", await stage.types(job), wanted)
    return "it waited, and went on with the yes of another person"


async def rejected(stage: AcceptanceFixture) -> str:
    job, approval = await _asked(stage, "deny")
    await stage.operations.approvals.vote(APPROVER, approval.approval_id, approve=False, reason=_REASON)
    try:
        await job.result(PATIENCE_S)
    except JobCancelled as exc:
        check_equal("the error's code", exc.error_code, "APPROVAL_REJECTED")
    else:
        raise CriterionFailed("the job succeeded, although it was rejected")
    check_equal(
        "the job's events", await stage.types(job), ["created", "claimed", "approval.requested", "approval.rejected"]
    )
    return "cancelled with APPROVAL_REJECTED"


async def _asked(stage: AcceptanceFixture, what: str) -> tuple[Job[Any], ApprovalRow]:
    stage.need_ledger()
    from holdfast.ledger.queries.operator_filters import ApprovalFilter

    job = await stage.submit("ask", what=what)

    async def question() -> list[ApprovalRow]:
        page = await stage.operations.approvals.list(APPROVER, ApprovalFilter(job_id=job.id))
        return list(page.approvals)

    (approval,) = await stage.until(question, "the question to reach the approvers")
    check_equal("the job's state while it waits", await job.state(), State.WAITING_APPROVAL)
    return job, approval


async def backlog(stage: AcceptanceFixture) -> str:
    engine, office = stage.app.engine, stage.operations.operating
    await office.update_control(
        OPERATOR, BACKLOG, reason=_REASON, verb="limit", backlog_alert=_LIMIT, intake_limit=_LIMIT
    )
    jobs = [await stage.submit("act", queue=BACKLOG, key="backlog") for _ in range(_LIMIT)]
    await BacklogMonitor(
        engine, QueueSelection(engine, [BACKLOG]), stage.room.settings, stage.app.ledger_backend
    ).check()
    check(f"backlog:{BACKLOG}" in engine.counts.alerts, f"no alert with {_LIMIT} jobs, the threshold being {_LIMIT}")
    if stage.has_ledger:
        page = await office.audit_log(OPERATOR)
        check(any(line.type == RAISED for line in page.entries), "the alert is not in the operators' log")
    await _refused(stage, "over its limit")
    await office.update_control(OPERATOR, BACKLOG, reason=_REASON, verb="pause", intake_limit=None, intake_paused=True)
    await _refused(stage, "paused")
    await office.update_control(
        OPERATOR, BACKLOG, reason=_REASON, verb="resume", intake_paused=False, backlog_alert=None
    )
    jobs.append(await stage.submit("act", queue=BACKLOG, key="backlog"))
    for job in jobs:
        await office.cancel(OPERATOR, job.id, queue=BACKLOG, reason=_REASON)
    await stage.nothing_pending(BACKLOG, of="the backlog")
    return f"an alert at {_LIMIT} jobs; intake refused over its limit and while paused, then open again"


async def _refused(stage: AcceptanceFixture, why: str) -> None:
    try:
        await stage.submit("act", queue=BACKLOG, key="too much")
    except IntakeRefused:
        return
    raise CriterionFailed(f"a submission was accepted although the queue's intake is {why}")


OPERATOR_CRITERIA: Final = (
    Criterion("X2.3", "at the limit suspended, resumed or dropped by an operator", "two jobs that fail", suspended),
    Criterion("A2.1", "an approval that is granted", "a job that asks, and a yes", approved),
    Criterion("A2.2", "an approval that is rejected", "a job that asks, and a no", rejected),
    Criterion("X2.5", "a backlog over its threshold", f"{_LIMIT} jobs without a worker, limits and pause", backlog),
)
