"""A job's life: it succeeds, it fails for good, its effect happens once, it is cancelled (X1, E1)."""

from __future__ import annotations

import asyncio
from typing import Final

from holdfast.acceptance.model import Criterion, Unmet, check, same
from holdfast.acceptance.room import MAIN
from holdfast.acceptance.stage import PATIENCE_S, Stage
from holdfast.core.states import State
from holdfast.errors import JobCancelled, JobFailed

#: A job that waits for so long does not begin while the run lasts.
LATER_S: Final = 3_600


async def success(stage: Stage) -> str:
    job = await stage.submit("add", left=2, right=3)
    same("the result", await job.result(PATIENCE_S), 5)
    same("the job's events", await stage.types(job), ["created", "claimed", "succeeded"])
    await stage.nothing_pending(MAIN)
    return "created → claimed → succeeded; acknowledged, nothing pending"


async def failure(stage: Stage) -> str:
    job = await stage.submit("fail", times=9)
    try:
        await job.result(PATIENCE_S)
    except JobFailed as exc:
        same("the error's code", exc.error_code, "TASK_ERROR")
    else:
        raise Unmet("the job succeeded, although every run failed")
    letter = await _letter(stage, job.id)
    told = await stage.story(job)
    wanted = ["created", *["claimed", "retrying"] * 3, "claimed", "dlq_pending", "dlq", "failed"]
    same("the job's events", [event.type.removeprefix("task.") for event in told], wanted)
    same("the dead letter in the three moves", {(event.data or {}).get("dlq_id") for event in told[-3:]}, {letter})
    same("runs in the job's history", [run.number for run in await job.history()], [1, 2, 3, 4])
    await stage.nothing_pending(MAIN)
    return "3 retries, then dlq_pending → dlq_recorded → failed; the dead letter was there before `failed`"


async def _letter(stage: Stage, job_id: str) -> str:
    """The dead letter's id, as it is recorded at this moment: `failed` is only said once it is."""
    if stage.has_ledger:
        queries = stage.app.ledger.queries
        # The row of the job itself may be an instant behind the engine; its dead letter must not be.
        key = (await queries.job(job_id, queue=MAIN)).key
        row = await queries.dead_letter(key)
        check(row, "the job is failed, and the ledger has no dead letter of it")
        assert row is not None
        same("retries in the dead letter", row.retry_count, 3)
        return row.dlq_id
    if not stage.room.settings.stream_dlq:
        # The stream is turned off: the job alone knows its dead letter.
        return (await stage.app.job(job_id, MAIN).view()).meta.dlq_id or "none"
    assert stage.room.redis is not None
    stream = stage.room.redis.keys(MAIN).dlq
    entries = [entry for entry in await stage.room.redis.entries(stream) if entry["task_id"] == job_id]
    same("entries in the dead letter stream", len(entries), 1)
    return entries[0]["dlq_id"]


async def effect_once(stage: Stage) -> str:
    stage.need_ledger()
    first = await stage.submit("pay", order="17")
    result = await first.result(PATIENCE_S)
    runs = [event for event in await stage.types(first) if event == "claimed"]
    same("runs of the first job", len(runs), 2)
    second = await stage.submit("pay", order="17")
    same("the second job's result", await second.result(PATIENCE_S), result)
    same("how often the effect happened", stage.outside.happened.count("17"), 1)
    return "two jobs, four runs, one effect"


async def one_job_per_key(stage: Stage) -> str:
    keyed = stage.app.tasks["act"].options(queue=MAIN, idempotency_key="verify-key")
    jobs = await asyncio.gather(*(keyed.submit(key="once") for _ in range(20)))
    same("jobs", len({job.id for job in jobs}), 1)
    same("submissions that were the first", sum(not job.duplicate for job in jobs), 1)
    await jobs[0].result(PATIENCE_S)
    late = await keyed.submit(key="once")
    same("the job of a submission after its end", (late.id, late.duplicate), (jobs[0].id, True))
    same("how often it ran", stage.outside.happened.count("once"), 1)
    return "21 submissions, 20 of them at once: one job, one run"


async def cancel(stage: Stage) -> str:
    job = await stage.app.tasks["act"].options(queue=MAIN, delay=LATER_S).submit(key="never")
    await job.cancel("holdfast verify", actor="verify")
    try:
        await job.result(PATIENCE_S)
    except JobCancelled:
        pass
    else:
        raise Unmet("a cancelled job gave a result")
    same("the job's state", await job.state(), State.CANCELLED)
    same("the job's events", await stage.types(job), ["created", "cancelled"])
    check("never" not in stage.outside.happened, "the job ran although it was cancelled")
    await stage.nothing_pending(MAIN)
    return "created → cancelled, it never ran"


CRITERIA: Final = (
    Criterion("X1.1", "success is recorded and acknowledged", "one job, one run", success),
    Criterion("X1.2", "failure is retried to the limit, then a dead letter", "one job that always fails", failure),
    Criterion("X1.4", "an outside effect happens once", "two jobs with one effect, each failing after it", effect_once),
    Criterion("E1", "one idempotency key is one job", "the same key 21 times", one_job_per_key),
    Criterion("H1", "a job can be cancelled", "a delayed job, cancelled", cancel),
)
