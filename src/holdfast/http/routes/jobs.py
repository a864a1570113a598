"""`/api/v1/jobs`: submit, look up, list, follow, cancel, retry now."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Final
from urllib.parse import quote

import msgspec
from msgspec import UNSET

from holdfast.client.options import SubmitOptions
from holdfast.core.job import Envelope, JobInfo, JobKey, Receipt
from holdfast.core.principal import Permission, Principal
from holdfast.core.states import FINAL
from holdfast.core.webhook_url import check_target
from holdfast.errors import (
    Denied,
    FeedDetached,
    FeedFull,
    GuardFailed,
    HoldfastError,
    IntakeLimited,
    IntakeRefused,
    InvalidOption,
    InvalidPayload,
    NotDurableYet,
    NotFound,
    PayloadTooLarge,
    TransitionInvalid,
    UnknownJob,
    UnknownTask,
)
from holdfast.http.operation import Call, Receive, Reply, ResponseSpec, operation, raw_arguments, wait_disconnect
from holdfast.http.problems import HttpError, ItemRefused, Unprocessable, problem_of
from holdfast.http.service import Service
from holdfast.http.wire import (
    KEY_PATTERN,
    BulkSubmitError,
    BulkSubmitItem,
    BulkSubmitRequest,
    BulkSubmitResponse,
    BulkSubmitResult,
    JobDetailResponse,
    JobEventsResponse,
    JobListResponse,
    JobQuery,
    QueueQuery,
    ReasonRequest,
    SubmitQuery,
    SubmitRequest,
    SubmitResponse,
    event_of_row,
    job_of_row,
    job_of_view,
)
from holdfast.ledger.queries.job_list import JobFilter
from holdfast.operations.access import visible_tenants

_TAG: Final = "jobs"
_PATH: Final = "/api/v1/jobs"
_ONE: Final = f"{_PATH}/{{job_id}}"
#: A wait is cut into pieces, so that a caller that hangs up is noticed between them.
_WAIT_MS: Final = 5_000
_OF_JOB: Final = {"job_id": "$response.body#/job_id"}
_LINKS: Final = {
    "job": ("getJob", _OF_JOB),
    "events": ("listJobEvents", _OF_JOB),
    "cancel": ("cancelJob", _OF_JOB),
    "retry": ("retryJob", _OF_JOB),
}


class WebhookRefused(HttpError):
    """Webhooks are off, or must not go there."""

    status = 403
    code = "WEBHOOK_REFUSED"


#: Why there cannot be such a job.
_CANNOT_BE: Final = (UnknownTask, NotFound, InvalidPayload, InvalidOption, PayloadTooLarge, WebhookRefused)


@operation(
    "POST",
    _PATH,
    "submitJob",
    tag=_TAG,
    right=Permission.SUBMIT,
    query=SubmitQuery,
    body=SubmitRequest,
    body_example={"task": "add", "payload": {"a": 1, "b": 2}},
    headers={"Idempotency-Key": ("A second submission with it gets the first one's job.", KEY_PATTERN)},
    answers={
        200: ResponseSpec("It has ended in time: the result, or the error.", JobDetailResponse, links=_LINKS),
        202: ResponseSpec(
            "Accepted; it will not be lost.",
            SubmitResponse,
            {"Location": "Where the job can be looked up."},
            links=_LINKS,
        ),
    },
    errors=(
        *_CANNOT_BE,
        Denied,
        GuardFailed,
        IntakeRefused,
        IntakeLimited,
        FeedFull,
        FeedDetached,
        NotDurableYet,
    ),
)
async def submit(call: Call) -> Reply:
    """Submit a job.

    With `wait` the answer comes when the job has ended, with its result, or after so many seconds; a job that has
    failed by then is a 200 as well, with its state and error.
    """
    query: SubmitQuery = call.query
    key = call.header("idempotency-key")
    envelope = _envelope(call, call.body, key)
    receipt = await (await call.service.app.submitter()).submit(envelope)
    if query.wait:
        view = await _ended(call.service, envelope.queue, receipt.job_id, query.wait, call.receive)
        if view is not None:
            return Reply(job_of_view(view))
    return _accepted(call, envelope, receipt)


@operation(
    "POST",
    f"{_PATH}/bulk",
    "submitJobs",
    tag=_TAG,
    right=Permission.SUBMIT,
    body=BulkSubmitRequest,
    body_example={"jobs": [{"task": "add", "payload": {"a": 1, "b": 2}, "idempotency_key": "sum-1"}]},
    answers={200: ResponseSpec("What became of each, in the order of the request.", BulkSubmitResponse)},
    errors=(*_CANNOT_BE, GuardFailed, FeedFull, FeedDetached, NotDurableYet),
)
async def submit_many(call: Call) -> Reply:
    """Submit many jobs.

    All are checked before the first is sent: one that cannot be refuses the request. After that each is accepted or
    refused for itself. Give them idempotency keys, and the whole request can be repeated.
    """
    wanted: BulkSubmitRequest = call.body
    envelopes = [_checked(call, number, item) for number, item in enumerate(wanted.jobs)]
    desk = await call.service.app.submitter()

    async def one(envelope: Envelope) -> BulkSubmitResult:
        try:
            receipt = await desk.submit(envelope)
        except (Denied, IntakeRefused) as exc:
            problem, _ = problem_of(exc, call.scope["path"])
            error = BulkSubmitError(code=problem.code, detail=problem.detail, status=problem.status)
            return BulkSubmitResult(error=error)
        return BulkSubmitResult(job_id=receipt.job_id, queue=envelope.queue, duplicate=receipt.duplicate)

    # At the same moment, so that they share the engine's steps.
    ended = await asyncio.gather(*map(one, envelopes), return_exceptions=True)
    results = [result for result in ended if isinstance(result, BulkSubmitResult)]
    if failure := next((each for each in ended if isinstance(each, BaseException)), None):
        raise failure
    refused = sum(result.error is not None for result in results)
    return Reply(BulkSubmitResponse(accepted=len(results) - refused, refused=refused, results=results))


@operation(
    "GET",
    _PATH,
    "listJobs",
    tag=_TAG,
    query=JobQuery,
    answers={
        200: ResponseSpec(
            "A page, newest first.",
            JobListResponse,
            links={"next": ("listJobs", {"cursor": "$response.body#/cursor"})},
        )
    },
)
async def list_jobs(call: Call) -> Reply:
    """List jobs, newest first.

    From the ledger: a moment behind the engine. While there is a `cursor` there may be more, even after a short page.
    """
    query: JobQuery = call.query
    wanted = JobFilter(
        states=frozenset(query.state),
        job_type=query.task,
        tenant_id=query.tenant_id,
        tenants=visible_tenants(call.principal),
        queues=frozenset(query.queue),
        since=query.since,
        until=query.until,
        error=query.error,
        trace_id=query.trace_id,
        idempotency_key=query.idempotency_key,
    )
    page = await call.service.queries.jobs(wanted, query.limit, query.cursor)
    return Reply(JobListResponse(jobs=[job_of_row(row) for row in page.jobs], cursor=page.cursor))


@operation(
    "GET",
    _ONE,
    "getJob",
    tag=_TAG,
    query=QueueQuery,
    answers={200: ResponseSpec("The job as it is now.", JobDetailResponse, links=_LINKS)},
    errors=(UnknownJob,),
)
async def get_job(call: Call) -> Reply:
    """Look a job up."""
    return Reply(job_of_view(await _located(call)))


@operation(
    "GET",
    f"{_ONE}/events",
    "listJobEvents",
    tag=_TAG,
    query=QueueQuery,
    answers={200: ResponseSpec("Its story, in order.", JobEventsResponse)},
    errors=(UnknownJob,),
)
async def list_events(call: Call) -> Reply:
    """A job's story so far, from the ledger."""
    view = await _located(call)
    rows = await call.service.queries.events(JobKey(view.tenant_id, view.queue, view.job_id))
    return Reply(JobEventsResponse(events=[event_of_row(row) for row in rows]))


