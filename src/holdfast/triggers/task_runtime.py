"""Runtime that submits a job of a holdfast task for each message.

The parameter names of the task decide which parts of a message it receives:

- `message`, `headers`, `source`, `message_id`, `received_at`, `event_name` and `focus` receive that part; a task may
  have any of them, and every other parameter must have a default;
- a task with none of them and one parameter receives the payload as that argument;
- a task with none of them and several parameters receives the members of the payload, a JSON object, as keyword
  arguments: the message is then the job's payload unchanged.

A payload of bytes is passed as base64 text. A task that is not registered here (in an app without tasks) receives all
seven parts. The message's dedup key is the job's idempotency key: the engine detects duplicates in the same step that
accepts the job.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.aio import is_own_cancellation
from holdfast.core.codec import encode_json
from holdfast.core.job import DEFAULT_QUEUE, EMPTY_META, Envelope, KeyReuse, Meta, Priority, new_job_ids
from holdfast.core.text import check_name
from holdfast.errors import EngineUnavailable, InvalidOption, InvalidPayload, PayloadTooLarge, UnknownTask
from holdfast.execution.backend import backend_of
from holdfast.triggers.envelope import key_or_hash
from holdfast.triggers.runtime import Runtime, RuntimeCall, RuntimeResult

if TYPE_CHECKING:
    from holdfast.app import Holdfast
    from holdfast.client.task import Task
    from holdfast.core.codec import Arguments


#: Parameter names that a message can fill.
OFFERED: Final = frozenset({"event_name", "message", "headers", "source", "message_id", "received_at", "focus"})
#: Instead of a task name: use the task named like the event.
BY_EVENT: Final = "*"

_Encode = Callable[[RuntimeCall], bytes]


class _Target:
    """A resolved task."""

    __slots__ = ("encode", "name", "priority", "queue")

    def __init__(self, name: str, queue: str, priority: Priority, encode: _Encode) -> None:
        self.name = name
        self.queue = queue
        self.priority = priority
        self.encode = encode


class TaskRuntime(Runtime):
    """Submits a job for each message."""

    submits_jobs = True

    def __init__(self, app: Holdfast, task: str = BY_EVENT) -> None:
        """`task` is a task name, or `*` (default) for the task named like the event.

        Raises `UnknownTask`, or `InvalidOption` if the task has a parameter that no message can fill.
        """
        self._app = app
        self._backend = backend_of(app)
        self._task = "" if task == BY_EVENT else task
        self._targets: dict[str, _Target] = {}
        if self._task:
            self._target(self._task)

    async def trigger_event(
        self, event_name: str, context: Mapping[str, Any], focus: str | None, tenant_id: str
    ) -> str:
        """Submit a job and return its id. Has no idempotency key: two calls submit two jobs."""
        trace_id = key_or_hash(f"queue-{context.get('message_id', '')}")
        call = RuntimeCall(event_name=event_name, context=context, focus=focus, tenant_id=tenant_id, trace_id=trace_id)
        return (await self.run_call(call)).run_id

    async def run_call(self, call: RuntimeCall) -> RuntimeResult:
        target = self._target(self._task or call.event_name)
        envelope = Envelope(
            job_id=new_job_ids(1)[0],
            task=target.name,
            payload=target.encode(call),
            queue=target.queue,
            tenant_id=call.tenant_id,
            idempotency_key=call.key,
            trace_id=call.trace_id,
            meta=_meta(call, target.priority),
            # A producer cannot be refused: the first message stands.
            on_key_reuse=KeyReuse.RETURN,
        )
        try:
            receipt = await (await self._backend.connections.submitter()).submit(envelope)
        except asyncio.CancelledError as exc:
            if is_own_cancellation(exc):
                raise
            # The submitter was closed. The job may have been accepted: its key shows that on redelivery.
            raise EngineUnavailable("the app was closed while a message was submitted") from exc
        return RuntimeResult(receipt.job_id, receipt.duplicate)

    def _target(self, name: str) -> _Target:
        target = self._targets.get(name)
        if target is None:
            tasks = self._app.tasks
            known = tasks.get(name)
            if known is None and tasks:
                raise UnknownTask(name, tuple(tasks))
            target = _target_of(known) if known is not None else self._unknown(name)
            # Cache tasks only: the number of event names is unbounded.
            if known is not None:
                self._targets[name] = target
        return target

    def _unknown(self, name: str) -> _Target:
        limit, label = self._app.settings.payload_limit, f"the arguments of task {check_name(name, 'task')!r}"
        return _Target(name, DEFAULT_QUEUE, Priority.NORMAL, lambda call: encode_json(call.arguments(), label, limit))


def _target_of(task: Task[..., Any]) -> _Target:
    arguments, limit = task.spec.arguments, task.spec.payload_limit
    filled = [name for name in arguments.names if name in OFFERED]
    missing = [name for name in _required_names(arguments) if name not in OFFERED]
    encode: _Encode
    if filled and missing:
        raise InvalidOption(
            f"task {task.name!r} has a parameter {missing[0]!r} that no message can fill; give it a default, or use "
            f"only {', '.join(sorted(OFFERED))}"
        )
    if filled:
        encode = _encode_by_name(arguments, frozenset(filled), limit)
    elif len(arguments.names) == 1:
        encode = _only_one(arguments, limit)
    else:
        encode = _members(task.name, arguments, limit)
    return _Target(task.name, task.queue, task.priority, encode)


def _encode_by_name(arguments: Arguments, filled: frozenset[str], limit: int) -> _Encode:
    def encode(call: RuntimeCall) -> bytes:
        given = {name: value for name, value in call.arguments().items() if name in filled}
        return arguments.encode((), given, limit)

    return encode


def _only_one(arguments: Arguments, limit: int) -> _Encode:
    return lambda call: arguments.encode((call.message(),), {}, limit)


def _members(task: str, arguments: Arguments, limit: int) -> _Encode:
    def encode(call: RuntimeCall) -> bytes:
        payload = call.message_json
        # An array would be read as positional arguments, which are not part of the contract.
        if payload is None or not isinstance(call.context["message"], dict):
            raise InvalidPayload(f"messages for task {task!r} must be JSON objects, because it has several parameters")
        if len(payload) > limit:
            raise PayloadTooLarge(f"the arguments of task {task!r}", len(payload), limit)
        arguments.decode(payload)
        return payload

    return encode


def _required_names(arguments: Arguments) -> list[str]:
    return [field.name for field in msgspec.structs.fields(arguments.struct) if field.required]


def _meta(call: RuntimeCall, priority: Priority) -> Meta:
    meta = Meta(
        priority=priority,
        key_window_ms=call.window_ms if call.key else 0,
        traceparent=call.traceparent,
        submitted_by=f"trigger:{call.trigger}" if call.trigger else "",
    )
    return EMPTY_META if meta == EMPTY_META else meta
