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
    RECLAIMED,
    TIMEOUT_S,
    AcceptanceFixture,
    Criterion,
    CriterionFailed,
    NotApplicable,
    check,
    check_equal,
)
from holdfast.verification.acceptance.sandbox import CRASH, FENCE, LEASE_S, MAIN, PAUSE

_ONE: Final = b"1"


async def crash(fixture: AcceptanceFixture) -> str:
    async with fixture.child(CRASH) as child:
        job = await fixture.submit("hold", queue=CRASH)
        await child.begun(job)
        await child.kill()
    killed_at = time.monotonic()
    async with fixture.worker(CRASH):
        check_equal("the result", await job.result(TIMEOUT_S), RECLAIMED)
        took_s = time.monotonic() - killed_at
        events = await fixture.events(job)
    check_equal("the job's events", [e.type for e in events], [f"task.{t}" for t in _RECLAIM_EVENTS])
    claimed, reclaimed = events[1], events[2]
    check_equal("the old owner in the event", (reclaimed.data or {}).get("old_worker"), claimed.worker)
    check_equal("the attempt of the second run", reclaimed.attempt, 2)
    await fixture.nothing_pending(CRASH)
    return f"finished {took_s:.1f} s after the kill, with a lease of {LEASE_S:g} s"


async def pause(fixture: AcceptanceFixture) -> str:
    if fixture.sandbox.deployment.embedded:
        raise NotApplicable(
            "a worker that is stopped during a commit keeps the file locked for all others; Q5 tests the fence"
        )
    async with fixture.child(PAUSE) as child:
        job = await fixture.submit("hold", queue=PAUSE)
        await child.begun(job)
        child.pause()
        async with fixture.worker(PAUSE):
            check_equal("the result", await job.result(TIMEOUT_S), RECLAIMED)
            before = await fixture.types(job)
            counts = await child.resume()
            check_equal("the job's events", before, _RECLAIM_EVENTS)
            check_equal("its events after the paused worker was resumed", await fixture.types(job), before)
    check_equal("final states that the paused worker could write", counts["succeeded"], 0)
    check(counts["refused"], "the paused worker was not notified of its lost lease")
    view = await job.info()
    check_equal("the job", (view.state, view.result), (State.SUCCEEDED, f'"{RECLAIMED}"'.encode()))
    await fixture.nothing_pending(PAUSE)
    return "reclaimed while it was paused; when it was resumed, its settle was refused"


async def fence(fixture: AcceptanceFixture) -> str:
    engine = fixture.app.engine
    job = await fixture.submit("add", queue=FENCE, left=1, right=1)
    (first,) = await engine.claim("verify-first", [FENCE], 1, round(TIMEOUT_S * 1000))
    check_equal("jobs reclaimed under a valid lease", len(await engine.reclaim("verify-second", [FENCE], 10)), 0)
    await asyncio.sleep(LEASE_S)

    async def reclaimed() -> bool:
        claims.extend(await engine.reclaim("verify-second", [FENCE], 10))
        return bool(claims)

    claims = [first][:0]
    await fixture.until(reclaimed, "the lost lease to be reclaimed")
    (second,) = claims
    now_ms = await engine.now_ms()
    late, right = Settlement(first, Succeed(_ONE), now_ms), Settlement(second, Succeed(b"2"), now_ms)
    check_equal("the answer to the first worker", (await engine.settle([late]))[0], SettleResult.STALE)
    check_equal("the answer to the second worker", (await engine.settle([right]))[0], SettleResult.APPLIED)
    check_equal("the answer to the same verdict, sent again", (await engine.settle([right]))[0], SettleResult.ALREADY)
    check_equal("the answer to the first worker, after the end", (await engine.settle([late]))[0], SettleResult.STALE)
    check_equal("the result", await job.result(TIMEOUT_S), 2)
    check_equal("the job's events", await fixture.types(job), _RECLAIM_EVENTS)
    await fixture.nothing_pending(FENCE)
    return "stale, applied, already, stale: one final state"


_RECLAIM_EVENTS: Final = ["created", "claimed", "reclaimed", "succeeded"]

