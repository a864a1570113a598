"""`holdfast serve`: the HTTP service, with the worker and the upkeep in the same process or apart (requirement H4)."""

from __future__ import annotations

import ipaddress
import logging
from typing import Annotated, Final

import typer

from holdfast.app import Holdfast
from holdfast.cli.command import command
from holdfast.cli.commands.run import Level, LogJson, LogLevel
from holdfast.cli.lifecycle import run_until_signal
from holdfast.cli.output import note
from holdfast.cli.session import EngineTarget, local_principal
from holdfast.errors import EngineUnavailable, LedgerUnavailable, NoLedger, UsageError
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
            help="The app: checks what is submitted, and is needed for --worker. Without it jobs are passed on.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="The port; 0 is any free one.")] = 8000,
    worker: Annotated[
        bool | None,
        typer.Option(
            "--worker/--no-worker",
            help="Work on jobs in this process. Default: HTTP_WORKER of the settings; yes with --dev.",
            show_default=False,
        ),
    ] = None,
    upkeep: Annotated[
        bool | None,
        typer.Option(
            "--upkeep/--no-upkeep",
            help="Do the upkeep in this process. Default: HTTP_UPKEEP of the settings, then yes.",
            show_default=False,
        ),
    ] = None,
    dev: Annotated[
        bool, typer.Option("--dev", help="Let everybody on this machine in without a token; only on loopback.")
    ] = False,
    log_json: LogJson = False,
    log_level: LogLevel = Level.INFO,
) -> None:
    """Serve the HTTP API until told to stop.

    Everybody needs a token (`holdfast token create`), except with --dev, which prints a link for your browser.
    SIGTERM or Ctrl-C finishes what is on its way; a second signal hurries.
    """
    from holdfast.http import create_api
    from holdfast.http.server import HttpServer, bind

    log_to_stderr(log_level, as_json=log_json)
    if dev and not _is_loopback(host):
        raise UsageError(
            f"--dev lets everybody in, so it listens on loopback only, not on {host}; leave one of them out"
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


def _works(app: Holdfast, reference: str | None, asked: bool | None, *, dev: bool) -> bool:
    wanted = asked if asked is not None else (app.settings.http_worker or (dev and reference is not None))
    if wanted and reference is None:
        raise UsageError("a worker needs the tasks: name the app, `holdfast serve module:app --worker`")
    return wanted


async def _check_ledger(app: Holdfast) -> None:
    """Raise `LedgerRefused`; stores that do not answer are waited for."""
    try:
        async with app:
            app.require_ledger()
    except EngineUnavailable as exc:
        _log.warning("the engine cannot be reached yet: %s", exc)


async def _check_tokens(app: Holdfast) -> None:
    """A service that nobody can use is a mistake that is better told now."""
    if app.settings.ledger is None and not app.settings.embedded:
        raise NoLedger("a server that knows who asks (tokens are kept there)")
    async with app:
        app.require_ledger()
        offices = Operations.for_app(app)
        try:
            rows = await offices.tokens.list(local_principal())
        except LedgerUnavailable as exc:
            _log.warning("whether there is a token could not be found out: %s", exc)
            return
        if not any(offices.tokens.state(row) == "valid" for row in rows):
            # An app may name its stores itself, which the program that makes the token does not know.
            stores = [f"HOLDFAST_URL={app.settings.url}"]
            stores += [f"HOLDFAST_LEDGER={app.settings.ledger}"] if app.settings.ledger is not None else []
            raise UsageError(
                "there is no valid token, so nobody could use this server; make one with "
                f"`{redact(' '.join(stores))} holdfast token create NAME --role admin --all-tenants`, "
                "or serve yourself with --dev"
            )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
