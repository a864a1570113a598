"""`holdfast dev`, `worker` and `upkeep`: commands that run until a signal."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import StrEnum
from functools import partial
from typing import Annotated, Final

import typer

from holdfast.app import Holdfast
from holdfast.cli.command import ExitCode, command
from holdfast.cli.lifecycle import LOOPBACK, run_until_signal
from holdfast.cli.live_view import LiveEventView
from holdfast.cli.output import note
from holdfast.cli.session import EngineTarget
from holdfast.cli.supervisor import REPLACED_CODE, WorkerCommand, supervise, supervised_target, watch_parent
from holdfast.core.job import DEFAULT_QUEUE
from holdfast.errors import EngineUnavailable
from holdfast.execution.backend import backend_of
from holdfast.observe.log_formats import log_to_stderr
from holdfast.observe.prometheus import ReadinessCheck, serve_metrics
from holdfast.observe.redact import redact
from holdfast.operations.metrics import render_metrics
from holdfast.operations.readiness import upkeep_readiness, worker_readiness
from holdfast.upkeep.relay_service import run_relay
from holdfast.upkeep.upkeep import Upkeep
from holdfast.worker.recycling import WorkerExit
from holdfast.worker.webhook_worker import run_webhook_worker
from holdfast.worker.worker import Worker

_log: Final = logging.getLogger("holdfast.cli")


class Level(StrEnum):
    """Log levels."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


