"""Acceptance criteria for jobs: life cycle, lost leases, replays.

`LIFE_CRITERIA`: a job succeeds, fails permanently, has its effect once, or is cancelled; one job per key (X1, E1, H1).
`LEASE_CRITERIA`: jobs of killed or paused workers are reclaimed, and the old worker is fenced (X1.3, X2.4, Q5, Q6).
`REPLAY_CRITERIA`: RP-001 to RP-005 (X3), which check transitions, retry counts, the link to the dead letter, and that a
second final write is refused.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any, Final

from holdfast.client.job import Job
from holdfast.core.states import State
from holdfast.core.verdict import Settlement, SettleResult, Succeed
from holdfast.errors import JobCancelled, JobFailed, TransitionInvalid
from holdfast.verification.acceptance.fixture import (
    OPERATOR,
    PATIENCE_S,
    TAKEN_OVER,
    AcceptanceFixture,
    Criterion,
    CriterionFailed,
    NotApplicable,
    check,
    check_equal,
)
from holdfast.verification.acceptance.sandbox import CRASH, FENCE, LEASE_S, MAIN, PAUSE

_ONE: Final = b"1"


async def crash(stage: AcceptanceFixture) -> str:
    async with stage.child(CRASH) as child:
        job = await stage.submit("hold", queue=CRASH)
        await child.begun(job)
        await child.kill()
    killed_at = time.monotonic()
    async with stage.worker(CRASH):
        check_equal("the result", await job.result(PATIENCE_S), TAKEN_OVER)
        took_s = time.monotonic() - killed_at
        told = await stage.events(job)
    check_equal("the job's events", [e.type for e in told], [f"task.{t}" for t in _TAKEN_OVER])
    claimed, reclaimed = told[1], told[2]
    check_equal("the old owner in the event", (reclaimed.data or {}).get("old_worker"), claimed.worker)
    check_equal("the attempt of the second run", reclaimed.attempt, 2)
    await stage.nothing_pending(CRASH)
    return f"finished {took_s:.1f} s after the kill, with a lease of {LEASE_S:g} s"


async def pause(stage: AcceptanceFixture) -> str:
    if stage.room.deployment.embedded:
        raise NotApplicable(
            "who is stopped in the middle of a commit keeps the file from all others; Q5 tries the fence"
        )
    async with stage.child(PAUSE) as child:
        job = await stage.submit("hold", queue=PAUSE)
        await child.begun(job)
        child.pause()
        async with stage.worker(PAUSE):
            check_equal("the result", await job.result(PATIENCE_S), TAKEN_OVER)
            before = await stage.types(job)
            counts = await child.resume()
            check_equal("the job's events", before, _TAKEN_OVER)
            check_equal("its events after the paused worker came back", await stage.types(job), before)
    check_equal("ends that the paused worker could write", counts["succeeded"], 0)
    check(counts["refused"], "nobody told the paused worker that its lease was lost")
    view = await job.info()
    check_equal("the job", (view.state, view.result), (State.SUCCEEDED, f'"{TAKEN_OVER}"'.encode()))
    await stage.nothing_pending(PAUSE)
    return "taken over while it stood still; when it came back, its end was refused"


async def fence(stage: AcceptanceFixture) -> str:
    engine = stage.app.engine
    job = await stage.submit("add", queue=FENCE, left=1, right=1)
    (first,) = await engine.claim("verify-first", [FENCE], 1, round(PATIENCE_S * 1000))
    check_equal("jobs taken from a lease that is held", len(await engine.reclaim("verify-second", [FENCE], 10)), 0)
    await asyncio.sleep(LEASE_S)

    async def taken_over() -> bool:
        claims.extend(await engine.reclaim("verify-second", [FENCE], 10))
        return bool(claims)

    claims = [first][:0]
    await stage.until(taken_over, "the lost lease to be taken over")
    (second,) = claims
    now_ms = await engine.now_ms()
    late, right = Settlement(first, Succeed(_ONE), now_ms), Settlement(second, Succeed(b"2"), now_ms)
    check_equal("the answer to the first worker", (await engine.settle([late]))[0], SettleResult.STALE)
    check_equal("the answer to the second worker", (await engine.settle([right]))[0], SettleResult.APPLIED)
    check_equal("the answer to the same verdict, sent again", (await engine.settle([right]))[0], SettleResult.ALREADY)
    check_equal("the answer to the first worker, after the end", (await engine.settle([late]))[0], SettleResult.STALE)
    check_equal("the result", await job.result(PATIENCE_S), 2)
    check_equal("the job's events", await stage.types(job), _TAKEN_OVER)
    await stage.nothing_pending(FENCE)
    return "stale, applied, already, stale: one end"


_TAKEN_OVER: Final = ["created", "claimed", "reclaimed", "succeeded"]

LEASE_CRITERIA: Final = (
    Criterion("X1.3", "a killed worker's job is finished by another", "kill -9 of a worker process in mid-job", crash),
    Criterion("Q6", "a paused worker is fenced off", "SIGSTOP, take-over, SIGCONT of a worker process", pause),
    Criterion("Q5", "a lease is taken once, when it is lost", "two workers and four verdicts on one job", fence),
)


#: A job that waits for so long does not begin while the run lasts.
LATER_S: Final = 3_600


async def success(stage: AcceptanceFixture) -> str:
    job = await stage.submit("add", left=2, right=3)
    check_equal("the result", await job.result(PATIENCE_S), 5)
    check_equal("the job's events", await stage.types(job), ["created", "claimed", "succeeded"])
    await stage.nothing_pending(MAIN)
    return "created → claimed → succeeded; acknowledged, nothing pending"


async def failure(stage: AcceptanceFixture) -> str:
    job = await stage.submit("fail", times=9)
    try:
        await job.result(PATIENCE_S)
    except JobFailed as exc:
        check_equal("the error's code", exc.error_code, "TASK_ERROR")
    else:
        raise CriterionFailed("the job succeeded, although every run failed")
    letter = await _letter(stage, job.id)
    told = await stage.events(job)
    wanted = ["created", *["claimed", "retrying"] * 3, "claimed", "dlq_pending", "dlq", "failed"]
    check_equal("the job's events", [event.type.removeprefix("task.") for event in told], wanted)
    check_equal(
        "the dead letter in the three moves", {(event.data or {}).get("dlq_id") for event in told[-3:]}, {letter}
    )
    check_equal("runs in the job's history", [run.number for run in await job.history()], [1, 2, 3, 4])
    await stage.nothing_pending(MAIN)
    return "3 retries, then dlq_pending → dlq_recorded → failed; the dead letter was there before `failed`"


async def _letter(stage: AcceptanceFixture, job_id: str) -> str:
    """The dead letter's id, as it is recorded at this moment: `failed` is only said once it is."""
    if stage.has_ledger:
        queries = stage.app.ledger.queries
        # The row of the job itself may be an instant behind the engine; its dead letter must not be.
        key = (await queries.job(job_id, queue=MAIN)).key
        row = await queries.dead_letter_of(key)
        check(row, "the job is failed, and the ledger has no dead letter of it")
        assert row is not None
        check_equal("retries in the dead letter", row.retry_count, 3)
        return row.dlq_id
    if not stage.room.settings.stream_dlq:
        # The stream is turned off: the job alone knows its dead letter.
        return (await stage.app.job(job_id, MAIN).info()).meta.dlq_id or "none"
    assert stage.room.redis is not None
    stream = stage.room.redis.keys(MAIN).dlq
    entries = [entry for entry in await stage.room.redis.entries(stream) if entry["task_id"] == job_id]
    check_equal("entries in the dead letter stream", len(entries), 1)
    return entries[0]["dlq_id"]


