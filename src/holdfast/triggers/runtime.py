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
    """A holdfast task, a Python callable, or an agent's runtime over HTTP."""

    async def trigger_event(
        self, event_name: str, context: Mapping[str, Any], focus: str | None, tenant_id: str
    ) -> str:
        """Act, or hand over durably; the id of the run. An exception is a failed try.

        `Fatal` and `UsageError` say that no other try will do better; `Unavailable` says that something is down: the
        trigger holds, and this uses up no retries.
        """
        ...


class RuntimeCall(msgspec.Struct, frozen=True, kw_only=True):
    """A message on its way to a runtime: the arguments of `trigger_event`, and what else is known of it."""

    event_name: str
    context: Mapping[str, Any]
    focus: str | None
    tenant_id: str
    trace_id: str
    traceparent: str = ""
    #: Two calls of one key are one run, within the window; empty: every call is a run.
    key: str = ""
    window_ms: int = 0
    #: The trigger's name.
    trigger: str = ""
    #: `context["message"]` as it came, if it is JSON.
    message_json: bytes | None = None

    def arguments(self) -> dict[str, Any]:
        """All of it by name, as JSON can hold it: bytes are base64, JSON stays as it came."""
        return {
            "event_name": self.event_name,
            **self.context,
            "message": self.message(),
            "focus": self.focus,
        }

    def message(self) -> Any:
        """The payload as JSON can hold it."""
        if self.message_json is not None:
            return msgspec.Raw(self.message_json)
        payload = self.context["message"]
        return base64.b64encode(payload).decode() if isinstance(payload, bytes) else payload


class RuntimeResult(msgspec.Struct, frozen=True):
    """What became of a call."""

    run_id: str
    #: Somebody has handed it over before; `run_id` is that run's, as far as it is known.
    duplicate: bool = False


@runtime_checkable
class InternalRuntime(Protocol):
    """A runtime of holdfast's own, which can do with more than `trigger_event` tells."""

    #: Calls go through an app's desk: guards are asked there, duplicates are known there, and once `act` is back the
    #: work is safe. Others need a trigger's own gate and store of keys.
    submits_jobs: bool

    async def run_call(self, call: RuntimeCall) -> RuntimeResult: ...


def adapt_runtime(runtime: Runtime) -> tuple[Callable[[RuntimeCall], Awaitable[RuntimeResult]], bool]:
    """How to call it, and whether it submits to an app's desk."""
    if isinstance(runtime, InternalRuntime):
        return runtime.run_call, runtime.submits_jobs

    async def act(call: RuntimeCall) -> RuntimeResult:
        return RuntimeResult(
            str(await runtime.trigger_event(call.event_name, call.context, call.focus, call.tenant_id) or "")
        )

    return act, False


class CallableRuntime(Runtime):
    """Calls `function(event_name, context, focus, tenant_id)`: an `async` one on the loop, a plain one in a thread.

    What it returns is the run's id: a text, a mapping with `run_id` or `id`, or nothing. The call is the run: a message
    is acknowledged once it has returned. A process that dies in between runs it again, so it should not mind that.
    """

    submits_jobs = False

    def __init__(self, function: Callable[..., Any]) -> None:
        if not callable(function):
            raise InvalidOption(f"a trigger's callable must be a function, not {function!r}")
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
    """The run's id in whatever a runtime answers; empty if it names none."""
    if isinstance(answer, Mapping):
        answer = answer.get("run_id") or answer.get("id")
    return clean(str(answer)) if isinstance(answer, str | int) and not isinstance(answer, bool) else ""


_NOBODY = Envelope(job_id="-", task="-", payload=b"{}")


class CallGuard:
    """Asks as if the call were a job: the event's name is the task's, what is known of the message are its arguments.

    The gate must know no tasks (`Gate(app.guard, {}, …)`): an event is none, even if it has the name of one.
    """

    def __init__(self, gate: GuardRunner, queue_name: str, payload_limit: int) -> None:
        self._gate = gate
        self._queue = queue_name
        # The message itself is within the limit; its headers and the JSON around it come on top.
        self._limit = 4 * payload_limit

    async def check(self, call: RuntimeCall) -> None:
        """Raises `Denied`, or `GuardFailed`. Nobody can be asked to approve a call: that is a no."""
        if not self._gate.applies_to(_NOBODY):
            return
        envelope = Envelope(
            job_id=new_job_ids(1)[0],
            task=call.event_name,
            payload=encode_json(call.arguments(), "what guards are told of the message", self._limit),
            queue=self._queue,
            tenant_id=call.tenant_id,
            idempotency_key=call.key,
            trace_id=call.trace_id,
        )
        try:
            admitted = await self._gate.review(envelope, "trigger")
        except NoLedger as exc:
            raise Denied(call.event_name, (str(exc),), ()) from exc
        ask = admitted.meta.ask
        if admitted.hold and ask is not None:
            reason = "people would have to approve it, which is possible only for the jobs of a holdfast task"
            raise Denied(call.event_name, (ask.reason, reason), ask.policies)
