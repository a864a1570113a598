"""Workers that die or stand still: their jobs are taken over, and they themselves are fenced off (X1.3, X2.4, Q6)."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from holdfast.acceptance.model import Criterion, NotApplicable, check, same
from holdfast.acceptance.room import CRASH, FENCE, LEASE_S, PAUSE
from holdfast.acceptance.stage import PATIENCE_S, TAKEN_OVER, Stage
from holdfast.core.states import State
from holdfast.core.verdict import Answer, Settlement, Succeed

_ONE: Final = b"1"


async def crash(stage: Stage) -> str:
    async with stage.child(CRASH) as child:
        job = await stage.submit("hold", queue=CRASH)
        await child.begun(job)
        await child.kill()
    killed_at = time.monotonic()
    async with stage.working(CRASH):
        same("the result", await job.result(PATIENCE_S), TAKEN_OVER)
        took_s = time.monotonic() - killed_at
        told = await stage.story(job)
    same("the job's events", [e.type for e in told], [f"task.{t}" for t in _TAKEN_OVER])
    claimed, reclaimed = told[1], told[2]
    same("the old owner in the event", (reclaimed.data or {}).get("old_worker"), claimed.worker)
    same("the attempt of the second run", reclaimed.attempt, 2)
    await stage.nothing_pending(CRASH)
    return f"finished {took_s:.1f} s after the kill, with a lease of {LEASE_S:g} s"


async def pause(stage: Stage) -> str:
    if stage.room.deployment.embedded:
        raise NotApplicable(
            "who is stopped in the middle of a commit keeps the file from all others; Q5 tries the fence"
        )
    async with stage.child(PAUSE) as child:
        job = await stage.submit("hold", queue=PAUSE)
        await child.begun(job)
        child.pause()
        async with stage.working(PAUSE):
            same("the result", await job.result(PATIENCE_S), TAKEN_OVER)
            before = await stage.types(job)
            counts = await child.come_back()
            same("the job's events", before, _TAKEN_OVER)
            same("its events after the paused worker came back", await stage.types(job), before)
    same("ends that the paused worker could write", counts["succeeded"], 0)
    check(counts["refused"], "nobody told the paused worker that its lease was lost")
    view = await job.view()
    same("the job", (view.state, view.result), (State.SUCCEEDED, f'"{TAKEN_OVER}"'.encode()))
    await stage.nothing_pending(PAUSE)
    return "taken over while it stood still; when it came back, its end was refused"


async def fence(stage: Stage) -> str:
    engine = stage.app.engine
    job = await stage.submit("add", queue=FENCE, left=1, right=1)
    (first,) = await engine.claim("verify-first", [FENCE], 1, round(PATIENCE_S * 1000))
    same("jobs taken from a lease that is held", len(await engine.reclaim("verify-second", [FENCE], 10)), 0)
    await asyncio.sleep(LEASE_S)

    async def taken_over() -> bool:
        claims.extend(await engine.reclaim("verify-second", [FENCE], 10))
        return bool(claims)

    claims = [first][:0]
    await stage.until(taken_over, "the lost lease to be taken over")
    (second,) = claims
    now_ms = await engine.now_ms()
    late, right = Settlement(first, Succeed(_ONE), now_ms), Settlement(second, Succeed(b"2"), now_ms)
    same("the answer to the first worker", (await engine.settle([late]))[0], Answer.STALE)
    same("the answer to the second worker", (await engine.settle([right]))[0], Answer.APPLIED)
    same("the answer to the same verdict, sent again", (await engine.settle([right]))[0], Answer.ALREADY)
    same("the answer to the first worker, after the end", (await engine.settle([late]))[0], Answer.STALE)
    same("the result", await job.result(PATIENCE_S), 2)
    same("the job's events", await stage.types(job), _TAKEN_OVER)
    await stage.nothing_pending(FENCE)
    return "stale, applied, already, stale: one end"


_TAKEN_OVER: Final = ["created", "claimed", "reclaimed", "succeeded"]

CRITERIA: Final = (
    Criterion("X1.3", "a killed worker's job is finished by another", "kill -9 of a worker process in mid-job", crash),
    Criterion("Q6", "a paused worker is fenced off", "SIGSTOP, take-over, SIGCONT of a worker process", pause),
    Criterion("Q5", "a lease is taken once, when it is lost", "two workers and four verdicts on one job", fence),
)
