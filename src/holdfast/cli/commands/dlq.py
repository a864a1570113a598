"""`holdfast dlq`: list, group, show, replay, discard, confirm and keep dead letters."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final

import typer

from holdfast.cli.command import AsJson, command
from holdfast.cli.confirm import All, DryRun, Rate, Yes, confirm, confirm_count, parse_rate, print_report, selects_ids
from holdfast.cli.event_view import (
    change_lines,
    dead_letter_detail_document,
    dead_letter_document,
    dead_letter_facts,
    dead_letter_row,
    event_rows,
    group_document,
    group_row,
)
from holdfast.cli.output import emit_facts, emit_json, emit_line, emit_rows, emit_text, note
from holdfast.cli.parse import (
    AppName,
    Code,
    DlqId,
    DlqIds,
    Fingerprint,
    OneOfQueues,
    Reason,
    RequiredReason,
    Since,
    Statuses,
    Task,
    Tenant,
    Until,
    Words,
    dead_letter_filter,
    edit_payload,
)
from holdfast.cli.prefixes import FULL_LENGTH, queries_of, whole_dead_letter_ids, with_whole_id
from holdfast.cli.session import EngineTarget, open_operations
from holdfast.errors import AlreadyReplayed, HoldfastError, InvalidOption, Unavailable
from holdfast.ledger.port.operators import DeadLetterStatus
from holdfast.operations.bulk import BulkReport, BulkResult

if TYPE_CHECKING:
    from holdfast.core.principal import Principal
    from holdfast.operations.dead_letters import DeadLetterOperations
    from holdfast.operations.operations import Operations


dlq = typer.Typer(help="List, show, replay and discard dead letters.", no_args_is_help=True)

_COLUMNS: Final = ("dead letter", "task", "queue", "tenant", "failed", "status", "error")


@command(
    dlq,
    "list",
    examples=(
        "holdfast dlq list --status open",
        "holdfast dlq list --task charge --since 2d --text timeout --limit 20",
        "holdfast dlq list --fingerprint 9f2c4b1a7d3e5f60 --json | jq '.[].dlq_id'",
    ),
)
async def list_dead_letters(
    at: EngineTarget,
    task: Task = None,
    queue: OneOfQueues = None,
    tenant: Tenant = None,
    code: Code = None,
    fingerprint: Fingerprint = None,
    since: Since = None,
    until: Until = None,
    text: Words = None,
    status: Statuses = None,
    limit: Annotated[int, typer.Option(min=1, max=1_000, help="Maximum number of rows.")] = 50,
    cursor: Annotated[
        str | None,
        typer.Option(
            metavar="CURSOR", help="Continue after a previous page; stderr prints the cursor.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List dead letters, newest first. If more rows follow, stderr prints the cursor."""
    async with open_operations(at) as (operations, principal):
        criteria = await dead_letter_filter(
            operations, task, queue, tenant, code, fingerprint, since, until, text, status
        )
        page = await operations.dead_letters.list(principal, criteria, limit, cursor)
        now_ms = await operations.engine.now_ms()
    if as_json:
        emit_json([dead_letter_document(dead_letter) for dead_letter in page.dead_letters])
    else:
        emit_rows(
            _COLUMNS,
            [dead_letter_row(dead_letter, now_ms) for dead_letter in page.dead_letters],
            empty="no dead letters",
        )
    if page.cursor is not None:
        note(f"more rows may follow: --cursor {page.cursor}")