@operation(
    "POST",
    f"{_ONE}/cancel",
    "cancelJob",
    tag=_TAG,
    right=Permission.OPERATE,
    query=QueueQuery,
    body=ReasonRequest,
    body_example={"reason": "the order was withdrawn"},
    answers={200: ResponseSpec("It is cancelled.", JobDetailResponse, links={"job": ("getJob", _OF_JOB)})},
    errors=(UnknownJob, TransitionInvalid),
)
async def cancel(call: Call) -> Reply:
    """Cancel a job, whether it waits or runs."""
    query: QueueQuery = call.query
    wish: ReasonRequest = call.body
    operating = call.service.operations.operating
    await operating.cancel(call.principal, call.path["job_id"], queue=query.queue, reason=wish.reason)
    return Reply(job_of_view(await _located(call)))


@operation(
    "POST",
    f"{_ONE}/retry",
    "retryJob",
    tag=_TAG,
    right=Permission.OPERATE,
    query=QueueQuery,
    body=ReasonRequest,
    body_example={"reason": "the mail server is back"},
    answers={200: ResponseSpec("It is due now.", JobDetailResponse, links={"job": ("getJob", _OF_JOB)})},
    errors=(UnknownJob, TransitionInvalid),
)
async def retry(call: Call) -> Reply:
    """Make a job that waits for its time, or for a retry, due now."""
    query: QueueQuery = call.query
    wish: ReasonRequest = call.body
    operating = call.service.operations.operating
    await operating.expedite(call.principal, call.path["job_id"], queue=query.queue, reason=wish.reason)
    return Reply(job_of_view(await _located(call)))


