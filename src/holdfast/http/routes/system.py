"""Health, readiness, metrics, the OpenAPI document, `/internal/tasks/stats` (H2) and the run endpoint (H3)."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from holdfast.core.principal import Permission
from holdfast.core.states import State
from holdfast.errors import (
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
from holdfast.observe.prometheus import HealthApp
from holdfast.operations.access import visible_tenants
from holdfast.operations.metrics import render_metrics
from holdfast.operations.readiness import DOWN, NONE, OK, engine_status, ledger_status

_INTERNAL_TAG: Final = "internal"


class StatsQuery(RequestBase, frozen=True, kw_only=True):
    """How many of the latest jobs."""

    latest: Annotated[int, Meta(ge=0, le=200)] = 20


class StatsResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs by state, and the newest ones."""

    states: dict[State, int]
    #: Counts of these states are the planner's guess.
    estimated: list[State]
    latest: list[JobResponse]


class RunQuery(QueueQuery, frozen=True, kw_only=True):
    """How it is to end: as the task says, unless a failure is asked for."""

    force_fail: Annotated[bool, Meta(description="Straight to the dead letter.")] = False
    transient_fail: Annotated[bool, Meta(description="One failure that may be retried.")] = False


@operation(
    "GET",
    "/internal/tasks/stats",
    "taskStats",
    tag=_INTERNAL_TAG,
    query=StatsQuery,
    answers={200: ResponseSpec("Counts and the latest jobs.", StatsResponse)},
)
async def stats(call: Call) -> Reply:
    """Jobs by state, and the latest ones; of the token's tenants, from the ledger."""
    query: StatsQuery = call.query
    queries, tenants = call.service.queries, visible_tenants(call.principal)
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
    right=Permission.OPERATE,
    query=RunQuery,
    answers={200: ResponseSpec("The job after one attempt.", JobDetailResponse)},
    errors=(UnknownJob, TransitionInvalid, StaleLease),
)
async def run(call: Call) -> Reply:
    """Run one job here and now, whether it is due or not.

    Off unless the setting `run_endpoint` is on. It takes a lease like a worker, and settles like one: a failure that is
    asked for with `transient_fail` is retried as the task's policy says, and given up when that is exhausted.
    """
    if not call.service.run_endpoint:
        raise NotFound("operation", "runJob: it is switched off (HOLDFAST_RUN_ENDPOINT)")
    query: RunQuery = call.query
    view = await call.service.operations.operating.find(call.principal, call.path["job_id"], query.queue)
    after = await call.service.debug_runner.run(
        view, call.principal.name, force_fail=query.force_fail, transient_fail=query.transient_fail
    )
    return Reply(job_of_view(after))


_TAG: Final = "system"
_METRICS: Final = 'task_total{queue="default",state="queued"} 1.0\n'


class ReadinessResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Whether this process can do its work: `ok`, `down`, `behind` or `none`."""

    ready: bool
    engine: str
    #: A ledger that is down stops neither submission nor work.
    ledger: str
    #: The worker in this process.
    worker: str


@operation(
    "GET",
    "/healthz",
    "health",
    tag=_TAG,
    right=None,
    answers={200: ResponseSpec("It lives.", HealthApp, example={"status": "ok"})},
)
async def health(call: Call) -> Reply:
    """Whether the process answers."""
    return Reply(HealthApp(status="ok"))


@operation(
    "GET",
    "/readyz",
    "readiness",
    tag=_TAG,
    right=None,
    answers={
        200: ResponseSpec("It is ready.", ReadinessResponse),
        503: ResponseSpec("It is not; what is missing is named.", ReadinessResponse, {"Retry-After": "Seconds."}),
    },
)
async def readiness(call: Call) -> Reply:
    """Whether this process can do its work: engine, ledger, and the worker if it has one.

    A ledger that is down is told, and is no reason to send nobody here: jobs are accepted and run all the same.
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
    right=None,
    answers={200: ResponseSpec("Metrics in Prometheus' format.", content_type="text/plain", example=_METRICS)},
    errors=(Unauthorized, Forbidden, *UNAVAILABLE),
)
async def metrics(call: Call) -> Reply:
    """Metrics, for a token that is of every tenant unless the service is set up to show them to everybody."""
    service = call.service
    if not service.metrics_open:
        person = await service.authenticator.authenticate(call.scope)
        person.require(Permission.READ)
        person.require_all_tenants("the list of metrics")
    service.check_open()
    body, content_type = await render_metrics(service.app)
    return Reply(body, content_type=content_type)


@operation(
    "GET",
    "/openapi.json",
    "openapi",
    tag=_TAG,
    right=None,
    answers={200: ResponseSpec("This document.", dict[str, Any], example={"openapi": "3.1.0"})},
)
async def openapi(call: Call) -> Reply:
    """The OpenAPI document; with the tasks and their arguments for whoever has a token."""
    return Reply(call.service.document(with_tasks=await caller_of(call) is not None))


async def _engine(call: Call) -> str:
    try:
        return await engine_status(call.service.operations.engine)
    except EngineUnavailable:
        return DOWN
