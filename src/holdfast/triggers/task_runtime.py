"""Messages become jobs of holdfast tasks.

What a task gets of a message is decided by the names of its parameters:

- those named `message`, `headers`, `source`, `message_id`, `received_at`, `event_name` and `focus` get just that; a
  task takes as many of them as it likes, and every other parameter must have a default;
- a task that has none of them, and one parameter, gets the payload as that one argument;
- a task that has none of them, and several parameters, gets the members of the payload, a JSON object, as its keyword
  arguments: the message is then the same as a job's payload on the wire.

A payload of bytes comes as base64 text. A task that is not registered here (an app without tasks only passes on) gets
all seven. The message's dedup key is the job's idempotency key: that it came before is found out by the engine, in the
same step that accepts the job.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.aio import is_own_cancellation
from holdfast.core.codec import encode_json
from holdfast.core.job import DEFAULT_QUEUE, EMPTY_META, Envelope, Meta, Priority, new_job_ids
from holdfast.core.text import check_name
from holdfast.errors import EngineUnavailable, InvalidOption, InvalidPayload, PayloadTooLarge, UnknownTask
from holdfast.triggers.envelope import key_or_hash
from holdfast.triggers.runtime import Runtime, RuntimeCall, RuntimeResult

if TYPE_CHECKING:
    from holdfast.app import Holdfast
    from holdfast.client.task import Task
    from holdfast.core.codec import Arguments


#: What a message has for a task's parameters.
OFFERED: Final = frozenset({"event_name", "message", "headers", "source", "message_id", "received_at", "focus"})
#: Instead of a task's name: the task that has the event's name.
BY_EVENT: Final = "*"

_Encode = Callable[[RuntimeCall], bytes]


class _Target:
    """A task, worked out once."""

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
        """`task`: its name; `*` (the default): the task that has the event's name. `UnknownTask`, or `InvalidOption` if
        it has a parameter that no message can fill."""
        self._app = app
        self._task = "" if task == BY_EVENT else task
        self._targets: dict[str, _Target] = {}
        if self._task:
            self._target(self._task)

    async def trigger_event(
        self, event_name: str, context: Mapping[str, Any], focus: str | None, tenant_id: str
    ) -> str:
        """The job's id. Without a key: called twice, there are two jobs."""
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
        )
        try:
            receipt = await (await self._app.submitter()).submit(envelope)
        except asyncio.CancelledError as exc:
            if is_own_cancellation(exc):
                raise
            # The desk was closed under us. What was on its way may be accepted: its key will tell.
            raise EngineUnavailable("the app was closed while a message was handed over") from exc
        return RuntimeResult(receipt.job_id, receipt.duplicate)

    def _target(self, name: str) -> _Target:
        target = self._targets.get(name)
        if target is None:
            tasks = self._app.tasks
            known = tasks.get(name)
            if known is None and tasks:
                raise UnknownTask(name, tuple(tasks))
            target = _known(known) if known is not None else self._unknown(name)
            # Of event names there may be any number; of tasks there are few.
            if known is not None:
                self._targets[name] = target
        return target

    def _unknown(self, name: str) -> _Target:
        limit, label = self._app.settings.payload_limit, f"the arguments of task {check_name(name, 'task')!r}"
        return _Target(name, DEFAULT_QUEUE, Priority.NORMAL, lambda call: encode_json(call.arguments(), label, limit))


def _known(task: Task[..., Any]) -> _Target:
    arguments, limit = task.plan.arguments, task.plan.payload_limit
    taken = [name for name in arguments.names if name in OFFERED]
    missing = [name for name in _needed(arguments) if name not in OFFERED]
    encode: _Encode
    if taken and missing:
        raise InvalidOption(
            f"task {task.name!r} has a parameter {missing[0]!r} that no message can fill; give it a default, or take "
            f"only {', '.join(sorted(OFFERED))}"
        )
    if taken:
        encode = _by_name(arguments, frozenset(taken), limit)
    elif len(arguments.names) == 1:
        encode = _only_one(arguments, limit)
    else:
        encode = _members(task.name, arguments, limit)
    return _Target(task.name, task.queue, task.priority, encode)


def _by_name(arguments: Arguments, taken: frozenset[str], limit: int) -> _Encode:
    def encode(call: RuntimeCall) -> bytes:
        given = {name: value for name, value in call.arguments().items() if name in taken}
        return arguments.encode((), given, limit)

    return encode


def _only_one(arguments: Arguments, limit: int) -> _Encode:
    return lambda call: arguments.encode((call.message(),), {}, limit)


def _members(task: str, arguments: Arguments, limit: int) -> _Encode:
    def encode(call: RuntimeCall) -> bytes:
        payload = call.message_json
        # An array would be read as positional arguments, which nobody has promised.
        if payload is None or not isinstance(call.context["message"], dict):
            raise InvalidPayload(f"task {task!r} has several parameters, so its messages must be JSON objects")
        if len(payload) > limit:
            raise PayloadTooLarge(f"the arguments of task {task!r}", len(payload), limit)
        arguments.decode(payload)
        return payload

    return encode


def _needed(arguments: Arguments) -> list[str]:
    return [field.name for field in msgspec.structs.fields(arguments.struct) if field.required]


def _meta(call: RuntimeCall, priority: Priority) -> Meta:
    meta = Meta(
        priority=priority,
        key_window_ms=call.window_ms if call.key else 0,
        traceparent=call.traceparent,
        submitted_by=f"trigger:{call.trigger}" if call.trigger else "",
    )
    return EMPTY_META if meta == EMPTY_META else meta
