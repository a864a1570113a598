"""`holdfast outbox`: list and retry outbox events, and run a relay."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, Final

import typer

from holdfast.app import Holdfast
from holdfast.cli.command import AsJson, command
from holdfast.cli.commands.worker import Level, LogJson, LogLevel, MetricsHost, MetricsPort, metrics
from holdfast.cli.lifecycle import LOOPBACK, run_until_signal
from holdfast.cli.output import as_json as as_document
from holdfast.cli.output import emit_json, emit_line, emit_rows, instant, note
from holdfast.cli.session import EngineTarget, current_principal, ledger_must_exist
from holdfast.clock import iso
from holdfast.core.principal import Principal
from holdfast.errors import InvalidOption, LedgerRefused, LedgerUnavailable, NoLedger
from holdfast.execution.backend import backend_of
from holdfast.factory import OutboxHandle
from holdfast.ledger.port.messages import OutboxEvent, OutboxStatus
from holdfast.observe.log_formats import log_to_stderr
from holdfast.operations.messages import OutboxOperations
from holdfast.upkeep.relay_service import RelayService

outbox = typer.Typer(help="List, retry and publish outbox events.", no_args_is_help=True)

_log: Final = logging.getLogger("holdfast.outbox")

_COLUMNS: Final = (
    "event",
    "destination",
    "topic",
    "key",
    "tenant",
    "status",
    "attempts",
    "created",
    "next attempt",
    "error",
)

Destination = Annotated[str, typer.Option(metavar="NAME", help="Only this destination.", show_default=False)]


@command(
    outbox,
    "list",
    examples=(
        "holdfast outbox list --status DEAD",
        "holdfast outbox list --destination default --topic orders --key order-7",
        "holdfast outbox list --status RETRYING --json | jq '.[].last_error'",
    ),
)
async def list_events(
    at: EngineTarget,
    status: Annotated[
        OutboxStatus | None, typer.Option(case_sensitive=False, help="Only in this status.", show_default=False)
    ] = None,
    destination: Destination = "",
    topic: Annotated[str, typer.Option(metavar="NAME", help="Only this topic.", show_default=False)] = "",
    key: Annotated[str, typer.Option(metavar="KEY", help="Only this key.", show_default=False)] = "",
    limit: Annotated[int, typer.Option(min=1, max=1_000, help="Maximum number of rows.")] = 50,
    after: Annotated[
        int | None,
        typer.Option(
            metavar="POSITION", help="Continue after a previous page; stderr prints the position.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List outbox events, newest first. If more rows follow, stderr prints the position."""
    async with _open_outbox(at) as (_, events, principal):
        found = await events.list(
            principal, status=status, destination=destination, topic=topic, key=key, after=after, limit=limit
        )
    if as_json:
        emit_json([_document(event) for event in found])
    else:
        emit_rows(_COLUMNS, [_row(event) for event in found], empty="no events")
    if len(found) == limit:
        note(f"more rows may follow: --after {found[-1].position}")


@command(
    outbox,
    "retry",
    examples=(
        "holdfast outbox retry 019a2f31c07d7e0ab1c2d3e4f5a6b7c8 --reason 'the broker is back'",
        "holdfast outbox retry --all-dead --destination default --reason 'the broker is back'",
    ),
)
async def retry(
    at: EngineTarget,
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="ID...", help="Ids of events, DEAD or RETRYING.", show_default=False)
    ] = None,
    all_dead: Annotated[bool, typer.Option("--all-dead", help="All DEAD events.")] = False,
    destination: Destination = "",
    reason: Annotated[str, typer.Option(help="Reason for the audit log.")] = "",
    as_json: AsJson = False,
) -> None:
    """Retry events now, with their attempt count reset. Exit code 2 if a named event is not DEAD or RETRYING."""
    if bool(ids) == all_dead:
        raise InvalidOption("pass either ids of events or --all-dead")
    if destination and not all_dead:
        raise InvalidOption("--destination requires --all-dead; omit it with ids")
    async with _open_outbox(at) as (_, events, principal):
        if ids:
            revived = await events.retry(principal, ids, reason=reason)
        else:
            revived = await events.retry_dead(principal, destination=destination, reason=reason)
    if as_json:
        emit_json({"revived": revived})
    else:
        emit_line(str(revived), "to be retried")
    if ids and revived < len(set(ids)):
        missing = len(set(ids)) - revived
        raise InvalidOption(f"{missing} of the ids are not DEAD or RETRYING events; see `holdfast outbox list`")


