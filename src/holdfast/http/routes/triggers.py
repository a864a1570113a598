"""`/api/v1/triggers`: list, pause and resume triggers, and list their executions (T4, H5)."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from holdfast.core.principal import Permission
from holdfast.errors import NotFound
from holdfast.http.operation import Call, Decorator, Reply, ResponseSpec, operation
from holdfast.http.wire import Exactly, Limit, NoQuery, ReasonRequest, RequestBase, instant
from holdfast.ledger.port.messages import Execution as Row
from holdfast.ledger.port.messages import ExecutionStatus
from holdfast.operations.messages import TriggerInfo, TriggerStatus

_TAG: Final = "triggers"
_PATH: Final = "/api/v1/triggers"


class TriggerProcessResponse(msgspec.Struct, frozen=True, kw_only=True):
    """State of a trigger as one process reports it."""

    process: str
    seen_at: datetime | None
    #: `status`, `running`, `adapter_healthy`, `active_workers`, `paused` and further values.
    health: dict[str, Any]


class TriggerResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A trigger with all processes that run it."""

    name: str
    queue_name: str
    adapter: str
    status: TriggerStatus
    active_workers: int
    paused: bool
    paused_by: str | None
    paused_at: datetime | None
    pause_reason: str | None
    processes: list[TriggerProcessResponse]


class TriggerListResponse(msgspec.Struct, frozen=True, kw_only=True):
    triggers: list[TriggerResponse]


class ExecutionResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One handled message."""

    tenant_id: str
    id: str
    message_id: str
    queue_name: str
    event_name: str
    status: ExecutionStatus
    started_at: datetime | None
    completed_at: datetime | None
    duration_ms: int
    #: Id of the job, or the run id that the runtime returned.
    agent_run_id: str
    error_message: str
    retry_count: int
    trace_id: str


class ExecutionListResponse(msgspec.Struct, frozen=True, kw_only=True):
    executions: list[ExecutionResponse]


class ExecutionQuery(RequestBase, frozen=True, kw_only=True):
    """Filter for executions. All given conditions must match."""

    queue_name: Annotated[Exactly, Meta(description="Queue of the broker.")] = ""
    message_id: Annotated[Exactly, Meta(description="Id of the message.")] = ""
    status: Annotated[tuple[ExecutionStatus, ...], Meta(description="Status; repeatable.")] = ()
    limit: Limit = 100


@operation(
    "GET",
    _PATH,
    "listTriggers",
    tag=_TAG,
    all_tenants=True,
    query=NoQuery,
    responses={200: ResponseSpec("Triggers by name.", TriggerListResponse)},
)
async def list_triggers(call: Call) -> Reply:
    """List triggers with their processes, health and pauses.

    A process that has not reported for 10 s is not listed.
    """
    views = await call.service.operations.triggers.list(call.principal)
    return Reply(TriggerListResponse(triggers=[_trigger(view) for view in views]))


@operation(
    "GET",
    f"{_PATH}/executions",
    "listExecutions",
    tag=_TAG,
    query=ExecutionQuery,
    responses={200: ResponseSpec("Executions, newest first.", ExecutionListResponse)},
)
async def list_executions(call: Call) -> Reply:
    """List executions: handled messages and their outcome."""
    query: ExecutionQuery = call.query
    rows = await call.service.operations.triggers.executions(
        call.principal,
        queue_name=query.queue_name,
        message_id=query.message_id,
        statuses=query.status,
        limit=query.limit,
    )
    return Reply(ExecutionListResponse(executions=[_execution(row) for row in rows]))


def _trigger_operation(verb: str, operation_id: str) -> Decorator:
    return operation(
        "POST",
        f"{_PATH}/{{name}}/{verb}",
        operation_id,
        tag=_TAG,
        permission=Permission.OPERATE,
        all_tenants=True,
        body=ReasonRequest,
        body_example={"reason": "printer out of order"},
        responses={200: ResponseSpec("The trigger after the change.", TriggerResponse)},
        errors=(NotFound,),
    )


@_trigger_operation("pause", "pauseTrigger")
async def pause(call: Call) -> Reply:
    """Pause a trigger.

    Its processes stop consuming within seconds; messages in flight are finished.
    """
    triggers = call.service.operations.triggers
    return Reply(_trigger(await triggers.pause(call.principal, call.path["name"], reason=call.body.reason)))


@_trigger_operation("resume", "resumeTrigger")
async def resume(call: Call) -> Reply:
    """Resume a trigger."""
    triggers = call.service.operations.triggers
    return Reply(_trigger(await triggers.resume(call.principal, call.path["name"], reason=call.body.reason)))


def _trigger(view: TriggerInfo) -> TriggerResponse:
    pause = view.pause
    return TriggerResponse(
        name=view.name,
        queue_name=view.queue_name,
        adapter=view.adapter,
        status=view.status,
        active_workers=view.active_workers,
        paused=pause is not None,
        paused_by=None if pause is None else pause.paused_by,
        paused_at=None if pause is None else instant(pause.paused_at_ms),
        pause_reason=None if pause is None else pause.reason,
        processes=[
            TriggerProcessResponse(process=each.process, seen_at=instant(each.seen_at_ms), health=dict(each.health))
            for each in view.processes
        ],
    )


def _execution(row: Row) -> ExecutionResponse:
    return ExecutionResponse(
        tenant_id=row.tenant_id,
        id=row.id,
        message_id=row.message_id,
        queue_name=row.queue_name,
        event_name=row.event_name,
        status=row.status,
        started_at=instant(row.started_at_ms),
        completed_at=instant(row.completed_at_ms),
        duration_ms=row.completed_at_ms - row.started_at_ms,
        agent_run_id=row.agent_run_id,
        error_message=row.error_message,
        retry_count=row.retry_count,
        trace_id=row.trace_id,
    )
