"""`/api/v1/dlq`: list, replay and discard dead letters (requirements D3–D5)."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType

from holdfast.core.principal import Permission
from holdfast.errors import (
    AlreadyReplayed,
    Conflict,
    Denied,
    IntakeRefused,
    InvalidPayload,
    NotFound,
    ReplayKeyReused,
    UsageError,
)
from holdfast.http.operation import Call, Decorator, Reply, ResponseSpec, operation, raw_arguments
from holdfast.http.problems import PayloadRejected
from holdfast.http.wire import (
    KEY_PATTERN,
    Arguments,
    BulkResponse,
    Cursor,
    Exactly,
    JobEventResponse,
    Limit,
    Name,
    NoQuery,
    ReasonRequest,
    RequestBase,
    Text,
    bulk_response,
    event_of_row,
    plain,
)
from holdfast.ledger.port.operators import DeadLetterStatus
from holdfast.ledger.queries.operator_filters import DeadLetterDetail, DeadLetterFilter, DeadLetterGroup, DeadLetterRow
from holdfast.operations.dead_letters import ReplayResult

_TAG: Final = "dlq"
_PATH: Final = "/api/v1/dlq"
_ONE: Final = f"{_PATH}/{{dlq_id}}"
#: Limits of one bulk replay: number of dead letters, and duration at the requested rate.
_MAX_DEAD_LETTERS: Final = 1_000
_MAX_DURATION_S: Final = 10.0
_FIRST: Final = {"dlq_id": "$response.body#/dead_letters/0/dlq_id"}


class DeadLetterResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A job that failed for good."""

    dlq_id: str
    job_id: str
    task: str
    queue: str
    tenant_id: str
    trace_id: str
    payload: Any
    error_code: str
    error: str
    retry_count: int
    failed_at: datetime
    status: DeadLetterStatus
    #: Equal for dead letters with the same kind of error.
    fingerprint: str
    #: Who requested the discard, and who confirmed it.
    requested_by: str | None
    confirmed_by: str | None
    reason: str | None
    #: The job of the latest replay, and the number of replays.
    replayed_as: str | None
    replay_count: int


class DeadLetterDetailResponse(DeadLetterResponse, frozen=True, kw_only=True):
    """A dead letter with stack, attempts and events."""

    stack: str
    #: All attempts.
    history: Any
    events: list[JobEventResponse]


class DeadLetterListResponse(msgspec.Struct, frozen=True, kw_only=True):
    dead_letters: list[DeadLetterResponse]
    cursor: str | None


class DeadLetterGroupsResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Dead letters by kind of error, most frequent first."""

    groups: list[DeadLetterGroup]


class PayloadDiffResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Changes of an edited payload, by JSON pointer. Added values have no `before`, removed ones no `after`."""

    changes: list[dict[str, Any]]


class DeadLetterQuery(RequestBase, frozen=True, kw_only=True):
    """Filter for dead letters. All given conditions must match."""

    status: tuple[DeadLetterStatus, ...] = ()
    task: Name | None = None
    queue: tuple[Name, ...] = ()
    tenant_id: Name | None = None
    error_code: Exactly | None = None
    fingerprint: Exactly | None = None
    error: Annotated[Text, Meta(description="Text contained in the error; case is ignored.")] | None = None
    since: Annotated[datetime, Meta(tz=True)] | None = None
    until: Annotated[datetime, Meta(tz=True)] | None = None


class DeadLetterListQuery(DeadLetterQuery, frozen=True, kw_only=True):
    """Filter and page parameters."""

    limit: Limit = 50
    cursor: Cursor | None = None


class PayloadRequest(RequestBase, frozen=True, kw_only=True):
    payload: Arguments


class ReplayRequest(ReasonRequest, frozen=True, kw_only=True):
    """Reason, and the edited payload if it was changed."""

    payload: Arguments | UnsetType = UNSET
    #: Replay although the latest replay is open or has succeeded.
    again: bool = False


class BulkReplayRequest(ReasonRequest, frozen=True, kw_only=True):
    """Replays all open dead letters that match. A dry run only counts them.

    Those that were replayed before are skipped and counted.
    """

    task: Name | None = None
    queue: tuple[Name, ...] = ()
    tenant_id: Name | None = None
    error_code: Text | None = None
    fingerprint: Text | None = None
    error: Text | None = None
    rate_per_s: Annotated[float, Meta(gt=0, le=1_000)] = 50
    dry_run: bool = True


