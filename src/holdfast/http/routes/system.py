"""Health, readiness, metrics, the OpenAPI document."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from holdfast.core.person import Right
from holdfast.errors import EngineUnavailable, Forbidden, Unauthorized
from holdfast.http.asgi import Reply
from holdfast.http.operation import Answer, Call, operation
from holdfast.http.problems import DOWN as UNAVAILABLE
from holdfast.http.routes.pages import caller_of
from holdfast.observe.metrics import exposition
from holdfast.observe.scrape import Health
from holdfast.readiness import DOWN, NONE, OK, engine_status, ledger_status

_TAG: Final = "system"
_METRICS: Final = 'task_total{queue="default",state="queued"} 1.0\n'


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
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
    answers={200: Answer("It lives.", Health, example={"status": "ok"})},
)
async def health(call: Call) -> Reply:
    """Whether the process answers."""
    return Reply(Health(status="ok"))


@operation(
    "GET",
    "/readyz",
    "readiness",
    tag=_TAG,
    right=None,
    answers={
        200: Answer("It is ready.", Readiness),
        503: Answer("It is not; what is missing is named.", Readiness, {"Retry-After": "Seconds."}),
    },
)
async def readiness(call: Call) -> Reply:
    """Whether this process can do its work: engine, ledger, and the worker if it has one.

    A ledger that is down is told, and is no reason to send nobody here: jobs are accepted and run all the same.
    """
    service = call.service
    engine = await _engine(call)
    worker = NONE if service.worker is None else (OK if service.worker.ready else DOWN)
    found = Readiness(
        ready=engine == OK and worker != DOWN,
        engine=engine,
        ledger=await ledger_status(service.offices.ledger) if engine == OK else DOWN,
        worker=worker,
    )
    return Reply(found) if found.ready else Reply(found, 503, [(b"retry-after", b"1")])


@operation(
    "GET",
    "/metrics",
    "metrics",
    tag=_TAG,
    right=None,
    answers={200: Answer("Metrics in Prometheus' format.", content_type="text/plain", example=_METRICS)},
    errors=(Unauthorized, Forbidden, *UNAVAILABLE),
)
async def metrics(call: Call) -> Reply:
    """Metrics, for a token that is of every tenant unless the service is set up to show them to everybody."""
    service = call.service
    if not service.metrics_open:
        person = await service.gate.person(call.scope)
        person.check(Right.READ)
        person.check_all_tenants("the list of metrics")
    service.check_open()
    body, content_type = await exposition(service.app)
    return Reply(body, content_type=content_type)


@operation(
    "GET",
    "/openapi.json",
    "openapi",
    tag=_TAG,
    right=None,
    answers={200: Answer("This document.", dict[str, Any], example={"openapi": "3.1.0"})},
)
async def openapi(call: Call) -> Reply:
    """The OpenAPI document; with the tasks and their arguments for whoever has a token."""
    return Reply(call.service.document(with_tasks=await caller_of(call) is not None))


async def _engine(call: Call) -> str:
    try:
        return await engine_status(call.service.offices.engine)
    except EngineUnavailable:
        return DOWN
