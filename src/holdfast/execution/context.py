"""`Context`: a running task's view of its own job, and its access to effects, steps and approvals.

A task gets a context if one of its parameters is annotated with `Context`. It is not part of the payload, and is not
created for tasks without such a parameter.

`Begun` keeps the coroutines that a task created through its context until they are awaited. A coroutine that is never
awaited silently does nothing, so without this check a job that omitted an `await` would succeed.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Concatenate, Final, ParamSpec, TypeVar, overload

from holdfast.core.codec import PAYLOAD_LIMIT
from holdfast.core.job import Approval, Claim
from holdfast.core.retry import Duration
from holdfast.effects.api import BlockingContext, EffectCall, Steps
from holdfast.effects.functions import require_outside
from holdfast.effects.runtime import EffectRuntime, RunScope
from holdfast.errors import RunEnded, UsageError
from holdfast.guard.decisions import approval_or_request

R = TypeVar("R")

#: Number of calls kept before those that have ended are dropped.
_PRUNE_AT: Final = 64


class Begun:
    """Coroutines of one run, with the call that created each."""

    __slots__ = ("_calls", "_prune_at")

    def __init__(self) -> None:
        self._calls: list[tuple[str, Coroutine[Any, Any, Any]]] = []
        self._prune_at = _PRUNE_AT

    def add(self, call: str, coroutine: Coroutine[Any, Any, R]) -> Coroutine[Any, Any, R]:
        """Keep the coroutine under the description `call`, and return it."""
        if len(self._calls) >= self._prune_at:
            self._calls = [each for each in self._calls if not _has_ended(each[1])]
            # With many open calls, each further call would otherwise check all of them again.
            self._prune_at = max(_PRUNE_AT, 2 * len(self._calls))
        self._calls.append((call, coroutine))
        return coroutine

    def end(self) -> list[str]:
        """Close coroutines that were never started; returns a description of each call that was not awaited."""
        left = []
        for call, coroutine in self._calls:
            if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                coroutine.close()
                left.append(f"{call} was not awaited")
            elif not _has_ended(coroutine):
                left.append(f"{call} was still running")
        self._calls.clear()
        return left


def _has_ended(coroutine: Coroutine[Any, Any, Any]) -> bool:
    return inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED


P = ParamSpec("P")


class Context:
    """One run of one job, as its function sees it."""

    __slots__ = ("_claim", "_made_at", "_own_scope", "_steps", "begun", "cancelled")

    def __init__(self, claim: Claim, tools: EffectRuntime | None = None) -> None:
        self._claim = claim
        self._made_at = time.monotonic()
        self._own_scope = None if tools is None else RunScope(claim, tools)
        self._steps: Steps | None = None
        #: Calls that the function must await before it returns.
        self.begun = Begun()
        #: True once the run was ended from outside: cancellation, timeout, lost lease or drain. An async task is
        #: cancelled as well; a function in a thread cannot be stopped and has to check this.
        self.cancelled = False

    def _end(self) -> None:
        """End the run: its function may still run, but can begin no further effect or step."""
        self.cancelled = True
        if self._own_scope is not None:
            self._own_scope.ended = True

    @property
    def _effects_in_doubt(self) -> Mapping[str, str]:
        """Effects of this run that an operator has to decide about, by key, with the reason."""
        return {} if self._own_scope is None else self._own_scope.in_doubt

    @property
    def job_id(self) -> str:
        return self._claim.lease.job_id

    @property
    def task(self) -> str:
        return self._claim.task

    @property
    def queue(self) -> str:
        return self._claim.lease.queue

    @property
    def tenant_id(self) -> str:
        return self._claim.tenant_id

    @property
    def attempt(self) -> int:
        """Number of this run, counted from 1 at claim; runs whose worker crashed count as well."""
        return self._claim.attempt

    @property
    def retry_count(self) -> int:
        """Number of retries that the job has used up."""
        return self._claim.meta.retry_count

    @property
    def idempotency_key(self) -> str:
        """The job's own key; its id if it was submitted without one.

        A replayed job has the key of the first job, so that effects named by it are the same effects.
        """
        replay = self._claim.meta.replay
        return replay.key if replay is not None else self._claim.idempotency_key or self._claim.lease.job_id

    @property
    def run_key(self) -> str:
        """The key of this run: job id and retry count (requirement Y3)."""
        return f"{self._claim.lease.job_id}:{self._claim.meta.retry_count}"

    @property
    def trace_id(self) -> str:
        return self._claim.trace_id

    @property
    def context(self) -> dict[str, Any]:
        """JSON values that the submitter sent besides the arguments."""
        return self._claim.meta.context or {}

    # Effects ---------------------------------------------------------------------------------------

    @property
    def effect(self) -> EffectCall:
        """`await ctx.effect(key, function, *args)`: run the function once per key of the tenant.

        Returns its result. A later call returns the recorded result. If it is unknown whether the effect happened (a
        crash, an exception, a timeout), the job is suspended; `ctx.effect.options(in_doubt=…)` changes that.
        """
        return EffectCall(self._scope("effect"), begin=self.begun.add)

    def transaction(
        self,
        database: Any,
        key: str,
        function: Callable[Concatenate[Any, P], Awaitable[R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Coroutine[Any, Any, R]:
        """Run `function(connection, *args)` once per key, in one transaction of your own database.

        The transaction commits the key, the function's writes and its result. `database` is SQLAlchemy's `AsyncEngine`,
        `async_sessionmaker`, `AsyncSession` or `AsyncConnection`, or a pool or connection of asyncpg; the function gets
        a connection (or session) with the transaction open.
        """
        if not _on_loop():
            raise UsageError("ctx.transaction needs an event loop; make the task an `async def`")
        return self.begun.add(f"ctx.transaction({key!r})", self._transaction(database, key, function, args, kwargs))

    async def _transaction(
        self,
        database: Any,
        key: str,
        function: Callable[..., Awaitable[R]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> R:
        # Imported here: workers whose tasks do not use it load no database driver.
        from holdfast.effects.transaction import transaction

        if self.cancelled:
            raise RunEnded(self.job_id, f"the transaction {key!r}")
        limit = PAYLOAD_LIMIT if self._own_scope is None else self._own_scope.tools.payload_limit
        result: R = await transaction(self._claim, limit, database, key, function, args, kwargs)
        return result

    @overload
    def step(
        self, name: str, function: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, R]: ...
    @overload
    def step(
        self, name: str, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, R]: ...
    def step(self, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run the function as a checkpoint: a retry returns the recorded result without running it again."""
        return self.begun.add(f"ctx.step({name!r})", self._own_steps().step(name, function, args, kwargs))

    def sleep(self, duration: Duration) -> Coroutine[Any, Any, None]:
        """Sleep for seconds or a `timedelta`.

        The job is released meanwhile, and its function starts again when due. Earlier sleeps and steps are not
        repeated. The attempt ends with an exception that is not an `Exception`: `finally` blocks run, `except
        Exception` does not catch it.
        """
        return self.begun.add("ctx.sleep", self._own_steps().sleep(duration))

    def approval(
        self, name: str, details: Any = None, *, reason: str = "", quorum: int = 1, deadline: Duration | None = None
    ) -> Coroutine[Any, Any, Approval]:
        """Return the approval of the request `name`; approvers see the `details` (JSON).

        The job is released until `quorum` different principals have approved, and then its function starts again;
        earlier steps are not repeated. A rejection, or no decision within `deadline`, cancels the job. The approval is
        for these details: other details are another request, so compute them in a step. As with `sleep`, the attempt
        ends with an exception that is not an `Exception`.
        """
        requesting = self._approval(name, details, reason=reason, quorum=quorum, deadline=deadline)
        return self.begun.add(f"ctx.approval({name!r})", requesting)

    async def _approval(self, name: str, details: Any, **options: Any) -> Approval:
        return self._request_approval(name, details, **options)

    @property
    def blocking(self) -> BlockingContext:
        """`effect`, `step`, `sleep` and `approval` for plain functions, which run in a thread."""
        return BlockingContext(lambda: self._scope("blocking"), self._own_steps, self._request_approval)

    def _request_approval(
        self, name: str, details: Any, *, reason: str, quorum: int, deadline: Duration | None
    ) -> Approval:
        require_outside("ctx.approval")
        if self.cancelled:
            raise RunEnded(self.job_id, f"the approval {name!r}")
        # The engine's clock, from the claim: the worker's clock may be wrong by more than a deadline.
        now_ms = self._claim.claimed_at_ms + round((time.monotonic() - self._made_at) * 1000)
        return approval_or_request(
            self._claim, name, details, reason=reason, quorum=quorum, deadline=deadline, now_ms=now_ms
        )

    def _own_steps(self) -> Steps:
        if self._steps is None:
            self._steps = Steps(self._scope("step"))
        return self._steps

    def _scope(self, what: str) -> RunScope:
        if self._own_scope is None:
            raise UsageError(
                f"ctx.{what} is not available with process=True or without a worker; "
                "in a unit test create the context with holdfast.testing.make_context(…)"
            )
        return self._own_scope

    def __repr__(self) -> str:
        return f"<Context {self.task} job={self.job_id} attempt={self.attempt}>"


def _on_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
