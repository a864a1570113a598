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

#: So many are kept before those that have ended are dropped.
_PRUNE_AT: Final = 64


class Begun:
    """Coroutines of one run, by what the task called."""

    __slots__ = ("_calls", "_prune_at")

    def __init__(self) -> None:
        self._calls: list[tuple[str, Coroutine[Any, Any, Any]]] = []
        self._prune_at = _PRUNE_AT

    def add(self, call: str, coroutine: Coroutine[Any, Any, R]) -> Coroutine[Any, Any, R]:
        """The coroutine, which is known from now on as `call`."""
        if len(self._calls) >= self._prune_at:
            self._calls = [each for each in self._calls if not _has_ended(each[1])]
            # Of many that are open at the same time each would be looked at again for every further one.
            self._prune_at = max(_PRUNE_AT, 2 * len(self._calls))
        self._calls.append((call, coroutine))
        return coroutine

    def end(self) -> list[str]:
        """The function has ended: what it did not await, in words. Nothing of that begins any more."""
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
        #: What the function has begun, to be awaited before it returns.
        self.begun = Begun()
        #: True once the run is over from outside: cancelled, out of time, lease lost, or the worker drains.
        #: An async task is cancelled as well; a function in a thread has to look here, nobody can stop it.
        self.cancelled = False

    def _end(self) -> None:
        """The run is over, whatever its function still does; from now on it begins no effect and no step."""
        self.cancelled = True
        if self._own_scope is not None:
            self._own_scope.ended = True

    @property
    def _effects_in_doubt(self) -> Mapping[str, str]:
        """Effects of this run that a person has to decide about, by key, with the reason."""
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
        """Which run this is, counted from 1 at claim: runs whose worker died count too."""
        return self._claim.attempt

    @property
    def retry_count(self) -> int:
        """How many retries the job has used up."""
        return self._claim.meta.retry_count

    @property
    def idempotency_key(self) -> str:
        """The job's own key; its id if it was submitted without one. A replayed job's is the first one's: its effects
        that are named by it are still the same."""
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
        """What the submitter sent along beside the arguments: user, trace, anything."""
        return self._claim.meta.context or {}

    # Acting once -----------------------------------------------------------------------------------

    @property
    def effect(self) -> EffectCall:
        """`await ctx.effect(key, function, *args)`: runs it once for each key of the tenant, and gives its result.

        Whoever comes second gets the recorded result. If nobody knows whether it happened (a crash, an exception, a
        timeout), the job is suspended; `ctx.effect.options(in_doubt=…)` says otherwise.
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
        """One transaction in a database of your own: the key, what `function(connection, *args)` writes, its result.

        `database` is SQLAlchemy's `AsyncEngine`, `async_sessionmaker`, `AsyncSession` or `AsyncConnection`, or a pool
        or connection of asyncpg; the function gets a connection (or session) in which the transaction is open.
        """
        if not _on_loop():
            raise UsageError("ctx.transaction is awaited: make the task an `async def`; a plain one has no event loop")
        return self.begun.add(f"ctx.transaction({key!r})", self._transaction(database, key, function, args, kwargs))

    async def _transaction(
        self,
        database: Any,
        key: str,
        function: Callable[..., Awaitable[R]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> R:
        # Here, so that workers whose tasks do not use it load no database driver.
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
        """A checkpoint: on a retry its recorded result comes back, and the function does not run again."""
        return self.begun.add(f"ctx.step({name!r})", self._own_steps().step(name, function, args, kwargs))

    def sleep(self, duration: Duration) -> Coroutine[Any, Any, None]:
        """Sleep for seconds, or a `timedelta`; the job is given back meanwhile, and begins anew when it is time.

        Sleeps and steps that are behind it are not taken again. The attempt ends in an exception that is no
        `Exception`: `finally` blocks run, `except Exception` does not see it.
        """
        return self.begun.add("ctx.sleep", self._own_steps().sleep(duration))

    def approval(
        self, name: str, details: Any = None, *, reason: str = "", quorum: int = 1, deadline: Duration | None = None
    ) -> Coroutine[Any, Any, Approval]:
        """People's yes to the question `name`, with the details that they are shown (JSON).

        Until `quorum` different people have said it the job is given back, and begins anew then; steps that are
        behind it are not taken again. A no, or no answer within `deadline`, cancels the job. The yes is for these
        details: with others it is another question, so take what you show from a step. As with `sleep`, the attempt
        ends in an exception that is no `Exception`.
        """
        asking = self._approval(name, details, reason=reason, quorum=quorum, deadline=deadline)
        return self.begun.add(f"ctx.approval({name!r})", asking)

    async def _approval(self, name: str, details: Any, **options: Any) -> Approval:
        return self._ask(name, details, **options)

    @property
    def blocking(self) -> BlockingContext:
        """`effect`, `step`, `sleep` and `approval` for plain functions, which run in a thread."""
        return BlockingContext(lambda: self._scope("blocking"), self._own_steps, self._ask)

    def _ask(self, name: str, details: Any, *, reason: str, quorum: int, deadline: Duration | None) -> Approval:
        require_outside("ctx.approval")
        if self.cancelled:
            raise RunEnded(self.job_id, f"the approval {name!r}")
        # The engine's clock, as the claim told it: a worker's own may be wrong by more than a deadline.
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
                f"ctx.{what} works in tasks that a worker runs in its own process, not with process=True; "
                "for a unit test make the context with holdfast.testing.make_context(…)"
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
