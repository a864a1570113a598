"""Acceptance criteria for servers, ledger, wire protocol and operators.

`SERVER_CRITERIA`: the run's sandbox, and the ledger's tables and permissions. `doctor_criteria` adds one criterion per
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
from holdfast.execution.backend import backend_of
from holdfast.operations.suspended import SuspendedFilter
from holdfast.upkeep.backlog_monitor import RAISED, BacklogMonitor
from holdfast.upkeep.loop import QueueSelection
from holdfast.verification.acceptance.criteria_jobs import LATER_S
from holdfast.verification.acceptance.fixture import (
    APPROVER,
    OPERATOR,
    TIMEOUT_S,
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


async def durable(fixture: AcceptanceFixture) -> str:
    fixture.need_ledger()
    job = await fixture.app.tasks["add"].options(queue=MAIN, durable=True).submit(left=1, right=2)
    try:
        row = await fixture.app.ledger.queries.job(job.id, queue=MAIN)
    except UnknownJob:
        check(False, "`submit` returned before the ledger had the job")
        raise
    first = (await fixture.app.ledger.queries.events(row.key))[0]
    check_equal("its first event in the ledger", first.type, "task.created")
    check_equal("the result", await job.result(TIMEOUT_S), 3)
    return "in the ledger when `submit` returned"


async def lost(fixture: AcceptanceFixture) -> str:
    fixture.need_redis()
    fixture.need_ledger()
    from holdfast.upkeep.reconciler import Reconciler

    redis, ledger, engine = fixture.sandbox.redis, backend_of(fixture.app).ledger, fixture.app.engine
    assert redis is not None
    assert ledger is not None
    options = fixture.app.tasks["act"].options(queue=MAIN, durable=True, delay=LATER_S, idempotency_key="verify-lost")
    job = await options.submit(key="lost")
    before = await job.info()
    await redis.lose(MAIN, job.id)
    check_equal("the job in the engine after it was removed", (await engine.get(MAIN, [job.id]))[0], None)
    report = await Reconciler(engine, ledger, [MAIN]).reconcile()
    check_equal("restored jobs", [found.key.job_id for found in report.jobs], [job.id])
    after = await job.info()
    check_equal(
        "its state and due time", (after.state, after.next_attempt_at_ms), (State.QUEUED, before.next_attempt_at_ms)
    )
    check_equal("the job with its key", (await options.submit(key="lost")).id, job.id)
    await fixture.operations.jobs.expedite(OPERATOR, job.id, queue=MAIN, reason="holdfast verify")
    await job.result(TIMEOUT_S)
    check_equal("how often it ran", fixture.outside.happened.count("lost"), 1)
    expected = ["created", "restored", "expedited", "claimed", "succeeded"]
    check_equal("the job's events", await fixture.types(job), expected)
    return "removed from Redis, restored from the ledger with its id, key and due time, run once"


async def check_histories(fixture: AcceptanceFixture) -> str:
    fixture.need_ledger()
    from holdfast.ledger.verify import verify_ledger

    await fixture.app.ledger.wait_caught_up(TIMEOUT_S)
    report = await verify_ledger(fixture.app.ledger.queries)
    check(report.ok, f"{report.fault_count} faults, the first: {report.faults[0] if report.faults else ''}")
    check_equal("open jobs", report.open_jobs, 0)
    check_equal("events that did not fit their job's history", report.anomalies, 0)
    check_equal("forks of the feed", report.forks, 0)
    return f"{report.jobs} jobs, {report.events} events: no gap, only legal moves, one final event each"


async def nothing_left(fixture: AcceptanceFixture) -> str:
    for queue in QUEUES:
        await fixture.nothing_pending(queue, of="all jobs")
    return f"{len(QUEUES)} queues: no open job, no message, no pending entry"


LEDGER_CRITERIA: Final = (
    Criterion("L4.1", "a durable submission is in the ledger when it returns", "one durable job", durable),
    Criterion("L4.2", "a job that the engine lost is restored", "a job removed from Redis, then `reconcile`", lost),
)
LAST: Final = (
    Criterion(
        "L2",
        "the ledger's histories are gapless and legal",
        "`holdfast verify` of all jobs of the run",
        check_histories,
    ),
    Criterion("Q2", "nothing is pending at the end", "every queue of the run is checked", nothing_left),
)


async def doctor_criteria(fixture: AcceptanceFixture) -> list[Criterion]:
    """One criterion for each finding of `holdfast doctor`: on one server, on each master, in a file."""
    found = [("engine", finding) for finding in await fixture.app.engine.diagnose([])]
    port = backend_of(fixture.app).ledger
    if port is not None and port.projection is not None:
        found += [("ledger", finding) for finding in await port.diagnose()]
    return [_criterion(part, finding) for part, finding in found]


def _criterion(part: str, finding: Finding) -> Criterion:
    check = "server" if finding.check == part else finding.check.removeprefix(f"{part} ")
    return Criterion(
        f"{part}.{check.replace(' ', '-')}",
        f"the {part}'s {check} does not endanger jobs",
        "the check of `holdfast doctor`",
        partial(_check_finding, finding=finding),
    )


async def _check_finding(_fixture: AcceptanceFixture, *, finding: Finding) -> str:
    message = f"{finding.message}; {finding.remedy}" if finding.remedy and not finding.ok else finding.message
    if finding.ok or finding.warning:
        return message if finding.ok else f"a warning, not a danger: {message}"
    raise CriterionFailed(message)


async def check_sandbox(fixture: AcceptanceFixture) -> str:
    if fixture.sandbox.no_ledger:
        raise CriterionFailed(fixture.sandbox.no_ledger)
    return f"created with the name {fixture.sandbox.name}"


async def tables(fixture: AcceptanceFixture) -> str:
    if fixture.sandbox.postgres is None:
        raise NotApplicable("no ledger in PostgreSQL (HOLDFAST_LEDGER)")
    if problem := await fixture.sandbox.postgres.table_problem():
        raise CriterionFailed(problem)
    return "of this release; the user may read and write them"


SERVER_CRITERIA: Final = (
    Criterion("place", "the check has a sandbox", "a separate namespace, and a schema or a file", check_sandbox),
    Criterion("ledger.tables", "the ledger's tables and rights on them", "the deployment's tables are checked", tables),
)


async def foreign(fixture: AcceptanceFixture) -> str:
    job = await _add_message(fixture, {"type": "add", "payload": '{"left": 20, "right": 22}', "trace_id": "foreign"})
    check_equal("the result", await job.result(TIMEOUT_S), 42)
    check_equal("the job's events", await fixture.types(job), ["created", "claimed", "succeeded"])
    check_equal("the trace_id", (await job.info()).trace_id, "foreign")
    await fixture.nothing_pending(MAIN)
    return "a plain XADD, adopted and run"


async def duplicate(fixture: AcceptanceFixture) -> str:
    fields = {"type": "act", "payload": '{"key": "foreign-once"}', "idempotency_key": "verify-foreign"}
    job = await _add_message(fixture, fields)
    await job.result(TIMEOUT_S)
    await _redis(fixture).add(_stream(fixture), {"task_id": new_job_ids(1)[0], **fields})
    # When this job has ended, all messages before it in the stream have been read.
    await (await fixture.submit("add", left=0, right=0)).result(TIMEOUT_S)
    check_equal("how often it ran", fixture.outside.happened.count("foreign-once"), 1)
    check_equal("the job's events", await fixture.types(job), ["created", "claimed", "succeeded", "duplicate"])
    await fixture.nothing_pending(MAIN)
    return "two messages with one idempotency key: one job; the second message is dropped and recorded"


async def malformed(fixture: AcceptanceFixture) -> str:
    job = await _add_message(fixture, {"type": "add", "payload": "{no JSON"})
    view = await fixture.until(lambda: _get_ended(fixture, job), "the malformed message to become a dead letter")
    check_equal("the job", (view.state, view.failure.code if view.failure else ""), (State.FAILED, "MESSAGE_MALFORMED"))
    check_equal("the job's events", await fixture.types(job), ["created", "dlq_pending", "dlq", "failed"])
    await fixture.nothing_pending(MAIN)
    return "dead-lettered immediately, with MESSAGE_MALFORMED"


async def result(fixture: AcceptanceFixture) -> str:
    fixture.need_redis()
    job = await fixture.submit("add", left=3, right=4)
    await job.result(TIMEOUT_S)
    entries = await _redis(fixture).entries(_redis(fixture).keys(MAIN).result)
    found = [
        (entry["status"], entry["result"], entry["retry_count"]) for entry in entries if entry["task_id"] == job.id
    ]
    check_equal("entries of the job in stream:result", found, [("succeeded", "7", "0")])
    return "one plain entry with status, result and retry_count"


async def _add_message(fixture: AcceptanceFixture, fields: dict[str, str]) -> Job[Any]:
    """Submit a job as another program would, with XADD."""
    fixture.need_redis()
    (job_id,) = new_job_ids(1)
    await _redis(fixture).add(_stream(fixture), {"task_id": job_id, **fields})
    job = fixture.app.job(job_id, MAIN)
    await fixture.until(lambda: _get_known(fixture, job_id), "a worker to adopt the message")
    return job


async def _get_known(fixture: AcceptanceFixture, job_id: str) -> bool:
    return (await fixture.app.engine.get(MAIN, [job_id]))[0] is not None


async def _get_ended(fixture: AcceptanceFixture, job: Job[Any]) -> Any:
    view = await job.info()
    return view if view.state in FINAL else None


def _stream(fixture: AcceptanceFixture) -> bytes:
    return _redis(fixture).keys(MAIN).streams[Priority.NORMAL]


def _redis(fixture: AcceptanceFixture) -> RedisSandbox:
    assert fixture.sandbox.redis is not None
    return fixture.sandbox.redis


WIRE_CRITERIA: Final = (
    Criterion("Q3.1", "another program's message is adopted", "a plain XADD", foreign),
    Criterion("Q3.2", "the same key by XADD is one job", "two XADDs with one idempotency key", duplicate),
    Criterion("Q15", "a malformed message is a dead letter", "an XADD whose payload is not JSON", malformed),
    Criterion("Q13", "results can be read by any client", "one job, then XRANGE of stream:result", result),
)


_REASON: Final = "holdfast verify"
_LIMIT: Final = 5


async def suspended(fixture: AcceptanceFixture) -> str:
    jobs = [await fixture.submit("fail_and_suspend", mended="mended") for _ in range(2)]
    for job in jobs:
        await fixture.until(partial(_is_suspended, fixture, job), "the job to be suspended")
    resumed, discarded = jobs
    operations = fixture.operations.suspended
    page = await operations.list(OPERATOR, SuspendedFilter(queues=frozenset({MAIN})))
    check_equal("suspended jobs that an operator sees", {job.job_id for job in page.jobs}, {job.id for job in jobs})
    fixture.outside.happened.append("mended")
    await operations.resume(OPERATOR, [resumed.id], reason=_REASON)
    await operations.discard(OPERATOR, [discarded.id], reason=_REASON)
    check_equal("the result after `resume`", await resumed.result(TIMEOUT_S), "succeeded")
    check_equal("the state after `discard`", await discarded.state(), State.CANCELLED)
    beginning = ["created", *["claimed", "retrying"] * 3, "claimed", "suspended"]
    check_equal(
        "the resumed job's events", await fixture.types(resumed), [*beginning, "resumed", "claimed", "succeeded"]
    )
    check_equal("the discarded job's events", await fixture.types(discarded), [*beginning, "cancelled"])
    await fixture.nothing_pending(MAIN)
    return "suspended after 3 retries, listed for an operator; one resumed and succeeded, one discarded"


async def _is_suspended(fixture: AcceptanceFixture, job: Job[Any]) -> bool:
    if await job.state() is not State.SUSPENDED:
        return False
    if fixture.has_ledger:
        # Operators' lists come from the ledger.
        await fixture.app.ledger.wait_caught_up(TIMEOUT_S)
    return True


async def approved(fixture: AcceptanceFixture) -> str:
    job, approval = await _request_approval(fixture, "grant")
    await fixture.operations.approvals.vote(APPROVER, approval.approval_id, approve=True, reason=_REASON)
    check_equal("the result", await job.result(TIMEOUT_S), f"grant, approved by {APPROVER.name}")
    expected = ["created", "claimed", "approval.requested", "approval.approved", "claimed", "succeeded"]
    check_equal("the job's events", await fixture.types(job), expected)
    return "waited, and continued when an approver approved it"


async def rejected(fixture: AcceptanceFixture) -> str:
    job, approval = await _request_approval(fixture, "deny")
    await fixture.operations.approvals.vote(APPROVER, approval.approval_id, approve=False, reason=_REASON)
    try:
        await job.result(TIMEOUT_S)
    except JobCancelled as exc:
        check_equal("the error's code", exc.error_code, "APPROVAL_REJECTED")
    else:
        raise CriterionFailed("the job succeeded, although it was rejected")
    check_equal(
        "the job's events", await fixture.types(job), ["created", "claimed", "approval.requested", "approval.rejected"]
    )
    return "cancelled with APPROVAL_REJECTED"


async def _request_approval(fixture: AcceptanceFixture, what: str) -> tuple[Job[Any], ApprovalRow]:
    fixture.need_ledger()
    from holdfast.ledger.queries.operator_filters import ApprovalFilter

    job = await fixture.submit("ask", what=what)

    async def requests() -> list[ApprovalRow]:
        page = await fixture.operations.approvals.list(APPROVER, ApprovalFilter(job_id=job.id))
        return list(page.approvals)

    (approval,) = await fixture.until(requests, "the approval request to be listed")
    check_equal("the job's state while it waits", await job.state(), State.WAITING_APPROVAL)
    return job, approval


async def backlog(fixture: AcceptanceFixture) -> str:
    engine, operations = fixture.app.engine, fixture.operations
    await operations.queues.update_control(
        OPERATOR, BACKLOG, reason=_REASON, verb="limit", backlog_alert=_LIMIT, intake_limit=_LIMIT
    )
    jobs = [await fixture.submit("act", queue=BACKLOG, key="backlog") for _ in range(_LIMIT)]
    await BacklogMonitor(
        engine, QueueSelection(engine, [BACKLOG]), fixture.sandbox.settings, backend_of(fixture.app).ledger
    ).check()
    check(f"backlog:{BACKLOG}" in engine.counters.alerts, f"no alert with {_LIMIT} jobs at a threshold of {_LIMIT}")
    if fixture.has_ledger:
        page = await operations.audit.list(OPERATOR)
        check(any(entry.type == RAISED for entry in page.entries), "the alert is not in the audit log")
    await _require_refusal(fixture, "over its limit")
    await operations.queues.update_control(
        OPERATOR, BACKLOG, reason=_REASON, verb="pause", intake_limit=None, intake_paused=True
    )
    await _require_refusal(fixture, "paused")
    await operations.queues.update_control(
        OPERATOR, BACKLOG, reason=_REASON, verb="resume", intake_paused=False, backlog_alert=None
    )
    jobs.append(await fixture.submit("act", queue=BACKLOG, key="backlog"))
    for job in jobs:
        await operations.jobs.cancel(OPERATOR, job.id, queue=BACKLOG, reason=_REASON)
    await fixture.nothing_pending(BACKLOG, of="the backlog")
    return f"an alert at {_LIMIT} jobs; intake refused over its limit and while paused, then resumed"


async def _require_refusal(fixture: AcceptanceFixture, reason: str) -> None:
    try:
        await fixture.submit("act", queue=BACKLOG, key="too much")
    except IntakeRefused:
        return
    raise CriterionFailed(f"a submission was accepted although the queue's intake is {reason}")


OPERATOR_CRITERIA: Final = (
    Criterion("X2.3", "suspended at the limit, then resumed or discarded", "two jobs that fail", suspended),
    Criterion("A2.1", "an approval request is approved", "a job that requests approval, and a vote", approved),
    Criterion("A2.2", "an approval request is rejected", "a job that requests approval, and a vote", rejected),
    Criterion("X2.5", "a backlog at its threshold", f"{_LIMIT} jobs without a worker, limits and pause", backlog),
)
