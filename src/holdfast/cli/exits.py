"""Exit codes that mean something, and the one line a person sees when something is wrong.

Scripts may rely on the codes: 3 and 5 are worth another try, 2, 4 and 6 are not.
"""

from __future__ import annotations

import sys
import traceback
from enum import IntEnum

from holdfast.cli.output import visible
from holdfast.cli.redact import redact
from holdfast.errors import (
    Conflict,
    Denied,
    Forbidden,
    HoldfastError,
    IntakeRefused,
    LedgerRefused,
    NotDurableYet,
    SchemaMismatch,
    TransitionInvalid,
    Unauthorized,
    Unavailable,
    Unknown,
    UsageError,
    WaitTimeout,
)


class ExitCode(IntEnum):
    """What the shell gets."""

    meaning: str

    def __new__(cls, value: int, meaning: str) -> ExitCode:
        code = int.__new__(cls, value)
        code._value_ = value
        code.meaning = meaning
        return code

    OK = 0, "done"
    FAILED = 1, "what was asked for failed: the job ended without a result, or `doctor` found a danger"
    USAGE = (
        2,
        "wrong call: unknown option, app, task, job or id, misfit arguments, a bad setting, another release's ledger",
    )
    UNAVAILABLE = 3, "the engine or a broker does not answer, or the queue takes no new jobs; safe to try again"
    ILLEGAL = 4, "no legal move (`WF_STATE_TRANSITION_INVALID`), or decided already (`CONFLICT`); nothing was changed"
    TIMEOUT = 5, "not finished within the time given; the job goes on"
    REFUSED = 6, "not allowed: no valid token, a role that may not, two people are needed, or a guard says no"


def exit_code(error: HoldfastError) -> ExitCode:
    """The code for an error."""
    match error:
        case UsageError() | SchemaMismatch() | Unknown() | LedgerRefused():
            return ExitCode.USAGE
        case Unavailable() | IntakeRefused():
            return ExitCode.UNAVAILABLE
        case TransitionInvalid() | Conflict():
            return ExitCode.ILLEGAL
        case WaitTimeout() | NotDurableYet():
            return ExitCode.TIMEOUT
        case Unauthorized() | Forbidden() | Denied():
            return ExitCode.REFUSED
        case _:
            return ExitCode.FAILED


def report(error: HoldfastError, *, debug: bool) -> ExitCode:
    """Tell the person, on stderr: one line, or with `debug` the whole traceback before it."""
    if debug:
        print(visible(redact("".join(traceback.format_exception(error)))), file=sys.stderr, end="")
    message = visible(" ".join(redact(str(error)).split()))
    print(f"holdfast: {error.code}: {message}", file=sys.stderr)
    return exit_code(error)
