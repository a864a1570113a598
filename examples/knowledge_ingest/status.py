"""How far a task is, in the words of this application."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from holdfast import JobInfo, State
from holdfast.errors import UnknownJob
from holdfast.ledger import JobFilter, JobRow
from knowledge_ingest.settings import QUEUE
from knowledge_ingest.tasks import app

#: The attempts are used up; a dead letter is written, or on its way.
_BURIED: Final = (State.DLQ_PENDING, State.DLQ_RECORDED, State.FAILED)
_STATUS: Final = {
    State.RUNNING: "RUNNING",
    State.RETRYING: "RETRYING",
    State.SUCCEEDED: "SUCCEEDED",
    **dict.fromkeys((*_BURIED, State.CANCELLED), "DEAD"),
}


class Model(BaseModel):
    """Names on the wire are `likeThis`."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)


class OutboxStatus(Model):
    """How far a task's event is: NEW, RETRYING, SENT or DEAD."""

    status: str
    attempt_count: int
    next_retry_at: datetime | None
    last_error: str | None


class TaskStatus(Model):
    """QUEUED, RUNNING, RETRYING, SUCCEEDED or DEAD."""

    task_id: str
    status: str
    #: Failures so far.
    attempt_count: int = 0
    next_retry_at: datetime | None = None
    last_error: str | None = None
    error_message: str | None = None
    #: In mode `kafka`, until there is a job.
    outbox: OutboxStatus | None = None


async def of_job(task_id: str, job_id: str) -> TaskStatus | None:
    """The engine knows a job until an hour after its end; the ledger for a month, but is a moment behind."""
    try:
        return _live(task_id, await app.job(job_id, QUEUE).info())
    except UnknownJob:
        pass
    try:
        return _remembered(task_id, await app.ledger.queries.job(job_id, queue=QUEUE))
    except UnknownJob:
        return None


async def of_event(event_id: str) -> TaskStatus | None:
    """Of the job that a trigger has made of the event, whose id is the job's trace id; None: there is none yet."""
    found = await app.ledger.queries.jobs(JobFilter(trace_id=event_id), limit=1)
    return await of_job(event_id, found.jobs[0].job_id) if found.jobs else None


def announced(event_id: str, event: dict[str, Any]) -> TaskStatus:
    """Of an event that is no job yet."""
    return TaskStatus(task_id=event_id, status="QUEUED", outbox=OutboxStatus(**event))


def _live(task_id: str, job: JobInfo) -> TaskStatus:
    due = datetime.fromtimestamp(job.next_attempt_at_ms / 1000, UTC) if job.state is State.RETRYING else None
    return _told(task_id, job.state, job.meta.retry_count, due, job.failure.message if job.failure else None)


def _remembered(task_id: str, row: JobRow) -> TaskStatus:
    return _told(task_id, row.state, row.retry_count, row.next_retry_at, row.last_error)


def _told(task_id: str, state: State, retries: int, due: datetime | None, error: str | None) -> TaskStatus:
    return TaskStatus(
        task_id=task_id,
        status=_STATUS.get(state, "QUEUED"),
        # Every failure but the last one was followed by a retry.
        attempt_count=retries + (state in _BURIED),
        next_retry_at=due,
        last_error=error,
        error_message=error,
    )
