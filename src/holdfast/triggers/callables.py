"""Messages become calls of a Python function, in the trigger's own process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from holdfast.effects.calls import call as call_function
from holdfast.effects.calls import name_of
from holdfast.errors import InvalidOption
from holdfast.ledger.text import clean
from holdfast.triggers.runtime import Call, Run, Runtime


class CallableRuntime(Runtime):
    """Calls `function(event_name, context, focus, tenant_id)`: an `async` one on the loop, a plain one in a thread.

    What it returns is the run's id: a text, a mapping with `run_id` or `id`, or nothing. The call is the run: a message
    is acknowledged once it has returned. A process that dies in between runs it again, so it should not mind that.
    """

    at_desk = False

    def __init__(self, function: Callable[..., Any]) -> None:
        if not callable(function):
            raise InvalidOption(f"a trigger's callable must be a function, not {function!r}")
        self._function = function

    async def trigger_event(
        self, event_name: str, context: Mapping[str, Any], focus: str | None, tenant_id: str
    ) -> str:
        return run_id_of(await call_function(self._function, (event_name, context, focus, tenant_id), {}))

    async def act(self, call: Call) -> Run:
        return Run(await self.trigger_event(call.event_name, call.context, call.focus, call.tenant_id))

    def __repr__(self) -> str:
        return f"<CallableRuntime {name_of(self._function)}>"


def run_id_of(answer: object) -> str:
    """The run's id in whatever a runtime answers; empty if it names none."""
    if isinstance(answer, Mapping):
        answer = answer.get("run_id") or answer.get("id")
    return clean(str(answer)) if isinstance(answer, str | int) and not isinstance(answer, bool) else ""
