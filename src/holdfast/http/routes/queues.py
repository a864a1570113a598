"""`/api/v1/queues` and `/api/v1/workers`: sizes and controls of queues, and their workers (H5)."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType

from holdfast.core.principal import Permission
from holdfast.core.states import State
from holdfast.core.text import check_name
from holdfast.engine.port import PartialFailure
from holdfast.engine.port.operators import QueueControl, TenantControl
from holdfast.engine.port.reads import WorkerInfo
from holdfast.errors import Conflict, ControlChanged, InvalidOption, NotFound
from holdfast.http.operation import Call, Decorator, Reply, ResponseSpec, operation
from holdfast.http.wire import Name, ReasonRequest, RequestBase, instant
from holdfast.operations.queues import QueueInfo

_TAG: Final = "queues"
_PATH: Final = "/api/v1/queues"
_ONE: Final = f"{_PATH}/{{queue}}"

#: JSON has only one number type: 5.0 is a valid integer.
Positive = Annotated[float, Meta(ge=1, le=1_000_000_000, multiple_of=1)]


class TenantControlResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Controls of one tenant in a queue."""

    weight: int
    concurrency: int | None
    intake_limit: int | None


class QueueControlResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Controls of a queue."""

    queue: str
    paused: bool
    intake_paused: bool
    #: How many jobs of the queue run at a time, over all workers and tenants.
    concurrency: int | None
    #: How many jobs each worker process runs at a time.
    worker_concurrency: int | None
    intake_limit: int | None
    backlog_alert: int | None
    tenants: dict[str, TenantControlResponse]


class QueueResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Size and controls of a queue. Null values span all tenants and are hidden from this token."""

    queue: str
    #: Open jobs.
    states: dict[State, int]
    #: Ready or running.
    backlog: int
    control: QueueControlResponse
    delayed: int | None
    workers: int | None
    pending: int | None
    dead_letters: int | None


class QueueListResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Queues that could be read."""

    queues: list[QueueResponse]
    #: Which queues are left out because their server is unreachable; null if none is.
    unreachable: str | None
    #: There are more: pass it as `after`. Null on the last page.
    next: str | None


class WorkerResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that claims from a queue."""

    worker: str
    queue: str
    seen_at: datetime | None
    #: Leases of the worker.
    pending: int


class WorkerListResponse(msgspec.Struct, frozen=True, kw_only=True):
    workers: list[WorkerResponse]


class QueuesQuery(RequestBase, frozen=True, kw_only=True):
    """Names of queues. Default: all."""

    queue: tuple[Name, ...] = ()


class QueuePageQuery(QueuesQuery, frozen=True, kw_only=True):
    """Names of queues (default: all), and one page of them: those after `after`, a `next` of the page before."""

    limit: Annotated[int, Meta(ge=1, le=1_000)] = 500
    after: Name = ""


class QueueRequest(ReasonRequest, frozen=True, kw_only=True):
    """Reason, and whether the queue may be new: no job was ever submitted to it."""

    new: bool = False


class LimitRequest(QueueRequest, frozen=True, kw_only=True):
    """A limit, or null to remove it."""

    value: Positive | None


class TenantControlRequest(QueueRequest, frozen=True, kw_only=True):
    """Omitted fields stay unchanged; null removes a limit."""

    weight: Annotated[float, Meta(ge=1, le=100, multiple_of=1)] | UnsetType = UNSET
    concurrency: Positive | UnsetType | None = UNSET
    intake_limit: Positive | UnsetType | None = UNSET


_CONTROLLED: Final = {200: ResponseSpec("The queue's controls after the change.", QueueControlResponse)}
_ERRORS: Final = (ControlChanged, NotFound)


@operation(
    "GET",
    _PATH,
    "listQueues",
    tag=_TAG,
    query=QueuePageQuery,
    responses={
        200: ResponseSpec(
            "Queues by name.",
            QueueListResponse,
            links={"next": ("listQueues", {"after": "$response.body#/next"})},
        )
    },
)
async def list_queues(call: Call) -> Reply:
    """List queues with their sizes and controls.

    A token restricted to some tenants gets the counts of their jobs, from the ledger.
    """
    query: QueuePageQuery = call.query
    unreachable = None
    find = call.service.operations.queues.find
    try:
        # One more, to know whether there is another page.
        views = await find(call.principal, query.queue, after=query.after, limit=query.limit + 1)
    except PartialFailure as exc:
        views, unreachable = exc.completed, str(exc)
    rows = [_queue(view) for view in views[: query.limit]]
    following = rows[-1].queue if len(views) > query.limit else None
    return Reply(QueueListResponse(queues=rows, unreachable=unreachable, next=following))


async def _change(call: Call, verb: str, **changes: Any) -> Reply:
    queue, request = await _known_queue(call), call.body
    control = await call.service.operations.queues.update_control(
        call.principal, queue, reason=request.reason, verb=verb, **changes
    )
    return Reply(_control(queue, control))


def _queue_operation(path: str, operation_id: str, body: type[msgspec.Struct], example: dict[str, Any]) -> Decorator:
    """Register an operation on one queue; it needs a token for all tenants."""
    return operation(
        "POST",
        f"{_ONE}/{path}",
        operation_id,
        tag=_TAG,
        permission=Permission.OPERATE,
        all_tenants=True,
        body=body,
        body_example={"reason": "printer out of order"} | example,
        responses=_CONTROLLED,
        errors=_ERRORS,
    )


@_queue_operation("pause", "pauseQueue", QueueRequest, {})
async def pause(call: Call) -> Reply:
    """Pause a queue.

    Workers claim no more jobs from it; running jobs continue.
    """
    return await _change(call, "pause", paused=True)


