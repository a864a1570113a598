"""From an exception to an outcome: what sort of failure it was, and what is kept of it (requirements Y2, Y8)."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from holdfast.core.job import Failure
from holdfast.core.verdict import (
    DEPENDENCY_UNAVAILABLE,
    EFFECT_NOT_AWAITED,
    GUARD_DENIED,
    PROCESS_DIED,
    TASK_ERROR,
    TASK_FATAL,
    TASK_TIMEOUT,
    AskedApproval,
    DeadLetter,
    GaveBack,
    Kind,
    Outcome,
    Raised,
    Suspend,
    Verdict,
)
from holdfast.effects.steps import Asleep
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
from holdfast.guard.asking import Asked
from holdfast.observe.redact import bounded
from holdfast.worker.plan import Policy

MESSAGE_LIMIT: Final = 2_000
STACK_LIMIT: Final = 8_000

_CODES: Final = {
    Kind.RETRYABLE: TASK_ERROR,
    Kind.FATAL: TASK_FATAL,
    Kind.UNAVAILABLE: DEPENDENCY_UNAVAILABLE,
    Kind.MISFIT: TASK_FATAL,
}

#: Whatever the task's policy says of exceptions: nobody but a person can decide.
_UNDECIDED: Final = (EffectInDoubt, StepMismatch)


def ended(exc: BaseException, policy: Policy) -> Outcome:
    """The user's code ended with this: it failed, it asks people, or it sleeps."""
    if (asked := _asked(exc)) is not None:
        return AskedApproval(_said(str(asked)), asked.ask)
    if (asleep := _asleep(exc)) is not None:
        return GaveBack(_said(str(asleep)), asleep.delay_ms, started=True)
    return raised(exc, policy)


def raised(exc: BaseException, policy: Policy) -> Raised:
    """The user's code raised this."""
    kind = _kind(exc, policy)
    if kind is not Kind.UNDECIDED:
        return Raised(kind, failure(_CODES[kind], exc), exc)
    undecided = list(_undecided(exc))
    # A group's own message names no key; these do, and say what to do.
    message = "; ".join(map(_message, undecided))
    return Raised(kind, Failure(undecided[0].code, _said(message), type_name(exc), _stack(exc)), exc)


def left_undecided(verdict: Verdict, undecided: Mapping[str, str]) -> Verdict:
    """A run that failed for good and left effects in doubt: a person decides, whatever the retry policy says."""
    if not undecided or not isinstance(verdict, DeadLetter):
        return verdict
    error = verdict.failure
    said = f"{error.type or error.code}: {error.message}"
    message = "; ".join(str(EffectInDoubt(key, why)) for key, why in undecided.items())
    if said not in message:
        message = f"{message}; the run ended with {said}"
    return Suspend(Failure(EffectInDoubt.code, _said(message), error.type, error.stack))


def misfit(exc: Exception) -> Raised:
    """The payload does not fit the task: a dead letter at once."""
    return Raised(Kind.MISFIT, failure(_payload_code(exc), exc), exc)


def bad_result(exc: Exception) -> Raised:
    """The function ran, but what it returned cannot be kept. Running it again would give the same."""
    return Raised(Kind.FATAL, failure(_payload_code(exc), exc), exc)


def not_awaited(calls: Sequence[str], is_async: bool) -> Raised:
    """The function returned before what it had begun was done. Running it again would be no better."""
    advice = "write `await`" if is_async else "use ctx.blocking in a plain function"
    more = f" (and {len(calls) - 1} more)" if len(calls) > 1 else ""
    message = f"{calls[0]} when the function returned{more}; {advice}"
    return Raised(Kind.FATAL, Failure(EFFECT_NOT_AWAITED, _said(message)))


def unknown_task(task: str, known: tuple[str, ...]) -> Raised:
    """This worker serves the queue but has no such task.

    A dead letter, not a retry: the job cannot run here however often it is tried, an operator sees at once
    what is missing, and once a worker has the task the dead letter is requeued. Deploy workers before the
    code that submits a new task.
    """
    return Raised(Kind.MISFIT, Failure(UnknownTask.code, str(UnknownTask(task, known)), UnknownTask.__name__))


def denied(exc: Denied) -> Raised:
    """A guard says no to a job that was accepted, or came from elsewhere."""
    return Raised(Kind.DENIED, Failure(GUARD_DENIED, _said(str(exc)), Denied.__name__))