LEASE_CRITERIA: Final = (
    Criterion("X1.3", "a killed worker's job is finished by another", "kill -9 of a worker during a job", crash),
    Criterion("Q6", "a paused worker is fenced", "SIGSTOP of a worker process, reclaim, SIGCONT", pause),
    Criterion("Q5", "a lease is reclaimed once, and only when lost", "two workers and four verdicts on one job", fence),
)


#: A job delayed by this long does not start during the run.
LATER_S: Final = 3_600


async def success(fixture: AcceptanceFixture) -> str:
    job = await fixture.submit("add", left=2, right=3)
    check_equal("the result", await job.result(TIMEOUT_S), 5)
    check_equal("the job's events", await fixture.types(job), ["created", "claimed", "succeeded"])
    await fixture.nothing_pending(MAIN)
    return "created → claimed → succeeded; acknowledged, nothing pending"


async def failure(fixture: AcceptanceFixture) -> str:
    job = await fixture.submit("fail", times=9)
    try:
        await job.result(TIMEOUT_S)
    except JobFailed as exc:
        check_equal("the error's code", exc.error_code, "TASK_ERROR")
    else:
        raise CriterionFailed("the job succeeded, although every run failed")
    dlq_id = await _dlq_id(fixture, job.id)
    events = await fixture.events(job)
    expected = ["created", *["claimed", "retrying"] * 3, "claimed", "dlq_pending", "dlq", "failed"]
    check_equal("the job's events", [event.type.removeprefix("task.") for event in events], expected)
    check_equal(
        "the dead letter in the three moves", {(event.data or {}).get("dlq_id") for event in events[-3:]}, {dlq_id}
    )
    check_equal("runs in the job's history", [run.number for run in await job.history()], [1, 2, 3, 4])
    await fixture.nothing_pending(MAIN)
    return "3 retries, then dlq_pending → dlq_recorded → failed; the dead letter existed before `failed`"


async def _dlq_id(fixture: AcceptanceFixture, job_id: str) -> str:
    """The dead letter's id. It must already be recorded: a job is `failed` only after its dead letter."""
    if fixture.has_ledger:
        queries = fixture.app.ledger.queries
        # The job's row may lag behind the engine; its dead letter must not.
        key = (await queries.job(job_id, queue=MAIN)).key
        row = await queries.dead_letter_of(key)
        check(row, "the job is failed, but the ledger has no dead letter for it")
        assert row is not None
        check_equal("retries in the dead letter", row.retry_count, 3)
        return row.dlq_id
    if not fixture.sandbox.settings.stream_dlq:
        # The stream is disabled: only the job has its dead letter's id.
        return (await fixture.app.job(job_id, MAIN).info()).meta.dlq_id or "none"
    assert fixture.sandbox.redis is not None
    stream = fixture.sandbox.redis.keys(MAIN).dlq
    entries = [entry for entry in await fixture.sandbox.redis.entries(stream) if entry["task_id"] == job_id]
    check_equal("entries in the dead letter stream", len(entries), 1)
    return entries[0]["dlq_id"]


async def effect_once(fixture: AcceptanceFixture) -> str:
    fixture.need_ledger()
    first = await fixture.submit("pay", order="17")
    result = await first.result(TIMEOUT_S)
    runs = [event for event in await fixture.types(first) if event == "claimed"]
    check_equal("runs of the first job", len(runs), 2)
    second = await fixture.submit("pay", order="17")
    check_equal("the second job's result", await second.result(TIMEOUT_S), result)
    check_equal("how often the effect happened", fixture.outside.happened.count("17"), 1)
    return "two jobs, four runs, one effect"


async def one_job_per_key(fixture: AcceptanceFixture) -> str:
    keyed = fixture.app.tasks["act"].options(queue=MAIN, idempotency_key="verify-key")
    jobs = await asyncio.gather(*(keyed.submit(key="once") for _ in range(20)))
    check_equal("jobs", len({job.id for job in jobs}), 1)
    check_equal("submissions that were not duplicates", sum(not job.duplicate for job in jobs), 1)
    await jobs[0].result(TIMEOUT_S)
    late = await keyed.submit(key="once")
    check_equal("the job of a submission after its end", (late.id, late.duplicate), (jobs[0].id, True))
    check_equal("how often it ran", fixture.outside.happened.count("once"), 1)
    return "21 submissions, 20 of them concurrent: one job, one run"


