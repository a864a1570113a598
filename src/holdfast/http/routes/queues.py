"""`/api/v1/queues` and `/api/v1/workers`: how full they are, and an operator's hand on them (requirement H5)."""

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

#: JSON knows one kind of number: 5.0 is a whole one.
Positive = Annotated[float, Meta(ge=1, le=1_000_000_000, multiple_of=1)]


class TenantControlResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant's part of a queue."""

    weight: int
    concurrency: int | None
    intake_limit: int | None


class QueueControlResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A queue's controls."""

    queue: str
    paused: bool
    intake_paused: bool
    concurrency: int | None
    intake_limit: int | None
    backlog_alert: int | None
    tenants: dict[str, TenantControlResponse]


class QueueResponse(msgspec.Struct, frozen=True, kw_only=True):
    """How full a queue is. Null: of all tenants together, and not for this token."""

    queue: str
    #: Open jobs.
    states: dict[State, int]
    #: In line or running.
    backlog: int
    control: QueueControlResponse
    delayed: int | None
    workers: int | None
    pending: int | None
    dead_letters: int | None


class QueueListResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Those that answer."""

    queues: list[QueueResponse]
    #: Which queues are not in the list, and why: their server does not answer. Null: all are there.
    missing: str | None


class WorkerResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that claims from a queue."""

    worker: str
    queue: str
    seen_at: datetime | None
    #: Leases that it holds.
    pending: int


class WorkerListResponse(msgspec.Struct, frozen=True, kw_only=True):
    workers: list[WorkerResponse]


class QueuesQuery(RequestBase, frozen=True, kw_only=True):
    """Which queues; none named: all."""

    queue: tuple[Name, ...] = ()


class QueueWish(ReasonRequest, frozen=True, kw_only=True):
    """Why, and whether the queue may be one that no job was ever submitted to."""

    new: bool = False


class LimitRequest(QueueWish, frozen=True, kw_only=True):
    """A number, or null for no limit of an operator's."""

    value: Positive | None


class TenantControlRequest(QueueWish, frozen=True, kw_only=True):
    """What is not named stays as it is; null takes a limit away."""

    weight: Annotated[float, Meta(ge=1, le=100, multiple_of=1)] | UnsetType = UNSET
    concurrency: Positive | UnsetType | None = UNSET
    intake_limit: Positive | UnsetType | None = UNSET


_CONTROLLED: Final = {200: ResponseSpec("The queue's controls now.", QueueControlResponse)}
_ERRORS: Final = (ControlChanged, NotFound)


@operation(
    "GET",
    _PATH,
    "listQueues",
    tag=_TAG,
    query=QueuesQuery,
    answers={200: ResponseSpec("Queues by name.", QueueListResponse)},
)
async def list_queues(call: Call) -> Reply:
    """How full queues are.

    A token of some tenants sees its own jobs' numbers, from the ledger.
    """
    query: QueuesQuery = call.query
    missing = None
    try:
        views = await call.service.operations.operating.queues(call.principal, query.queue)
    except PartialFailure as exc:
        views, missing = exc.completed, str(exc)
    return Reply(QueueListResponse(queues=[_queue(view) for view in views], missing=missing))


async def _change(call: Call, verb: str, **changes: Any) -> Reply:
    queue, wish = await _known(call), call.body
    control = await call.service.operations.operating.update_control(
        call.principal, queue, reason=wish.reason, verb=verb, **changes
    )
    return Reply(_control(queue, control))


def _lever(path: str, operation_id: str, body: type[msgspec.Struct], example: dict[str, Any]) -> Decorator:
    """An operation on one queue, for those who are of every tenant."""
    return operation(
        "POST",
        f"{_ONE}/{path}",
        operation_id,
        tag=_TAG,
        right=Permission.OPERATE,
        all_tenants=True,
        body=body,
        body_example={"reason": "the printer burns"} | example,
        answers=_CONTROLLED,
        errors=_ERRORS,
    )


