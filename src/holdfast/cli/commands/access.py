"""`holdfast token`: create, list and revoke tokens. `holdfast log`: print the audit log."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from holdfast.cli.command import AsJson, command
from holdfast.cli.event_view import iso
from holdfast.cli.output import emit_json, emit_rows, note, shorten
from holdfast.cli.parse import duration, parse_time_or_age
from holdfast.cli.session import EngineTarget, open_operations
from holdfast.core.principal import ALL_TENANTS, Role
from holdfast.errors import InvalidOption

if TYPE_CHECKING:
    from holdfast.ledger.queries.operator_filters import AuditRow
    from holdfast.ledger.queries.records import JsonText


_COLUMNS: Final = ("when", "who", "what", "on", "tenant", "why", "before", "after")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(token, name="token")
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
    at: EngineTarget,
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
    async with open_operations(at) as (offices, person):
        from holdfast.ledger.queries.operator_filters import AuditFilter

        now_ms = await offices.engine.now_ms()
        wanted = AuditFilter(
            actor=actor,
            types=frozenset(kind or ()),
            target=target,
            target_id=target_id,
            tenants=None if tenant is None else (tenant,),
            since=None if since is None else parse_time_or_age(since, "--since", now_ms),
            until=None if until is None else parse_time_or_age(until, "--until", now_ms),
        )
        page = await offices.operating.audit_log(person, wanted, limit, cursor)
    if as_json:
        emit_json([_document(line) for line in page.entries])
    else:
        emit_rows(_COLUMNS, [_row(line) for line in page.entries], empty="nobody has done anything")
    if page.cursor is not None:
        note(f"there may be more: --cursor {page.cursor}")


def _row(line: AuditRow) -> tuple[str, ...]:
    return (
        iso(line.at) or "",
        line.actor,
        line.type,
        f"{line.target} {line.target_id}",
        line.tenant_id,
        shorten(line.reason),
        _short(line.before),
        _short(line.after),
    )


def _short(value: JsonText | None) -> str:
    return "" if value is None else shorten(value.text, 80)


def _document(line: AuditRow) -> dict[str, Any]:
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
        "at": iso(line.at),
    }


token = typer.Typer(help="Who may come in, as whom: tokens for the API and this program.", no_args_is_help=True)


@command(
    token,
    "create",
    examples=(
        "holdfast token create ada --role admin --all-tenants",
        "holdfast token create deploy-bot --role operator --tenant acme --tenant globex --expires 30d",
        "export HOLDFAST_TOKEN=$(holdfast token create ada --role operator --all-tenants)",
    ),
)
async def create(
    at: EngineTarget,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The person's, or the program's: it goes into the log.")],
    role: Annotated[Role, typer.Option(help="What it may do.")],
    tenant: Annotated[
        list[str] | None,
        typer.Option("--tenant", metavar="NAME", help="A tenant that it is for; repeatable.", show_default=False),
    ] = None,
    all_tenants: Annotated[
        bool, typer.Option("--all-tenants", help="For every tenant, those to come included.")
    ] = False,
    expires: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Valid for so long (12h, 30d). Default: for ever.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a token and print it, this once: only its hash is kept.

    Its name is the person: two tokens of one name are one person where two are needed.
    """
    if all_tenants and tenant:
        raise InvalidOption("say --tenant or --all-tenants, not both")
    expires_in = None if expires is None else duration(expires, "--expires")
    async with open_operations(at, make=True) as (offices, person):
        tenants = [ALL_TENANTS] if all_tenants else tenant or []
        row, text = await offices.tokens.create(person, name=name, role=role, tenants=tenants, expires_in=expires_in)
    if as_json:
        emit_json(
            {
                "token": text,
                "token_id": row.token_id,
                "name": row.name,
                "role": row.role,
                "tenants": row.tenants,
                "expires_at": iso(row.expires_at),
            }
        )
        return
    print(text)
    note(f"token {row.token_id} of {row.name} ({row.role}); it is not shown again")


@command(token, "list", examples=("holdfast token list", "holdfast token list --json | jq '.[].name'"))
async def list_tokens(at: EngineTarget, as_json: AsJson = False) -> None:
    """Every token with its state; never its text, which nobody has but its owner."""
    async with open_operations(at) as (offices, person):
        rows = await offices.tokens.list(person)
        states = {row.token_id: offices.tokens.state(row) for row in rows}
    if as_json:
        emit_json(
            [
                {
                    "token_id": row.token_id,
                    "name": row.name,
                    "role": row.role,
                    "tenants": row.tenants,
                    "state": states[row.token_id],
                    "created_by": row.created_by,
                    "created_at": iso(row.created_at),
                    "expires_at": iso(row.expires_at),
                    "revoked_at": iso(row.revoked_at),
                }
                for row in rows
            ]
        )
        return
    lines = [
        (row.token_id, row.name, row.role.value, ", ".join(row.tenants), states[row.token_id], _day(row.expires_at))
        for row in rows
    ]
    emit_rows(("token", "name", "role", "tenants", "state", "expires"), lines, empty="no tokens")


@command(
    token,
    "revoke",
    examples=("holdfast token revoke 3f9c0c1d2e4b5a67 --reason 'laptop lost'",),
)
async def revoke(
    at: EngineTarget,
    token_id: Annotated[str, typer.Argument(metavar="TOKEN", help="Its id, as `holdfast token list` shows it.")],
    reason: Annotated[str, typer.Option(help="Why; kept in the log.")] = "",
    as_json: AsJson = False,
) -> None:
    """A token is valid no longer: everywhere within five seconds."""
    async with open_operations(at) as (offices, person):
        row = await offices.tokens.revoke(person, token_id, reason=reason)
    if as_json:
        emit_json({"token_id": row.token_id, "name": row.name, "state": "revoked"})
    else:
        note(f"token {row.token_id} of {row.name} is revoked")


def _day(at: datetime | None) -> str:
    return "never" if at is None else at.strftime("%Y-%m-%d %H:%MZ")
