"""`app.guard`: the guards that review every job before it may run.

    @app.guard
    async def budget(request: GuardRequest) -> Decision | None: ...

    app.guard.rule("large", task="pay*", when=lambda args: args["amount"] > 1000, then=RequireApproval("over 1000"))

A guard that raises, returns an invalid value or times out blocks the job: `GuardFailed`.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final, TypeVar, overload

from holdfast.errors import GuardFailed, HoldfastError, InvalidOption
from holdfast.guard.decisions import Allow, Decision, Deny, GuardRequest, RequireApproval, Ruling, combine

Guard = Callable[[GuardRequest], Decision | None] | Callable[[GuardRequest], Awaitable[Decision | None]]
G = TypeVar("G", bound=Guard)

_NAME_LIMIT: Final = 200


@dataclass(frozen=True, slots=True)
class RegisteredGuard:
    """A guard and its policy name."""

    policy: str
    guard: Callable[[GuardRequest], Any]
    #: Whether it does not block, and is called on the event loop.
    immediate: bool = False


class GuardRegistry:
    """An app's guards. Add them with `@app.guard` or `app.guard.rule(…)`."""

    def __init__(self, timeout_s: Callable[[], float]) -> None:
        self._timeout_s = timeout_s
        #: In the order of their registration.
        self.registered: list[RegisteredGuard] = []

    @overload
    def __call__(self, guard: G, /) -> G: ...
    @overload
    def __call__(self, /, *, name: str) -> Callable[[G], G]: ...
    def __call__(self, guard: Any = None, /, *, name: str | None = None) -> Any:
        """Register a function, `async` or not, that reviews every job. Its name is the policy name.

        A plain function runs in a thread. Returning None means no objection.
        """

        def register(guard: G) -> G:
            if not callable(guard):
                raise InvalidOption(f"@app.guard decorates a function, not {guard!r}")
            self._add(name or str(getattr(guard, "__name__", "")), guard)
            return guard

        return register if guard is None else register(guard)

    def rule(
        self,
        name: str,
        *,
        task: str = "*",
        tenant: str = "*",
        when: Callable[[dict[str, Any]], object] | None = None,
        then: RequireApproval | Deny,
    ) -> None:
        """Add a rule: jobs that match get the decision `then`.

        `task` and `tenant` are patterns with `*` and `?`. `when` gets the arguments by name and must not block.
        """
        if not isinstance(then, RequireApproval | Deny):
            raise InvalidOption(f"then must be RequireApproval(…) or Deny(…), not {then!r}")
        if inspect.iscoroutinefunction(when):
            raise InvalidOption(f"when must be a plain function of the arguments, not {when!r}")

        def rule(request: GuardRequest) -> Decision | None:
            if not fnmatchcase(request.task, task) or not fnmatchcase(request.tenant_id, tenant):
                return None
            return then if when is None or when(request.arguments) else None

        self._add(name, rule, immediate=True)

    async def judge(self, request: GuardRequest) -> Ruling:
        """Call all guards, to collect all reasons, and combine their decisions. Raises `GuardFailed`."""
        decisions = [(registered.policy, await self._call_guard(registered, request)) for registered in self.registered]
        return combine(decisions)

    def _add(self, name: object, guard: Callable[[GuardRequest], Any], *, immediate: bool = False) -> None:
        if not isinstance(name, str) or not 1 <= len(name) <= _NAME_LIMIT:
            raise InvalidOption(f"a guard's name must be a string of 1 to {_NAME_LIMIT} characters, got {name!r}")
        if any(other.policy == name for other in self.registered):
            raise InvalidOption(f"guard {name!r} is already registered; give one of them another name=…")
        self.registered.append(RegisteredGuard(name, guard, immediate))

    async def _call_guard(self, registered: RegisteredGuard, request: GuardRequest) -> Decision:
        limit_s = self._timeout_s()
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                decision = await _call(registered, request)
        except HoldfastError:
            # The guard chose the error, and with it whether a retry helps.
            raise
        except Exception as exc:
            if isinstance(exc, TimeoutError) and limit.expired():
                raise GuardFailed(registered.policy, f"no decision within {limit_s:g} s") from exc
            raise GuardFailed(registered.policy, f"{type(exc).__name__}: {exc}") from exc
        if decision is None:
            return Allow()
        if not isinstance(decision, Decision):
            raise GuardFailed(
                registered.policy, f"it returned {decision!r}, which is not an Allow, RequireApproval, Deny or None"
            )
        return decision


async def _call(registered: RegisteredGuard, request: GuardRequest) -> Any:
    guard = registered.guard
    if registered.immediate:
        return guard(request)
    if inspect.iscoroutinefunction(guard) or inspect.iscoroutinefunction(getattr(guard, "__call__", None)):  # noqa: B004
        return await guard(request)
    answer = await _in_thread(lambda: guard(request))
    # For example a lambda that calls an `async` function.
    return await answer if inspect.isawaitable(answer) else answer


async def _in_thread(work: Callable[[], Any]) -> Any:
    """Run `work` in a daemon thread; if it never returns, it does not keep the process alive."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def run() -> None:
        try:
            outcome: tuple[Any, BaseException | None] = (work(), None)
        except BaseException as exc:  # noqa: BLE001 - raised where it is awaited
            outcome = (None, exc)
        try:
            loop.call_soon_threadsafe(set_outcome, *outcome)
        except RuntimeError:
            # The event loop is closed, and the waiter with it.
            return

    def set_outcome(value: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            # A future cannot hold a StopIteration, and a SystemExit must not end the loop.
            future.set_exception(
                error
                if isinstance(error, Exception) and not isinstance(error, StopIteration)
                else RuntimeError(repr(error))
            )

    threading.Thread(target=run, name="holdfast-guard", daemon=True).start()
    return await future
