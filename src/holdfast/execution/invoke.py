"""Call a task's function and turn what it returns or raises into an outcome (requirements Y2, Y8).

It never raises what the user's code raised. It behaves the same on the event loop, in a thread, in a child process and
in inline mode. What is kept of an exception is bounded and redacted.
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
    NoLedger,
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

#: Whatever the task's policy says of exceptions: nobody but a person can decide.
_UNDECIDED: Final = (EffectInDoubt, StepMismatch)


def outcome_of(exc: BaseException, policy: TaskPolicy) -> Outcome:
    """The user's code ended with this: it failed, it asks people, or it sleeps."""
    if (asked := _asked(exc)) is not None:
        return ApprovalNeeded(_said(str(asked)), asked.ask)
    if (asleep := _asleep(exc)) is not None:
        return Deferred(_said(str(asleep)), asleep.delay_ms, started=True)
    return failure_outcome(exc, policy)


def failure_outcome(exc: BaseException, policy: TaskPolicy) -> Raised:
    """The user's code raised this."""
    kind = _kind(exc, policy)
    if kind is not FailureKind.IN_DOUBT:
        return Raised(kind, describe_failure(_CODES[kind], exc), exc)
    undecided = list(_undecided(exc))
    # A group's own message names no key; these do, and say what to do.
    message = "; ".join(map(_message, undecided))
    return Raised(kind, Failure(undecided[0].code, _said(message), type_name(exc), _stack(exc)), exc)


def suspend_if_in_doubt(verdict: Verdict, undecided: Mapping[str, str]) -> Verdict:
    """A run that failed for good and left effects in doubt: a person decides, whatever the retry policy says."""
    if not undecided or not isinstance(verdict, DeadLetter):
        return verdict
    error = verdict.failure
    said = f"{error.type or error.code}: {error.message}"
    message = "; ".join(str(EffectInDoubt(key, why)) for key, why in undecided.items())
    if said not in message:
        message = f"{message}; the run ended with {said}"
    return Suspend(Failure(EffectInDoubt.code, _said(message), error.type, error.stack))


def invalid_payload(exc: Exception) -> Raised:
    """The payload does not fit the task: a dead letter at once."""
    return Raised(FailureKind.INVALID, describe_failure(_payload_code(exc), exc), exc)


def invalid_result(exc: Exception) -> Raised:
    """The function ran, but what it returned cannot be kept. Running it again would give the same."""
    return Raised(FailureKind.FATAL, describe_failure(_payload_code(exc), exc), exc)


def not_awaited(calls: Sequence[str], is_async: bool) -> Raised:
    """The function returned before what it had begun was done. Running it again would be no better."""
    advice = "write `await`" if is_async else "use ctx.blocking in a plain function"
    more = f" (and {len(calls) - 1} more)" if len(calls) > 1 else ""
    message = f"{calls[0]} when the function returned{more}; {advice}"
    return Raised(FailureKind.FATAL, Failure(EFFECT_NOT_AWAITED, _said(message)))


def unknown_task(task: str, known: tuple[str, ...]) -> Raised:
    """This worker serves the queue but has no such task.

    A dead letter, not a retry: the job cannot run here however often it is tried, an operator sees at once
    what is missing, and once a worker has the task the dead letter is requeued. Deploy workers before the
    code that submits a new task.
    """
    return Raised(FailureKind.INVALID, Failure(UnknownTask.code, str(UnknownTask(task, known)), UnknownTask.__name__))


def denied(exc: Denied) -> Raised:
    """A guard says no to a job that was accepted, or came from elsewhere."""
    return Raised(FailureKind.DENIED, Failure(GUARD_DENIED, _said(str(exc)), Denied.__name__))


def guard_failed(exc: Exception) -> Raised:
    """A guard could not look at a job, which therefore does not run: tried again like any failure of a run."""
    if isinstance(exc, InvalidPayload):
        return invalid_payload(exc)
    if isinstance(exc, NoLedger):
        return approval_impossible(exc)
    if isinstance(exc, Unavailable):
        return Raised(FailureKind.UNAVAILABLE, describe_failure(DEPENDENCY_UNAVAILABLE, exc), exc)
    return Raised(FailureKind.RETRYABLE, describe_failure(GuardFailed.code, exc), exc)


def approval_impossible(exc: NoLedger) -> Raised:
    """People are to decide, and there is no ledger to keep the question: it would wait for ever."""
    return Raised(FailureKind.FATAL, describe_failure(exc.code, exc))


