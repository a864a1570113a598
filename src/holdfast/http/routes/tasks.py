"""`/api/v1/tasks`: tasks that workers have announced, with the JSON Schema of their arguments."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from holdfast.core.announcement import AnnouncedTask
from holdfast.core.job import Priority
from holdfast.errors import TaskNotAnnounced
from holdfast.http.operation import Call, Reply, ResponseSpec, operation
from holdfast.http.routes.queues import QueuesQuery
from holdfast.http.wire import PriorityName, instant
from holdfast.operations.tasks import TaskInfo

_TAG: Final = "tasks"
_PATH: Final = "/api/v1/tasks"


class TaskResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A task as a worker announced it last."""

    task: str
    queue: str
    priority: PriorityName
    #: Names of the arguments, optional ones in brackets; null if they cannot be described.
    arguments: list[str] | None
    #: Fingerprint of its latest schema.
    fingerprint: str
    #: Number of schemas that workers have now; more than one during a deployment.
    current_schemas: int
    seen_at: datetime | None


class TaskListResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Tasks by name."""

    tasks: list[TaskResponse]


class TaskSchemaResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One schema of a task."""

    fingerprint: str
    queue: str
    priority: PriorityName
    #: JSON Schema of the arguments; null if they cannot be described.
    schema: Annotated[dict[str, Any] | None, Meta(description="JSON Schema of the arguments.")]
    seen_at: datetime | None


class TaskDetailResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A task with its schemas, the latest first."""

    task: str
    schemas: list[TaskSchemaResponse]


@operation(
    "GET",
    _PATH,
    "listTasks",
    tag=_TAG,
    query=QueuesQuery,
    responses={200: ResponseSpec("Tasks by name.", TaskListResponse)},
)
async def list_tasks(call: Call) -> Reply:
    """List the tasks that workers have announced, also of workers that have stopped."""
    query: QueuesQuery = call.query
    found = await call.service.operations.tasks.list(call.principal, query.queue)
    return Reply(TaskListResponse(tasks=[_task(info) for info in found]))


@operation(
    "GET",
    f"{_PATH}/{{task}}",
    "getTask",
    tag=_TAG,
    responses={200: ResponseSpec("The task.", TaskDetailResponse)},
    errors=(TaskNotAnnounced,),
)
async def get_task(call: Call) -> Reply:
    """Get a task with the JSON Schema of its arguments."""
    info = await call.service.operations.tasks.get(call.principal, call.path["task"])
    return Reply(TaskDetailResponse(task=info.task, schemas=[_schema(each) for each in info.schemas]))


def _task(info: TaskInfo) -> TaskResponse:
    latest = info.latest
    return TaskResponse(
        task=info.task,
        queue=latest.queue,
        priority=_priority(latest),
        arguments=info.arguments,
        fingerprint=latest.fingerprint,
        current_schemas=info.current,
        seen_at=instant(latest.seen_at_ms),
    )


def _schema(announced: AnnouncedTask) -> TaskSchemaResponse:
    return TaskSchemaResponse(
        fingerprint=announced.fingerprint,
        queue=announced.queue,
        priority=_priority(announced),
        schema=announced.document,
        seen_at=instant(announced.seen_at_ms),
    )


def _priority(announced: AnnouncedTask) -> Any:
    return Priority(announced.priority).name.lower()