async def cancel(fixture: AcceptanceFixture) -> str:
    job = await fixture.app.tasks["act"].options(queue=MAIN, delay=LATER_S).submit(key="never")
    await job.cancel("holdfast verify", actor="verify")
    try:
        await job.result(TIMEOUT_S)
    except JobCancelled:
        pass
    else:
        raise CriterionFailed("a cancelled job returned a result")
    check_equal("the job's state", await job.state(), State.CANCELLED)
    check_equal("the job's events", await fixture.types(job), ["created", "cancelled"])
    check("never" not in fixture.outside.happened, "the job ran although it was cancelled")
    await fixture.nothing_pending(MAIN)
    return "created → cancelled, never ran"


LIFE_CRITERIA: Final = (
    Criterion("X1.1", "success is recorded and acknowledged", "one job, one run", success),
    Criterion("X1.2", "failures are retried to the limit, then dead-lettered", "a job that always fails", failure),
    Criterion(
        "X1.4", "an external effect happens once", "two jobs with one effect, each failing after it", effect_once
    ),
    Criterion("E1", "one idempotency key is one job", "the same key 21 times", one_job_per_key),
    Criterion("H1", "a job can be cancelled", "a delayed job, cancelled", cancel),
)


_DEAD_LETTERED: Final = ["dlq_pending", "dlq_recorded", "failed"]


async def _replay(fixture: AcceptanceFixture, failures: int, *, trace: str) -> tuple[Job[Any], list[str]]:
    """Run a job that fails `failures` times to its end. Returns it and the states it went through."""
    job = await fixture.app.tasks["fail"].options(queue=MAIN, trace_id=trace).submit(times=failures)
    try:
        await job.result(TIMEOUT_S)
    except JobFailed:
        check(failures > 3, f"the job failed after {failures} transient errors; 3 retries are allowed")
    states = [str(event.to_state) for event in await fixture.events(job) if event.to_state is not None]
    return job, states


async def transient(fixture: AcceptanceFixture, *, failures: int) -> str:
    trace = f"trace-RP-{failures}"
    job, states = await _replay(fixture, failures, trace=trace)
    dead_lettered = failures > 3
    expected = ["queued", *["running", "retrying"] * min(failures, 3), "running"]
    expected += _DEAD_LETTERED if dead_lettered else ["succeeded"]
    check_equal("transitions", states, expected)
    view = await job.info()
    check_equal("retry_count", view.meta.retry_count, min(failures, 3))
    check_equal("trace_id", view.trace_id, trace)
    if dead_lettered:
        check(view.meta.dlq_id, "the failed job has no dlq_id")
    return f"{' → '.join(states)}; retry_count {view.meta.retry_count}"


async def second_final_write(fixture: AcceptanceFixture) -> str:
    job, before = await _replay(fixture, 0, trace="trace-RP-005")
    refused = 0
    for to in (State.FAILED, State.CANCELLED, State.QUEUED, State.DLQ_PENDING):
        try:
            await fixture.app.engine.move(MAIN, job.id, to, actor=OPERATOR.name, reason="a second final write")
        except TransitionInvalid as exc:
            check_equal("the refusal's code", exc.code, "WF_STATE_TRANSITION_INVALID")
            refused += 1
        else:
            raise CriterionFailed(f"a succeeded job was moved to {to}")
    check_equal("the job's state", await job.state(), State.SUCCEEDED)
    check_equal("transitions", [str(e.to_state) for e in await fixture.events(job) if e.to_state is not None], before)
    return f"{refused} moves refused with WF_STATE_TRANSITION_INVALID, nothing changed"


REPLAY_CRITERIA: Final = (
    Criterion("RP-001", "queued → running → succeeded", "a job without errors", partial(transient, failures=0)),
    Criterion("RP-002", "one transient error", "a job that fails once", partial(transient, failures=1)),
    Criterion("RP-003", "three transient errors", "a job that fails three times", partial(transient, failures=3)),
    Criterion("RP-004", "four transient errors", "a job that fails four times", partial(transient, failures=4)),
    Criterion("RP-005", "a second final write is refused", "four moves of a succeeded job", second_final_write),
)
