"""The wire protocol, as any Redis client sees it: foreign messages and results (Q3, Q13, Q15)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from holdfast.acceptance.model import Criterion, same
from holdfast.acceptance.room import MAIN
from holdfast.acceptance.stage import PATIENCE_S, Stage
from holdfast.core.job import Priority, new_job_ids
from holdfast.core.states import FINAL, State
from holdfast.handle import Job

if TYPE_CHECKING:
    from holdfast.acceptance.redis_side import RedisSide


async def foreign(stage: Stage) -> str:
    job = await _added(stage, {"type": "add", "payload": '{"left": 20, "right": 22}', "trace_id": "foreign"})
    same("the result", await job.result(PATIENCE_S), 42)
    same("the job's events", await stage.types(job), ["created", "claimed", "succeeded"])
    same("the trace_id", (await job.view()).trace_id, "foreign")
    await stage.nothing_pending(MAIN)
    return "XADD by hand, adopted and run"


async def duplicate(stage: Stage) -> str:
    fields = {"type": "act", "payload": '{"key": "foreign-once"}', "idempotency_key": "verify-foreign"}
    job = await _added(stage, fields)
    await job.result(PATIENCE_S)
    await _redis(stage).add(_line(stage), {"task_id": new_job_ids(1)[0], **fields})
    # Whatever is in line before this one has been looked at when it has ended.
    await (await stage.submit("add", left=0, right=0)).result(PATIENCE_S)
    same("how often it ran", stage.outside.happened.count("foreign-once"), 1)
    same("the job's events", await stage.types(job), ["created", "claimed", "succeeded", "duplicate"])
    await stage.nothing_pending(MAIN)
    return "two messages with one idempotency key: one job, the second is dropped and recorded"


async def malformed(stage: Stage) -> str:
    job = await _added(stage, {"type": "add", "payload": "{no JSON"})
    view = await stage.until(lambda: _ended(stage, job), "the malformed message to become a dead letter")
    same("the job", (view.state, view.failure.code if view.failure else ""), (State.FAILED, "MESSAGE_MALFORMED"))
    same("the job's events", await stage.types(job), ["created", "dlq_pending", "dlq", "failed"])
    await stage.nothing_pending(MAIN)
    return "a dead letter at once, with MESSAGE_MALFORMED"


async def result(stage: Stage) -> str:
    stage.need_redis()
    job = await stage.submit("add", left=3, right=4)
    await job.result(PATIENCE_S)
    entries = await _redis(stage).entries(_redis(stage).keys(MAIN).result)
    found = [
        (entry["status"], entry["result"], entry["retry_count"]) for entry in entries if entry["task_id"] == job.id
    ]
    same("entries of the job in stream:result", found, [("succeeded", "7", "0")])
    return "one plain entry with status, result and retry_count"


async def _added(stage: Stage, fields: dict[str, str]) -> Job[Any]:
    """A job that another program has submitted."""
    stage.need_redis()
    (job_id,) = new_job_ids(1)
    await _redis(stage).add(_line(stage), {"task_id": job_id, **fields})
    job = stage.app.job(job_id, MAIN)
    await stage.until(lambda: _known(stage, job_id), "a worker to adopt the message")
    return job


async def _known(stage: Stage, job_id: str) -> bool:
    return (await stage.app.engine.get(MAIN, [job_id]))[0] is not None


async def _ended(stage: Stage, job: Job[Any]) -> Any:
    view = await job.view()
    return view if view.state in FINAL else None


def _line(stage: Stage) -> bytes:
    return _redis(stage).keys(MAIN).streams[Priority.NORMAL]


def _redis(stage: Stage) -> RedisSide:
    assert stage.room.redis is not None
    return stage.room.redis


CRITERIA: Final = (
    Criterion("Q3.1", "another program's message is adopted", "a plain XADD", foreign),
    Criterion("Q3.2", "the same key by XADD is one job", "two XADDs with one idempotency key", duplicate),
    Criterion("Q15", "a malformed message is a dead letter", "an XADD whose payload is no JSON", malformed),
    Criterion("Q13", "results can be read by any client", "one job, then XRANGE of stream:result", result),
)
