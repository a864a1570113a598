"""Errors as `application/problem+json` (RFC 9457): one table from error class to status.

Clients get the stable code and what to do. Messages of stores and drivers go only to the log.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import msgspec

from holdfast import errors
from holdfast.observe.redact import redact

_log: Final = logging.getLogger("holdfast.http")

CONTENT_TYPE: Final = "application/problem+json"
#: docs/reference/failure-codes.md explains every code.
_TYPE_BASE: Final = "urn:holdfast:problem:"
#: Value of `Retry-After`, in seconds.
RETRY_AFTER_S: Final = 1
INTERNAL: Final = "INTERNAL_ERROR"


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of every error response."""

    type: str
    title: str
    status: int
    detail: str
    #: Stable between releases.
    code: str
    #: Path of the request.
    instance: str
    #: The job concerned.
    job_id: str | None = None
    #: For an illegal move: the current state …
    from_state: str | None = None
    #: … and the requested one.
    to_state: str | None = None
    #: Reasons of the guards that denied the job, and their policy names.
    reasons: list[str] | None = None
    policies: list[str] | None = None


class HttpError(errors.HoldfastError):
    """An error that exists only over HTTP."""

    status = 400
    headers: tuple[tuple[str, str], ...] = ()


class BadRequest(HttpError):
    """The body is not JSON."""

    code = "MALFORMED_REQUEST"


class Unprocessable(HttpError):
    """JSON, parameters or headers that are invalid for the schema."""

    status = 422
    code = "INVALID_REQUEST"


class NoSuchPath(HttpError):
    status = 404
    code = "NO_SUCH_PATH"

    def __init__(self) -> None:
        super().__init__("path not found; see /openapi.json for all paths")


class MethodNotAllowed(HttpError):
    status = 405
    code = "METHOD_NOT_ALLOWED"

    def __init__(self, method: str, allowed: tuple[str, ...]) -> None:
        super().__init__(f"{method} is not allowed for this path; use {', '.join(allowed)}")
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


class RequestTooSlow(HttpError):
    status = 408
    code = "REQUEST_TOO_SLOW"

    def __init__(self) -> None:
        super().__init__("the request took too long to arrive; send it again")


class AddressTooLong(HttpError):
    status = 414
    code = "ADDRESS_TOO_LONG"

    def __init__(self) -> None:
        super().__init__("the address of the request is too long; use fewer or shorter parameters")


class HeadersTooLarge(HttpError):
    status = 431
    code = "HEADERS_TOO_LARGE"

    def __init__(self) -> None:
        super().__init__("the request has too many headers, or they are too large; send fewer")


class TooManyConnections(HttpError):
    """Connections to the process, or requests that wait on one connection."""

    status = 503
    code = "TOO_MANY_CONNECTIONS"

    def __init__(self) -> None:
        super().__init__("too many connections, or requests that wait on one connection; retry later")


#: The first matching class applies. A text replaces the error's own, which may reveal hosts and drivers.
_TABLE: Final[tuple[tuple[type[errors.HoldfastError], int, str], ...]] = (
    (errors.NoLedger, 503, ""),
    (
        errors.TaskNotAnnounced,
        404,
        'no worker has announced this task; GET /api/v1/tasks lists those that are known, "force": true submits it',
    ),
    (errors.UnknownTask, 404, "task not found; /openapi.json lists the tasks if you send a token"),
    (errors.UnknownJob, 404, ""),
    (errors.PayloadTooLarge, 413, ""),
    (errors.UsageError, 422, ""),
    (errors.Denied, 403, ""),
    (errors.GuardFailed, 503, "a guard failed, so the job was not accepted; retry"),
    (errors.Unauthorized, 401, ""),
    (errors.Forbidden, 403, ""),
    (errors.NotFound, 404, ""),
    (errors.Conflict, 409, ""),
    (errors.TransitionInvalid, 409, ""),
    (errors.StaleLease, 409, ""),
    (errors.FeedFull, 503, "the queue accepts no jobs because its ledger is behind; retry"),
    (errors.FeedDetached, 503, "the queue accepts no jobs because its ledger is not ready; retry"),
    (errors.IntakeRefused, 429, ""),
    (errors.NotDurableYet, 503, ""),
    (errors.SchemaMismatch, 503, "the ledger has the schema of another release; ask the operator of this service"),
    (errors.EngineUnavailable, 503, "the engine is unreachable; accepted jobs are safe, retry"),
    (errors.LedgerUnavailable, 503, "the ledger is unreachable; jobs are still accepted and run, retry"),
    (errors.Unavailable, 503, "a dependency is unavailable; retry"),
)

#: Errors of any operation that reads jobs.
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
    408: "Too slow",
    409: "Conflict",
    410: "Gone",
    413: "Too large",
    414: "Address too long",
    415: "Unsupported media type",
    422: "Invalid request",
    429: "Intake refused",
    431: "Headers too large",
    500: "Internal error",
    503: "Unavailable",
}
_WAIT: Final = frozenset({429, 503})


class PayloadRejected(HttpError):
    """An edited payload that the dead letter's task does not accept."""

    status = 409
    code = "INVALID_PAYLOAD"


class ItemRefused(HttpError):
    """One job of a bulk request is invalid; none was submitted."""

    def __init__(self, path: str, problem: Problem) -> None:
        super().__init__(f"{path}: {problem.detail}; nothing was submitted")
        self.status = problem.status
        self.code = problem.code


def status_of(kind: type[errors.HoldfastError]) -> int:
    """HTTP status for errors of this class."""
    if issubclass(kind, HttpError):
        return kind.status
    return next((status for known, status, _ in _TABLE if issubclass(kind, known)), 500)


def problem_of(error: Exception, instance: str) -> tuple[Problem, list[tuple[bytes, bytes]]]:
    """Return the problem document of an error and its headers.

    Unexpected errors are logged and reported as 500.
    """
    status = error.status if isinstance(error, HttpError) else 500
    if isinstance(error, errors.HoldfastError) and not isinstance(error, HttpError):
        status = status_of(type(error))
    if status == 500 or not isinstance(error, errors.HoldfastError):
        _log.error("request to %s failed unexpectedly", instance, exc_info=error)
        return _problem(500, INTERNAL, "internal error; see the server log", instance), []
    if status == 503:
        _log.warning("request to %s not served: %s", instance, error)
    is_private = isinstance(error, errors.IntakeLimited) and not error.is_disclosed
    text = redact(error.public if is_private else str(error))  # type: ignore[attr-defined]
    if not isinstance(error, HttpError):
        text = next(replacement or text for known, _, replacement in _TABLE if isinstance(error, known))
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
        case errors.NotDurableYet() | errors.AlreadyReplayed() | errors.IdempotencyKeyReused():
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