async def effect_once(stage: AcceptanceFixture) -> str:
    stage.need_ledger()
    first = await stage.submit("pay", order="17")
    result = await first.result(PATIENCE_S)
    runs = [event for event in await stage.types(first) if event == "claimed"]
    check_equal("runs of the first job", len(runs), 2)
    second = await stage.submit("pay", order="17")
    check_equal("the second job's result", await second.result(PATIENCE_S), result)
    check_equal("how often the effect happened", stage.outside.happened.count("17"), 1)
    return "two jobs, four runs, one effect"


async def one_job_per_key(stage: AcceptanceFixture) -> str:
    keyed = stage.app.tasks["act"].options(queue=MAIN, idempotency_key="verify-key")
    jobs = await asyncio.gather(*(keyed.submit(key="once") for _ in range(20)))
    check_equal("jobs", len({job.id for job in jobs}), 1)
    check_equal("submissions that were the first", sum(not job.duplicate for job in jobs), 1)
    await jobs[0].result(PATIENCE_S)
    late = await keyed.submit(key="once")
    check_equal("the job of a submission after its end", (late.id, late.duplicate), (jobs[0].id, True))
    check_equal("how often it ran", stage.outside.happened.count("once"), 1)
    return "21 submissions, 20 of them at once: one job, one run"


