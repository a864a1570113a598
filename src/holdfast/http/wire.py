"""Request and response structs of the HTTP API.

The msgspec structs validate requests, encode responses and are the schemas of the OpenAPI document. Requests with
unknown fields are refused. Instants are RFC 3339 in UTC.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from holdfast.core.job import Event, Failure, JobInfo, KeyReuse, Priority
from holdfast.core.states import State
from holdfast.ledger.queries import job_list, paging
from holdfast.ledger.queries.records import EventRow, JobRow
from holdfast.operations.bulk import BulkReport

#: Names of queues, tenants and tasks: printable ASCII without blanks and braces.
NAME_PATTERN: Final = r"^[!-z|~]{1,200}$"
KEY_PATTERN: Final = r"^[!-~]{1,255}$"
#: Ids: printable ASCII without blanks.
ID_PATTERN: Final = r"^[!-~]{1,200}$"
#: At least one visible character. Spelt out because regular expression engines disagree on white space.
VISIBLE_PATTERN: Final = r"[^\x00-\x20\x7f-\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff]"
#: Any id, also of an earlier release, which could be long.
LAST_EVENT_PATTERN: Final = r"^[!-~]*$"

Name = Annotated[str, Meta(pattern=NAME_PATTERN, examples=["default"])]
Key = Annotated[str, Meta(pattern=KEY_PATTERN, examples=["order-17"])]
Reason = Annotated[str, Meta(pattern=VISIBLE_PATTERN, max_length=2_000, examples=["the customer called"])]
Limit = Annotated[int, Meta(ge=1, le=1_000)]
Cursor = Annotated[
    str,
    Meta(
        pattern=paging.cursor_pattern(paging.CURSOR_NAMES),
        max_length=4_000,
        description="Cursor of the previous page.",
        examples=[paging.encode_cursor(1_790_000_000_000_000, "01a1e0a3", "acme")],
    ),
]
JobCursor = Annotated[
    str,
    Meta(
        pattern=paging.cursor_pattern(job_list.CURSOR_NAMES),
        max_length=4_000,
        description="Cursor of the previous page.",
        examples=[paging.encode_cursor(1_790_000_000_000_000, "01a1e0a3", "default", "acme")],
    ),
]
Text = Annotated[str, Meta(min_length=1, max_length=1_000)]
#: Exact value of a field; may be empty, because responses use the empty string for an absent value.
Exactly = Annotated[str, Meta(max_length=1_000)]
WebhookUrl = Annotated[
    str,
    Meta(
        pattern=r"^https?://[A-Za-z0-9.-]{1,253}(:[0-9]{1,5})?(/[!-~]{0,700})?$", examples=["https://example.org/hook"]
    ),
]
PriorityName = Literal["high", "normal", "low"]
#: Kept byte for byte.
Arguments = Annotated[
    Raw, Meta(description="The task's arguments by name.", extra_json_schema={"type": "object", "examples": [{"a": 1}]})
]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_PRIORITIES: Final[dict[int, PriorityName]] = {Priority.HIGH: "high", Priority.NORMAL: "normal", Priority.LOW: "low"}


class RequestBase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all request structs."""


class NoQuery(RequestBase, frozen=True, kw_only=True):
    """No parameters."""


class ReasonRequest(RequestBase, frozen=True, kw_only=True):
    """Reason for an operator's action."""

    reason: Reason


class QueueQuery(RequestBase, frozen=True, kw_only=True):
    """Selects one of several jobs with the same id."""

    queue: Annotated[str | None, Meta(description="The job's queue; needed if several jobs have this id.")] = None


# Jobs --------------------------------------------------------------------------------------------------


class SubmitRequest(RequestBase, frozen=True, kw_only=True):
    """A job to submit."""

    task: Name
    payload: Arguments | UnsetType = UNSET
    queue: Name | UnsetType = UNSET
    tenant_id: Annotated[Name, Meta(description="Default: the token's only tenant.")] | UnsetType = UNSET
    priority: PriorityName | UnsetType = UNSET
    #: Earliest start, in seconds from now …
    delay_s: Annotated[float, Meta(ge=0, le=31_536_000)] | UnsetType = UNSET
    #: … or as an instant; not both.
    run_at: Annotated[datetime, Meta(tz=True)] | UnsetType = UNSET
    trace_id: Key | UnsetType = UNSET
    context: Annotated[Raw, Meta(extra_json_schema={"type": "object"})] | UnsetType = UNSET
    durable: Annotated[bool, Meta(description="Respond only when the job is in the ledger.")] = False
    webhook_url: WebhookUrl | UnsetType = UNSET
    force: Annotated[
        bool,
        Meta(
            description="If the service has no app: accept a task that no worker has announced, or arguments that do "
            "not fit."
        ),
    ] = False
    on_key_reuse: Annotated[
        KeyReuse, Meta(description="If the idempotency key belongs to another request: refuse it, or return its job.")
    ] = KeyReuse.REFUSE