@_lever("pause", "pauseQueue", QueueWish, {})
async def pause(call: Call) -> Reply:
    """Pause a queue: workers take nothing more from it; what runs goes on."""
    return await _change(call, "pause", paused=True)


@_lever("resume", "resumeQueue", QueueWish, {})
async def resume(call: Call) -> Reply:
    """Let workers take jobs from a queue again."""
    return await _change(call, "unpause", paused=False)


@_lever("intake/pause", "pauseIntake", QueueWish, {})
async def pause_intake(call: Call) -> Reply:
    """Refuse new jobs; what is there is worked on."""
    return await _change(call, "pause_intake", intake_paused=True)


@_lever("intake/resume", "resumeIntake", QueueWish, {})
async def resume_intake(call: Call) -> Reply:
    """Accept new jobs again."""
    return await _change(call, "resume_intake", intake_paused=False)


@_lever("intake/limit", "limitIntake", LimitRequest, {"value": 10_000})
async def limit_intake(call: Call) -> Reply:
    """Refuse new jobs while so many are in line or running."""
    return await _change(call, "limit", intake_limit=_whole(call.body.value))


@_lever("concurrency", "setConcurrency", LimitRequest, {"value": 50})
async def set_concurrency(call: Call) -> Reply:
    """How many jobs each worker process runs at a time; all of them hear of it within seconds."""
    return await _change(call, "concurrency", concurrency=_whole(call.body.value))


@_lever("alert", "setBacklogAlert", LimitRequest, {"value": 5_000})
async def set_alert(call: Call) -> Reply:
    """Raise an alert when so many jobs are in line or running."""
    return await _change(call, "limit", backlog_alert=_whole(call.body.value))


@_lever("tenants/{tenant_id}", "setTenant", TenantControlRequest, {"weight": 2, "concurrency": 10})
async def set_tenant(call: Call) -> Reply:
    """One tenant's share of a queue: weight beside others, limits of its own."""
    queue, wish = await _known(call), call.body
    changes = {
        name: _whole(value)
        for name in ("weight", "concurrency", "intake_limit")
        if (value := getattr(wish, name)) is not UNSET
    }
    tenant = _plain_name(call.path["tenant_id"], "tenant")
    operating = call.service.operations.operating
    try:
        control = await operating.update_tenant(call.principal, queue, tenant, reason=wish.reason, **changes)
    except InvalidOption as exc:
        # So many tenants have parts of their own already.
        raise Conflict(str(exc)) from exc
    return Reply(_control(queue, control))


@operation(
    "GET",
    "/api/v1/workers",
    "listWorkers",
    tag=_TAG,
    all_tenants=True,
    query=QueuesQuery,
    answers={200: ResponseSpec("Workers by name.", WorkerListResponse)},
)
async def list_workers(call: Call) -> Reply:
    """Workers, as the engine last saw them."""
    query: QueuesQuery = call.query
    views = await call.service.operations.operating.workers(call.principal, query.queue)
    return Reply(WorkerListResponse(workers=[_worker(view) for view in views]))


async def _known(call: Call) -> str:
    """The queue of the path; `Unknown` for one that never had a job, unless the request says that it is new."""
    queue = _named(call)
    if not call.body.new:
        try:
            await call.service.operations.operating.require_queue(call.principal, queue)
        except NotFound as exc:
            raise NotFound("queue", exc.name, f'{exc.advice}; send "new": true for a queue that is to come') from exc
    return queue


def _whole(number: float | None) -> int | None:
    return None if number is None else int(number)


def _named(call: Call) -> str:
    return _plain_name(call.path["queue"], "queue")


def _plain_name(name: str, what: str) -> str:
    """A name that nothing can have is a thing that is not there."""
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
        intake_limit=control.intake_limit,
        backlog_alert=control.backlog_alert,
        tenants={name: _part(part) for name, part in control.tenants.items()},
    )


def _part(part: TenantControl) -> TenantControlResponse:
    return TenantControlResponse(weight=part.weight, concurrency=part.concurrency, intake_limit=part.intake_limit)


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
