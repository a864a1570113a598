"""`holdfast migrate`: upgrade, drop and inspect the ledger's tables.

An embedded engine has one file and one schema, which `up` upgrades as well.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from holdfast.cli.command import AsJson, ExitCode, command
from holdfast.cli.output import emit_json, note, read_answer
from holdfast.cli.session import EngineTarget
from holdfast.errors import InvalidOption, UsageError
from holdfast.factory import sqlite_path
from holdfast.settings import Settings

if TYPE_CHECKING:
    from holdfast.ledger.migrate import MigrationChange, MigrationStatus, Target


migrate = typer.Typer(no_args_is_help=True, help="Upgrade, drop and inspect the ledger's tables.")

Ledger = Annotated[
    str | None,
    typer.Option(
        "--ledger",
        metavar="URL",
        help="Ledger: postgresql://user:password@host/database or sqlite:///ledger.db. Default: HOLDFAST_LEDGER, "
        "holdfast.toml.",
        show_default=False,
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not prompt.")]


async def up(at: EngineTarget, ledger: Ledger = None, as_json: AsJson = False) -> None:
    """Create or upgrade the ledger's tables. All or nothing; safe to repeat."""
    from holdfast.ledger import migrate as migrations

    async with _target(at, ledger) as target:
        change = await migrations.up(target)
    if as_json:
        emit_json(_document(change))
    elif change.before == change.after:
        note(f"{change.ledger} is already at {change.after}; nothing to do")
    else:
        note(f"{change.ledger} upgraded from {change.before or 'nothing'} to {change.after}")


async def down(at: EngineTarget, ledger: Ledger = None, yes: Yes = False, as_json: AsJson = False) -> None:
    """Drop the ledger's tables with all their data.

    This deletes job histories, dead letters, recorded effects and steps, and approvals. The engine keeps its jobs, but
    a job whose effect was recorded in the ledger may repeat it. Stop all workers first.
    """
    from holdfast.ledger import migrate as migrations

    async with _target(at, ledger) as target:
        status = await migrations.status(target)
        if status.version is None and not isinstance(target, migrations.EngineFile):
            if as_json:
                emit_json({"ledger": status.ledger, "before": None, "after": None})
            else:
                note(f"{status.ledger} has no holdfast tables; nothing to do")
            return
        if not yes and not isinstance(target, migrations.EngineFile):
            _confirm(status.ledger)
        change = await migrations.down(target)
    if as_json:
        emit_json(_document(change))
    else:
        note(f"{change.ledger}: dropped the ledger's tables (version {change.before})")


async def status(at: EngineTarget, ledger: Ledger = None, as_json: AsJson = False) -> None:
    """Print the ledger's version and the one this release needs. Exit code 1 if they differ."""
    from holdfast.ledger import migrate as migrations

    async with _target(at, ledger) as target:
        found = await migrations.status(target)
    if as_json:
        emit_json(
            {
                "ledger": found.ledger,
                "version": found.version,
                "wanted": found.required,
                "pending": [{"version": one.version, "title": one.title} for one in found.pending],
                "ok": found.version == found.required,
            }
        )
    else:
        _print_status(found)
    if found.version != found.required:
        raise typer.Exit(ExitCode.FAILED)


command(
    migrate,
    "up",
    examples=(
        "holdfast migrate up",
        "holdfast migrate up --ledger postgresql://holdfast@db.example/holdfast",
        "holdfast migrate up --ledger sqlite:///ledger.db --json",
    ),
)(up)
command(
    migrate,
    "down",
    examples=(
        "holdfast migrate down",
        "holdfast migrate down --yes --ledger postgresql://holdfast@db.example/holdfast",
    ),
)(down)
command(migrate, "status", examples=("holdfast migrate status", "holdfast migrate status --json | jq -e .ok"))(status)


@asynccontextmanager
async def _target(at: EngineTarget, given: str | None) -> AsyncIterator[Target]:
    from holdfast.ledger.migrate import EngineFile, migration_store

    settings = Settings.load(url=at.url, namespace=at.namespace, ledger=given)
    if settings.embedded:
        yield EngineFile(_path(settings.url))
        return
    if settings.ledger is None:
        raise InvalidOption("there is no ledger; set HOLDFAST_LEDGER, or pass --ledger postgresql://… or sqlite:///…")
    if urlsplit(settings.ledger).scheme == "sqlite":
        yield _path(settings.ledger)
        return
    store = migration_store(settings.ledger)
    try:
        yield store
    finally:
        await store.close()


def _path(url: str) -> Path:
    return Path(sqlite_path(url)).resolve()


def _confirm(ledger: str) -> None:
    if not sys.stdin.isatty():
        raise UsageError("cannot prompt before dropping the ledger: stdin is not a terminal; pass --yes")
    note(
        f"This drops all holdfast tables in {ledger}: job histories, dead letters, recorded effects and steps. "
        "It cannot be undone."
    )
    if read_answer("Type the word ledger to continue:").strip() != "ledger":
        raise UsageError("nothing was changed")


def _print_status(found: MigrationStatus) -> None:
    from holdfast.ledger.migrate import UNKNOWN_VERSION

    at = f"is at {found.version}" if found.version else "has no holdfast tables yet"
    if found.newer:
        advice = f"; this release needs {found.required}: upgrade holdfast"
    elif found.pending:
        advice = f"; `holdfast migrate up` applies {', '.join(f'{one.version} ({one.title})' for one in found.pending)}"
    elif found.version != found.required:
        advice = f"; {UNKNOWN_VERSION}"
    else:
        advice = ", as this release needs"
    note(f"{found.ledger} {at}{advice}")


def _document(change: MigrationChange) -> dict[str, Any]:
    return {"ledger": change.ledger, "before": change.before, "after": change.after}