@operation(
    "GET",
    _PATH,
    "listLetters",
    tag=_TAG,
    query=DeadLetterListQuery,
    responses={
        200: ResponseSpec(
            "A page, newest first.",
            DeadLetterListResponse,
            links={
                "dead_letter": ("getLetter", _FIRST),
                "replay": ("replayLetter", _FIRST),
                "diff": ("diffLetter", _FIRST),
                "discard": ("discardLetter", _FIRST),
                "confirm": ("confirmDiscard", _FIRST),
                "keep": ("keepLetter", _FIRST),
                "next": ("listLetters", {"cursor": "$response.body#/cursor"}),
            },
        )
    },
)
async def list_dead_letters(call: Call) -> Reply:
    """List dead letters, newest first."""
    query: DeadLetterListQuery = call.query
    found = await call.service.operations.dead_letters.list(call.principal, _filter(query), query.limit, query.cursor)
    return Reply(
        DeadLetterListResponse(dead_letters=[_dead_letter(row) for row in found.dead_letters], cursor=found.cursor)
    )


@operation(
    "GET",
    f"{_PATH}/groups",
    "listLetterGroups",
    tag=_TAG,
    query=DeadLetterQuery,
    responses={200: ResponseSpec("Kinds of errors, most frequent first.", DeadLetterGroupsResponse)},
)
async def groups(call: Call) -> Reply:
    """Group dead letters by kind of error."""
    return Reply(
        DeadLetterGroupsResponse(
            groups=list(await call.service.operations.dead_letters.groups(call.principal, _filter(call.query)))
        )
    )


@operation(
    "POST",
    f"{_PATH}/replay",
    "replayLetters",
    tag=_TAG,
    permission=Permission.OPERATE,
    body=BulkReplayRequest,
    body_example={"reason": "the mail server is back", "task": "send_mail", "dry_run": True},
    responses={200: ResponseSpec("The number of matches, or a result for each.", BulkResponse)},
    errors=(Conflict, IntakeRefused),
)
async def replay_many(call: Call) -> Reply:
    """Replay all open dead letters that match a filter, as new jobs.

    The default is a dry run, which only counts them.
    """
    request: BulkReplayRequest = call.body
    dead_letters, dead_letter_filter = call.service.operations.dead_letters, _filter(request)
    if not request.dry_run:
        count = await dead_letters.count(
            call.principal, msgspec.structs.replace(dead_letter_filter, statuses=frozenset({DeadLetterStatus.OPEN}))
        )
        if count > _MAX_DEAD_LETTERS:
            raise Conflict(
                f"{count:,} dead letters exceed the limit of {_MAX_DEAD_LETTERS:,} per request; narrow the filter or "
                "use `holdfast dlq replay`"
            )
        if count > _MAX_DURATION_S * request.rate_per_s:
            raise Conflict(
                f"{count:,} dead letters at {request.rate_per_s:g} per second exceed the limit of "
                f"{_MAX_DURATION_S:g} s per request; narrow the filter, raise the rate or use `holdfast dlq replay`"
            )
    report = await dead_letters.replay_many(
        call.principal,
        dead_letter_filter,
        reason=request.reason,
        rate_per_s=request.rate_per_s,
        dry_run=request.dry_run,
    )
    return Reply(bulk_response(report))


@operation(
    "GET",
    _ONE,
    "getLetter",
    tag=_TAG,
    responses={200: ResponseSpec("The dead letter with its full history.", DeadLetterDetailResponse)},
    errors=(NotFound,),
)
async def show(call: Call) -> Reply:
    """Get a dead letter with stack, attempts and events."""
    return Reply(_detail(await call.service.operations.dead_letters.show(call.principal, call.path["dlq_id"])))


@operation(
    "POST",
    f"{_ONE}/diff",
    "diffLetter",
    tag=_TAG,
    body=PayloadRequest,
    body_example={"payload": {"to": "ada@example.org"}},
    responses={200: ResponseSpec("The changes.", PayloadDiffResponse)},
    errors=(NotFound, PayloadRejected),
)
async def diff(call: Call) -> Reply:
    """Compare an edited payload with the original."""
    body: PayloadRequest = call.body
    dead_letters = call.service.operations.dead_letters
    try:
        changes = await dead_letters.diff(call.principal, call.path["dlq_id"], raw_arguments(body.payload))
    except InvalidPayload as exc:
        raise PayloadRejected(str(exc)) from exc
    return Reply(PayloadDiffResponse(changes=[change.document for change in changes]))


