"""`holdfast log`: what people did."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from holdfast.cli.command import AsJson, Connection, command
from holdfast.cli.format import shorten
from holdfast.cli.output import emit_json, emit_rows, note
from holdfast.cli.parse import when
from holdfast.cli.story import moment
from holdfast.cli.who import at_work

if TYPE_CHECKING:
    from holdfast.ledger.deeds import LogRow
    from holdfast.ledger.records import Json

_COLUMNS: Final = ("when", "who", "what", "on", "tenant", "why", "before", "after")


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(
        app,
        "log",
        examples=(
            "holdfast log --since 1d",
            "holdfast log --actor ada --type operator.dlq_discard",
            "holdfast log --target queue --id mail --json | jq '.[].after'",
        ),
    )(log)


async def log(
    at: Connection,
    actor: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only what this person did.", show_default=False)
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option("--type", "-t", metavar="TYPE", help="Only operator.cancel, say; repeatable.", show_default=False),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="Only on a job, queue, dlq, approval, token, trigger, effect, outbox or task.",
            show_default=False,
        ),
    ] = None,
    target_id: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="Only on the one of this id.", show_default=False)
    ] = None,
    tenant: Annotated[
        str | None, typer.Option("--tenant", metavar="NAME", help="Only of this tenant.", show_default=False)
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="WHEN", help="At this instant or later, or so long ago (1h, 2d).", show_default=False),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(metavar="WHEN", help="Before this instant, or longer ago than this.", show_default=False),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1_000, help="At most so many.")] = 50,
    cursor: Annotated[
        str | None,
        typer.Option(metavar="CURSOR", help="Go on where a list ended, as told on stderr.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The operators' log, newest first: who did what to what, when and why, before and after."""
    async with at_work(at) as (offices, person):
        from holdfast.ledger.deeds import LogFilter

        now_ms = await offices.engine.now_ms()
        wanted = LogFilter(
            actor=actor,
            types=frozenset(kind or ()),
            target=target,
            target_id=target_id,
            tenants=None if tenant is None else (tenant,),
            since=None if since is None else when(since, "--since", now_ms),
            until=None if until is None else when(until, "--until", now_ms),
        )
        page = await offices.operating.log(person, wanted, limit, cursor)
    if as_json:
        emit_json([_document(line) for line in page.lines])
    else:
        emit_rows(_COLUMNS, [_row(line) for line in page.lines], empty="nobody has done anything")
    if page.cursor is not None:
        note(f"there may be more: --cursor {page.cursor}")


def _row(line: LogRow) -> tuple[str, ...]:
    return (
        moment(line.at) or "",
        line.actor,
        line.type,
        f"{line.target} {line.target_id}",
        line.tenant_id,
        shorten(line.reason),
        _short(line.before),
        _short(line.after),
    )


def _short(value: Json | None) -> str:
    return "" if value is None else shorten(value.text, 80)


def _document(line: LogRow) -> dict[str, Any]:
    return {
        "id": line.id,
        "type": line.type,
        "actor": line.actor,
        "target": line.target,
        "target_id": line.target_id,
        "queue": line.queue or None,
        "tenant_id": line.tenant_id,
        "reason": line.reason or None,
        "before": None if line.before is None else line.before.value,
        "after": None if line.after is None else line.after.value,
        "at": moment(line.at),
    }
