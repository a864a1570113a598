"""Health, readiness, metrics, OpenAPI document, `/internal/tasks/stats` (H2), run endpoint (H3)."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from holdfast.core.principal import Permission
from holdfast.core.states import State
from holdfast.errors import (
    ConcurrencyLimited,
    EngineUnavailable,
    Forbidden,
    NotFound,
    StaleLease,
    TransitionInvalid,
    Unauthorized,
    UnknownJob,
)
from holdfast.http.operation import Call, Reply, ResponseSpec, operation
from holdfast.http.problems import DOWN as UNAVAILABLE
from holdfast.http.routes.pages import caller_of
from holdfast.http.wire import JobDetailResponse, JobResponse, QueueQuery, RequestBase, job_of_row, job_of_view
from holdfast.ledger.queries.job_list import JobFilter
from holdfast.observe.prometheus import LivenessResponse
from holdfast.operations.metrics import render_metrics
from holdfast.operations.readiness import DOWN, NONE, OK, engine_status, ledger_status

_INTERNAL_TAG: Final = "internal"


class StatsQuery(RequestBase, frozen=True, kw_only=True):
    """Parameters of the statistics."""

    latest: Annotated[int, Meta(ge=0, le=200)] = 20


class StatsResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Number of jobs by state, and the newest jobs."""

    states: dict[State, int]
    #: States whose counts are estimates of the query planner.
    estimated: list[State]
    latest: list[JobResponse]


class RunQuery(QueueQuery, frozen=True, kw_only=True):
    """Parameters of a run: the task's outcome counts, unless a failure is requested."""

    force_fail: Annotated[bool, Meta(description="Fail permanently: dead-letter the job without running it.")] = False
    transient_fail: Annotated[bool, Meta(description="Fail once, retryably, without running the job.")] = False


@operation(
    "GET",
    "/internal/tasks/stats",
    "taskStats",
    tag=_INTERNAL_TAG,
    query=StatsQuery,
    responses={200: ResponseSpec("Counts and the newest jobs.", StatsResponse)},
)
async def stats(call: Call) -> Reply:
    """Count jobs by state and list the newest, for the token's tenants, from the ledger."""
    query: StatsQuery = call.query
    queries, tenants = call.service.queries, call.principal.visible_tenants
    states: dict[State, int] = dict.fromkeys(State, 0)
    estimated: set[State] = set()
    for tenant in (None,) if tenants is None else tenants:
        counts = await queries.counts(tenant)
        estimated |= counts.estimated
        for state, count in counts.states.items():
            states[state] += count
    latest = (await queries.jobs(JobFilter(tenants=tenants), query.latest)).jobs if query.latest else []
    return Reply(StatsResponse(states=states, estimated=sorted(estimated), latest=[job_of_row(row) for row in latest]))


@operation(
    "POST",
    "/api/v1/internal/jobs/{job_id}/run",
    "runJob",
    tag=_INTERNAL_TAG,
    permission=Permission.OPERATE,
    query=RunQuery,
    responses={200: ResponseSpec("The job after one attempt.", JobDetailResponse)},
    errors=(UnknownJob, TransitionInvalid, StaleLease, ConcurrencyLimited),
)
async def run(call: Call) -> Reply:
    """Run one job in this process now, whether or not it is due.

    Disabled unless the setting `run_endpoint` is on. It claims and settles the job like a worker: a failure requested
    with `transient_fail` is retried as the task's policy says, until its retries are exhausted.
    """
    if not call.service.run_endpoint:
        raise NotFound("operation", "runJob", "enable it with HOLDFAST_RUN_ENDPOINT")
    query: RunQuery = call.query
    view = await call.service.operations.jobs.find(call.principal, call.path["job_id"], query.queue)
    after = await call.service.debug_runner.run(
        view, call.principal.name, force_fail=query.force_fail, transient_fail=query.transient_fail
    )
    return Reply(job_of_view(msgspec.structs.replace(after, payload=after.payload or view.payload)))


_TAG: Final = "system"
_METRICS: Final = 'task_total{queue="default",state="queued"} 1.0\n'


class ReadinessResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Readiness of this process and its parts: `ok`, `down`, `behind` or `none`."""

    ready: bool
    engine: str
    #: Without the ledger, jobs are still accepted and run.
    ledger: str
    #: The worker in this process.
    worker: str


@operation(
    "GET",
    "/healthz",
    "health",
    tag=_TAG,
    permission=None,
    responses={200: ResponseSpec("The process is alive.", LivenessResponse, example={"status": "ok"})},
)
async def health(call: Call) -> Reply:
    """Check that the process is alive."""
    return Reply(LivenessResponse(status="ok"))


@operation(
    "GET",
    "/readyz",
    "readiness",
    tag=_TAG,
    permission=None,
    responses={
        200: ResponseSpec("Ready.", ReadinessResponse),
        503: ResponseSpec("Not ready; the body names the part.", ReadinessResponse, {"Retry-After": "Seconds."}),
    },
)
async def readiness(call: Call) -> Reply:
    """Check that this process is ready: engine, ledger, and its worker if it has one.

    An unreachable ledger is reported but does not make the process unready: jobs are still accepted and run.
    """
    service = call.service
    engine = await _engine(call)
    worker = NONE if service.worker is None else (OK if service.worker.ready else DOWN)
    found = ReadinessResponse(
        ready=engine == OK and worker != DOWN,
        engine=engine,
        ledger=await ledger_status(service.operations.ledger) if engine == OK else DOWN,
        worker=worker,
    )
    return Reply(found) if found.ready else Reply(found, 503, [(b"retry-after", b"1")])


@operation(
    "GET",
    "/metrics",
    "metrics",
    tag=_TAG,
    permission=None,
    responses={200: ResponseSpec("Metrics in Prometheus format.", content_type="text/plain", example=_METRICS)},
    errors=(Unauthorized, Forbidden, *UNAVAILABLE),
)
async def metrics(call: Call) -> Reply:
    """Get metrics.

    Needs a token for all tenants, unless the setting `metrics_open` is on.
    """
    service = call.service
    if not service.metrics_open:
        principal = await service.authenticator.authenticate(call.scope)
        principal.require(Permission.READ)
        principal.require_all_tenants("the list of metrics")
    service.check_open()
    body, content_type = await render_metrics(service.app)
    return Reply(body, content_type=content_type)


@operation(
    "GET",
    "/openapi.json",
    "openapi",
    tag=_TAG,
    permission=None,
    responses={200: ResponseSpec("This document.", dict[str, Any], example={"openapi": "3.1.0"})},
)
async def openapi(call: Call) -> Reply:
    """Get the OpenAPI document, with tasks and their arguments for authenticated callers."""
    return Reply(call.service.document(with_tasks=await caller_of(call) is not None))


async def _engine(call: Call) -> str:
    try:
        return await engine_status(call.service.operations.engine)
    except EngineUnavailable:
        return DOWN