@operation(
    "POST",
    f"{_ONE}/replay",
    "replayLetter",
    tag=_TAG,
    permission=Permission.OPERATE,
    body=ReplayRequest,
    body_example={"reason": "the address was wrong", "payload": {"to": "ada@example.org"}},
    headers={"Idempotency-Key": ("A repeated request with this key returns the first replay.", KEY_PATTERN)},
    responses={
        200: ResponseSpec("The new job.", ReplayResult, links={"job": ("getJob", {"job_id": "$response.body#/job_id"})})
    },
    errors=(NotFound, AlreadyReplayed, Conflict, Denied, ReplayKeyReused, IntakeRefused, PayloadRejected),
)
async def replay(call: Call) -> Reply:
    """Replay a dead letter as a new job, with its original or an edited payload.

    Without a key, a dead letter whose latest replay is open or has succeeded is refused with the id of that job, unless
    `again` is set.
    """
    request: ReplayRequest = call.body
    payload = None if request.payload is UNSET else raw_arguments(request.payload)
    try:
        done = await call.service.operations.dead_letters.replay(
            call.principal,
            call.path["dlq_id"],
            reason=request.reason,
            payload=payload,
            again=request.again,
            idempotency_key=call.header("idempotency-key"),
            waits=True,
        )
    except InvalidPayload as exc:
        raise PayloadRejected(str(exc)) from exc
    except ReplayKeyReused:
        raise
    except UsageError as exc:
        # For example a message without a task.
        raise Conflict(str(exc)) from exc
    return Reply(done)


def _dead_letter_operation(verb: str, operation_id: str, body: type[msgspec.Struct] | None) -> Decorator:
    return operation(
        "POST",
        f"{_ONE}/{verb}",
        operation_id,
        tag=_TAG,
        permission=Permission.OPERATE,
        query=NoQuery if body is None else None,
        body=body,
        body_example=None if body is None else {"reason": "it was a test"},
        responses={200: ResponseSpec("The dead letter after the change.", DeadLetterDetailResponse)},
        errors=(NotFound, Conflict),
    )


@_dead_letter_operation("discard", "discardLetter", ReasonRequest)
async def discard(call: Call) -> Reply | None:
    """Request that a dead letter be discarded.

    Another principal must confirm.
    """
    await call.service.operations.dead_letters.discard(call.principal, call.path["dlq_id"], call.body.reason)
    return await show(call)


@_dead_letter_operation("confirm", "confirmDiscard", None)
async def confirm(call: Call) -> Reply | None:
    """Confirm the discard of a dead letter that another principal requested."""
    await call.service.operations.dead_letters.confirm(call.principal, call.path["dlq_id"])
    return await show(call)


@_dead_letter_operation("keep", "keepLetter", ReasonRequest)
async def keep(call: Call) -> Reply | None:
    """Withdraw the request to discard a dead letter."""
    await call.service.operations.dead_letters.keep(call.principal, call.path["dlq_id"], call.body.reason)
    return await show(call)


def _filter(request: DeadLetterQuery | BulkReplayRequest) -> DeadLetterFilter:
    tenants = None if request.tenant_id is None else (request.tenant_id,)
    return DeadLetterFilter(
        tenants=tenants,
        statuses=frozenset(request.status) if isinstance(request, DeadLetterQuery) else frozenset(),
        job_type=request.task,
        queues=frozenset(request.queue),
        error_code=request.error_code,
        fingerprint=request.fingerprint,
        text=request.error,
        since=request.since if isinstance(request, DeadLetterQuery) else None,
        until=request.until if isinstance(request, DeadLetterQuery) else None,
    )


def _fields(row: DeadLetterRow) -> dict[str, Any]:
    return {
        "dlq_id": row.dlq_id,
        "job_id": row.job_id,
        "task": row.job_type,
        "queue": row.queue,
        "tenant_id": row.tenant_id,
        "trace_id": row.trace_id,
        "payload": plain(row.payload.text.encode()),
        "error_code": row.error_code,
        "error": row.error,
        "retry_count": row.retry_count,
        "failed_at": row.failed_at,
        "status": row.status,
        "fingerprint": row.fingerprint,
        "requested_by": row.requested_by,
        "confirmed_by": row.confirmed_by,
        "reason": row.reason,
        "replayed_as": row.replayed_as,
        "replay_count": row.replay_count,
    }


def _dead_letter(row: DeadLetterRow) -> DeadLetterResponse:
    return DeadLetterResponse(**_fields(row))


def _detail(row: DeadLetterDetail) -> DeadLetterDetailResponse:
    events = [event_of_row(event) for event in row.events]
    return DeadLetterDetailResponse(
        **_fields(row), stack=row.stack, history=plain(row.history.text.encode()), events=events
    )
