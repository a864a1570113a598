"""`/api/v1/jobs`: submit, get, list, wait for, cancel and expedite jobs."""

from __future__ import annotations

import asyncio
import logging
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
    IdempotencyKeyReused,
    IntakeLimited,
    IntakeRefused,
    InvalidOption,
    InvalidPayload,
    NotDurableYet,
    NotFound,
    PayloadTooLarge,
    TaskNotAnnounced,
    TransitionInvalid,
    Unavailable,
    UnknownJob,
    UnknownTask,
)
from holdfast.http.operation import Call, Reply, ResponseSpec, operation, raw_arguments, wait_disconnect
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
    SubmittedJobResponse,
    event_of_row,
    job_of_row,
    job_of_view,
    submitted_job,
)
from holdfast.ledger.queries.job_list import JobFilter

_log: Final = logging.getLogger("holdfast.http")

_TAG: Final = "jobs"
_PATH: Final = "/api/v1/jobs"
_ONE: Final = f"{_PATH}/{{job_id}}"
#: A wait is split into parts of this length, to notice a disconnected client in between.
_WAIT_MS: Final = 5_000
_OF_JOB: Final = {"job_id": "$response.body#/job_id"}
_LINKS: Final = {
    "job": ("getJob", _OF_JOB),
    "events": ("listJobEvents", _OF_JOB),
    "cancel": ("cancelJob", _OF_JOB),
    "retry": ("retryJob", _OF_JOB),
}


class WebhookRefused(HttpError):
    """Webhooks are disabled, or the address is not allowed."""

    status = 403
    code = "WEBHOOK_REFUSED"


#: Errors of a submission that is invalid.
_INVALID: Final = (
    UnknownTask,
    TaskNotAnnounced,
    NotFound,
    InvalidPayload,
    InvalidOption,
    PayloadTooLarge,
    WebhookRefused,
)


