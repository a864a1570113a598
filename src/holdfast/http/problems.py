"""Errors as `application/problem+json` (RFC 9457): one table from an error's class to its status.

An outsider learns the stable code and what to do. What stores and drivers say stays in the log.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import msgspec

from holdfast import errors
from holdfast.observe.redact import redact

_log: Final = logging.getLogger("holdfast.http")

CONTENT_TYPE: Final = "application/problem+json"
#: Every code is explained in docs/reference/failure-codes.md.
_TYPE_BASE: Final = "urn:holdfast:problem:"
#: How long whoever came at a bad moment should wait, in seconds.
RETRY_AFTER_S: Final = 1
INTERNAL: Final = "INTERNAL_ERROR"


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What went wrong, as every error answer says it."""

    type: str
    title: str
    status: int
    detail: str
    #: Stable between releases.
    code: str
    #: The path that was asked for.
    instance: str
    #: The job it is about.
    job_id: str | None = None
    #: An illegal move: where the job was …
    from_state: str | None = None
    #: … and where it should have gone.
    to_state: str | None = None
    #: A guard's reasons, and the names of its rules.
    reasons: list[str] | None = None
    policies: list[str] | None = None


class HttpError(errors.HoldfastError):
    """What only HTTP can get wrong."""

    status = 400
    headers: tuple[tuple[str, str], ...] = ()


class BadRequest(HttpError):
    """Not even JSON."""

    code = "MALFORMED_REQUEST"


class Unprocessable(HttpError):
    """JSON, parameters or headers that do not fit the schema."""

    status = 422
    code = "INVALID_REQUEST"


class NoSuchPath(HttpError):
    status = 404
    code = "NO_SUCH_PATH"

    def __init__(self) -> None:
        super().__init__("there is nothing at this path; /openapi.json lists all there is")


class MethodNotAllowed(HttpError):
    status = 405
    code = "METHOD_NOT_ALLOWED"

    def __init__(self, method: str, allowed: tuple[str, ...]) -> None:
        super().__init__(f"{method} is not for this path; it knows {', '.join(allowed)}")
        self.headers = (("allow", ", ".join(allowed)),)


class BodyTooLarge(HttpError):
    status = 413
    code = "BODY_TOO_LARGE"

    def __init__(self, limit: int) -> None:
        super().__init__(f"the body has more than {limit:,} bytes; pass a reference instead of the data")


class UnsupportedMediaType(HttpError):
    status = 415
    code = "UNSUPPORTED_MEDIA_TYPE"

    def __init__(self) -> None:
        super().__init__("send the body as application/json")


#: The first class that fits counts. A text replaces the error's own, which may tell of hosts and drivers.
_TABLE: Final[tuple[tuple[type[errors.HoldfastError], int, str], ...]] = (
    (errors.NoLedger, 503, ""),
    (errors.UnknownTask, 404, "no task of that name is known here; /openapi.json lists them for whoever has a token"),
    (errors.UnknownJob, 404, ""),
    (errors.PayloadTooLarge, 413, ""),
    (errors.UsageError, 422, ""),
    (errors.Denied, 403, ""),
    (errors.GuardFailed, 503, "a guard could not look at this job, so it may not pass; try again"),
    (errors.Unauthorized, 401, ""),
    (errors.Forbidden, 403, ""),
    (errors.NotFound, 404, ""),
    (errors.Conflict, 409, ""),
    (errors.TransitionInvalid, 409, ""),
    (errors.StaleLease, 409, ""),
    (errors.FeedFull, 503, "the queue takes no new jobs: its ledger is behind; try again"),
    (errors.FeedDetached, 503, "the queue takes no new jobs: its ledger is not ready; try again"),
    (errors.IntakeRefused, 429, ""),
    (errors.NotDurableYet, 503, ""),
    (errors.SchemaMismatch, 503, "the ledger is of another release; whoever runs this service knows what to do"),
    (errors.EngineUnavailable, 503, "the engine does not answer; what it accepted is safe, try again"),
    (errors.LedgerUnavailable, 503, "the ledger does not answer; jobs are accepted and run all the same, try again"),
    (errors.Unavailable, 503, "something this needs is down; try again"),
)

#: What any operation that looks at jobs may meet.
DOWN: Final = (
    errors.EngineUnavailable,
    errors.EngineRefused,
    errors.LedgerUnavailable,
    errors.SchemaMismatch,
    errors.NoLedger,
)

TITLES: Final = {
    400: "Malformed request",
    401: "Not authenticated",
    403: "Not allowed",
    404: "Not found",
    405: "Method not allowed",
    409: "Conflict",
    410: "Gone",
    413: "Too large",
    415: "Unsupported media type",
    422: "Invalid request",
    429: "Intake refused",
    500: "Internal error",
    503: "Unavailable",
}
_WAIT: Final = frozenset({429, 503})


class PayloadRejected(HttpError):
    """An edited payload that the letter's task cannot be called with."""

    status = 409
    code = "INVALID_PAYLOAD"


class ItemRefused(HttpError):
    """One of many cannot be: none was taken."""

    def __init__(self, place: str, problem: Problem) -> None:
        super().__init__(f"{place}: {problem.detail}; nothing was submitted")
        self.status = problem.status
        self.code = problem.code


def status_of(kind: type[errors.HoldfastError]) -> int:
    """The status that an error of this class is answered with."""
    if issubclass(kind, HttpError):
        return kind.status
    return next((status for known, status, _ in _TABLE if issubclass(kind, known)), 500)


def problem_of(error: Exception, instance: str) -> tuple[Problem, list[tuple[bytes, bytes]]]:
    """The document of an error, and the headers that go with it. What nobody foresaw is logged, and told as a 500."""
    status = error.status if isinstance(error, HttpError) else 500
    if isinstance(error, errors.HoldfastError) and not isinstance(error, HttpError):
        status = status_of(type(error))
    if status == 500 or not isinstance(error, errors.HoldfastError):
        _log.error("a request to %s failed in an unexpected way", instance, exc_info=error)
        return _problem(500, INTERNAL, "this should not have happened; the server's log tells more", instance), []
    if status == 503:
        _log.warning("a request to %s could not be served: %s", instance, error)
    text = redact(str(error))
    if not isinstance(error, HttpError):
        text = next(said or text for known, _, said in _TABLE if isinstance(error, known))
    return _problem(status, error.code, text, instance, **_more(error)), _headers(error, status)


def _problem(status: int, code: str, detail: str, instance: str, **more: Any) -> Problem:
    return Problem(
        type=_TYPE_BASE + code.lower().replace("_", "-"),
        title=TITLES[status],
        status=status,
        detail=detail,
        code=code,
        instance=instance,
        **more,
    )


def _more(error: errors.HoldfastError) -> dict[str, Any]:
    match error:
        case errors.TransitionInvalid():
            states = {"from_state": error.from_state, "to_state": error.to_state}
            return {"job_id": error.job_id} | {name: state for name, state in states.items() if state}
        case errors.Denied():
            return {"reasons": [redact(reason) for reason in error.reasons], "policies": list(error.policies)}
        case errors.NotDurableYet():
            return {"job_id": error.job_id}
        case _:
            return {}


def _headers(error: errors.HoldfastError, status: int) -> list[tuple[bytes, bytes]]:
    headers = [(name.encode(), value.encode()) for name, value in getattr(error, "headers", ())]
    if status == 401:
        headers.append((b"www-authenticate", b'Bearer realm="holdfast"'))
    if status in _WAIT:
        headers.append((b"retry-after", str(RETRY_AFTER_S).encode()))
    return headers