def guard_failed(exc: Exception) -> Raised:
    """A guard could not look at a job, which therefore does not run: tried again like any failure of a run."""
    if isinstance(exc, InvalidPayload):
        return misfit(exc)
    if isinstance(exc, NoLedger):
        return nobody_to_ask(exc)
    if isinstance(exc, Unavailable):
        return Raised(Kind.UNAVAILABLE, failure(DEPENDENCY_UNAVAILABLE, exc), exc)
    return Raised(Kind.RETRYABLE, failure(GuardFailed.code, exc), exc)


def nobody_to_ask(exc: NoLedger) -> Raised:
    """People are to decide, and there is no ledger to keep the question: it would wait for ever."""
    return Raised(Kind.FATAL, failure(exc.code, exc))


def timed_out(timeout_s: float, cancelled: BaseException | None = None) -> Raised:
    """It had its time; a retry may be quicker. `cancelled`: how its code ended, which shows where it was."""
    message = f"the task ran longer than its timeout of {timeout_s:g} s"
    error = TimeoutError(message)
    error.__cause__ = cancelled
    return Raised(Kind.RETRYABLE, Failure(TASK_TIMEOUT, message, TimeoutError.__name__), error)


def process_died(exit_code: int | None) -> Raised:
    """The child process ended in mid-run: killed, out of memory, a crash in native code."""
    how = f"was killed by signal {-exit_code}" if exit_code is not None and exit_code < 0 else f"exited ({exit_code})"
    return Raised(Kind.RETRYABLE, Failure(PROCESS_DIED, f"the child process {how} before the task was done"))


def failure(code: str, exc: BaseException) -> Failure:
    """What is kept of an exception: bounded, without secrets, and writable as UTF-8 whatever it holds."""
    return Failure(code, _said(_message(exc)), type_name(exc), _stack(exc))


def type_name(exc: BaseException) -> str:
    """The exception's type as an operator would look for it."""
    kind = type(exc)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _payload_code(exc: Exception) -> str:
    # A user's own validator may raise anything.
    return exc.code if isinstance(exc, HoldfastError) else InvalidPayload.code


def _asked(exc: BaseException) -> Asked | None:
    """Of several questions at the same time the first is asked; one that others sleep beside is asked, too."""
    if isinstance(exc, BaseExceptionGroup):
        questions = [_asked(inner) for inner in exc.exceptions]
        waiting = [question or _asleep(inner) for question, inner in zip(questions, exc.exceptions, strict=True)]
        return next(filter(None, questions), None) if all(waiting) else None
    return exc if isinstance(exc, Asked) else None


def _asleep(exc: BaseException) -> Asleep | None:
    """Several may sleep at the same time: the first to wake up decides."""
    if isinstance(exc, BaseExceptionGroup):
        sleepers = [_asleep(inner) for inner in exc.exceptions]
        return (
            min((one for one in sleepers if one), key=lambda one: one.delay_ms, default=None) if all(sleepers) else None
        )
    return exc if isinstance(exc, Asleep) else None


def _undecided(exc: BaseException) -> Iterator[EffectInDoubt | StepMismatch]:
    if isinstance(exc, BaseExceptionGroup):
        for inner in exc.exceptions:
            yield from _undecided(inner)
    elif isinstance(exc, _UNDECIDED):
        yield exc


def _kind(exc: BaseException, policy: Policy) -> Kind:
    if isinstance(exc, _UNDECIDED):
        return Kind.UNDECIDED
    if isinstance(exc, BaseExceptionGroup) and not isinstance(exc, policy.retry_on + policy.fatal_on):
        return _kind_of_group(exc, policy)
    if isinstance(exc, (Fatal, *policy.fatal_on)):
        return Kind.FATAL
    if isinstance(exc, (Unavailable, *policy.unavailable_on)):
        return Kind.UNAVAILABLE
    if policy.retry_on:
        return Kind.RETRYABLE if isinstance(exc, policy.retry_on) else Kind.FATAL
    return Kind.FATAL if isinstance(exc, UsageError) else Kind.RETRYABLE


def _kind_of_group(group: BaseExceptionGroup[BaseException], policy: Policy) -> Kind:
    """Of what a `TaskGroup` raises: what a person must decide goes first, then fatal ones; an outage if it is all."""
    kinds = {_kind(exc, policy) for exc in group.exceptions}
    for decisive in (Kind.UNDECIDED, Kind.FATAL):
        if decisive in kinds:
            return decisive
    return Kind.UNAVAILABLE if kinds == {Kind.UNAVAILABLE} else Kind.RETRYABLE


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
    return bounded(_clean("".join(lines)), STACK_LIMIT, end=True)


def _said(message: str) -> str:
    return bounded(_clean(message), MESSAGE_LIMIT)


def _clean(text: str) -> str:
    # A lone surrogate would make the whole settlement unwritable.
    return text.encode("utf-8", "replace").decode("utf-8")