class BulkSubmitItem(SubmitRequest, frozen=True, kw_only=True):
    """One job of a bulk request."""

    idempotency_key: Key | UnsetType = UNSET


class BulkSubmitRequest(RequestBase, frozen=True, kw_only=True):
    """Jobs to submit."""

    jobs: Annotated[list[BulkSubmitItem], Meta(min_length=1, max_length=1_000)]


class SubmitQuery(RequestBase, frozen=True, kw_only=True):
    """Parameters of a submission."""

    wait: Annotated[float, Meta(ge=0, le=60, description="Seconds to wait for the job to end.")] = 0


class JobErrorResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Last failure of a job."""

    code: str
    message: str
    type: str = ""


class JobResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A job at the time of the request."""

    job_id: str
    task: str
    queue: str
    tenant_id: str
    state: State
    attempt: int
    retry_count: int
    priority: PriorityName
    idempotency_key: str
    trace_id: str
    created_at: datetime
    run_at: datetime | None = None
    next_attempt_at: datetime | None = None
    finished_at: datetime | None = None
    worker: str = ""
    error: JobErrorResponse | None = None
    dlq_id: str | None = None


class JobDetailResponse(JobResponse, frozen=True, kw_only=True):
    """A job with payload, context and result."""

    payload: Any
    context: Any = None
    result: Any = None
    submitted_by: str = ""


class SubmittedJobResponse(JobDetailResponse, frozen=True, kw_only=True):
    """The job of a submission that waited for its end."""

    #: The idempotency key was known; this is the job that was submitted first.
    duplicate: bool


class SubmitResponse(msgspec.Struct, frozen=True, kw_only=True):
    """An accepted submission."""

    job_id: str
    queue: str
    #: The idempotency key was known; this is the job that was submitted first.
    duplicate: bool
    #: Path of the job.
    location: str