@_queue_operation("resume", "resumeQueue", QueueRequest, {})
async def resume(call: Call) -> Reply:
    """Resume a queue.

    Workers claim jobs from it again.
    """
    return await _change(call, "unpause", paused=False)


@_queue_operation("intake/pause", "pauseIntake", QueueRequest, {})
async def pause_intake(call: Call) -> Reply:
    """Pause a queue's intake.

    New jobs are refused; jobs already accepted are processed.
    """
    return await _change(call, "pause_intake", intake_paused=True)


@_queue_operation("intake/resume", "resumeIntake", QueueRequest, {})
async def resume_intake(call: Call) -> Reply:
    """Resume a queue's intake.

    New jobs are accepted again.
    """
    return await _change(call, "resume_intake", intake_paused=False)


@_queue_operation("intake/limit", "limitIntake", LimitRequest, {"value": 10_000})
async def limit_intake(call: Call) -> Reply:
    """Set a queue's intake limit.

    New jobs are refused while the backlog is at the limit.
    """
    return await _change(call, "limit", intake_limit=_whole(call.body.value))


@_queue_operation("concurrency", "setConcurrency", LimitRequest, {"value": 50})
async def set_concurrency(call: Call) -> Reply:
    """Limit how many jobs of a queue run at a time, over all workers and tenants.

    The limit is never exceeded: jobs of a worker that was killed count until another worker has reclaimed them. If more
    jobs are running, no job starts until enough of them have ended.
    """
    return await _change(call, "concurrency", concurrency=_whole(call.body.value))


@_queue_operation("worker-concurrency", "setWorkerConcurrency", LimitRequest, {"value": 50})
async def set_worker_concurrency(call: Call) -> Reply:
    """Set how many jobs each worker process of a queue runs at a time.

    Workers apply the change within seconds. Null uses the worker's own setting.
    """
    return await _change(call, "worker_concurrency", worker_concurrency=_whole(call.body.value))


@_queue_operation("alert", "setBacklogAlert", LimitRequest, {"value": 5_000})
async def set_alert(call: Call) -> Reply:
    """Set the backlog at which an alert is raised."""
    return await _change(call, "limit", backlog_alert=_whole(call.body.value))


@_queue_operation("tenants/{tenant_id}", "setTenant", TenantControlRequest, {"weight": 2, "concurrency": 10})
async def set_tenant(call: Call) -> Reply:
    """Set a tenant's weight and limits in a queue."""
    queue, request = await _known_queue(call), call.body
    changes = {
        name: _whole(value)
        for name in ("weight", "concurrency", "intake_limit")
        if (value := getattr(request, name)) is not UNSET
    }
    tenant = _valid_name(call.path["tenant_id"], "tenant")
    queues = call.service.operations.queues
    try:
        control = await queues.update_tenant(call.principal, queue, tenant, reason=request.reason, **changes)
    except InvalidOption as exc:
        # The limit on tenants with controls is reached.
        raise Conflict(str(exc)) from exc
    return Reply(_control(queue, control))


@operation(
    "GET",
    "/api/v1/workers",
    "listWorkers",
    tag=_TAG,
    all_tenants=True,
    query=QueuesQuery,
    responses={200: ResponseSpec("Workers by name.", WorkerListResponse)},
)
async def list_workers(call: Call) -> Reply:
    """List workers, as last seen by the engine."""
    query: QueuesQuery = call.query
    views = await call.service.operations.queues.workers(call.principal, query.queue)
    return Reply(WorkerListResponse(workers=[_worker(view) for view in views]))


async def _known_queue(call: Call) -> str:
    """Queue of the path. Raises `NotFound` if it never had a job, unless the request declares it new."""
    queue = _require_queue(call)
    if not call.body.new:
        try:
            await call.service.operations.queues.require_queue(call.principal, queue)
        except NotFound as exc:
            raise NotFound("queue", exc.name, f'{exc.advice}; send "new": true to create it') from exc
    return queue


def _whole(number: float | None) -> int | None:
    return None if number is None else int(number)


def _require_queue(call: Call) -> str:
    return _valid_name(call.path["queue"], "queue")


def _valid_name(name: str, what: str) -> str:
    """Check a name of the path. Raises `NotFound` for an invalid one, since nothing can have it."""
    try:
        return check_name(name, what)
    except InvalidOption as exc:
        raise NotFound(what, name[:100]) from exc


def _control(queue: str, control: QueueControl) -> QueueControlResponse:
    return QueueControlResponse(
        queue=queue,
        paused=control.paused,
        intake_paused=control.intake_paused,
        concurrency=control.concurrency,
        worker_concurrency=control.worker_concurrency,
        intake_limit=control.intake_limit,
        backlog_alert=control.backlog_alert,
        tenants={name: _tenant_control(each) for name, each in control.tenants.items()},
    )


def _tenant_control(control: TenantControl) -> TenantControlResponse:
    return TenantControlResponse(
        weight=control.weight, concurrency=control.concurrency, intake_limit=control.intake_limit
    )


def _queue(view: QueueInfo) -> QueueResponse:
    return QueueResponse(
        queue=view.queue,
        states=view.states,
        backlog=view.backlog,
        control=_control(view.queue, view.control),
        delayed=view.delayed,
        workers=view.workers,
        pending=view.pending,
        dead_letters=view.dead_letters,
    )


def _worker(view: WorkerInfo) -> WorkerResponse:
    return WorkerResponse(worker=view.worker, queue=view.queue, seen_at=instant(view.seen_at_ms), pending=view.pending)