@operation(
    "POST",
    _PATH,
    "submitJob",
    tag=_TAG,
    permission=Permission.SUBMIT,
    query=SubmitQuery,
    body=SubmitRequest,
    body_example={"task": "add", "payload": {"a": 1, "b": 2}},
    headers={
        "Idempotency-Key": (
            "A repeated submission with this key returns the first job. Another task or other arguments are refused.",
            KEY_PATTERN,
        )
    },
    responses={
        200: ResponseSpec("The job ended in time: the result or the error.", SubmittedJobResponse, links=_LINKS),
        202: ResponseSpec(
            "Accepted; the job will not be lost.",
            SubmitResponse,
            {"Location": "Path of the job."},
            links=_LINKS,
        ),
    },
    errors=(
        *_INVALID,
        IdempotencyKeyReused,
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

    With `wait` the response is sent when the job has ended, with its result, or after that many seconds. A job that has
    failed is a 200, too, with its state and error.
    """
    query: SubmitQuery = call.query
    key = call.header("idempotency-key")
    envelope = await _envelope(call, call.body, key)
    try:
        receipt = await (await call.service.backend.connections.submitter()).submit(envelope)
    except IntakeLimited as exc:
        exc.is_disclosed = call.principal.sees_all_tenants
        raise
    if query.wait:
        view = await _wait_ended(call, envelope.queue, receipt.job_id, query.wait)
        # The ledger can have a job of another tenant with this id, if another program chose it.
        if view is not None and view.tenant_id == envelope.tenant_id:
            if not view.payload and not receipt.duplicate:
                # The ledger may be behind.
                view = msgspec.structs.replace(view, payload=envelope.payload)
            view = await call.service.operations.jobs.add_arguments(view)
            return Reply(submitted_job(view, receipt.duplicate))
    return _accept_reply(call, envelope, receipt)


@operation(
    "POST",
    f"{_PATH}/bulk",
    "submitJobs",
    tag=_TAG,
    permission=Permission.SUBMIT,
    body=BulkSubmitRequest,
    body_example={"jobs": [{"task": "add", "payload": {"a": 1, "b": 2}, "idempotency_key": "sum-1"}]},
    responses={200: ResponseSpec("A result per job, in the order of the request.", BulkSubmitResponse)},
    errors=(*_INVALID, GuardFailed, FeedFull, FeedDetached, NotDurableYet),
)
async def submit_many(call: Call) -> Reply:
    """Submit many jobs.

    All jobs are checked before the first is submitted; one invalid job refuses the request. After that each job is
    accepted or refused on its own, for example by an intake limit, or because its key belongs to another request. With
    idempotency keys the whole request can be repeated.
    """
    request: BulkSubmitRequest = call.body
    envelopes = [await _check_item(call, number, item) for number, item in enumerate(request.jobs)]
    submitter = await call.service.backend.connections.submitter()

    async def one(envelope: Envelope) -> BulkSubmitResult:
        try:
            receipt = await submitter.submit(envelope)
        except (Denied, IntakeRefused, IdempotencyKeyReused) as exc:
            if isinstance(exc, IntakeLimited):
                exc.is_disclosed = call.principal.sees_all_tenants
            problem, _ = problem_of(exc, call.scope["path"])
            error = BulkSubmitError(code=problem.code, detail=problem.detail, status=problem.status)
            return BulkSubmitResult(error=error)
        return BulkSubmitResult(job_id=receipt.job_id, queue=envelope.queue, duplicate=receipt.duplicate)

    # Concurrently, so that they share calls to the engine.
    outcomes = await asyncio.gather(*map(one, envelopes), return_exceptions=True)
    results = [result for result in outcomes if isinstance(result, BulkSubmitResult)]
    if failure := next((each for each in outcomes if isinstance(each, BaseException)), None):
        raise failure
    refused = sum(result.error is not None for result in results)
    return Reply(BulkSubmitResponse(accepted=len(results) - refused, refused=refused, results=results))


@operation(
    "GET",
    _PATH,
    "listJobs",
    tag=_TAG,
    query=JobQuery,
    responses={
        200: ResponseSpec(
            "A page, newest first.",
            JobListResponse,
            links={"next": ("listJobs", {"cursor": "$response.body#/cursor"})},
        )
    },
)
async def list_jobs(call: Call) -> Reply:
    """List jobs, newest first.

    Read from the ledger, which is slightly behind the engine. A `cursor` means that there may be more, even after a
    short page.
    """
    query: JobQuery = call.query
    job_filter = JobFilter(
        states=frozenset(query.state),
        job_type=query.task,
        tenant_id=query.tenant_id,
        tenants=call.principal.visible_tenants,
        queues=frozenset(query.queue),
        since=query.since,
        until=query.until,
        error=query.error,
        trace_id=query.trace_id,
        idempotency_key=query.idempotency_key,
    )
    page = await call.service.queries.jobs(job_filter, query.limit, query.cursor)
    return Reply(JobListResponse(jobs=[job_of_row(row) for row in page.jobs], cursor=page.cursor))


@operation(
    "GET",
    _ONE,
    "getJob",
    tag=_TAG,
    query=QueueQuery,
    responses={200: ResponseSpec("The job.", JobDetailResponse, links=_LINKS)},
    errors=(UnknownJob,),
)
async def get_job(call: Call) -> Reply:
    """Get a job."""
    return Reply(job_of_view(await _find_job(call)))


@operation(
    "GET",
    f"{_ONE}/events",
    "listJobEvents",
    tag=_TAG,
    query=QueueQuery,
    responses={200: ResponseSpec("The events, in order.", JobEventsResponse)},
    errors=(UnknownJob,),
)
async def list_events(call: Call) -> Reply:
    """List the events of a job, from the ledger."""
    view = await _find_job(call)
    rows = await call.service.queries.events(JobKey(view.tenant_id, view.queue, view.job_id))
    return Reply(JobEventsResponse(events=[event_of_row(row) for row in rows]))


@operation(
    "POST",
    f"{_ONE}/cancel",
    "cancelJob",
    tag=_TAG,
    permission=Permission.OPERATE,
    query=QueueQuery,
    body=ReasonRequest,
    body_example={"reason": "the order was withdrawn"},
    responses={200: ResponseSpec("The cancelled job.", JobDetailResponse, links={"job": ("getJob", _OF_JOB)})},
    errors=(UnknownJob, TransitionInvalid),
)
async def cancel(call: Call) -> Reply:
    """Cancel a waiting or running job."""
    query: QueueQuery = call.query
    request: ReasonRequest = call.body
    operating = call.service.operations.jobs
    await operating.cancel(call.principal, call.path["job_id"], queue=query.queue, reason=request.reason)
    return Reply(job_of_view(await _find_job(call)))


@operation(
    "POST",
    f"{_ONE}/retry",
    "retryJob",
    tag=_TAG,
    permission=Permission.OPERATE,
    query=QueueQuery,
    body=ReasonRequest,
    body_example={"reason": "the mail server is back"},
    responses={200: ResponseSpec("The job, due now.", JobDetailResponse, links={"job": ("getJob", _OF_JOB)})},
    errors=(UnknownJob, TransitionInvalid),
)
async def retry(call: Call) -> Reply:
    """Make a delayed or retrying job due now."""
    query: QueueQuery = call.query
    request: ReasonRequest = call.body
    operating = call.service.operations.jobs
    await operating.expedite(call.principal, call.path["job_id"], queue=query.queue, reason=request.reason)
    return Reply(job_of_view(await _find_job(call)))


# Helpers -----------------------------------------------------------------------------------------------


async def _find_job(call: Call) -> JobInfo:
    query: QueueQuery = call.query
    return await call.service.operations.jobs.find(call.principal, call.path["job_id"], query.queue)


async def _check_item(call: Call, number: int, item: BulkSubmitItem) -> Envelope:
    try:
        return await _envelope(call, item, None if item.idempotency_key is UNSET else item.idempotency_key)
    except HoldfastError as exc:
        problem, _ = problem_of(exc, call.scope["path"])
        raise ItemRefused(f"jobs[{number}]", problem) from exc


async def _envelope(call: Call, request: SubmitRequest, key: str | None) -> Envelope:
    options: SubmitOptions = {
        "tenant_id": tenant_of(call.principal, request.tenant_id or None),
        "durable": request.durable,
    }
    if key is not None:
        options["idempotency_key"] = key
    if request.queue is not UNSET:
        options["queue"] = request.queue
    options["on_key_reuse"] = request.on_key_reuse
    if request.priority is not UNSET:
        options["priority"] = request.priority
    if request.run_at is not UNSET and request.delay_s is not UNSET:
        raise Unprocessable("delay_s and run_at exclude each other; pass only one")
    if request.run_at is not UNSET:
        options["run_at"] = request.run_at
    if request.delay_s is not UNSET:
        options["delay"] = timedelta(seconds=request.delay_s)
    if request.trace_id is not UNSET:
        options["trace_id"] = request.trace_id
    if request.context is not UNSET:
        options["context"] = _object(request.context, "context")
    if request.webhook_url is not UNSET:
        options["webhook"] = _webhook(call.service, request.webhook_url)
    payload = b"{}" if request.payload is UNSET else raw_arguments(request.payload)
    backend, announced = call.service.backend, None
    if not backend.tasks:
        announced = await backend.announced.require(request.task, payload, force=request.force)
    envelope = backend.envelope(request.task, payload, announced, **options)
    meta = msgspec.structs.replace(envelope.meta, submitted_by=call.principal.name)
    return msgspec.structs.replace(envelope, meta=meta)


def tenant_of(principal: Principal, tenant_id: str | None) -> str:
    """Tenant of a submission. Raises `NotFound` for a tenant that the principal cannot see."""
    if tenant_id is not None:
        if not principal.can_see(tenant_id):
            raise NotFound("tenant", tenant_id)
        return tenant_id
    if principal.sees_all_tenants:
        return "default"
    if len(principal.tenants) != 1:
        raise NotFound("tenant", "(none given)", "pass tenant_id, because this token has several tenants")
    return next(iter(principal.tenants))


def _object(raw: msgspec.Raw, what: str) -> dict[str, object]:
    try:
        value = msgspec.json.decode(raw)
    except (ValueError, RecursionError) as exc:
        raise Unprocessable(f"the body is invalid: {exc} - at `$.{what}`") from exc
    if not isinstance(value, dict):
        raise Unprocessable(f"the body is invalid: Expected `object` - at `$.{what}`")
    return value


def _webhook(service: Service, url: str) -> str:
    settings = service.app.settings
    if not settings.webhooks_enabled:
        raise WebhookRefused("webhooks are disabled: no secret to sign them is set; set HOLDFAST_WEBHOOK_SECRET")
    try:
        check_target(url, settings.webhook_allow_list)
    except (InvalidOption, ValueError) as exc:
        raise WebhookRefused(str(exc)) from exc
    return url


async def _wait_ended(call: Call, queue: str, job_id: str, wait_s: float) -> JobInfo | None:
    """Wait for a job to end.

    None on timeout, if the client disconnects, if its token becomes invalid, at shutdown, if the stores do not answer,
    or if the job was lost.
    """
    token_ended = asyncio.Event()
    with call.ending_with_token(token_ended.set, token_ended.set):
        return await _wait_until(call, queue, job_id, wait_s, token_ended)


async def _wait_until(call: Call, queue: str, job_id: str, wait_s: float, ended: asyncio.Event) -> JobInfo | None:
    service, loop = call.service, asyncio.get_running_loop()
    deadline = loop.time() + min(wait_s, service.app.settings.http_wait_limit_s)
    submitter = await service.backend.connections.submitter()
    gone = asyncio.create_task(wait_disconnect(call.receive))
    endings = {gone, asyncio.create_task(service.ending.wait()), asyncio.create_task(ended.wait())}
    try:
        while (left_s := deadline - loop.time()) > 0 and not any(each.done() for each in endings):
            waiting = asyncio.ensure_future(
                submitter.wait_final(queue, job_id, min(_WAIT_MS, max(1, int(left_s * 1000))))
            )
            await asyncio.wait({waiting, *endings}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
                return None
            try:
                view = waiting.result()
            except Unavailable as exc:
                # It is accepted: that must not be answered with an error.
                _log.info("waiting for job %s ended: %s", job_id, exc)
                return None
            if view is None or view.state in FINAL:
                return view
    finally:
        for each in endings:
            each.cancel()
        await asyncio.gather(*endings, return_exceptions=True)
    return None


def _accept_reply(call: Call, envelope: Envelope, receipt: Receipt) -> Reply:
    path = f"{call.scope.get('root_path', '')}{_PATH}/{quote(receipt.job_id, safe='')}"
    if envelope.queue != "default":
        path += f"?queue={quote(envelope.queue, safe='')}"
    document = SubmitResponse(job_id=receipt.job_id, queue=envelope.queue, duplicate=receipt.duplicate, location=path)
    return Reply(document, 202, [(b"location", path.encode())])
