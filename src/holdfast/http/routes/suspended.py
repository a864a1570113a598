"""`/api/v1/suspended` and `/internal/tasks/suspended`: jobs that wait for an operator (requirements D6, H2)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from holdfast.core.person import Right
from holdfast.dlq.many import Report, Result
from holdfast.dlq.suspended import SuspendedFilter
from holdfast.errors import TransitionInvalid, UnknownJob
from holdfast.http.asgi import Reply
from holdfast.http.many import Outcome, outcome
from holdfast.http.operation import Answer, Call, operation
from holdfast.http.wire import Exactly, JobCursor, Name, PageQuery, Text, Wish

_TAG: Final = "suspended"
_FIRST: Final = {"job_id": "$response.body#/jobs/0/job_id"}
_PATHS: Final = {"/api/v1/suspended": "", "/internal/tasks/suspended": "Internal"}

Ids = Annotated[tuple[Name, ...], Meta(max_length=1_000)]


class SuspendedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job that waits for an operator."""

    job_id: str
    task: str
    queue: str
    tenant_id: str
    attempt: int
    retry_count: int
    created_at: datetime
    error_code: str
    error: str


class SuspendedJobs(msgspec.Struct, frozen=True, kw_only=True):
    jobs: list[SuspendedJob]
    cursor: str | None


class SuspendedQuery(PageQuery, frozen=True, kw_only=True):
    """Which suspended jobs."""

    cursor: JobCursor | None = None
    task: Name | None = None
    queue: tuple[Name, ...] = ()
    tenant_id: Name | None = None
    error_code: Exactly | None = None
    error: Text | None = None
    since: Annotated[datetime, Meta(tz=True)] | None = None
    until: Annotated[datetime, Meta(tz=True)] | None = None


class BulkWish(Wish, frozen=True, kw_only=True):
    """These jobs, or, if none are named, all that the filter fits. A dry run only counts."""

    job_ids: Ids = ()
    task: Name | None = None
    queue: tuple[Name, ...] = ()
    tenant_id: Name | None = None
    error_code: Text | None = None
    error: Text | None = None
    dry_run: bool = False


def _chosen(wish: BulkWish) -> Sequence[str] | SuspendedFilter:
    if wish.job_ids:
        return wish.job_ids
    return SuspendedFilter(
        job_type=wish.task,
        queues=frozenset(wish.queue),
        tenant_id=wish.tenant_id,
        error_code=wish.error_code,
        error=wish.error,
    )


async def list_suspended(call: Call) -> Reply:
    """List suspended jobs."""
    query: SuspendedQuery = call.query
    wanted = SuspendedFilter(
        job_type=query.task,
        queues=frozenset(query.queue),
        tenant_id=query.tenant_id,
        error_code=query.error_code,
        error=query.error,
        since=query.since,
        until=query.until,
    )
    found = await call.service.offices.suspended.list(call.person, wanted, query.limit, query.cursor)
    jobs = [SuspendedJob(**msgspec.structs.asdict(job)) for job in found.jobs]
    return Reply(SuspendedJobs(jobs=jobs, cursor=found.cursor))


async def resume(call: Call) -> Reply:
    """Send a suspended job back to work: its retries start again, its history stays."""
    job_id, wish = call.path["job_id"], call.body
    await call.service.offices.operating.resume(call.person, job_id, reason=wish.reason)
    return Reply(outcome(_one(job_id)))


async def discard(call: Call) -> Reply:
    """Give a suspended job up: it is cancelled, with the reason."""
    job_id, wish = call.path["job_id"], call.body
    await call.service.offices.operating.discard(call.person, job_id, reason=wish.reason)
    return Reply(outcome(_one(job_id)))


async def resume_many(call: Call) -> Reply:
    """Resume many suspended jobs; each result is told."""
    wish: BulkWish = call.body
    suspended = call.service.offices.suspended
    report = await suspended.resume(call.person, _chosen(wish), reason=wish.reason, dry_run=wish.dry_run)
    return Reply(outcome(report))


async def discard_many(call: Call) -> Reply:
    """Give many suspended jobs up; each result is told."""
    wish: BulkWish = call.body
    suspended = call.service.offices.suspended
    report = await suspended.discard(call.person, _chosen(wish), reason=wish.reason, dry_run=wish.dry_run)
    return Reply(outcome(report))


def _one(job_id: str) -> Report:
    return Report(matched=1, dry_run=False, results=[Result(id=job_id, done=True, job_id=job_id)])


def _register(path: str, part: str) -> None:
    told = {200: Answer("What became of it.", Outcome)}
    example = {"reason": "the disk is free again"}
    operation(
        "GET",
        path,
        f"list{part}Suspended",
        tag=_TAG,
        query=SuspendedQuery,
        answers={
            200: Answer(
                "A page, newest first.",
                SuspendedJobs,
                links={
                    "resume": (f"resume{part}Suspended", _FIRST),
                    "discard": (f"discard{part}Suspended", _FIRST),
                    "next": (f"list{part}Suspended", {"cursor": "$response.body#/cursor"}),
                },
            )
        },
    )(list_suspended)
    for verb, one, many in (("resume", resume, resume_many), ("discard", discard, discard_many)):
        operation(
            "POST",
            f"{path}/{verb}",
            f"{verb}{part}ManySuspended",
            tag=_TAG,
            right=Right.OPERATE,
            body=BulkWish,
            body_example=example | {"task": "publish", "dry_run": True},
            answers=told,
            errors=(UnknownJob,),
        )(many)
        operation(
            "POST",
            f"{path}/{{job_id}}/{verb}",
            f"{verb}{part}Suspended",
            tag=_TAG,
            right=Right.OPERATE,
            body=Wish,
            body_example=example,
            answers=told,
            errors=(UnknownJob, TransitionInvalid),
        )(one)


for _path, _part in _PATHS.items():
    _register(_path, _part)
