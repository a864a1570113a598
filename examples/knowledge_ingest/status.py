"""The state of a task in the terms of this application."""

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

#: The attempts are used up, and a dead letter is or will be written.
_DEAD: Final = (State.DLQ_PENDING, State.DLQ_RECORDED, State.FAILED)
_STATUS: Final = {
    State.RUNNING: "RUNNING",
    State.RETRYING: "RETRYING",
    State.SUCCEEDED: "SUCCEEDED",
    **dict.fromkeys((*_DEAD, State.CANCELLED), "DEAD"),
}


class Model(BaseModel):
    """JSON names are camelCase."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)


class OutboxStatus(Model):
    """State of a task's event: NEW, RETRYING, SENT or DEAD."""

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


async def get_job_status(task_id: str, job_id: str) -> TaskStatus | None:
    """Status of a job. The engine has it until an hour after its end; the ledger for a month, with a short delay."""
    try:
        return _from_engine(task_id, await app.job(job_id, QUEUE).info())
    except UnknownJob:
        pass
    try:
        return _from_ledger(task_id, await app.ledger.queries.job(job_id, queue=QUEUE))
    except UnknownJob:
        return None


async def get_event_status(event_id: str) -> TaskStatus | None:
    """Status of the job that the trigger submitted for the event, found by its trace id; None if there is none yet."""
    found = await app.ledger.queries.jobs(JobFilter(trace_id=event_id), limit=1)
    return await get_job_status(event_id, found.jobs[0].job_id) if found.jobs else None


def queued_status(event_id: str, event: dict[str, Any]) -> TaskStatus:
    """Status of an event without a job."""
    return TaskStatus(task_id=event_id, status="QUEUED", outbox=OutboxStatus(**event))


def _from_engine(task_id: str, job: JobInfo) -> TaskStatus:
    due = datetime.fromtimestamp(job.next_attempt_at_ms / 1000, UTC) if job.state is State.RETRYING else None
    return _to_status(task_id, job.state, job.meta.retry_count, due, job.failure.message if job.failure else None)


def _from_ledger(task_id: str, row: JobRow) -> TaskStatus:
    return _to_status(task_id, row.state, row.retry_count, row.next_retry_at, row.last_error)


def _to_status(task_id: str, state: State, retries: int, due: datetime | None, error: str | None) -> TaskStatus:
    return TaskStatus(
        task_id=task_id,
        status=_STATUS.get(state, "QUEUED"),
        # Every failure except the last was followed by a retry.
        attempt_count=retries + (state in _DEAD),
        next_retry_at=due,
        last_error=error,
        error_message=error,
    )
