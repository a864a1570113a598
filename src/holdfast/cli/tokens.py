"""`holdfast token`: who may come in, as whom."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer

from holdfast.cli.command import AsJson, Connection, command
from holdfast.cli.output import emit_json, emit_rows, note
from holdfast.cli.parse import duration
from holdfast.cli.story import moment
from holdfast.cli.who import at_work
from holdfast.core.person import ALL_TENANTS, Role
from holdfast.errors import InvalidOption

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
    at: Connection,
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
    async with at_work(at, make=True) as (offices, person):
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
                "expires_at": moment(row.expires_at),
            }
        )
        return
    print(text)
    note(f"token {row.token_id} of {row.name} ({row.role}); it is not shown again")


@command(token, "list", examples=("holdfast token list", "holdfast token list --json | jq '.[].name'"))
async def list_tokens(at: Connection, as_json: AsJson = False) -> None:
    """Every token with its state; never its text, which nobody has but its owner."""
    async with at_work(at) as (offices, person):
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
                    "created_at": moment(row.created_at),
                    "expires_at": moment(row.expires_at),
                    "revoked_at": moment(row.revoked_at),
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
    at: Connection,
    token_id: Annotated[str, typer.Argument(metavar="TOKEN", help="Its id, as `holdfast token list` shows it.")],
    reason: Annotated[str, typer.Option(help="Why; kept in the log.")] = "",
    as_json: AsJson = False,
) -> None:
    """A token is valid no longer: everywhere within five seconds."""
    async with at_work(at) as (offices, person):
        row = await offices.tokens.revoke(person, token_id, reason=reason)
    if as_json:
        emit_json({"token_id": row.token_id, "name": row.name, "state": "revoked"})
    else:
        note(f"token {row.token_id} of {row.name} is revoked")


def _day(at: datetime | None) -> str:
    return "never" if at is None else at.strftime("%Y-%m-%d %H:%MZ")
