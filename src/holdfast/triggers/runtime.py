"""Who acts on a message (requirement T5)."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import msgspec


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


class Call(msgspec.Struct, frozen=True, kw_only=True):
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


class Run(msgspec.Struct, frozen=True):
    """What became of a call."""

    run_id: str
    #: Somebody has handed it over before; `run_id` is that run's, as far as it is known.
    duplicate: bool = False


@runtime_checkable
class ActingRuntime(Protocol):
    """A runtime of holdfast's own, which can do with more than `trigger_event` tells."""

    #: Calls go through an app's desk: guards are asked there, duplicates are known there, and once `act` is back the
    #: work is safe. Others need a trigger's own gate and store of keys.
    at_desk: bool

    async def act(self, call: Call) -> Run: ...


def acting(runtime: Runtime) -> tuple[Callable[[Call], Awaitable[Run]], bool]:
    """How to call it, and whether it submits to an app's desk."""
    if isinstance(runtime, ActingRuntime):
        return runtime.act, runtime.at_desk

    async def act(call: Call) -> Run:
        return Run(str(await runtime.trigger_event(call.event_name, call.context, call.focus, call.tenant_id) or ""))

    return act, False
