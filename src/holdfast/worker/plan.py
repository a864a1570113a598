"""Everything about a task that running one of its jobs needs, worked out once when it is registered."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from holdfast.core.codec import PAYLOAD_LIMIT, Arguments, encode_json
from holdfast.core.job import Claim
from holdfast.core.retry import Retry
from holdfast.core.verdict import OnExhausted
from holdfast.errors import InvalidOption
from holdfast.worker.context import Context


class Mode(Enum):
    """Where a function runs."""

    #: `async def`: an asyncio task on the worker's event loop.
    LOOP = auto()
    #: `def`: a thread. Cannot be stopped from outside.
    THREAD = auto()
    #: `process=True`: a child process, killed when its time is up, when it is cancelled or loses its lease.
    PROCESS = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What becomes of a task's jobs when they fail or take too long."""

    retry: Retry = field(default_factory=Retry)
    timeout_ms: int | None = None
    on_exhausted: OnExhausted = OnExhausted.DEAD_LETTER
    retry_on: tuple[type[BaseException], ...] = ()
    fatal_on: tuple[type[BaseException], ...] = ()
    unavailable_on: tuple[type[BaseException], ...] = ()
    process: bool = False


class Plan:
    """A function, how it is called, and its policy."""

    __slots__ = (
        "_result_label",
        "arguments",
        "context_name",
        "decode",
        "function",
        "mode",
        "name",
        "payload_limit",
        "policy",
        "timeout_s",
    )

    def __init__(
        self, name: str, function: Callable[..., Any], policy: Policy, payload_limit: int = PAYLOAD_LIMIT
    ) -> None:
        self.name = name
        self.function = function
        self.policy = policy
        self.payload_limit = payload_limit
        self.arguments = Arguments(function, name, Context)
        self.decode = self.arguments.decode
        self.context_name = self.arguments.injected_name
        self.mode = _mode(name, function, policy)
        self.timeout_s = None if policy.timeout_ms is None else policy.timeout_ms / 1000
        self._result_label = f"the result of task {name!r}"

    def encode_result(self, value: Any) -> bytes:
        """JSON; raises `InvalidPayload` or `PayloadTooLarge`."""
        return encode_json(value, self._result_label, self.payload_limit)

    def bind(self, claim: Claim, context: Context | None) -> dict[str, Any]:
        """Keyword arguments for one run; raises `InvalidPayload`."""
        arguments = self.decode(claim.payload)
        if self.context_name is not None:
            arguments[self.context_name] = context
        return arguments


def _mode(name: str, function: Callable[..., Any], policy: Policy) -> Mode:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise InvalidOption(f"task {name!r} yields; a task returns one value")
    if policy.process:
        return Mode.PROCESS
    return Mode.LOOP if inspect.iscoroutinefunction(function) else Mode.THREAD