@command(
    dlq,
    "groups",
    examples=("holdfast dlq groups", "holdfast dlq groups --since 1d --json | jq '.[0].fingerprint'"),
)
async def groups(
    at: EngineTarget,
    task: Task = None,
    queue: OneOfQueues = None,
    tenant: Tenant = None,
    code: Code = None,
    fingerprint: Fingerprint = None,
    since: Since = None,
    until: Until = None,
    text: Words = None,
    status: Statuses = None,
    as_json: AsJson = False,
) -> None:
    """Group dead letters by error, most frequent first. Default: only open dead letters."""
    async with open_operations(at) as (operations, principal):
        chosen = status or [DeadLetterStatus.OPEN]
        criteria = await dead_letter_filter(
            operations, task, queue, tenant, code, fingerprint, since, until, text, chosen
        )
        found = await operations.dead_letters.groups(principal, criteria)
        now_ms = await operations.engine.now_ms()
    if as_json:
        emit_json([group_document(group) for group in found])
        return
    columns = ("fingerprint", "task", "dead letters", "first", "last", "error")
    emit_rows(columns, [group_row(group, now_ms) for group in found], empty="no dead letters")


@command(
    dlq,
    "show",
    examples=(
        "holdfast dlq show 019a2f31c07d7e0ab1c2d3e4f5a6b7c8",
        "holdfast dlq show 019a2f31c07d7e0ab1c2d3e4f5a6b7c8 --json | jq .payload > payload.json",
    ),
)
async def show(at: EngineTarget, dlq_id: DlqId, as_json: AsJson = False) -> None:
    """Show one dead letter: payload, error, stack, and the history of its job."""
    async with open_operations(at) as (operations, principal):
        dead_letters = operations.dead_letters
        dead_letter = await with_whole_id(
            queries_of(operations),
            "dead letter",
            principal,
            dlq_id,
            lambda full_id: dead_letters.show(principal, full_id),
        )
    if as_json:
        emit_json(dead_letter_detail_document(dead_letter))
        return
    emit_facts(dead_letter_facts(dead_letter), 12)
    emit_line()
    emit_rows(
        ("when", "after", "what", "detail"),
        event_rows(dead_letter.events),
        empty="the ledger no longer has the job's history",
    )
    if dead_letter.stack:
        emit_line()
        emit_text(dead_letter.stack.rstrip())


