"""`holdfast dlq`: dead letters, as one looks at them. What is done with them is in `cli.deciding`."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from holdfast.cli.command import AsJson, Connection, command
from holdfast.cli.filters import (
    Code,
    Fingerprint,
    LetterId,
    OneOfQueues,
    Since,
    Statuses,
    Task,
    Tenant,
    Until,
    Words,
    letter_filter,
)
from holdfast.cli.letters import group_document, group_row, letter_document, letter_facts, letter_row, whole_document
from holdfast.cli.output import emit_facts, emit_json, emit_rows, note, visible
from holdfast.cli.prefixes import abbreviated, queries_of
from holdfast.cli.story import event_rows
from holdfast.cli.who import at_work
from holdfast.ledger.people import LetterStatus

dlq = typer.Typer(help="Dead letters: look, replay, discard by two people.", no_args_is_help=True)

_COLUMNS: Final = ("letter", "task", "queue", "tenant", "failed", "status", "error")


@command(
    dlq,
    "list",
    examples=(
        "holdfast dlq list --status open",
        "holdfast dlq list --task charge --since 2d --text timeout --limit 20",
        "holdfast dlq list --fingerprint 9f2c4b1a7d3e5f60 --json | jq '.[].dlq_id'",
    ),
)
async def list_letters(
    at: Connection,
    task: Task = None,
    queue: OneOfQueues = None,
    tenant: Tenant = None,
    code: Code = None,
    fingerprint: Fingerprint = None,
    since: Since = None,
    until: Until = None,
    text: Words = None,
    status: Statuses = None,
    limit: Annotated[int, typer.Option(min=1, max=1_000, help="At most so many.")] = 50,
    cursor: Annotated[
        str | None,
        typer.Option(metavar="CURSOR", help="Go on where a list ended, as told on stderr.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Dead letters, newest first. If there are more, stderr says how to go on."""
    async with at_work(at) as (offices, person):
        wanted = await letter_filter(offices, task, queue, tenant, code, fingerprint, since, until, text, status)
        page = await offices.letters.list(person, wanted, limit, cursor)
        now_ms = await offices.engine.now_ms()
    if as_json:
        emit_json([letter_document(letter) for letter in page.letters])
    else:
        emit_rows(_COLUMNS, [letter_row(letter, now_ms) for letter in page.letters], empty="no dead letters")
    if page.cursor is not None:
        note(f"there may be more: --cursor {page.cursor}")


@command(
    dlq,
    "groups",
    examples=("holdfast dlq groups", "holdfast dlq groups --since 1d --json | jq '.[0].fingerprint'"),
)
async def groups(
    at: Connection,
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
    """Kinds of error that letters died of, the most frequent first; without --status only open letters count."""
    async with at_work(at) as (offices, person):
        chosen = status or [LetterStatus.OPEN]
        wanted = await letter_filter(offices, task, queue, tenant, code, fingerprint, since, until, text, chosen)
        found = await offices.letters.groups(person, wanted)
        now_ms = await offices.engine.now_ms()
    if as_json:
        emit_json([group_document(group) for group in found])
        return
    columns = ("fingerprint", "task", "letters", "first", "last", "error")
    emit_rows(columns, [group_row(group, now_ms) for group in found], empty="no dead letters")


@command(
    dlq,
    "show",
    examples=(
        "holdfast dlq show 019a2f31c07d7e0ab1c2d3e4f5a6b7c8",
        "holdfast dlq show 019a2f31c07d7e0ab1c2d3e4f5a6b7c8 --json | jq .payload > payload.json",
    ),
)
async def show(at: Connection, dlq_id: LetterId, as_json: AsJson = False) -> None:
    """One dead letter: payload, error, stack, and every step of its job."""
    async with at_work(at) as (offices, person):
        letters = offices.letters
        letter = await abbreviated(
            queries_of(offices), "dead letter", person, dlq_id, lambda whole: letters.show(person, whole)
        )
    if as_json:
        emit_json(whole_document(letter))
        return
    emit_facts(letter_facts(letter), 12)
    print()
    emit_rows(
        ("when", "after", "what", "detail"), event_rows(letter.events), empty="the ledger has its story no longer"
    )
    if letter.stack:
        print()
        print(visible(letter.stack.rstrip()))
