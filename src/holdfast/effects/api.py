"""The calls of a task: `ctx.effect`, `ctx.step`, `ctx.sleep` (requirement E4) and `ctx.blocking`.

A step is a checkpoint inside a job; a sleep continues when the process ends. A step is identified by its position in
the order in which the task's own code takes its steps. On a retry, a recorded step returns its result and does not run
again. If the code has changed so that another step is at a recorded position, the recorded results cannot be matched to
steps, and the job is suspended.

`BlockingContext` (`ctx.blocking`) offers the same to plain functions, which run in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from datetime import timedelta
from typing import Any, Final, ParamSpec, TypeVar, overload

import msgspec

from holdfast.core.codec import encode_json
from holdfast.core.job import Approval, JobKey
from holdfast.core.retry import Duration, duration_ms
from holdfast.core.text import clean
from holdfast.effects.effect import Effect
from holdfast.effects.functions import (
    EffectOptions,
    InDoubt,
    call_function,
    decode_result,
    inside_step,
    make_options,
    require_outside,
)
from holdfast.effects.runtime import EffectRuntime, RunScope
from holdfast.errors import InvalidOption, StepMismatch, Unavailable, UsageError
from holdfast.ledger.port.effects import Step

_NAME_LIMIT: Final = 200
#: Step name of a sleep.
_SLEEP: Final = "holdfast.sleep"
#: A remaining sleep shorter than this is waited for: releasing the job would cost more.
_SHORT_MS: Final = 1_000


class SleepInterrupt(BaseException):
    """Ends the attempt until the job is due again.

    Not an `Exception`, so that a task's handlers do not catch it.
    """

    def __init__(self, delay_ms: int) -> None:
        super().__init__(f"asleep for {timedelta(milliseconds=delay_ms)}")
        self.delay_ms = delay_ms


class Steps:
    """The steps of one run."""

    def __init__(self, scope: RunScope) -> None:
        claim = scope.claim
        self._scope = scope
        self._tools = scope.tools
        self._job = JobKey(claim.tenant_id, claim.queue, claim.job_id)
        self._attempt = claim.attempt
        self._steps_begun = 0
        self._loading: asyncio.Future[dict[int, Step]] | None = None

    async def step(self, name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the recorded result, or call the function and record what it returns."""
        require_outside("ctx.step")
        position, recorded = await self._next(_require_name(name))
        if recorded is not None:
            return decode_result(function, recorded.result)
        self._scope.check(f"the step {name!r}")
        with inside_step("step"):
            value = await call_function(function, args, kwargs)
        return decode_result(function, (await self.record(position, name, value)).result)

    async def sleep(self, duration: Duration) -> None:
        """Return when the sleep is over. Until then the job is released and occupies no worker."""
        require_outside("ctx.sleep")
        pause_ms = duration_ms(duration, "the time to sleep")
        position, step = await self._next(_SLEEP)
        now_ms = self._tools.now_ms()
        if step is None:
            step = await self.record(position, _SLEEP, now_ms + pause_ms)
        left_ms = msgspec.json.decode(step.result, type=int) - now_ms
        if left_ms > 0:
            await self.rest(left_ms)

    async def rest(self, left_ms: int) -> None:
        """Wait for the rest of a sleep, or end the attempt until then."""
        if left_ms >= _SHORT_MS:
            raise SleepInterrupt(left_ms)
        await asyncio.sleep(left_ms / 1000)

    # Also used by threads, which run the function themselves --------------------------------------------------

    async def find(self, name: str) -> tuple[int, Step | None]:
        """The next position, and the step recorded there."""
        return await self._next(_require_name(name))

    async def record(self, position: int, name: str, value: Any) -> Step:
        """Record a step unless its position is recorded; returns the recorded one. Raises `InvalidPayload`."""
        result = encode_json(value, f"the result of step {name!r}", self._tools.payload_limit)
        store = await self._tools.store()
        step = await store.record(
            Step(key=self._job, position=position, name=name, result=result, attempt=self._attempt)
        )
        self._check(step, name)
        return step

    async def _next(self, name: str) -> tuple[int, Step | None]:
        self._scope.check(f"the step {name!r}")
        # Counted before the first await: the order of the calls is the order of the steps.
        self._steps_begun += 1
        position = self._steps_begun
        step = (await self._load_steps()).get(position)
        if step is not None:
            self._check(step, name)
        return position, step

    async def _load_steps(self) -> dict[int, Step]:
        """The recorded steps, read once per run, at the first step."""
        if self._loading is None or (self._loading.done() and self._has_failed(self._loading)):
            self._loading = asyncio.ensure_future(self._load())
        return await asyncio.shield(self._loading)

    async def _load(self) -> dict[int, Step]:
        store = await self._tools.store()
        return {step.position: step for step in await store.steps(self._job)}

    @staticmethod
    def _has_failed(loading: asyncio.Future[dict[int, Step]]) -> bool:
        return loading.cancelled() or loading.exception() is not None

    def _check(self, step: Step, name: str) -> None:
        if step.name != clean(name):
            raise StepMismatch(
                f"step {step.position} of job {self._job.job_id} was recorded as {step.name!r}, but the code now takes "
                f"{name!r}; restore the old order of steps and resume the job, or cancel it and submit it again"
            )


def _require_name(name: object) -> str:
    if not isinstance(name, str) or not name or len(name) > _NAME_LIMIT:
        raise InvalidOption(f"a step's name must be a string of 1 to {_NAME_LIMIT} characters, got {name!r}")
    return name


