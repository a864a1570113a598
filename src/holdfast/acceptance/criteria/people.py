"""What people do: look after suspended jobs, answer questions, keep a backlog in bounds (X2.3, X2.5, A2)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from holdfast.acceptance.model import Criterion, Unmet, check, same
from holdfast.acceptance.room import BACKLOG, MAIN
from holdfast.acceptance.stage import APPROVER, OPERATOR, PATIENCE_S, Stage
from holdfast.core.states import State
from holdfast.dlq.suspended import SuspendedFilter
from holdfast.errors import IntakeRefused, JobCancelled
from holdfast.handle import Job
from holdfast.upkeep.alarm import RAISED, Alarm
from holdfast.upkeep.loop import Queues

if TYPE_CHECKING:
    from holdfast.ledger.people import ApprovalRow

_REASON: Final = "holdfast verify"
_LIMIT: Final = 5


async def suspended(stage: Stage) -> str:
    jobs = [await stage.submit("fail_and_suspend", mended="mended") for _ in range(2)]
    for job in jobs:
        await stage.until(partial(_is_suspended, stage, job), "the job to be suspended")
    resumed, dropped = jobs
    office = stage.offices.suspended
    seen = await office.list(OPERATOR, SuspendedFilter(queues=frozenset({MAIN})))
    same("suspended jobs that an operator sees", {job.job_id for job in seen.jobs}, {job.id for job in jobs})
    stage.outside.happened.append("mended")
    await office.resume(OPERATOR, [resumed.id], reason=_REASON)
    await office.discard(OPERATOR, [dropped.id], reason=_REASON)
    same("the result after `resume`", await resumed.result(PATIENCE_S), "succeeded")
    same("the state after `discard`", await dropped.state(), State.CANCELLED)
    beginning = ["created", *["claimed", "retrying"] * 3, "claimed", "suspended"]
    same("the resumed job's events", await stage.types(resumed), [*beginning, "resumed", "claimed", "succeeded"])
    same("the dropped job's events", await stage.types(dropped), [*beginning, "cancelled"])
    await stage.nothing_pending(MAIN)
    return "suspended after 3 retries, seen by an operator; one resumed and done, one dropped"


async def _is_suspended(stage: Stage, job: Job[Any]) -> bool:
    if await job.state() is not State.SUSPENDED:
        return False
    if stage.has_ledger:
        # Lists of operators come from there.
        await stage.app.ledger.caught_up(PATIENCE_S)
    return True


async def approved(stage: Stage) -> str:
    job, approval = await _asked(stage, "grant")
    await stage.offices.approvals.vote(APPROVER, approval.approval_id, approve=True, reason=_REASON)
    same("the result", await job.result(PATIENCE_S), f"grant, approved by {APPROVER.name}")
    wanted = ["created", "claimed", "approval.requested", "approval.approved", "claimed", "succeeded"]
    same("the job's events", await stage.types(job), wanted)
    return "it waited, and went on with the yes of another person"


async def rejected(stage: Stage) -> str:
    job, approval = await _asked(stage, "deny")
    await stage.offices.approvals.vote(APPROVER, approval.approval_id, approve=False, reason=_REASON)
    try:
        await job.result(PATIENCE_S)
    except JobCancelled as exc:
        same("the error's code", exc.error_code, "APPROVAL_REJECTED")
    else:
        raise Unmet("the job succeeded, although it was rejected")
    same("the job's events", await stage.types(job), ["created", "claimed", "approval.requested", "approval.rejected"])
    return "cancelled with APPROVAL_REJECTED"


async def _asked(stage: Stage, what: str) -> tuple[Job[Any], ApprovalRow]:
    stage.need_ledger()
    from holdfast.ledger.deeds import ApprovalFilter

    job = await stage.submit("ask", what=what)

    async def question() -> list[ApprovalRow]:
        page = await stage.offices.approvals.list(APPROVER, ApprovalFilter(job_id=job.id))
        return list(page.approvals)

    (approval,) = await stage.until(question, "the question to reach the approvers")
    same("the job's state while it waits", await job.state(), State.WAITING_APPROVAL)
    return job, approval


async def backlog(stage: Stage) -> str:
    engine, office = stage.app.engine, stage.offices.operating
    await office.change_control(
        OPERATOR, BACKLOG, reason=_REASON, verb="limit", backlog_alert=_LIMIT, intake_limit=_LIMIT
    )
    jobs = [await stage.submit("act", queue=BACKLOG, key="backlog") for _ in range(_LIMIT)]
    await Alarm(engine, Queues(engine, [BACKLOG]), stage.room.settings, stage.app.ledger_port).look()
    check(f"backlog:{BACKLOG}" in engine.counts.alerts, f"no alert with {_LIMIT} jobs, the threshold being {_LIMIT}")
    if stage.has_ledger:
        page = await office.log(OPERATOR)
        check(any(line.type == RAISED for line in page.lines), "the alert is not in the operators' log")
    await _refused(stage, "over its limit")
    await office.change_control(OPERATOR, BACKLOG, reason=_REASON, verb="pause", intake_limit=None, intake_paused=True)
    await _refused(stage, "paused")
    await office.change_control(
        OPERATOR, BACKLOG, reason=_REASON, verb="resume", intake_paused=False, backlog_alert=None
    )
    jobs.append(await stage.submit("act", queue=BACKLOG, key="backlog"))
    for job in jobs:
        await office.cancel(OPERATOR, job.id, queue=BACKLOG, reason=_REASON)
    await stage.nothing_pending(BACKLOG, of="the backlog")
    return f"an alert at {_LIMIT} jobs; intake refused over its limit and while paused, then open again"


async def _refused(stage: Stage, why: str) -> None:
    try:
        await stage.submit("act", queue=BACKLOG, key="too much")
    except IntakeRefused:
        return
    raise Unmet(f"a submission was accepted although the queue's intake is {why}")


CRITERIA: Final = (
    Criterion("X2.3", "at the limit suspended, resumed or dropped by an operator", "two jobs that fail", suspended),
    Criterion("A2.1", "an approval that is granted", "a job that asks, and a yes", approved),
    Criterion("A2.2", "an approval that is rejected", "a job that asks, and a no", rejected),
    Criterion("X2.5", "a backlog over its threshold", f"{_LIMIT} jobs without a worker, limits and pause", backlog),
)
