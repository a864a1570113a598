"""`/api/v1/suspended` and `/internal/tasks/suspended`: jobs that wait for an operator (D6, H2)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from holdfast.core.principal import Permission
from holdfast.errors import TransitionInvalid, UnknownJob
from holdfast.http.operation import Call, Reply, ResponseSpec, operation
from holdfast.http.wire import BulkResponse, Exactly, JobCursor, Name, PageQuery, ReasonRequest, Text, bulk_response
from holdfast.operations.bulk import BulkReport, BulkResult
from holdfast.operations.suspended import SuspendedFilter

_TAG: Final = "suspended"
_FIRST: Final = {"job_id": "$response.body#/jobs/0/job_id"}
_PATHS: Final = {"/api/v1/suspended": "", "/internal/tasks/suspended": "Internal"}

Ids = Annotated[tuple[Name, ...], Meta(max_length=1_000)]


class SuspendedJobResponse(msgspec.Struct, frozen=True, kw_only=True):
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


class SuspendedListResponse(msgspec.Struct, frozen=True, kw_only=True):
    jobs: list[SuspendedJobResponse]
    cursor: str | None


class SuspendedQuery(PageQuery, frozen=True, kw_only=True):
    """Filter for suspended jobs."""

    cursor: JobCursor | None = None
    task: Name | None = None
    queue: tuple[Name, ...] = ()
    tenant_id: Name | None = None
    error_code: Exactly | None = None
    error: Text | None = None
    since: Annotated[datetime, Meta(tz=True)] | None = None
    until: Annotated[datetime, Meta(tz=True)] | None = None


class BulkSuspendedRequest(ReasonRequest, frozen=True, kw_only=True):
    """The named jobs, or all that match the filter if none are named. A dry run only counts them."""

    job_ids: Ids = ()
    task: Name | None = None
    queue: tuple[Name, ...] = ()
    tenant_id: Name | None = None
    error_code: Text | None = None
    error: Text | None = None
    dry_run: bool = False


def _selection(request: BulkSuspendedRequest) -> Sequence[str] | SuspendedFilter:
    if request.job_ids:
        return request.job_ids
    return SuspendedFilter(
        job_type=request.task,
        queues=frozenset(request.queue),
        tenant_id=request.tenant_id,
        error_code=request.error_code,
        error=request.error,
    )


async def list_suspended(call: Call) -> Reply:
    """List suspended jobs."""
    query: SuspendedQuery = call.query
    suspended_filter = SuspendedFilter(
        job_type=query.task,
        queues=frozenset(query.queue),
        tenant_id=query.tenant_id,
        error_code=query.error_code,
        error=query.error,
        since=query.since,
        until=query.until,
    )
    found = await call.service.operations.suspended.list(call.principal, suspended_filter, query.limit, query.cursor)
    jobs = [SuspendedJobResponse(**msgspec.structs.asdict(job)) for job in found.jobs]
    return Reply(SuspendedListResponse(jobs=jobs, cursor=found.cursor))


async def resume(call: Call) -> Reply:
    """Resume a suspended job.

    Its retries start again; its history is kept.
    """
    job_id, request = call.path["job_id"], call.body
    await call.service.operations.jobs.resume(call.principal, job_id, reason=request.reason)
    return Reply(bulk_response(_one(job_id)))


async def discard(call: Call) -> Reply:
    """Discard a suspended job.

    It ends as cancelled, with the reason.
    """
    job_id, request = call.path["job_id"], call.body
    await call.service.operations.jobs.discard(call.principal, job_id, reason=request.reason)
    return Reply(bulk_response(_one(job_id)))


async def resume_many(call: Call) -> Reply:
    """Resume suspended jobs in bulk, with a result for each."""
    request: BulkSuspendedRequest = call.body
    suspended = call.service.operations.suspended
    report = await suspended.resume(call.principal, _selection(request), reason=request.reason, dry_run=request.dry_run)
    return Reply(bulk_response(report))


async def discard_many(call: Call) -> Reply:
    """Discard suspended jobs in bulk, with a result for each."""
    request: BulkSuspendedRequest = call.body
    suspended = call.service.operations.suspended
    report = await suspended.discard(
        call.principal, _selection(request), reason=request.reason, dry_run=request.dry_run
    )
    return Reply(bulk_response(report))


def _one(job_id: str) -> BulkReport:
    return BulkReport(matched=1, dry_run=False, results=[BulkResult(id=job_id, done=True, job_id=job_id)])


def _register(path: str, part: str) -> None:
    responses = {200: ResponseSpec("A result for each job.", BulkResponse)}
    example = {"reason": "disk space is available again"}
    operation(
        "GET",
        path,
        f"list{part}Suspended",
        tag=_TAG,
        query=SuspendedQuery,
        responses={
            200: ResponseSpec(
                "A page, newest first.",
                SuspendedListResponse,
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
            permission=Permission.OPERATE,
            body=BulkSuspendedRequest,
            body_example=example | {"task": "publish", "dry_run": True},
            responses=responses,
            errors=(UnknownJob,),
        )(many)
        operation(
            "POST",
            f"{path}/{{job_id}}/{verb}",
            f"{verb}{part}Suspended",
            tag=_TAG,
            permission=Permission.OPERATE,
            body=ReasonRequest,
            body_example=example,
            responses=responses,
            errors=(UnknownJob, TransitionInvalid),
        )(one)


for _path, _part in _PATHS.items():
    _register(_path, _part)