def timed_out(timeout_s: float, cancelled: BaseException | None = None) -> Raised:
    """It had its time; a retry may be quicker. `cancelled`: how its code ended, which shows where it was."""
    message = f"the task ran longer than its timeout of {timeout_s:g} s"
    error = TimeoutError(message)
    error.__cause__ = cancelled
    return Raised(FailureKind.RETRYABLE, Failure(TASK_TIMEOUT, message, TimeoutError.__name__), error)


def process_died(exit_code: int | None) -> Raised:
    """The child process ended in mid-run: killed, out of memory, a crash in native code."""
    how = f"was killed by signal {-exit_code}" if exit_code is not None and exit_code < 0 else f"exited ({exit_code})"
    return Raised(FailureKind.RETRYABLE, Failure(PROCESS_DIED, f"the child process {how} before the task was done"))


def describe_failure(code: str, exc: BaseException) -> Failure:
    """What is kept of an exception: bounded, without secrets, and writable as UTF-8 whatever it holds."""
    return Failure(code, _said(_message(exc)), type_name(exc), _stack(exc))


def type_name(exc: BaseException) -> str:
    """The exception's type as an operator would look for it."""
    kind = type(exc)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _payload_code(exc: Exception) -> str:
    # A user's own validator may raise anything.
    return exc.code if isinstance(exc, HoldfastError) else InvalidPayload.code


def _asked(exc: BaseException) -> ApprovalInterrupt | None:
    """Of several questions at the same time the first is asked; one that others sleep beside is asked, too."""
    if isinstance(exc, BaseExceptionGroup):
        questions = [_asked(inner) for inner in exc.exceptions]
        waiting = [question or _asleep(inner) for question, inner in zip(questions, exc.exceptions, strict=True)]
        return next(filter(None, questions), None) if all(waiting) else None
    return exc if isinstance(exc, ApprovalInterrupt) else None


def _asleep(exc: BaseException) -> SleepInterrupt | None:
    """Several may sleep at the same time: the first to wake up decides."""
    if isinstance(exc, BaseExceptionGroup):
        sleepers = [_asleep(inner) for inner in exc.exceptions]
        return (
            min((one for one in sleepers if one), key=lambda one: one.delay_ms, default=None) if all(sleepers) else None
        )
    return exc if isinstance(exc, SleepInterrupt) else None


def _undecided(exc: BaseException) -> Iterator[EffectInDoubt | StepMismatch]:
    if isinstance(exc, BaseExceptionGroup):
        for inner in exc.exceptions:
            yield from _undecided(inner)
    elif isinstance(exc, _UNDECIDED):
        yield exc


def _kind(exc: BaseException, policy: TaskPolicy) -> FailureKind:
    if isinstance(exc, _UNDECIDED):
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
    """Of what a `TaskGroup` raises: what a person must decide goes first, then fatal ones; an outage if it is all."""
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
    # The end is kept: that is where it happened.
    return redact_and_truncate(_clean("".join(lines)), STACK_LIMIT, end=True)


def _said(message: str) -> str:
    return redact_and_truncate(_clean(message), MESSAGE_LIMIT)


def _clean(text: str) -> str:
    # A lone surrogate would make the whole settlement unwritable.
    return text.encode("utf-8", "replace").decode("utf-8")


async def invoke(plan: TaskSpec, claim: Claim, context: Context | None) -> Outcome:
    """Run an `async def`. Whatever it raises, `SystemExit` and cancellation included, is an outcome."""
    try:
        arguments = plan.bind(claim, context)
    except Exception as exc:  # noqa: BLE001 - decoding calls the user's validators
        return invalid_payload(exc)
    try:
        value = await plan.function(**arguments)
    except BaseException as exc:  # noqa: BLE001 - the user's code
        _end(context)
        return outcome_of(exc, plan.policy)
    return _returned(plan, value, _end(context))


def invoke_sync(plan: TaskSpec, claim: Claim, context: Context | None) -> Outcome:
    """Run a plain function in this thread."""
    try:
        arguments = plan.bind(claim, context)
    except Exception as exc:  # noqa: BLE001 - decoding calls the user's validators
        return invalid_payload(exc)
    try:
        value = plan.function(**arguments)
    except BaseException as exc:  # noqa: BLE001 - the user's code
        _end(context)
        return outcome_of(exc, plan.policy)
    return _returned(plan, value, _end(context))


def _end(context: Context | None) -> list[str]:
    """What the function has begun and not awaited."""
    return [] if context is None else context.begun.end()


def _returned(plan: TaskSpec, value: Any, left: list[str]) -> Outcome:
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
        return invalid_result(exc)
