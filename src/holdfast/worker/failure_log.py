"""Log record of an attempt that did not succeed, with the exception and the job's fields.

A retry is a warning, a job that failed for good an error. The message is redacted and bounded. The exception is
passed unchanged as `exc_info`, for handlers like Sentry's; holdfast's formatters redact its traceback.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from holdfast.core.job import Claim, Failure
from holdfast.core.verdict import GUARD_DENIED, DeadLetter, Hold, Outcome, Raised, Release, RetryLater, Suspend, Verdict
from holdfast.observe.logs import log_fields

_log: Final = logging.getLogger("holdfast.worker")


class ChildTaskError(Exception):
    """Failure of a task in a child process. Its `__cause__` has the child's traceback."""


class ChildTraceback(Exception):
    """The traceback of a child process, as text."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def log_ending(claim: Claim, verdict: Verdict, outcome: Outcome) -> None:
    """Log the verdict on an attempt, unless it succeeded. Never raises."""
    try:
        _log_ending(claim, verdict, _error(outcome) if isinstance(outcome, Raised) else None)
    except Exception as exc:  # noqa: BLE001 - the user's log handlers may raise anything
        _log.error("could not log the failure of job %s: %s", claim.job_id, type(exc).__name__)


def _error(outcome: Raised) -> BaseException | None:
    """The exception raised, or a substitute for one raised in a child process."""
    if outcome.error is not None or not outcome.failure.stack:
        return outcome.error
    error = ChildTaskError(_describe(outcome.failure))
    error.__cause__ = ChildTraceback(outcome.failure.stack)
    return error


def _log_ending(claim: Claim, verdict: Verdict, error: BaseException | None) -> None:
    match verdict:
        case RetryLater(counts=False, failure=failure):
            # A warning only once per outage: a job may wait for days.
            first = not claim.meta.unavailable_count
            level = logging.WARNING if first else logging.INFO
            text = "job %s (%s) waits for a dependency, next attempt in %g s: %s"
            arguments: tuple[Any, ...] = (claim.job_id, claim.task, verdict.delay_ms / 1000, _describe(failure))
            _log.log(level, text, *arguments, exc_info=error if first else None, extra=_fields(claim, failure))
        case RetryLater(failure=failure, delay_ms=delay_ms):
            arguments = (claim.attempt, claim.job_id, claim.task, delay_ms / 1000, _describe(failure))
            text = "attempt %d of job %s (%s) failed, retry in %g s: %s"
            _log.warning(text, *arguments, exc_info=error, extra=_fields(claim, failure))
        case DeadLetter(failure=failure) | Suspend(failure=failure):
            became = "is suspended" if isinstance(verdict, Suspend) else "failed for good"
            # A guard's denial is a decision, not an error.
            level = logging.WARNING if failure.code == GUARD_DENIED else logging.ERROR
            arguments = (claim.job_id, claim.task, became, _describe(failure))
            _log.log(level, "job %s (%s) %s: %s", *arguments, exc_info=error, extra=_fields(claim, failure))
        case Hold(message=message):
            _log.info("job %s (%s) waits for approval: %s", claim.job_id, claim.task, message, extra=log_fields(claim))
        case Release(unknown=True):
            pass  # `UnknownJobs` logs one warning for all jobs of a task
        case Release(message=message):
            _log.debug("job %s (%s) was released: %s", claim.job_id, claim.task, message, extra=log_fields(claim))


def _fields(claim: Claim, failure: Failure) -> dict[str, Any]:
    return log_fields(claim) | {"code": failure.code, "error_type": failure.type}


def _describe(failure: Failure) -> str:
    return ": ".join(part for part in (failure.code, failure.type, failure.message) if part)