P = ParamSpec("P")
R = TypeVar("R")

Begin = Callable[[str, Coroutine[Any, Any, Any]], Coroutine[Any, Any, Any]]
ExceptionTypes = type[BaseException] | tuple[type[BaseException], ...]

_DEFAULTS: Final = EffectOptions()
#: How often a waiting thread checks whether the worker's loop is still open.
_POLL_S: Final = 1.0


class EffectCall:
    """`await ctx.effect(key, function, *args)`.

    With options: `await ctx.effect.options(…)(key, function, *args)`.
    """

    __slots__ = ("_begin", "_options", "_scope")

    def __init__(self, scope: RunScope, options: EffectOptions = _DEFAULTS, *, begin: Begin) -> None:
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
        """Run the function once for this key of the tenant, across all callers; returns its recorded result."""
        effect = Effect(self._scope, self._options, key, function, args, kwargs)
        return self._begin(f"ctx.effect({key!r})", effect.run())

    def options(
        self, *, in_doubt: InDoubt = "suspend", not_done: ExceptionTypes = (), ttl: Duration | None = None
    ) -> EffectCall:
        """Return the same call with a policy.

        `in_doubt`: what to do if it is unknown whether the effect happened: `"suspend"` the job for an operator,
        `"run_again"` (then at least once), or an async function of the key that returns `Done(value)` or `NotDone()`.
        `not_done`: exceptions that prove that nothing happened; the key is free again.
        `ttl`: how long after the effect the key may be used again; without it, never.
        """
        return EffectCall(self._scope, make_options(in_doubt, not_done, ttl), begin=self._begin)


class BlockingEffectCall:
    """`ctx.blocking.effect(key, function, *args)`."""

    __slots__ = ("_options", "_scope")

    def __init__(self, scope: RunScope, options: EffectOptions = _DEFAULTS) -> None:
        self._scope = scope
        self._options = options

    def __call__(self, key: str, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function once for this key of the tenant, in this thread; returns its recorded result."""
        tools = self._scope.tools
        effect = Effect(self._scope, self._options, key, function, args, kwargs)
        ticket = run_on_loop(tools, effect.reserve)
        if ticket.value is not None:
            recorded: R = effect.decode(ticket.value)
            return recorded
        if self._scope.ended:
            run_on_loop(tools, lambda: effect.release(ticket))
        try:
            with inside_step("effect"):
                value = function(*args, **kwargs)
        except BaseException as exc:
            # Bound now: the name is deleted at the end of this block.
            error = exc
            run_on_loop(tools, lambda: effect.failed(ticket, error))
            raise
        result: R = run_on_loop(tools, lambda: effect.succeeded(ticket, value))
        return result

    def options(
        self, *, in_doubt: InDoubt = "suspend", not_done: ExceptionTypes = (), ttl: Duration | None = None
    ) -> BlockingEffectCall:
        """Return the same call with a policy, as `ctx.effect.options`. A check is `async` here as well."""
        return BlockingEffectCall(self._scope, make_options(in_doubt, not_done, ttl))


class BlockingContext:
    """Effects, steps, sleep and approvals for plain functions, which the worker runs in a thread."""

    __slots__ = ("_find_scope", "_find_steps", "_request_approval")

    def __init__(
        self, scope: Callable[[], RunScope], steps: Callable[[], Steps], request_approval: Callable[..., Approval]
    ) -> None:
        """`scope` and `steps` may raise: a child process has neither, but can request approvals."""
        self._find_scope = scope
        self._find_steps = steps
        self._request_approval = request_approval

    @property
    def _scope(self) -> RunScope:
        return self._find_scope()

    @property
    def _steps(self) -> Steps:
        return self._find_steps()

    @property
    def effect(self) -> BlockingEffectCall:
        return BlockingEffectCall(self._scope)

    def approval(
        self, name: str, details: Any = None, *, reason: str = "", quorum: int = 1, deadline: Duration | None = None
    ) -> Approval:
        """As `ctx.approval`: the job is released until the request is approved."""
        return self._request_approval(name, details, reason=reason, quorum=quorum, deadline=deadline)

    def step(self, name: str, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """As `ctx.step`: a checkpoint; the function runs in this thread."""
        require_outside("ctx.blocking.step")
        tools = self._scope.tools
        position, step = run_on_loop(tools, lambda: self._steps.find(name))
        if step is None:
            self._scope.check(f"the step {name!r}")
            with inside_step("step"):
                value = function(*args, **kwargs)
            step = run_on_loop(tools, lambda: self._steps.record(position, name, value))
        result: R = decode_result(function, step.result)
        return result

    def sleep(self, duration: Duration) -> None:
        """Return when the sleep is over; the job is released until then."""
        run_on_loop(self._scope.tools, lambda: self._steps.sleep(duration))


T = TypeVar("T")


def run_on_loop(tools: EffectRuntime, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `make()` on the worker's loop and return its result. Blocks this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        future = asyncio.run_coroutine_threadsafe(make(), tools.loop)
    else:
        raise UsageError("ctx.blocking would block the running event loop; await ctx.effect, ctx.step or ctx.sleep")
    while True:
        try:
            return future.result(_POLL_S)
        except TimeoutError:
            if future.done():
                # The result has just arrived, or the coroutine itself raised a TimeoutError.
                return future.result()
            if tools.loop.is_closed():
                raise Unavailable("the worker has ended; the job will run again elsewhere") from None
