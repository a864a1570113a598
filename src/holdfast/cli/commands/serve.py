"""`holdfast serve`: the HTTP service, with or without worker and upkeep in the same process (H4)."""

from __future__ import annotations

import ipaddress
import logging
from typing import Annotated, Final

import typer

from holdfast.app import Holdfast
from holdfast.cli.command import command
from holdfast.cli.commands.worker import Level, LogJson, LogLevel
from holdfast.cli.lifecycle import run_until_signal
from holdfast.cli.output import note
from holdfast.cli.session import EngineTarget, local_principal
from holdfast.errors import EngineUnavailable, LedgerUnavailable, NoLedger, UsageError
from holdfast.execution.backend import backend_of
from holdfast.observe.log_formats import log_to_stderr
from holdfast.observe.redact import redact
from holdfast.operations.operations import Operations

_log: Final = logging.getLogger("holdfast.cli")


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(
        app,
        "serve",
        examples=(
            "holdfast serve orders.py:app --dev",
            "holdfast serve shop.tasks:app --host 0.0.0.0 --port 8080 --worker",
            "holdfast serve --url redis://127.0.0.1:6379/0 --no-upkeep",
        ),
    )(serve)


async def serve(
    at: EngineTarget,
    app: Annotated[
        str | None,
        typer.Argument(
            metavar="APP",
            help="App: checks submissions, and is required for --worker. Default: submit without checks.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port; 0 picks a free one.")] = 8000,
    worker: Annotated[
        bool | None,
        typer.Option(
            "--worker/--no-worker",
            help="Run jobs in this process. Default: the setting HTTP_WORKER; yes with --dev.",
            show_default=False,
        ),
    ] = None,
    upkeep: Annotated[
        bool | None,
        typer.Option(
            "--upkeep/--no-upkeep",
            help="Run upkeep in this process. Default: the setting HTTP_UPKEEP, then yes.",
            show_default=False,
        ),
    ] = None,
    dev: Annotated[
        bool, typer.Option("--dev", help="Allow requests from this machine without a token; only on loopback.")
    ] = False,
    log_json: LogJson = False,
    log_level: LogLevel = Level.INFO,
) -> None:
    """Serve the HTTP API until a signal.

    Callers need a token (`holdfast token create`), except with --dev, which prints a link for your browser.
    SIGTERM or Ctrl-C finishes requests in flight; a second signal stops now.
    """
    from holdfast.http import create_api
    from holdfast.http.server import HttpServer, bind

    log_to_stderr(log_level, as_json=log_json)
    if dev and not _is_loopback(host):
        raise UsageError(
            f"--dev allows requests without a token and must listen on loopback, not on {host}; omit --dev or --host"
        )
    holdfast = at.some_app(app)
    works = _works(holdfast, app, worker, dev=dev)
    await (_check_ledger(holdfast) if dev else _check_tokens(holdfast))
    api = create_api(holdfast, dev=dev, worker=works, upkeep=upkeep)
    try:
        sock = bind(host, port)
    except OSError as exc:
        raise UsageError(f"cannot listen on {host} port {port}: {exc.strerror}; choose another with --port") from exc
    server = HttpServer(api, sock)
    with sock, run_until_signal(server.stop):
        _log.info(
            "serving %s on %s%s", redact(holdfast.settings.url), server.address, ", with a worker" if works else ""
        )
        if dev:
            note(f"open {api.state.service.authenticator.link(server.address)}  (works once)")
            note(f"for another link: curl -X POST {server.address}/dev")
        await server.run_until_stopped()
    _log.info("server ended")


def _works(app: Holdfast, reference: str | None, given: bool | None, *, dev: bool) -> bool:
    works = given if given is not None else (app.settings.http_worker or (dev and reference is not None))
    if works and reference is None:
        raise UsageError("a worker needs an app; run `holdfast serve module:app --worker`")
    return works


async def _check_ledger(app: Holdfast) -> None:
    """Raise `LedgerRefused` if the ledger refuses; unreachable stores are retried later."""
    try:
        async with app:
            backend_of(app).require_ledger()
    except EngineUnavailable as exc:
        _log.warning("cannot reach the engine, retrying: %s", exc)


async def _check_tokens(app: Holdfast) -> None:
    """Raise `UsageError` if there is no valid token, because the server would be unusable."""
    if app.settings.ledger is None and not app.settings.embedded:
        raise NoLedger("a server that authenticates callers by token")
    async with app:
        backend_of(app).require_ledger()
        operations = Operations.for_app(app)
        try:
            rows = await operations.tokens.list(local_principal())
        except LedgerUnavailable as exc:
            _log.warning("cannot check for valid tokens: %s", exc)
            return
        if not any(operations.tokens.state(row) == "valid" for row in rows):
            # An app may set its stores in code, which `holdfast token create` does not see.
            stores = [f"HOLDFAST_URL={app.settings.url}"]
            stores += [f"HOLDFAST_LEDGER={app.settings.ledger}"] if app.settings.ledger is not None else []
            raise UsageError(
                "there is no valid token; create one with "
                f"`{redact(' '.join(stores))} holdfast token create NAME --role admin --all-tenants`, "
                "or pass --dev"
            )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