class BulkSubmitError(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    detail: str
    status: int


class BulkSubmitResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result for one job of a bulk request: a job or an error."""

    job_id: str | None = None
    queue: str | None = None
    duplicate: bool = False
    error: BulkSubmitError | None = None


class BulkSubmitResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Results in the order of the request."""

    accepted: int
    refused: int
    results: list[BulkSubmitResult]


class PageQuery(RequestBase, frozen=True, kw_only=True):
    """Page parameters of a list."""

    limit: Limit = 50
    cursor: Cursor | None = None


class JobQuery(PageQuery, frozen=True, kw_only=True):
    """Filter for jobs. All given conditions must match."""

    cursor: JobCursor | None = None
    state: tuple[State, ...] = ()
    queue: tuple[Name, ...] = ()
    task: Name | None = None
    tenant_id: Name | None = None
    since: Annotated[datetime, Meta(tz=True, description="Created at or after this instant.")] | None = None
    until: Annotated[datetime, Meta(tz=True, description="Created before this instant.")] | None = None
    error: Annotated[Text, Meta(description="Text contained in the last error; case is ignored.")] | None = None
    trace_id: Exactly | None = None
    idempotency_key: Exactly | None = None


class JobListResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A page of jobs. A non-null cursor means that there may be more."""

    jobs: list[JobResponse]
    cursor: str | None


class JobEventResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a job."""

    type: str
    job_id: str
    queue: str
    tenant_id: str
    at: datetime
    seq: int | None = None
    from_state: State | None = None
    to_state: State | None = None
    attempt: int = 0
    retry_count: int = 0
    worker: str = ""
    message: str = ""
    data: Any = None


class JobEventsResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A job's events so far, in order."""

    events: list[JobEventResponse]


# Conversions -------------------------------------------------------------------------------------------


def instant(ms: int) -> datetime | None:
    """Convert an engine's instant; 0 means none."""
    return _EPOCH + timedelta(milliseconds=ms) if ms else None


def plain(encoded: bytes | None) -> Any:
    """Return JSON unchanged, and anything else as text: foreign messages may not be JSON."""
    if encoded is None:
        return None
    try:
        msgspec.json.decode(encoded)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return encoded.decode(errors="replace")
    return Raw(encoded)


def job_of_view(view: JobInfo) -> JobDetailResponse:
    """Convert a job of the engine."""
    meta = view.meta
    return JobDetailResponse(
        job_id=view.job_id,
        task=view.task,
        queue=view.queue,
        tenant_id=view.tenant_id,
        state=view.state,
        attempt=view.attempt,
        retry_count=meta.retry_count,
        priority=_PRIORITIES[meta.priority],
        idempotency_key=view.idempotency_key,
        trace_id=view.trace_id,
        created_at=instant(view.created_at_ms) or _EPOCH,
        run_at=instant(meta.run_at_ms),
        next_attempt_at=instant(view.next_attempt_at_ms),
        finished_at=instant(view.finished_at_ms),
        worker=view.worker,
        error=_error(view.failure),
        dlq_id=meta.dlq_id or None,
        # Empty if neither the engine nor the ledger has the arguments.
        payload=plain(view.payload or None),
        context=meta.context,
        result=plain(view.result),
        submitted_by=meta.submitted_by,
    )


def submitted_job(view: JobInfo, duplicate: bool) -> SubmittedJobResponse:
    """Convert the job of a submission that waited for its end."""
    job = job_of_view(view)
    return SubmittedJobResponse(**{name: getattr(job, name) for name in job.__struct_fields__}, duplicate=duplicate)


def job_of_row(row: JobRow) -> JobResponse:
    """Convert a job of the ledger's lists."""
    error = None
    if row.error_code is not None:
        error = JobErrorResponse(code=row.error_code, message=row.last_error or "")
    return JobResponse(
        job_id=row.job_id,
        task=row.job_type,
        queue=row.queue,
        tenant_id=row.tenant_id,
        state=row.state,
        attempt=row.attempt,
        retry_count=row.retry_count,
        priority=_PRIORITIES.get(row.priority, "normal"),
        idempotency_key=row.idempotency_key,
        trace_id=row.trace_id,
        created_at=row.created_at,
        run_at=row.run_at,
        next_attempt_at=row.next_retry_at,
        finished_at=row.finished_at,
        worker=row.worker or "",
        error=error,
        dlq_id=row.dlq_id,
    )


def event_of_row(row: EventRow) -> JobEventResponse:
    """Convert an event of the ledger."""
    return JobEventResponse(
        type=row.type,
        job_id=row.job_id,
        queue=row.queue,
        tenant_id=row.tenant_id,
        at=row.at,
        seq=row.seq,
        from_state=row.from_state,
        to_state=row.to_state,
        attempt=row.attempt,
        retry_count=row.retry_count,
        worker=row.worker or "",
        message=row.message or "",
        data=None if row.data is None else row.data.value,
    )


def event_of_feed(queue: str, event: Event) -> JobEventResponse:
    """Convert an event of the engine's feed."""
    return JobEventResponse(
        type=event.type,
        job_id=event.job_id,
        queue=queue,
        tenant_id=event.tenant_id,
        at=_EPOCH + timedelta(milliseconds=event.at_ms),
        from_state=event.from_state,
        to_state=event.to_state,
        attempt=event.attempt,
        retry_count=event.retry_count,
        worker=event.worker,
        message=event.message,
        data=event.data,
    )


def _error(failure: Failure | None) -> JobErrorResponse | None:
    return None if failure is None else JobErrorResponse(code=failure.code, message=failure.message, type=failure.type)


class BulkItemResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Result for one item."""

    id: str
    done: bool
    #: Nothing had to be done, for example because the dead letter was already replayed.
    skipped: bool = False
    #: The resulting job, if there is one.
    job_id: str = ""
    code: str = ""
    message: str = ""


class BulkResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a bulk operation."""

    #: Number of matches before anything was changed.
    matched: int
    done: int
    failed: int
    #: Items that needed nothing: dead letters that were already replayed, also before this request.
    skipped: int
    dry_run: bool
    #: Why the remaining items were not processed; empty if all were.
    stopped: str
    results: list[BulkItemResponse]


def bulk_response(report: BulkReport) -> BulkResponse:
    """Convert a report of the operations."""
    results = [
        BulkItemResponse(
            id=each.id,
            done=each.done,
            skipped=each.skipped,
            job_id=each.job_id,
            code=each.code,
            message=each.message,
        )
        for each in report.results
    ]
    return BulkResponse(
        matched=report.matched,
        done=report.done,
        failed=report.failed,
        skipped=report.skipped,
        dry_run=report.dry_run,
        stopped=report.stopped,
        results=results,
    )