# Inside ------------------------------------------------------------------------------------------------


async def _located(call: Call) -> JobInfo:
    query: QueueQuery = call.query
    return await call.service.operations.operating.find(call.principal, call.path["job_id"], query.queue)


def _checked(call: Call, number: int, item: BulkSubmitItem) -> Envelope:
    try:
        return _envelope(call, item, None if item.idempotency_key is UNSET else item.idempotency_key)
    except HoldfastError as exc:
        problem, _ = problem_of(exc, call.scope["path"])
        raise ItemRefused(f"jobs[{number}]", problem) from exc


def _envelope(call: Call, wanted: SubmitRequest, key: str | None) -> Envelope:
    options: SubmitOptions = {
        "tenant_id": tenant_of(call.principal, wanted.tenant_id or None),
        "durable": wanted.durable,
    }
    if key is not None:
        options["idempotency_key"] = key
    if wanted.queue is not UNSET:
        options["queue"] = wanted.queue
    if wanted.priority is not UNSET:
        options["priority"] = wanted.priority
    if wanted.run_at is not UNSET and wanted.delay_s is not UNSET:
        raise Unprocessable("give delay_s or run_at, not both")
    if wanted.run_at is not UNSET:
        options["run_at"] = wanted.run_at
    if wanted.delay_s is not UNSET:
        options["delay"] = timedelta(seconds=wanted.delay_s)
    if wanted.trace_id is not UNSET:
        options["trace_id"] = wanted.trace_id
    if wanted.context is not UNSET:
        options["context"] = _object(wanted.context, "context")
    if wanted.webhook_url is not UNSET:
        options["webhook"] = _webhook(call.service, wanted.webhook_url)
    payload = b"{}" if wanted.payload is UNSET else raw_arguments(wanted.payload)
    envelope = call.service.app.envelope(wanted.task, payload, **options)
    meta = msgspec.structs.replace(envelope.meta, submitted_by=call.principal.name)
    return msgspec.structs.replace(envelope, meta=meta)


def tenant_of(person: Principal, asked: str | None) -> str:
    """Whose job it is to be. A tenant that is not the person's is not there."""
    if asked is not None:
        if not person.can_see(asked):
            raise NotFound("tenant", asked)
        return asked
    if person.sees_all_tenants:
        return "default"
    if len(person.tenants) != 1:
        raise NotFound("tenant", "(none named, and this token is of several)")
    return next(iter(person.tenants))


def _object(raw: msgspec.Raw, what: str) -> dict[str, object]:
    value = msgspec.json.decode(raw)
    if not isinstance(value, dict):
        raise Unprocessable(f"the body does not fit: Expected `object` - at `$.{what}`")
    return value


def _webhook(service: Service, url: str) -> str:
    settings = service.app.settings
    if not settings.webhooks_enabled:
        raise WebhookRefused("webhooks are switched off here: nothing has been set up to sign them with")
    try:
        check_target(url, settings.webhook_allow_list)
    except (InvalidOption, ValueError) as exc:
        raise WebhookRefused(str(exc)) from exc
    return url


async def _ended(service: Service, queue: str, job_id: str, wait_s: float, receive: Receive) -> JobInfo | None:
    """The job if it ends within the time; None if not, if nobody waits any more, or if this process has to end."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + min(wait_s, service.app.settings.http_wait_limit_s)
    desk = await service.app.submitter()
    gone = asyncio.create_task(wait_disconnect(receive))
    ending = asyncio.create_task(service.ending.wait())
    try:
        while (left_s := deadline - loop.time()) > 0 and not gone.done() and not ending.done():
            waiting = asyncio.ensure_future(desk.wait_final(queue, job_id, min(_WAIT_MS, max(1, int(left_s * 1000)))))
            await asyncio.wait({waiting, gone, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
                return None
            view = waiting.result()
            if view is not None and view.state in FINAL:
                return view
    finally:
        gone.cancel()
        ending.cancel()
        await asyncio.gather(gone, ending, return_exceptions=True)
    return None


def _accepted(call: Call, envelope: Envelope, receipt: Receipt) -> Reply:
    path = f"{call.scope.get('root_path', '')}{_PATH}/{quote(receipt.job_id, safe='')}"
    if envelope.queue != "default":
        path += f"?queue={quote(envelope.queue, safe='')}"
    document = SubmitResponse(job_id=receipt.job_id, queue=envelope.queue, duplicate=receipt.duplicate, location=path)
    return Reply(document, 202, [(b"location", path.encode())])
