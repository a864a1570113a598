"""Call a task's function and turn what it returns or raises into an outcome (requirements Y2, Y8).

It never raises what the user's code raised. It behaves the same on the event loop, in a thread, in a child process and
in inline mode. The record of an exception is bounded and redacted.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from holdfast.core.job import Claim, Failure
from holdfast.core.verdict import (
    DEPENDENCY_UNAVAILABLE,
    EFFECT_NOT_AWAITED,
    GUARD_DENIED,
    PROCESS_DIED,
    TASK_ERROR,
    TASK_FATAL,
    TASK_TIMEOUT,
    ApprovalNeeded,
    DeadLetter,
    Deferred,
    FailureKind,
    Outcome,
    Raised,
    Returned,
    Suspend,
    Verdict,
)
from holdfast.effects.api import SleepInterrupt
from holdfast.errors import (
    Denied,
    EffectInDoubt,
    Fatal,
    GuardFailed,
    HoldfastError,
    InvalidPayload,
    InvalidResult,
    NoLedger,
    PayloadTooLarge,
    StepMismatch,
    Unavailable,
    UnknownTask,
    UsageError,
)
from holdfast.execution.context import Context
from holdfast.execution.spec import TaskPolicy, TaskSpec
from holdfast.guard.decisions import ApprovalInterrupt
from holdfast.observe.redact import redact_and_truncate

MESSAGE_LIMIT: Final = 2_000
STACK_LIMIT: Final = 8_000

_CODES: Final = {
    FailureKind.RETRYABLE: TASK_ERROR,
    FailureKind.FATAL: TASK_FATAL,
    FailureKind.UNAVAILABLE: DEPENDENCY_UNAVAILABLE,
    FailureKind.INVALID: TASK_FATAL,
}

#: Codes of `invalid_result`; no exception of a task gets them.
_RETURNED: Final = (InvalidResult.code, PayloadTooLarge.code)

#: An operator has to decide, whatever the task's policy for exceptions is.
_IN_DOUBT: Final = (EffectInDoubt, StepMismatch)


def outcome_of(exc: BaseException, policy: TaskPolicy) -> Outcome:
    """The outcome of an exception: a failure, an approval request, or a sleep."""
    if (approval := _approval_interrupt(exc)) is not None:
        return ApprovalNeeded(_truncate(str(approval)), approval.request)
    if (sleep := _sleep_interrupt(exc)) is not None:
        return Deferred(_truncate(str(sleep)), sleep.delay_ms, started=True)
    return failure_outcome(exc, policy)


def failure_outcome(exc: BaseException, policy: TaskPolicy) -> Raised:
    """The outcome of an exception that is a failure."""
    kind = _kind(exc, policy)
    if kind is not FailureKind.IN_DOUBT:
        return Raised(kind, describe_failure(_CODES[kind], exc), exc)
    in_doubt = list(_errors_in_doubt(exc))
    # A group's own message names no key; these name it, and the remedy.
    message = "; ".join(map(_message, in_doubt))
    return Raised(kind, Failure(in_doubt[0].code, _truncate(message), type_name(exc), _stack(exc)), exc)


def suspend_if_in_doubt(verdict: Verdict, in_doubt: Mapping[str, str]) -> Verdict:
    """Suspend a job that failed for good and left effects in doubt, whatever the retry policy is."""
    if not in_doubt or not isinstance(verdict, DeadLetter):
        return verdict
    error = verdict.failure
    cause = f"{error.type or error.code}: {error.message}"
    message = "; ".join(str(EffectInDoubt(key, reason)) for key, reason in in_doubt.items())
    if cause not in message:
        message = f"{message}; the run ended with {cause}"
    return Suspend(Failure(EffectInDoubt.code, _truncate(message), error.type, error.stack))


def invalid_payload(exc: Exception) -> Raised:
    """The payload does not fit the task: dead-lettered without a retry."""
    return Raised(FailureKind.INVALID, describe_failure(_payload_code(exc), exc), exc)


def invalid_result(exc: Exception) -> Raised:
    """The function returned a result that cannot be stored. Not retried: its effects have happened."""
    code = PayloadTooLarge.code if isinstance(exc, PayloadTooLarge) else InvalidResult.code
    return Raised(FailureKind.FATAL, describe_failure(code, exc), exc)


def has_returned(outcome: Outcome) -> bool:
    """Whether the function returned, with a result that can be stored or not."""
    if isinstance(outcome, Raised):
        return outcome.failure.code in _RETURNED
    return isinstance(outcome, Returned)


def not_awaited(calls: Sequence[str], is_async: bool) -> Raised:
    """The function returned before its calls were done. A retry would do the same."""
    advice = "write `await`" if is_async else "use ctx.blocking in a plain function"
    more = f" (and {len(calls) - 1} more)" if len(calls) > 1 else ""
    message = f"{calls[0]} when the function returned{more}; {advice}"
    return Raised(FailureKind.FATAL, Failure(EFFECT_NOT_AWAITED, _truncate(message)))


def unknown_task(task: str, known: tuple[str, ...]) -> Raised:
    """This worker serves the queue but does not have the task, and no other worker has claimed the job in time.

    The job is dead-lettered, not retried: an operator sees what is missing, and can replay the dead letter once a
    worker has the task. Until then `worker.unknown_jobs` releases it for other workers.
    """
    return Raised(FailureKind.INVALID, Failure(UnknownTask.code, str(UnknownTask(task, known)), UnknownTask.__name__))


def to_denied(exc: Denied) -> Raised:
    """A guard denied a job that was already accepted, or that another program wrote."""
    return Raised(FailureKind.DENIED, Failure(GUARD_DENIED, _truncate(str(exc)), Denied.__name__))


def guard_failed(exc: Exception) -> Raised:
    """A guard could not review a job, so it does not run; retried like any failed run."""
    if isinstance(exc, InvalidPayload):
        return invalid_payload(exc)
    if isinstance(exc, NoLedger):
        return approval_impossible(exc)
    if isinstance(exc, Unavailable):
        return Raised(FailureKind.UNAVAILABLE, describe_failure(DEPENDENCY_UNAVAILABLE, exc), exc)
    return Raised(FailureKind.RETRYABLE, describe_failure(GuardFailed.code, exc), exc)


def approval_impossible(exc: NoLedger) -> Raised:
    """An approval is required, and there is no ledger to store the request: the job would wait forever."""
    return Raised(FailureKind.FATAL, describe_failure(exc.code, exc))


def timed_out(timeout_s: float, cancelled: BaseException | None = None) -> Raised:
    """The run exceeded its timeout; retryable.

    `cancelled`: the exception that ended its code, which shows where it was.
    """
    message = f"the task ran longer than its timeout of {timeout_s:g} s"
    error = TimeoutError(message)
    error.__cause__ = cancelled
    return Raised(FailureKind.RETRYABLE, Failure(TASK_TIMEOUT, message, TimeoutError.__name__), error)


def process_died(exit_code: int | None) -> Raised:
    """The child process ended during the run: killed, out of memory, or a crash in native code."""
    how = f"was killed by signal {-exit_code}" if exit_code is not None and exit_code < 0 else f"exited ({exit_code})"
    return Raised(FailureKind.RETRYABLE, Failure(PROCESS_DIED, f"the child process {how} before the task was done"))


def describe_failure(code: str, exc: BaseException) -> Failure:
    """The record of an exception: bounded, redacted, and always valid UTF-8."""
    return Failure(code, _truncate(_message(exc)), type_name(exc), _stack(exc))


def type_name(exc: BaseException) -> str:
    """The exception's qualified type name, without `builtins`."""
    kind = type(exc)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _payload_code(exc: Exception) -> str:
    # A user's own validator may raise anything.
    return exc.code if isinstance(exc, HoldfastError) else InvalidPayload.code


