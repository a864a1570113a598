"""The ledger: durable submissions, lost jobs that come back, and in the end every story whole (L2, L3, L4)."""

from __future__ import annotations

from typing import Final

from holdfast.acceptance.criteria.life import LATER_S
from holdfast.acceptance.model import Criterion, check, same
from holdfast.acceptance.room import MAIN, QUEUES
from holdfast.acceptance.stage import OPERATOR, PATIENCE_S, Stage
from holdfast.core.states import State
from holdfast.errors import UnknownJob


async def durable(stage: Stage) -> str:
    stage.need_ledger()
    job = await stage.app.tasks["add"].options(queue=MAIN, durable=True).submit(left=1, right=2)
    try:
        row = await stage.app.ledger.queries.job(job.id, queue=MAIN)
    except UnknownJob:
        check(False, "`submit` had returned, and the ledger did not have the job")
        raise
    first = (await stage.app.ledger.queries.story(row.key))[0]
    same("its first event in the ledger", first.type, "task.created")
    same("the result", await job.result(PATIENCE_S), 3)
    return "in the ledger when `submit` returned"


async def lost(stage: Stage) -> str:
    stage.need_redis()
    stage.need_ledger()
    from holdfast.upkeep.reconciler import Reconciler

    redis, ledger, engine = stage.room.redis, stage.app.ledger_port, stage.app.engine
    assert redis is not None
    assert ledger is not None
    options = stage.app.tasks["act"].options(queue=MAIN, durable=True, delay=LATER_S, idempotency_key="verify-lost")
    job = await options.submit(key="lost")
    before = await job.view()
    await redis.lose(MAIN, job.id)
    same("the job in the engine after it was removed", (await engine.get(MAIN, [job.id]))[0], None)
    report = await Reconciler(engine, ledger, [MAIN]).reconcile()
    same("jobs that were put back", [found.key.job_id for found in report.jobs], [job.id])
    after = await job.view()
    same("its state and due time", (after.state, after.next_attempt_at_ms), (State.QUEUED, before.next_attempt_at_ms))
    same("the job of its key", (await options.submit(key="lost")).id, job.id)
    await stage.offices.operating.retry_now(OPERATOR, job.id, queue=MAIN, reason="holdfast verify")
    await job.result(PATIENCE_S)
    same("how often it ran", stage.outside.happened.count("lost"), 1)
    wanted = ["created", "restored", "expedited", "claimed", "succeeded"]
    same("the job's events", await stage.types(job), wanted)
    return "removed from Redis, put back from the ledger under its id, key and due time, run once"


async def whole_stories(stage: Stage) -> str:
    stage.need_ledger()
    from holdfast.ledger.verify import verify_ledger

    await stage.app.ledger.caught_up(PATIENCE_S)
    report = await verify_ledger(stage.app.ledger.queries)
    check(report.ok, f"{report.fault_count} faults, the first: {report.faults[0] if report.faults else ''}")
    same("jobs without an end", report.open_jobs, 0)
    same("events that did not fit their job's story", report.anomalies, 0)
    same("forks of the feed", report.forks, 0)
    return f"{report.jobs} jobs, {report.events} events: no gap, only legal moves, one end each"


async def nothing_left(stage: Stage) -> str:
    for queue in QUEUES:
        await stage.nothing_pending(queue, of="all jobs")
    return f"{len(QUEUES)} queues: no open job, no message, nothing unacknowledged"


CRITERIA: Final = (
    Criterion("L4.1", "a durable submission is in the ledger when it returns", "one durable job", durable),
    Criterion("L4.2", "a job that the engine lost comes back", "a job removed from Redis, then `reconcile`", lost),
)
LAST: Final = (
    Criterion(
        "L2", "the ledger's stories are gapless and legal", "`holdfast verify` of all jobs of the run", whole_stories
    ),
    Criterion("Q2", "nothing is pending in the end", "a look at every queue of the run", nothing_left),
)
