"""`holdfast token`: create, list and revoke tokens. `holdfast log`: print the audit log."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from holdfast.cli.command import AsJson, command
from holdfast.cli.event_view import iso
from holdfast.cli.output import emit_json, emit_line, emit_rows, note, shorten
from holdfast.cli.parse import duration, parse_time_or_age
from holdfast.cli.session import EngineTarget, open_operations
from holdfast.core.principal import ALL_TENANTS, Role
from holdfast.errors import InvalidOption

if TYPE_CHECKING:
    from holdfast.ledger.queries.operator_filters import AuditRow
    from holdfast.ledger.queries.records import JsonText


_COLUMNS: Final = ("when", "actor", "type", "target", "tenant", "reason", "before", "after")


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
        str | None, typer.Option(metavar="NAME", help="Only entries of this actor.", show_default=False)
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            "--type",
            "-t",
            metavar="TYPE",
            help="Only this type, for example operator.cancel; repeatable.",
            show_default=False,
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="Only this kind of target: job, queue, dlq, approval, token, trigger, effect, outbox or task.",
            show_default=False,
        ),
    ] = None,
    target_id: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="Only the target with this id.", show_default=False)
    ] = None,
    tenant: Annotated[
        str | None, typer.Option("--tenant", metavar="NAME", help="Only this tenant.", show_default=False)
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="WHEN", help="Only since this instant or age (1h, 2d).", show_default=False),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(metavar="WHEN", help="Only before this instant or age.", show_default=False),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1_000, help="Maximum number of rows.")] = 50,
    cursor: Annotated[
        str | None,
        typer.Option(
            metavar="CURSOR", help="Continue after a previous page; stderr prints the cursor.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the audit log, newest first: actor, action, target, reason, values before and after."""
    async with open_operations(at) as (operations, principal):
        from holdfast.ledger.queries.operator_filters import AuditFilter

        now_ms = await operations.engine.now_ms()
        audit_filter = AuditFilter(
            actor=actor,
            types=frozenset(kind or ()),
            target=target,
            target_id=target_id,
            tenants=None if tenant is None else (tenant,),
            since=None if since is None else parse_time_or_age(since, "--since", now_ms),
            until=None if until is None else parse_time_or_age(until, "--until", now_ms),
        )
        page = await operations.audit.list(principal, audit_filter, limit, cursor)
    if as_json:
        emit_json([_document(entry) for entry in page.entries])
    else:
        emit_rows(_COLUMNS, [_row(entry) for entry in page.entries], empty="no audit entries")
    if page.cursor is not None:
        note(f"more rows may follow: --cursor {page.cursor}")


def _row(entry: AuditRow) -> tuple[str, ...]:
    return (
        iso(entry.at) or "",
        entry.actor,
        entry.type,
        f"{entry.target} {entry.target_id}",
        entry.tenant_id,
        shorten(entry.reason),
        _short(entry.before),
        _short(entry.after),
    )


def _short(value: JsonText | None) -> str:
    return "" if value is None else shorten(value.text, 80)


def _document(entry: AuditRow) -> dict[str, Any]:
    return {
        "id": entry.id,
        "type": entry.type,
        "actor": entry.actor,
        "target": entry.target,
        "target_id": entry.target_id,
        "queue": entry.queue or None,
        "tenant_id": entry.tenant_id,
        "reason": entry.reason or None,
        "before": None if entry.before is None else entry.before.value,
        "after": None if entry.after is None else entry.after.value,
        "at": iso(entry.at),
    }


token = typer.Typer(help="Manage tokens for the API and the command line.", no_args_is_help=True)


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
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the principal (user or program), as the audit log has it.")
    ],
    role: Annotated[Role, typer.Option(help="Role.")],
    tenant: Annotated[
        list[str] | None,
        typer.Option("--tenant", metavar="NAME", help="Tenant it is valid for; repeatable.", show_default=False),
    ] = None,
    all_tenants: Annotated[
        bool, typer.Option("--all-tenants", help="Valid for every tenant, including future ones.")
    ] = False,
    expires: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Lifetime (12h, 30d). Default: unlimited.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create a token and print it. It cannot be printed again: only its hash is stored.

    The name identifies the principal: two tokens with the same name count as one principal where two are required.
    """
    if all_tenants and tenant:
        raise InvalidOption("--tenant and --all-tenants exclude each other; pass one of them")
    expires_in = None if expires is None else duration(expires, "--expires")
    async with open_operations(at, make=True) as (operations, principal):
        tenants = [ALL_TENANTS] if all_tenants else tenant or []
        row, text = await operations.tokens.create(
            principal, name=name, role=role, tenants=tenants, expires_in=expires_in
        )
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
    emit_line(text)
    note(f"token {row.token_id} of {row.name} ({row.role}); it cannot be shown again")


@command(token, "list", examples=("holdfast token list", "holdfast token list --json | jq '.[].name'"))
async def list_tokens(at: EngineTarget, as_json: AsJson = False) -> None:
    """List tokens with their states. Token texts are not stored and cannot be shown."""
    async with open_operations(at) as (operations, principal):
        rows = await operations.tokens.list(principal)
        states = {row.token_id: operations.tokens.state(row) for row in rows}
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
    token_id: Annotated[str, typer.Argument(metavar="TOKEN", help="Id of the token, from `holdfast token list`.")],
    reason: Annotated[str, typer.Option(help="Reason for the audit log.")] = "",
    as_json: AsJson = False,
) -> None:
    """Revoke a token. All processes reject it within 5 s."""
    async with open_operations(at) as (operations, principal):
        row = await operations.tokens.revoke(principal, token_id, reason=reason)
    if as_json:
        emit_json({"token_id": row.token_id, "name": row.name, "state": "revoked"})
    else:
        note(f"token {row.token_id} of {row.name} is revoked")


def _day(at: datetime | None) -> str:
    return "never" if at is None else at.strftime("%Y-%m-%d %H:%MZ")