def _approval_interrupt(exc: BaseException) -> ApprovalInterrupt | None:
    """The first approval request of an exception or group; a group may have only requests and sleeps."""
    if isinstance(exc, BaseExceptionGroup):
        requests = [_approval_interrupt(inner) for inner in exc.exceptions]
        waiting = [request or _sleep_interrupt(inner) for request, inner in zip(requests, exc.exceptions, strict=True)]
        return next(filter(None, requests), None) if all(waiting) else None
    return exc if isinstance(exc, ApprovalInterrupt) else None


def _sleep_interrupt(exc: BaseException) -> SleepInterrupt | None:
    """The shortest sleep of an exception or group; a group may have only sleeps."""
    if isinstance(exc, BaseExceptionGroup):
        sleepers = [_sleep_interrupt(inner) for inner in exc.exceptions]
        return (
            min((one for one in sleepers if one), key=lambda one: one.delay_ms, default=None) if all(sleepers) else None
        )
    return exc if isinstance(exc, SleepInterrupt) else None


def _errors_in_doubt(exc: BaseException) -> Iterator[EffectInDoubt | StepMismatch]:
    if isinstance(exc, BaseExceptionGroup):
        for inner in exc.exceptions:
            yield from _errors_in_doubt(inner)
    elif isinstance(exc, _IN_DOUBT):
        yield exc