@command(
    dlq,
    "replay",
    examples=(
        "holdfast dlq replay 019a2f31c07d7e0ab1c2d3e4f5a6b7c8 --reason 'the bank is back'",
        "holdfast dlq replay 019a2f31c07d7e0ab1c2d3e4f5a6b7c8 --set amount=12 --set currency=EUR",
        "holdfast dlq replay 019a2f31c07d7e0ab1c2d3e4f5a6b7c8 --edit payload.json --app shop.py:app --yes",
        "holdfast dlq replay --fingerprint 9f2c4b1a7d3e5f60 --dry-run",
        "holdfast dlq replay --all --rate 20/s --reason 'after the outage' --yes",
    ),
)
async def replay(
    at: EngineTarget,
    dlq_ids: DlqIds = None,
    edit: Annotated[
        str | None,
        typer.Option("--edit", metavar="FILE", help="Replacement payload, as JSON; - is stdin.", show_default=False),
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Change one argument; repeatable.", show_default=False),
    ] = None,
    task: Task = None,
    queue: OneOfQueues = None,
    tenant: Tenant = None,
    code: Code = None,
    fingerprint: Fingerprint = None,
    since: Since = None,
    until: Until = None,
    text: Words = None,
    everything: All = False,
    reason: Reason = "",
    rate: Rate = "50/s",
    app: AppName = None,
    again: Annotated[
        bool, typer.Option("--again", help="Also replay ids whose latest replay is open or has succeeded.")
    ] = False,
    key: Annotated[
        str | None,
        typer.Option(
            "--key", metavar="KEY", help="Idempotency key: the same key is the same replay.", show_default=False
        ),
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Submit dead letters as new jobs: by their ids, all open ones that match a filter, or all open ones.

    The new job shares the effects of the original. The changes of an edited payload are shown before it is submitted.
    A dead letter whose latest replay is open or has succeeded is refused; of several, it is skipped and counted.
    Ctrl-C stops a bulk replay; repeat the command to continue with the rest.
    """
    ids, per_s = dlq_ids or [], parse_rate(rate)
    given = (task, queue, tenant, code, fingerprint, since, until, text)
    single = selects_ids(ids, filtered=any(value is not None for value in given), everything=everything)
    if (edit is not None or change) and len(ids) != 1:
        raise InvalidOption("--edit and --set work on one dead letter; pass exactly one id")
    if key is not None and len(ids) != 1:
        raise InvalidOption("--key works on one dead letter; pass exactly one id")
    if again and not single:
        raise InvalidOption("--again works on ids; pass the ids of the dead letters")
    async with open_operations(at, app) as (operations, principal):
        dead_letters = operations.dead_letters
        ids = await _full_ids(operations, principal, ids)
        replay_one = partial(_replay_one, dead_letters, principal, reason=reason, again=again, key=key)
        if edit is not None or change:
            payload = await _edited_payload(dead_letters, principal, ids[0], edit, change or [])
            if not dry_run:
                confirm(f"Replay {ids[0]} with this payload?", yes=yes)
            report = await _each(ids, dry_run, partial(replay_one, payload=payload), dead_letters, principal)
        elif single:
            report = await _each(ids, dry_run, replay_one, dead_letters, principal)
        else:
            criteria = await dead_letter_filter(operations, *given, None)
            many = partial(dead_letters.replay_many, principal, criteria, reason=reason, rate_per_s=per_s)
            prompt = f"Replay {{}}, {per_s:g} a second?"
            report = await confirm_count(many, prompt, "dead letter", "replaying", dry_run=dry_run, yes=yes)
    print_report(report, "dead letter", as_json=as_json)


@command(
    dlq,
    "discard",
    examples=(
        "holdfast dlq discard 019a2f31c07d7e0ab1c2d3e4f5a6b7c8 --reason 'customer withdrew'",
        "holdfast dlq discard --task newsletter --until 30d --reason 'discontinued' --dry-run",
    ),
)
async def discard(
    at: EngineTarget,
    dlq_ids: DlqIds = None,
    task: Task = None,
    queue: OneOfQueues = None,
    tenant: Tenant = None,
    code: Code = None,
    fingerprint: Fingerprint = None,
    since: Since = None,
    until: Until = None,
    text: Words = None,
    everything: All = False,
    reason: RequiredReason = "",
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Request that dead letters be discarded. Another principal, with its own token, has to confirm."""
    given = (task, queue, tenant, code, fingerprint, since, until, text)
    ids = dlq_ids or []
    single = selects_ids(ids, filtered=any(value is not None for value in given), everything=everything)
    async with open_operations(at) as (operations, principal):
        dead_letters = operations.dead_letters

        async def request(dlq_id: str) -> BulkResult:
            await dead_letters.discard(principal, dlq_id, reason)
            return BulkResult(id=dlq_id, done=True)

        if single:
            ids = await _full_ids(operations, principal, ids)
            report = await _each(ids, dry_run, request, dead_letters, principal)
        else:
            criteria = await dead_letter_filter(operations, *given, None)
            many = partial(dead_letters.discard_many, principal, criteria, reason=reason)
            report = await confirm_count(
                many, "Request to discard {}?", "dead letter", "requesting", dry_run=dry_run, yes=yes
            )
    print_report(report, "dead letter", as_json=as_json)


@command(
    dlq,
    "confirm",
    examples=(
        "holdfast dlq confirm 019a2f31c07d7e0ab1c2d3e4f5a6b7c8",
        "holdfast dlq confirm --task newsletter --yes",
    ),
)
async def confirm_discard(
    at: EngineTarget,
    dlq_ids: DlqIds = None,
    task: Task = None,
    queue: OneOfQueues = None,
    tenant: Tenant = None,
    code: Code = None,
    fingerprint: Fingerprint = None,
    since: Since = None,
    until: Until = None,
    text: Words = None,
    everything: All = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Discard dead letters at the request of another principal. The requester cannot confirm."""
    given = (task, queue, tenant, code, fingerprint, since, until, text)
    ids = dlq_ids or []
    single = selects_ids(ids, filtered=any(value is not None for value in given), everything=everything)
    async with open_operations(at) as (operations, principal):
        dead_letters = operations.dead_letters

        async def confirm_one(dlq_id: str) -> BulkResult:
            await dead_letters.confirm(principal, dlq_id)
            return BulkResult(id=dlq_id, done=True)

        if single:
            ids = await _full_ids(operations, principal, ids)
            report = await _each(ids, dry_run, confirm_one, dead_letters, principal)
        else:
            criteria = await dead_letter_filter(operations, *given, None)
            many = partial(dead_letters.confirm_many, principal, criteria)
            report = await confirm_count(
                many, "Discard {} permanently?", "dead letter", "discarding", dry_run=dry_run, yes=yes
            )
    print_report(report, "dead letter", as_json=as_json)


@command(
    dlq,
    "keep",
    examples=("holdfast dlq keep 019a2f31c07d7e0ab1c2d3e4f5a6b7c8 --reason 'we found the customer'",),
)
async def keep(
    at: EngineTarget, dlq_ids: DlqIds = None, reason: Reason = "", dry_run: DryRun = False, as_json: AsJson = False
) -> None:
    """Withdraw requests to discard dead letters; they are open again."""
    ids = dlq_ids or []
    selects_ids(ids, filtered=False, everything=False)
    async with open_operations(at) as (operations, principal):

        async def act(dlq_id: str) -> BulkResult:
            await operations.dead_letters.keep(principal, dlq_id, reason)
            return BulkResult(id=dlq_id, done=True)

        ids = await _full_ids(operations, principal, ids)
        report = await _each(ids, dry_run, act, operations.dead_letters, principal)
    print_report(report, "dead letter", as_json=as_json)


async def _full_ids(operations: Operations, principal: Principal, ids: list[str]) -> list[str]:
    """Return full ids; a single one may be a prefix."""
    if len(ids) == 1 and len(ids[0]) < FULL_LENGTH:
        return await whole_dead_letter_ids(operations, principal, ids)
    return ids


async def _each(
    ids: list[str],
    dry_run: bool,
    act: Callable[[str], Awaitable[BulkResult]],
    dead_letters: DeadLetterOperations,
    principal: Principal,
) -> BulkReport:
    """Apply `act` to each id. With several ids, an id that fails does not stop the others."""
    chosen = list(dict.fromkeys(ids))
    if dry_run:
        for dlq_id in chosen:
            await dead_letters.show(principal, dlq_id)
        return BulkReport(matched=len(chosen), dry_run=True)
    results = []
    for dlq_id in chosen:
        try:
            results.append(await act(dlq_id))
        except HoldfastError as exc:
            if len(chosen) == 1 or isinstance(exc, Unavailable):
                raise
            replayed = exc.job_id if isinstance(exc, AlreadyReplayed) else ""
            results.append(
                BulkResult(
                    id=dlq_id, done=False, skipped=bool(replayed), job_id=replayed, code=exc.code, message=str(exc)
                )
            )
    return BulkReport(matched=len(chosen), dry_run=False, results=results)


async def _edited_payload(
    dead_letters: DeadLetterOperations, principal: Principal, dlq_id: str, edit: str | None, pairs: list[str]
) -> bytes:
    """Return the edited payload, and print what it changes."""
    dead_letter = await dead_letters.show(principal, dlq_id)
    payload = edit_payload(dead_letter.payload.text, edit, pairs)
    for line in change_lines(await dead_letters.diff(principal, dlq_id, payload)):
        note(line)
    return payload


async def _replay_one(
    dead_letters: DeadLetterOperations,
    principal: Principal,
    dlq_id: str,
    *,
    reason: str,
    payload: bytes | None = None,
    again: bool,
    key: str | None,
) -> BulkResult:
    done = await dead_letters.replay(
        principal, dlq_id, reason=reason, payload=payload, again=again, idempotency_key=key
    )
    if done.duplicate:
        note("duplicate idempotency key: no new job was created")
    return BulkResult(id=dlq_id, done=True, job_id=done.job_id)