App = Annotated[str, typer.Argument(metavar="APP", help="App: module:app or file.py:app.", show_default=False)]
WorkQueues = Annotated[
    list[str] | None,
    typer.Option(
        "--queue",
        "-q",
        metavar="NAME",
        help="Serve this queue; repeatable. Default: all queues of the app's tasks, and 'default'.",
        show_default=False,
    ),
]
Concurrency = Annotated[
    int | None,
    typer.Option(
        "--concurrency",
        "-c",
        min=1,
        help="Concurrent jobs per process. Default: HOLDFAST_CONCURRENCY, then 100.",
        show_default=False,
    ),
]
LogJson = Annotated[bool, typer.Option("--log-json", help="Log JSON lines, also on a terminal.")]
LogLevel = Annotated[Level, typer.Option("--log-level", help="Log level.")]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        "--metrics-port",
        min=0,
        max=65_535,
        metavar="PORT",
        help="Serve /metrics, /livez and /readyz on this port; 0 picks a free port, which is logged.",
        show_default=False,
    ),
]
MetricsHost = Annotated[
    str,
    typer.Option(
        "--metrics-host", metavar="HOST", help="Address to serve metrics on. They are served without authentication."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    command(app, "dev", examples=("holdfast dev orders.py:app", "holdfast dev shop.tasks:app --concurrency 4"))(dev)
    command(
        app,
        "worker",
        examples=(
            "holdfast worker shop.tasks:app",
            "holdfast worker shop.tasks:app --concurrency 50 --processes 4 --queue mail --queue default",
            "holdfast worker orders.py:app --url redis://127.0.0.1:6379/0 --name blue --no-upkeep",
            "holdfast worker shop.tasks:app --processes 2 --metrics-port 9100",
        ),
    )(worker)
    command(
        app,
        "upkeep",
        examples=("holdfast upkeep", "holdfast upkeep shop.tasks:app", "holdfast upkeep --queue mail --queue default"),
    )(upkeep)


async def dev(
    at: EngineTarget,
    app: App,
    queue: WorkQueues = None,
    concurrency: Concurrency = None,
    log_level: LogLevel = Level.WARNING,
) -> None:
    """Run worker and upkeep in one process and print events, for development.

    Ctrl-C finishes the running jobs and exits; a second Ctrl-C stops now.
    """
    log_to_stderr(log_level, as_json=False)
    async with at.app(app) as holdfast:
        backend = backend_of(holdfast)
        backend.require_ledger()
        queues = _queues(holdfast, queue)
        worker = Worker(holdfast, queues=queues, concurrency=concurrency)
        with run_until_signal(worker.drain):
            note(f"holdfast dev · {redact(holdfast.settings.url)} · queues {', '.join(queues)}")
            note(f"tasks: {', '.join(sorted(holdfast.tasks)) or 'none'}")
            note("ready; submit from your code or with `holdfast submit`, Ctrl-C to stop")
            await _warn(holdfast, queues)
            # With that setting the worker runs a relay itself.
            own = not holdfast.settings.outbox_relay
            async with LiveEventView(holdfast.engine, queues), run_relay(holdfast, enabled=own):
                await worker.run()
        note("drained; open jobs stay queued for the next start")


async def worker(
    at: EngineTarget,
    app: App,
    queue: WorkQueues = None,
    concurrency: Concurrency = None,
    processes: Annotated[int, typer.Option("--processes", "-p", min=1, help="Worker processes.")] = 1,
    no_upkeep: Annotated[bool, typer.Option("--no-upkeep", help="Do not run upkeep in this process.")] = False,
    name: Annotated[
        str | None, typer.Option(help="Prefix of the worker's name in logs and histories.", show_default=False)
    ] = None,
    worker_id: Annotated[
        str | None,
        typer.Option(
            "--id",
            metavar="ID",
            help="Stable identity: a worker that starts again with it takes over the leases of its last start at once. "
            "Default: HOLDFAST_WORKER_ID.",
            show_default=False,
        ),
    ] = None,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = LOOPBACK,
    log_json: LogJson = False,
    log_level: LogLevel = Level.INFO,
    supervisor: Annotated[int | None, typer.Option(hidden=True, help="The process that started this one.")] = None,
    isolated: Annotated[
        int | None, typer.Option(hidden=True, help="Run jobs that must run alone, with the lock of this descriptor.")
    ] = None,
) -> None:
    """Claim and run jobs until a signal.

    SIGTERM or Ctrl-C drains: the worker claims nothing, finishes running jobs within the grace time
    (HOLDFAST_DRAIN_GRACE_S), releases the rest and exits with code 0. A second signal stops it now.
    With --processes the first process serves its metrics on --metrics-port, the next on the port after it, and so on.
    Of several workers with the same --id the one that started last works; the others stop and exit with code 2. With
    --processes the ids of the processes are ID-0, ID-1 and so on.
    """
    log_to_stderr(log_level, as_json=log_json)
    if supervisor is not None:
        at = supervised_target(at)
    holdfast = at.app(app)
    if worker_id is None:
        worker_id = holdfast.settings.worker_id
    call = WorkerCommand(
        at=at,
        app=app,
        queues=queue,
        concurrency=concurrency,
        upkeep=not no_upkeep,
        name=name,
        log_json=log_json,
        log_level=log_level,
        worker_id=worker_id,
        metrics_port=metrics_port,
        metrics_host=metrics_host,
    )
    if processes > 1:
        await supervise(holdfast, call, processes)
        return
    async with holdfast:
        backend = backend_of(holdfast)
        backend.require_ledger()
        queues = _queues(holdfast, queue)
        work = Worker(
            holdfast,
            queues=queues,
            concurrency=concurrency,
            upkeep=not no_upkeep,
            name=name,
            worker_id=worker_id if isolated is None else None,
            isolated_command=call if isolated is None else None,
            on_cleared=None if isolated is None else partial(os.close, isolated),
        )
        with run_until_signal(work.drain):
            await _warn(holdfast, queues)
            readiness = partial(worker_readiness, holdfast, work, upkeep=not no_upkeep)
            async with watch_parent(supervisor, work.drain), metrics(holdfast, metrics_host, metrics_port, readiness):
                ended = await work.run()
    _log.info("worker %s ended: %s", work.incarnation, ended, extra={"incarnation": work.incarnation})
    if ended is WorkerExit.REPLACED:
        raise typer.Exit(ExitCode.USAGE if supervisor is None else REPLACED_CODE)


async def upkeep(
    at: EngineTarget,
    app: Annotated[
        str | None, typer.Argument(metavar="APP", help="Use the queues of this app.", show_default=False)
    ] = None,
    queue: Annotated[
        list[str] | None,
        typer.Option(
            "--queue",
            "-q",
            metavar="NAME",
            help="Only this queue; repeatable. Default: the app's queues, or all that ever had a job.",
            show_default=False,
        ),
    ] = None,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = LOOPBACK,
    log_json: LogJson = False,
    log_level: LogLevel = Level.INFO,
) -> None:
    """Promote, reclaim and prune, and publish the outbox's events, without running jobs.

    Workers do this themselves. Use it when they run with --no-upkeep, or while no worker runs.
    """
    log_to_stderr(log_level, as_json=log_json)
    holdfast = at.app(app) if app else Holdfast(settings=at.settings())
    async with holdfast:
        backend = backend_of(holdfast)
        backend.require_ledger()
        queues = _queues(holdfast, queue) if app or queue else []
        service = Upkeep(backend.engine, queues, backend.settings, backend.ledger)
        with run_until_signal(service.stop):
            async with (
                run_webhook_worker(backend.engine, backend.ledger, backend.settings),
                run_relay(holdfast),
                metrics(holdfast, metrics_host, metrics_port, partial(upkeep_readiness, holdfast, service)),
            ):
                _log.info("upkeep started on %s: queues %s", redact(holdfast.settings.url), ", ".join(queues) or "all")
                await service.run()
    _log.info("upkeep ended")


@asynccontextmanager
async def metrics(
    app: Holdfast, host: str, port: int | None, readiness: ReadinessCheck | None = None
) -> AsyncIterator[None]:
    """Serve metrics and health while the block runs, if a port is given."""
    if port is None:
        yield
        return
    async with serve_metrics(host, port, lambda: render_metrics(app), readiness):
        yield


def _queues(app: Holdfast, named: list[str] | None) -> list[str]:
    if named:
        return list(dict.fromkeys(named))
    return sorted({DEFAULT_QUEUE} | {task.queue for task in app.tasks.values()})


async def _warn(app: Holdfast, queues: list[str]) -> None:
    """Warn at the start if the store may lose data (Q11).

    A SQLite file is only checked by `doctor`.
    """
    if app.settings.url.startswith("sqlite:"):
        return
    try:
        findings = await app.engine.diagnose(queues)
    except EngineUnavailable as exc:
        # Some servers forbid these queries; the worker starts anyway.
        _log.warning("cannot check whether the store may lose data: %s", exc)
        return
    for finding in findings:
        if not finding.ok and not finding.warning:
            _log.warning("%s: %s; %s", finding.check, finding.message, finding.remedy)