def _kind(exc: BaseException, policy: TaskPolicy) -> FailureKind:
    if isinstance(exc, _IN_DOUBT):
        return FailureKind.IN_DOUBT
    if isinstance(exc, BaseExceptionGroup) and not isinstance(exc, policy.retry_on + policy.fatal_on):
        return _kind_of_group(exc, policy)
    if isinstance(exc, (Fatal, *policy.fatal_on)):
        return FailureKind.FATAL
    if isinstance(exc, (Unavailable, *policy.unavailable_on)):
        return FailureKind.UNAVAILABLE
    if policy.retry_on:
        return FailureKind.RETRYABLE if isinstance(exc, policy.retry_on) else FailureKind.FATAL
    return FailureKind.FATAL if isinstance(exc, UsageError) else FailureKind.RETRYABLE


def _kind_of_group(group: BaseExceptionGroup[BaseException], policy: TaskPolicy) -> FailureKind:
    """Kind of a group: in doubt has precedence, then fatal; unavailable only if all are."""
    kinds = {_kind(exc, policy) for exc in group.exceptions}
    for decisive in (FailureKind.IN_DOUBT, FailureKind.FATAL):
        if decisive in kinds:
            return decisive
    return FailureKind.UNAVAILABLE if kinds == {FailureKind.UNAVAILABLE} else FailureKind.RETRYABLE


def _message(exc: BaseException) -> str:
    try:
        return str(exc)
    except Exception as broken:  # noqa: BLE001 - a user's __str__ may do anything
        return f"(its message cannot be read: {type(broken).__name__})"


def _stack(exc: BaseException) -> str:
    try:
        lines = traceback.format_exception(exc)
    except Exception as broken:  # noqa: BLE001 - formatting calls the user's code
        return f"(its stack cannot be read: {type(broken).__name__})"
    # The end is kept, because it shows where the error happened.
    return redact_and_truncate(_clean("".join(lines)), STACK_LIMIT, end=True)


def _truncate(message: str) -> str:
    return redact_and_truncate(_clean(message), MESSAGE_LIMIT)


def _clean(text: str) -> str:
    # A lone surrogate would make the whole settlement unwritable.
    return text.encode("utf-8", "replace").decode("utf-8")


async def invoke(spec: TaskSpec, claim: Claim, context: Context | None) -> Outcome:
    """Run an `async def`.

    Everything it raises, including `SystemExit` and cancellation, becomes an outcome.
    """
    try:
        arguments = spec.bind(claim, context)
    except Exception as exc:  # noqa: BLE001 - decoding calls the user's validators
        return invalid_payload(exc)
    try:
        value = await spec.function(**arguments)
    except BaseException as exc:  # noqa: BLE001 - the user's code
        _end(context)
        return outcome_of(exc, spec.policy)
    return _to_outcome(spec, value, _end(context))


def invoke_sync(spec: TaskSpec, claim: Claim, context: Context | None) -> Outcome:
    """Run a plain function in this thread."""
    try:
        arguments = spec.bind(claim, context)
    except Exception as exc:  # noqa: BLE001 - decoding calls the user's validators
        return invalid_payload(exc)
    try:
        value = spec.function(**arguments)
    except BaseException as exc:  # noqa: BLE001 - the user's code
        _end(context)
        return outcome_of(exc, spec.policy)
    return _to_outcome(spec, value, _end(context))


def _end(context: Context | None) -> list[str]:
    """Close the context's coroutines; returns the calls that were not awaited or not done."""
    return [] if context is None else context.begun.end()


def _to_outcome(spec: TaskSpec, value: Any, left: list[str]) -> Outcome:
    if left:
        if inspect.iscoroutine(value):
            value.close()
        return not_awaited(left, inspect.iscoroutinefunction(spec.function))
    try:
        return Returned(spec.results.encode(value, spec.payload_limit))
    except Exception as exc:  # noqa: BLE001 - encoding calls the user's models
        if not inspect.iscoroutine(value):
            return invalid_result(exc)
    value.close()
    advice = "decorate the `async def` itself, or wrap it in one"
    return invalid_result(InvalidResult(f"task {spec.name!r} returned a coroutine; {advice}"))
