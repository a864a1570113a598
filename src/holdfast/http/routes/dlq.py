"""`/api/v1/dlq`: dead letters (requirements D3–D5)."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType

from holdfast.core.principal import Permission
from holdfast.errors import Conflict, Denied, IntakeRefused, InvalidPayload, NotFound, UsageError
from holdfast.http.operation import Call, Decorator, Reply, ResponseSpec, operation, raw_arguments
from holdfast.http.problems import PayloadRejected
from holdfast.http.wire import (
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
#: What an HTTP request should wait for at most: so many letters, and so many seconds at the rate that is asked for.
_AT_ONCE: Final = 1_000
_AT_MOST_S: Final = 10.0
_OF_LETTER: Final = {"dlq_id": "$response.body#/letters/0/dlq_id"}


class DeadLetterResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A job that was given up."""

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
    #: Letters that died of the same kind of error have the same.
    fingerprint: str
    #: Who asked for it to be thrown away, and who agreed.
    requested_by: str | None
    confirmed_by: str | None
    reason: str | None
    #: The latest job made of it, and how many there were.
    replayed_as: str | None
    replay_count: int


class DeadLetterDetailResponse(DeadLetterResponse, frozen=True, kw_only=True):
    """A dead letter with everything that is needed to decide about it."""

    stack: str
    #: Every attempt.
    history: Any
    events: list[JobEventResponse]


class DeadLetterListResponse(msgspec.Struct, frozen=True, kw_only=True):
    letters: list[DeadLetterResponse]
    cursor: str | None


class DeadLetterGroupsResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Letters by the kind of error, the most frequent first."""

    groups: list[DeadLetterGroup]


class PayloadDiffResponse(msgspec.Struct, frozen=True, kw_only=True):
    """What an edited payload changes, by JSON pointer; without `before` what is new, without `after` what goes."""

    changes: list[dict[str, Any]]


class DeadLetterQuery(RequestBase, frozen=True, kw_only=True):
    """Which letters. Everything given must hold."""

    status: tuple[DeadLetterStatus, ...] = ()
    task: Name | None = None
    queue: tuple[Name, ...] = ()
    tenant_id: Name | None = None
    error_code: Exactly | None = None
    fingerprint: Exactly | None = None
    error: Annotated[Text, Meta(description="Text in the error, in any case.")] | None = None
    since: Annotated[datetime, Meta(tz=True)] | None = None
    until: Annotated[datetime, Meta(tz=True)] | None = None


class DeadLetterListQuery(DeadLetterQuery, frozen=True, kw_only=True):
    """A page of them."""

    limit: Limit = 50
    cursor: Cursor | None = None


class PayloadRequest(RequestBase, frozen=True, kw_only=True):
    payload: Arguments


class ReplayRequest(ReasonRequest, frozen=True, kw_only=True):
    """Why; and the payload, if it is another one now."""

    payload: Arguments | UnsetType = UNSET


class BulkReplayRequest(ReasonRequest, frozen=True, kw_only=True):
    """Every open letter that the filter fits. A dry run only counts."""

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
    answers={
        200: ResponseSpec(
            "A page, newest first.",
            DeadLetterListResponse,
            links={
                "letter": ("getLetter", _OF_LETTER),
                "replay": ("replayLetter", _OF_LETTER),
                "diff": ("diffLetter", _OF_LETTER),
                "discard": ("discardLetter", _OF_LETTER),
                "confirm": ("confirmDiscard", _OF_LETTER),
                "keep": ("keepLetter", _OF_LETTER),
                "next": ("listLetters", {"cursor": "$response.body#/cursor"}),
            },
        )
    },
)
async def list_dead_letters(call: Call) -> Reply:
    """List dead letters, newest first."""
    query: DeadLetterListQuery = call.query
    found = await call.service.operations.dead_letters.list(call.principal, _filter(query), query.limit, query.cursor)
    return Reply(DeadLetterListResponse(letters=[_letter(row) for row in found.dead_letters], cursor=found.cursor))


@operation(
    "GET",
    f"{_PATH}/groups",
    "listLetterGroups",
    tag=_TAG,
    query=DeadLetterQuery,
    answers={200: ResponseSpec("Kinds of errors, the most frequent first.", DeadLetterGroupsResponse)},
)
async def groups(call: Call) -> Reply:
    """Dead letters by the kind of error that they died of."""
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
    right=Permission.OPERATE,
    body=BulkReplayRequest,
    body_example={"reason": "the mail server is back", "task": "send_mail", "dry_run": True},
    answers={200: ResponseSpec("How many there are, or what became of each.", BulkResponse)},
    errors=(Conflict, IntakeRefused),
)
async def replay_many(call: Call) -> Reply:
    """Send every open letter of a filter back to work, as new jobs; by default only count them."""
    wish: BulkReplayRequest = call.body
    letters, wanted = call.service.operations.dead_letters, _filter(wish)
    if not wish.dry_run:
        count = await letters.count(
            call.principal, msgspec.structs.replace(wanted, statuses=frozenset({DeadLetterStatus.OPEN}))
        )
        if count > _AT_ONCE:
            raise Conflict(
                f"{count:,} letters are too many for one request (the limit is {_AT_ONCE:,}); narrow the filter, or "
                "use `holdfast dlq replay`"
            )
        if count > _AT_MOST_S * wish.rate_per_s:
            raise Conflict(
                f"{count:,} letters at {wish.rate_per_s:g} a second take longer than a request should (the limit is "
                f"{_AT_MOST_S:g} s); narrow the filter, raise the rate, or use `holdfast dlq replay`"
            )
    report = await letters.replay_many(
        call.principal, wanted, reason=wish.reason, rate_per_s=wish.rate_per_s, dry_run=wish.dry_run
    )
    return Reply(bulk_response(report))


@operation(
    "GET",
    _ONE,
    "getLetter",
    tag=_TAG,
    answers={200: ResponseSpec("The letter with its full history.", DeadLetterDetailResponse)},
    errors=(NotFound,),
)
async def show(call: Call) -> Reply:
    """One dead letter with everything that is known of it."""
    return Reply(_sheet(await call.service.operations.dead_letters.show(call.principal, call.path["dlq_id"])))


@operation(
    "POST",
    f"{_ONE}/diff",
    "diffLetter",
    tag=_TAG,
    body=PayloadRequest,
    body_example={"payload": {"to": "ada@example.org"}},
    answers={200: ResponseSpec("What an edited payload would change.", PayloadDiffResponse)},
    errors=(NotFound, PayloadRejected),
)
async def diff(call: Call) -> Reply:
    """What an edited payload changes."""
    body: PayloadRequest = call.body
    letters = call.service.operations.dead_letters
    try:
        changes = await letters.diff(call.principal, call.path["dlq_id"], raw_arguments(body.payload))
    except InvalidPayload as exc:
        raise PayloadRejected(str(exc)) from exc
    return Reply(PayloadDiffResponse(changes=[change.document for change in changes]))


@operation(
    "POST",
    f"{_ONE}/replay",
    "replayLetter",
    tag=_TAG,
    right=Permission.OPERATE,
    body=ReplayRequest,
    body_example={"reason": "the address was wrong", "payload": {"to": "ada@example.org"}},
    answers={
        200: ResponseSpec("The new job.", ReplayResult, links={"job": ("getJob", {"job_id": "$response.body#/job_id"})})
    },
    errors=(NotFound, Conflict, Denied, IntakeRefused, PayloadRejected),
)
async def replay(call: Call) -> Reply:
    """Send a dead letter back to work as a new job, with its payload as it was or as edited."""
    wish: ReplayRequest = call.body
    payload = None if wish.payload is UNSET else raw_arguments(wish.payload)
    try:
        done = await call.service.operations.dead_letters.replay(
            call.principal, call.path["dlq_id"], reason=wish.reason, payload=payload
        )
    except InvalidPayload as exc:
        raise PayloadRejected(str(exc)) from exc
    except UsageError as exc:
        # A message that named no task, say.
        raise Conflict(str(exc)) from exc
    return Reply(done)


def _deed(verb: str, operation_id: str, body: type[msgspec.Struct] | None) -> Decorator:
    return operation(
        "POST",
        f"{_ONE}/{verb}",
        operation_id,
        tag=_TAG,
        right=Permission.OPERATE,
        query=NoQuery if body is None else None,
        body=body,
        body_example=None if body is None else {"reason": "it was a test"},
        answers={200: ResponseSpec("The letter as it is now.", DeadLetterDetailResponse)},
        errors=(NotFound, Conflict),
    )


@_deed("discard", "discardLetter", ReasonRequest)
async def discard(call: Call) -> Reply | None:
    """Ask for a letter to be thrown away; somebody else has to confirm."""
    await call.service.operations.dead_letters.discard(call.principal, call.path["dlq_id"], call.body.reason)
    return await show(call)


@_deed("confirm", "confirmDiscard", None)
async def confirm(call: Call) -> Reply | None:
    """Throw a letter away, as another person has asked for."""
    await call.service.operations.dead_letters.confirm(call.principal, call.path["dlq_id"])
    return await show(call)


@_deed("keep", "keepLetter", ReasonRequest)
async def keep(call: Call) -> Reply | None:
    """Keep a letter after all."""
    await call.service.operations.dead_letters.keep(call.principal, call.path["dlq_id"], call.body.reason)
    return await show(call)


def _filter(asked: DeadLetterQuery | BulkReplayRequest) -> DeadLetterFilter:
    tenants = None if asked.tenant_id is None else (asked.tenant_id,)
    return DeadLetterFilter(
        tenants=tenants,
        statuses=frozenset(asked.status) if isinstance(asked, DeadLetterQuery) else frozenset(),
        job_type=asked.task,
        queues=frozenset(asked.queue),
        error_code=asked.error_code,
        fingerprint=asked.fingerprint,
        text=asked.error,
        since=asked.since if isinstance(asked, DeadLetterQuery) else None,
        until=asked.until if isinstance(asked, DeadLetterQuery) else None,
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


def _letter(row: DeadLetterRow) -> DeadLetterResponse:
    return DeadLetterResponse(**_fields(row))


def _sheet(row: DeadLetterDetail) -> DeadLetterDetailResponse:
    events = [event_of_row(event) for event in row.events]
    return DeadLetterDetailResponse(
        **_fields(row), stack=row.stack, history=plain(row.history.text.encode()), events=events
    )
