"""One run of a task's function: arguments in, outcome out; never raises what the user's code raised.

The same on the event loop, in a thread, in a child process and in inline mode.
"""

from __future__ import annotations

import inspect
from typing import Any

from holdfast.core.job import Claim
from holdfast.core.verdict import Outcome, Returned
from holdfast.errors import InvalidPayload
from holdfast.worker.classify import bad_result, ended, misfit, not_awaited
from holdfast.worker.context import Context
from holdfast.worker.plan import Plan


async def perform(plan: Plan, claim: Claim, context: Context | None) -> Outcome:
    """Run an `async def`. Whatever it raises, `SystemExit` and cancellation included, is an outcome."""
    try:
        arguments = plan.bind(claim, context)
    except Exception as exc:  # noqa: BLE001 - decoding calls the user's validators
        return misfit(exc)
    try:
        value = await plan.function(**arguments)
    except BaseException as exc:  # noqa: BLE001 - the user's code
        _end(context)
        return ended(exc, plan.policy)
    return _returned(plan, value, _end(context))


def perform_sync(plan: Plan, claim: Claim, context: Context | None) -> Outcome:
    """Run a plain function in this thread."""
    try:
        arguments = plan.bind(claim, context)
    except Exception as exc:  # noqa: BLE001 - decoding calls the user's validators
        return misfit(exc)
    try:
        value = plan.function(**arguments)
    except BaseException as exc:  # noqa: BLE001 - the user's code
        _end(context)
        return ended(exc, plan.policy)
    return _returned(plan, value, _end(context))


def _end(context: Context | None) -> list[str]:
    """What the function has begun and not awaited."""
    return [] if context is None else context.begun.end()


def _returned(plan: Plan, value: Any, left: list[str]) -> Outcome:
    if left:
        if inspect.iscoroutine(value):
            value.close()
        return not_awaited(left, inspect.iscoroutinefunction(plan.function))
    try:
        if inspect.iscoroutine(value):
            value.close()
            raise InvalidPayload(
                f"task {plan.name!r} returned a coroutine; decorate the `async def` itself, or wrap it in one"
            )
        return Returned(plan.encode_result(value))
    except Exception as exc:  # noqa: BLE001 - encoding calls the user's models
        return bad_result(exc)