async def cancel(stage: AcceptanceFixture) -> str:
    job = await stage.app.tasks["act"].options(queue=MAIN, delay=LATER_S).submit(key="never")
    await job.cancel("holdfast verify", actor="verify")
    try:
        await job.result(PATIENCE_S)
    except JobCancelled:
        pass
    else:
        raise CriterionFailed("a cancelled job gave a result")
    check_equal("the job's state", await job.state(), State.CANCELLED)
    check_equal("the job's events", await stage.types(job), ["created", "cancelled"])
    check("never" not in stage.outside.happened, "the job ran although it was cancelled")
    await stage.nothing_pending(MAIN)
    return "created → cancelled, it never ran"


LIFE_CRITERIA: Final = (
    Criterion("X1.1", "success is recorded and acknowledged", "one job, one run", success),
    Criterion("X1.2", "failure is retried to the limit, then a dead letter", "one job that always fails", failure),
    Criterion("X1.4", "an outside effect happens once", "two jobs with one effect, each failing after it", effect_once),
    Criterion("E1", "one idempotency key is one job", "the same key 21 times", one_job_per_key),
    Criterion("H1", "a job can be cancelled", "a delayed job, cancelled", cancel),
)


_GIVEN_UP: Final = ["dlq_pending", "dlq_recorded", "failed"]


async def _replay(stage: AcceptanceFixture, failures: int, *, trace: str) -> tuple[Job[Any], list[str]]:
    """A job that fails so often, run to its end; and the states that it went through."""
    job = await stage.app.tasks["fail"].options(queue=MAIN, trace_id=trace).submit(times=failures)
    try:
        await job.result(PATIENCE_S)
    except JobFailed:
        check(failures > 3, f"the job failed after {failures} transient errors; 3 retries are allowed")
    states = [str(event.to_state) for event in await stage.events(job) if event.to_state is not None]
    return job, states


async def transient(stage: AcceptanceFixture, *, failures: int) -> str:
    trace = f"trace-RP-{failures}"
    job, states = await _replay(stage, failures, trace=trace)
    given_up = failures > 3
    wanted = ["queued", *["running", "retrying"] * min(failures, 3), "running"]
    wanted += _GIVEN_UP if given_up else ["succeeded"]
    check_equal("transitions", states, wanted)
    view = await job.info()
    check_equal("retry_count", view.meta.retry_count, min(failures, 3))
    check_equal("trace_id", view.trace_id, trace)
    if given_up:
        check(view.meta.dlq_id, "the failed job is linked to no dlq_id")
    return f"{' → '.join(states)}; retry_count {view.meta.retry_count}"


async def second_final_write(stage: AcceptanceFixture) -> str:
    job, before = await _replay(stage, 0, trace="trace-RP-005")
    refused = 0
    for to in (State.FAILED, State.CANCELLED, State.QUEUED, State.DLQ_PENDING):
        try:
            await stage.app.engine.move(MAIN, job.id, to, actor=OPERATOR.name, reason="a second final write")
        except TransitionInvalid as exc:
            check_equal("the refusal's code", exc.code, "WF_STATE_TRANSITION_INVALID")
            refused += 1
        else:
            raise CriterionFailed(f"a job that had succeeded was moved to {to}")
    check_equal("the job's state", await job.state(), State.SUCCEEDED)
    check_equal("transitions", [str(e.to_state) for e in await stage.events(job) if e.to_state is not None], before)
    return f"{refused} moves refused with WF_STATE_TRANSITION_INVALID, nothing changed"


REPLAY_CRITERIA: Final = (
    Criterion("RP-001", "queued → running → succeeded", "a job without errors", partial(transient, failures=0)),
    Criterion("RP-002", "one transient error", "a job that fails once", partial(transient, failures=1)),
    Criterion("RP-003", "three transient errors", "a job that fails three times", partial(transient, failures=3)),
    Criterion("RP-004", "the fourth is the last", "a job that fails four times", partial(transient, failures=4)),
    Criterion("RP-005", "a second final write is refused", "four moves of a job that succeeded", second_final_write),
)
