"""The replays RP-001 to RP-005 (X3): transitions, retry counts, the dead letter's link, and no second final write."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from holdfast.acceptance.model import Criterion, Unmet, check, same
from holdfast.acceptance.room import MAIN
from holdfast.acceptance.stage import OPERATOR, PATIENCE_S, Stage
from holdfast.core.states import State
from holdfast.errors import JobFailed, TransitionInvalid
from holdfast.handle import Job

_GIVEN_UP: Final = ["dlq_pending", "dlq_recorded", "failed"]


async def _replay(stage: Stage, failures: int, *, trace: str) -> tuple[Job[Any], list[str]]:
    """A job that fails so often, run to its end; and the states that it went through."""
    job = await stage.app.tasks["fail"].options(queue=MAIN, trace_id=trace).submit(times=failures)
    try:
        await job.result(PATIENCE_S)
    except JobFailed:
        check(failures > 3, f"the job failed after {failures} transient errors; 3 retries are allowed")
    states = [str(event.to_state) for event in await stage.story(job) if event.to_state is not None]
    return job, states


async def transient(stage: Stage, *, failures: int) -> str:
    trace = f"trace-RP-{failures}"
    job, states = await _replay(stage, failures, trace=trace)
    given_up = failures > 3
    wanted = ["queued", *["running", "retrying"] * min(failures, 3), "running"]
    wanted += _GIVEN_UP if given_up else ["succeeded"]
    same("transitions", states, wanted)
    view = await job.view()
    same("retry_count", view.meta.retry_count, min(failures, 3))
    same("trace_id", view.trace_id, trace)
    if given_up:
        check(view.meta.dlq_id, "the failed job is linked to no dlq_id")
    return f"{' → '.join(states)}; retry_count {view.meta.retry_count}"


async def second_final_write(stage: Stage) -> str:
    job, before = await _replay(stage, 0, trace="trace-RP-005")
    refused = 0
    for to in (State.FAILED, State.CANCELLED, State.QUEUED, State.DLQ_PENDING):
        try:
            await stage.app.engine.move(MAIN, job.id, to, actor=OPERATOR.name, reason="a second final write")
        except TransitionInvalid as exc:
            same("the refusal's code", exc.code, "WF_STATE_TRANSITION_INVALID")
            refused += 1
        else:
            raise Unmet(f"a job that had succeeded was moved to {to}")
    same("the job's state", await job.state(), State.SUCCEEDED)
    same("transitions", [str(e.to_state) for e in await stage.story(job) if e.to_state is not None], before)
    return f"{refused} moves refused with WF_STATE_TRANSITION_INVALID, nothing changed"


CRITERIA: Final = (
    Criterion("RP-001", "queued → running → succeeded", "a job without errors", partial(transient, failures=0)),
    Criterion("RP-002", "one transient error", "a job that fails once", partial(transient, failures=1)),
    Criterion("RP-003", "three transient errors", "a job that fails three times", partial(transient, failures=3)),
    Criterion("RP-004", "the fourth is the last", "a job that fails four times", partial(transient, failures=4)),
    Criterion("RP-005", "a second final write is refused", "four moves of a job that succeeded", second_final_write),
)
