"""Runtimes, which act on messages (T5), and guards for calls that do not become jobs.

`Runtime` is the protocol. `CallableRuntime` calls a Python function in the trigger's process.

`CallGuard` runs the app's guards on calls that do not become jobs (A4); jobs are reviewed when they are submitted. A
guard that requires approval denies such a call, since only jobs can wait for one.
"""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import msgspec

from holdfast.core.codec import encode_json
from holdfast.core.job import Envelope, new_job_ids
from holdfast.core.text import clean
from holdfast.effects.functions import call_function, function_name
from holdfast.errors import Denied, InvalidOption, NoLedger
from holdfast.guard.runner import GuardRunner


class Runtime(Protocol):
    """Handles messages: a holdfast task, a Python callable, or an agent runtime over HTTP."""

    async def trigger_event(
        self, event_name: str, context: Mapping[str, Any], focus: str | None, tenant_id: str
    ) -> str:
        """Run, or submit durably. Returns the run id. An exception is a failed attempt.

        `Fatal` and `UsageError` are permanent. `Unavailable` means that a dependency is down: the trigger holds the
        message without using up retries.
        """
        ...


class RuntimeCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a runtime: the arguments of `trigger_event`, plus trace, dedup key and trigger."""

    event_name: str
    context: Mapping[str, Any]
    focus: str | None
    tenant_id: str
    trace_id: str
    traceparent: str = ""
    #: Calls with the same key within the window are one run. Empty: every call is a run.
    key: str = ""
    window_ms: int = 0
    #: Name of the trigger.
    trigger: str = ""
    #: The original JSON of `context["message"]`, if it is JSON.
    message_json: bytes | None = None

    def arguments(self) -> dict[str, Any]:
        """All arguments by name, encodable as JSON: bytes become base64, JSON stays unchanged."""
        return {
            "event_name": self.event_name,
            **self.context,
            "message": self.message(),
            "focus": self.focus,
        }

    def message(self) -> Any:
        """The payload, encodable as JSON."""
        if self.message_json is not None:
            return msgspec.Raw(self.message_json)
        payload = self.context["message"]
        return base64.b64encode(payload).decode() if isinstance(payload, bytes) else payload


class RuntimeResult(msgspec.Struct, frozen=True):
    """Result of a call."""

    run_id: str
    #: The call repeats an earlier one; `run_id` is that of the earlier run, if known.
    duplicate: bool = False


@runtime_checkable
class InternalRuntime(Protocol):
    """A built-in runtime, which uses more than the arguments of `trigger_event`."""

    #: Whether calls go through an app's submitter, which reviews guards, detects duplicates and submits durably. Other
    #: runtimes need guards and a dedup store of the trigger.
    submits_jobs: bool

    async def run_call(self, call: RuntimeCall) -> RuntimeResult: ...


def adapt_runtime(runtime: Runtime) -> tuple[Callable[[RuntimeCall], Awaitable[RuntimeResult]], bool]:
    """The function to call, and whether the runtime submits jobs."""
    if isinstance(runtime, InternalRuntime):
        return runtime.run_call, runtime.submits_jobs

    async def act(call: RuntimeCall) -> RuntimeResult:
        return RuntimeResult(
            str(await runtime.trigger_event(call.event_name, call.context, call.focus, call.tenant_id) or "")
        )

    return act, False


class CallableRuntime(Runtime):
    """Calls `function(event_name, context, focus, tenant_id)`.

    An async function runs on the event loop, any other in a thread. It returns the run id as a string, as a mapping
    with `run_id` or `id`, or nothing. The message is acknowledged after the function has returned. If the process
    crashes in between, the function runs again, so it should be idempotent.
    """

    submits_jobs = False

    def __init__(self, function: Callable[..., Any]) -> None:
        if not callable(function):
            raise InvalidOption(f"callable of a trigger must be a function, not {function!r}")
        self._function = function

    async def trigger_event(
        self, event_name: str, context: Mapping[str, Any], focus: str | None, tenant_id: str
    ) -> str:
        return run_id_of(await call_function(self._function, (event_name, context, focus, tenant_id), {}))

    async def run_call(self, call: RuntimeCall) -> RuntimeResult:
        return RuntimeResult(await self.trigger_event(call.event_name, call.context, call.focus, call.tenant_id))

    def __repr__(self) -> str:
        return f"<CallableRuntime {function_name(self._function)}>"


def run_id_of(answer: object) -> str:
    """Extract the run id from the answer of a runtime; empty if it has none."""
    if isinstance(answer, Mapping):
        answer = answer.get("run_id") or answer.get("id")
    return clean(str(answer)) if isinstance(answer, str | int) and not isinstance(answer, bool) else ""


_PLACEHOLDER = Envelope(job_id="-", task="-", payload=b"{}")


class CallGuard:
    """Runs the guards as if the call were a job.

    The event name is the task, the parts of the message (`RuntimeCall.arguments`) are the arguments. The runner must
    have no tasks (`GuardRunner(app.guard, {}, …)`): an event is not a task, even with the same name.
    """

    def __init__(self, guards: GuardRunner, queue_name: str, payload_limit: int) -> None:
        self._guards = guards
        self._queue = queue_name
        # `payload_limit` applies to the message alone; the guard input also has headers, and bytes as base64.
        self._limit = 4 * payload_limit

    async def check(self, call: RuntimeCall) -> None:
        """Raise `Denied` or `GuardFailed`. A guard that requires approval denies the call."""
        if not self._guards.applies_to(_PLACEHOLDER):
            return
        envelope = Envelope(
            job_id=new_job_ids(1)[0],
            task=call.event_name,
            payload=encode_json(call.arguments(), "the guard input of the message", self._limit),
            queue=self._queue,
            tenant_id=call.tenant_id,
            idempotency_key=call.key,
            trace_id=call.trace_id,
        )
        try:
            reviewed = await self._guards.review(envelope, "trigger")
        except NoLedger as exc:
            raise Denied(call.event_name, (str(exc),), ()) from exc
        request = reviewed.meta.approval_request
        if reviewed.hold and request is not None:
            reason = "it requires approval, which is possible only for jobs of a holdfast task"
            raise Denied(call.event_name, (request.reason, reason), request.policies)
