"""What a task calls: `ctx.effect`, and `ctx.blocking` for functions that run in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, ParamSpec, TypeVar, overload

from holdfast.core.job import Consent
from holdfast.core.retry import Duration
from holdfast.effects.calls import decode_as, inside, must_be_outside
from holdfast.effects.effect import Effect, EffectOptions, InDoubt, make_options
from holdfast.effects.steps import Steps
from holdfast.effects.tools import Scope, Tools
from holdfast.errors import Unavailable, UsageError

P = ParamSpec("P")
R = TypeVar("R")

Begin = Callable[[str, Coroutine[Any, Any, Any]], Coroutine[Any, Any, Any]]
ExceptionTypes = type[BaseException] | tuple[type[BaseException], ...]

_DEFAULTS: Final = EffectOptions()
#: How often a thread that waits looks whether the worker's loop is still there.
_LOOK_S: Final = 1.0


class EffectCall:
    """`await ctx.effect(key, function, *args)`, or with options `await ctx.effect.options(…)(key, function, *args)`."""

    __slots__ = ("_begin", "_options", "_scope")

    def __init__(self, scope: Scope, options: EffectOptions = _DEFAULTS, *, begin: Begin) -> None:
        """`begin` is called with every effect that is to be awaited."""
        self._scope = scope
        self._options = options
        self._begin = begin

    @overload
    def __call__(
        self, key: str, function: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, R]: ...
    @overload
    def __call__(
        self, key: str, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, R]: ...
    def __call__(self, key: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run the function once for this key of the tenant, whoever calls, and however often; its recorded result."""
        effect = Effect(self._scope, self._options, key, function, args, kwargs)
        return self._begin(f"ctx.effect({key!r})", effect.run())

    def options(
        self, *, in_doubt: InDoubt = "suspend", not_done: ExceptionTypes = (), ttl: Duration | None = None
    ) -> EffectCall:
        """The same with a policy.

        `in_doubt`: what to do if nobody knows whether it happened: `"suspend"` the job for a person, `"run_again"`
        (at least once, then), or an async function of the key that answers `Done(value)` or `NotDone()`.
        `not_done`: exceptions that prove that nothing happened; the key is free again.
        `ttl`: the key may be used again so long after the effect; without it, never.
        """
        return EffectCall(self._scope, make_options(in_doubt, not_done, ttl), begin=self._begin)


class BlockingEffectCall:
    """`ctx.blocking.effect(key, function, *args)`."""

    __slots__ = ("_options", "_scope")

    def __init__(self, scope: Scope, options: EffectOptions = _DEFAULTS) -> None:
        self._scope = scope
        self._options = options

    def __call__(self, key: str, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function once for this key of the tenant, here in this thread; its recorded result."""
        tools = self._scope.tools
        effect = Effect(self._scope, self._options, key, function, args, kwargs)
        ticket = wait_for(tools, effect.begin)
        if ticket.value is not None:
            recorded: R = effect.decoded(ticket.value)
            return recorded
        if self._scope.stopped:
            wait_for(tools, lambda: effect.refused(ticket))
        try:
            with inside("effect"):
                value = function(*args, **kwargs)
        except BaseException as exc:
            # Bound now: the name is gone once this block is left.
            error = exc
            wait_for(tools, lambda: effect.failed(ticket, error))
            raise
        result: R = wait_for(tools, lambda: effect.succeeded(ticket, value))
        return result

    def options(
        self, *, in_doubt: InDoubt = "suspend", not_done: ExceptionTypes = (), ttl: Duration | None = None
    ) -> BlockingEffectCall:
        """The same with a policy, as in `ctx.effect.options`. A check is `async` here, too."""
        return BlockingEffectCall(self._scope, make_options(in_doubt, not_done, ttl))


class Blocking:
    """Effects, steps, sleep and approvals for plain functions, which the worker runs in a thread."""

    __slots__ = ("_ask", "_find_scope", "_find_steps")

    def __init__(self, scope: Callable[[], Scope], steps: Callable[[], Steps], ask: Callable[..., Consent]) -> None:
        """`scope` and `steps` may raise: a child process has none, and can ask people all the same."""
        self._find_scope = scope
        self._find_steps = steps
        self._ask = ask

    @property
    def _scope(self) -> Scope:
        return self._find_scope()

    @property
    def _steps(self) -> Steps:
        return self._find_steps()

    @property
    def effect(self) -> BlockingEffectCall:
        return BlockingEffectCall(self._scope)

    def approval(
        self, name: str, details: Any = None, *, reason: str = "", quorum: int = 1, deadline: Duration | None = None
    ) -> Consent:
        """People's yes, as `ctx.approval`; until it is there the job is given back."""
        return self._ask(name, details, reason=reason, quorum=quorum, deadline=deadline)

    def step(self, name: str, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """A checkpoint; the function runs here in this thread."""
        must_be_outside("ctx.blocking.step")
        tools = self._scope.tools
        position, step = wait_for(tools, lambda: self._steps.find(name))
        if step is None:
            self._scope.check(f"the step {name!r}")
            with inside("step"):
                value = function(*args, **kwargs)
            step = wait_for(tools, lambda: self._steps.record(position, name, value))
        result: R = decode_as(function, step.result)
        return result

    def sleep(self, duration: Duration) -> None:
        """Returns once it is time; until then the job is given back."""
        wait_for(self._scope.tools, lambda: self._steps.sleep(duration))


T = TypeVar("T")


def wait_for(tools: Tools, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """The result of `make()`, run on the worker's loop. Blocks this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        future = asyncio.run_coroutine_threadsafe(make(), tools.loop)
    else:
        raise UsageError(
            "ctx.blocking would block the event loop that runs here; await ctx.effect, ctx.step or ctx.sleep"
        )
    while True:
        try:
            return future.result(_LOOK_S)
        except TimeoutError:
            if future.done():
                # It came in this very moment, or raised a TimeoutError of its own.
                return future.result()
            if tools.loop.is_closed():
                raise Unavailable("the worker has ended; the job will run again elsewhere") from None
