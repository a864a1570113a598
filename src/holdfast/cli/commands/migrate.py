"""`holdfast migrate`: the ledger's tables, up to this release or back down.

An engine on SQLite that is its own ledger has one file and one schema, which `up` brings to this release, too.
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
from holdfast.cli.output import emit_json, note
from holdfast.cli.session import EngineTarget
from holdfast.errors import InvalidOption, UsageError
from holdfast.factory import sqlite_path
from holdfast.settings import Settings

if TYPE_CHECKING:
    from holdfast.ledger.migrate import MigrationChange, MigrationStatus, Target


migrate = typer.Typer(no_args_is_help=True, help="Bring the ledger's tables up to this release, or take them away.")

Ledger = Annotated[
    str | None,
    typer.Option(
        "--ledger",
        metavar="URL",
        help="The ledger: postgresql://user:password@host/database or sqlite:///ledger.db. Default: HOLDFAST_LEDGER, "
        "holdfast.toml.",
        show_default=False,
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


async def up(at: EngineTarget, ledger: Ledger = None, as_json: AsJson = False) -> None:
    """Make or upgrade the ledger's tables: all or nothing, and harmless to repeat."""
    from holdfast.ledger import migrate as migrations

    async with _target(at, ledger) as target:
        change = await migrations.up(target)
    if as_json:
        emit_json(_document(change))
    elif change.before == change.after:
        note(f"{change.ledger} is at {change.after} already; nothing to do")
    else:
        note(f"{change.ledger} went from {change.before or 'nothing'} to {change.after}")


async def down(at: EngineTarget, ledger: Ledger = None, yes: Yes = False, as_json: AsJson = False) -> None:
    """Drop the ledger's tables and everything in them.

    Lost are: the story of every job, dead letters, recorded effects and steps, approvals. The engine keeps its jobs,
    but a job whose effect was recorded here may do it again. Stop workers first.
    """
    from holdfast.ledger import migrate as migrations

    async with _target(at, ledger) as target:
        status = await migrations.status(target)
        if status.version is None and not isinstance(target, migrations.EngineFile):
            if as_json:
                emit_json({"ledger": status.ledger, "before": None, "after": None})
            else:
                note(f"{status.ledger} has no tables of holdfast; nothing to do")
            return
        if not yes and not isinstance(target, migrations.EngineFile):
            _confirm(status.ledger)
        change = await migrations.down(target)
    if as_json:
        emit_json(_document(change))
    else:
        note(f"{change.ledger}: the ledger's tables are gone (they were at {change.before})")


async def status(at: EngineTarget, ledger: Ledger = None, as_json: AsJson = False) -> None:
    """Say which version the ledger has, and which one this release wants. Exit code 1 if they differ."""
    from holdfast.ledger import migrate as migrations

    async with _target(at, ledger) as target:
        found = await migrations.status(target)
    if as_json:
        emit_json(
            {
                "ledger": found.ledger,
                "version": found.version,
                "wanted": found.wanted,
                "pending": [{"version": one.version, "title": one.title} for one in found.pending],
                "ok": found.version == found.wanted,
            }
        )
    else:
        _tell(found)
    if found.version != found.wanted:
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
        raise InvalidOption("no ledger is named; set HOLDFAST_LEDGER, or give --ledger postgresql://… or sqlite:///…")
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
        raise UsageError("this drops the whole ledger; repeat it with --yes if that is what you want")
    note(
        f"This drops all of holdfast's tables in {ledger}: stories, dead letters, recorded effects and steps. "
        "It cannot be undone."
    )
    if input("Type the word ledger to go on: ").strip() != "ledger":
        raise UsageError("nothing was changed")


def _tell(found: MigrationStatus) -> None:
    from holdfast.ledger.migrate import UNKNOWN_VERSION

    at = f"is at {found.version}" if found.version else "has no tables of holdfast yet"
    if found.newer:
        advice = f"; this release knows {found.wanted}: upgrade holdfast here"
    elif found.pending:
        advice = f"; `holdfast migrate up` applies {', '.join(f'{one.version} ({one.title})' for one in found.pending)}"
    elif found.version != found.wanted:
        advice = f"; {UNKNOWN_VERSION}"
    else:
        advice = "; that is what this release wants"
    note(f"{found.ledger} {at}{advice}")


def _document(change: MigrationChange) -> dict[str, Any]:
    return {"ledger": change.ledger, "before": change.before, "after": change.after}