@command(
    outbox,
    "relay",
    examples=(
        "holdfast outbox relay",
        "holdfast outbox relay app.main:app",
        "holdfast outbox relay --url redis://127.0.0.1:6379/0 --metrics-port 9102 --log-json",
    ),
)
async def relay(
    at: EngineTarget,
    app: Annotated[
        str | None,
        typer.Argument(
            metavar="APP",
            help="App whose settings name the targets. Default: environment and holdfast.toml.",
            show_default=False,
        ),
    ] = None,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = LOOPBACK,
    log_json: LogJson = False,
    log_level: LogLevel = Level.INFO,
) -> None:
    """Publish events to the brokers of outbox_targets, and jobs to the engine, until a signal.

    Any number of relays may run. SIGTERM or Ctrl-C finishes events in flight and exits.
    """
    log_to_stderr(log_level, as_json=log_json)
    async with _app(at, app) as holdfast:
        backend = backend_of(holdfast)
        assert backend.outbox is not None
        await _check_database(holdfast, backend.outbox)
        relaying = RelayService(holdfast, backend.outbox)
        with run_until_signal(relaying.stop):
            _log.info("relay started: destinations %s", ", ".join(relaying.destinations))
            async with metrics(holdfast, metrics_host, metrics_port):
                await relaying.run()
    _log.info("relay ended")


async def _check_database(app: Holdfast, outbox: OutboxHandle) -> None:
    """Raise `LedgerRefused` if the database refuses; an unreachable database is retried later."""
    if app.settings.outbox_url is None:
        backend_of(app).require_ledger()
        return
    try:
        await outbox.open()
    except LedgerUnavailable as exc:
        if isinstance(exc, LedgerRefused):
            raise
        _log.warning("outbox database unreachable, retrying: %s", exc)


@asynccontextmanager
async def _app(at: EngineTarget, reference: str | None = None) -> AsyncIterator[Holdfast]:
    app = at.some_app(reference)
    if app.settings.outbox_url is None:
        ledger_must_exist(app.settings)
    async with app:
        if backend_of(app).outbox is None:
            raise NoLedger("an outbox (or set HOLDFAST_OUTBOX_URL to the database that has it)")
        yield app


@asynccontextmanager
async def _open_outbox(at: EngineTarget) -> AsyncIterator[tuple[Holdfast, OutboxOperations, Principal]]:
    async with _app(at) as app:
        backend = backend_of(app)
        assert backend.outbox is not None
        yield app, OutboxOperations(backend.outbox), await current_principal(app.settings, backend.ledger)


def _row(event: OutboxEvent) -> tuple[str, ...]:
    return (
        event.id,
        event.destination,
        event.topic,
        event.key,
        event.tenant_id,
        event.status,
        str(event.attempt_count),
        instant(event.created_at_ms),
        "" if event.next_retry_at_ms is None else instant(event.next_retry_at_ms),
        event.last_error,
    )


def _document(event: OutboxEvent) -> dict[str, Any]:
    return {
        "id": event.id,
        "tenant_id": event.tenant_id,
        "destination": event.destination,
        "topic": event.topic,
        "key": event.key or None,
        "status": event.status,
        "attempt_count": event.attempt_count,
        "next_retry_at": iso(event.next_retry_at_ms or 0),
        "last_error": event.last_error or None,
        "created_at": iso(event.created_at_ms),
        "sent_at": iso(event.sent_at_ms or 0),
        "headers": dict(event.headers),
        "payload": as_document(event.payload.encode()),
        "position": event.position,
    }
