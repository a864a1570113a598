"""`holdfast dev`, `worker` and `upkeep`: the commands that stay."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import StrEnum
from functools import partial
from typing import Annotated, Final

import typer

from holdfast.app import Holdfast
from holdfast.cli.command import command
from holdfast.cli.lifecycle import LOOPBACK, WorkerCommand, run_until_signal, supervise, watch_parent
from holdfast.cli.live_view import LiveEventView
from holdfast.cli.output import note
from holdfast.cli.session import EngineTarget
from holdfast.core.job import DEFAULT_QUEUE
from holdfast.errors import EngineUnavailable
from holdfast.observe.log_formats import log_to_stderr
from holdfast.observe.prometheus import AskReadiness, serve_metrics
from holdfast.observe.redact import redact
from holdfast.operations.metrics import render_metrics
from holdfast.operations.readiness import upkeep_readiness, worker_readiness
from holdfast.upkeep.relay_service import run_relay
from holdfast.upkeep.upkeep import Upkeep
from holdfast.worker.webhook_worker import run_webhook_worker
from holdfast.worker.worker import Worker

_log: Final = logging.getLogger("holdfast.cli")


class Level(StrEnum):
    """How much to log."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


App = Annotated[str, typer.Argument(metavar="APP", help="The app: module:app or file.py:app.", show_default=False)]
WorkQueues = Annotated[
    list[str] | None,
    typer.Option(
        "--queue",
        "-q",
        metavar="NAME",
        help="Serve this queue; may be repeated. Default: every queue that a task of the app names, and 'default'.",
        show_default=False,
    ),
]
Concurrency = Annotated[
    int | None,
    typer.Option(
        "--concurrency",
        "-c",
        min=1,
        help="Jobs at a time in each process. Default: HOLDFAST_CONCURRENCY, then 100.",
        show_default=False,
    ),
]
LogJson = Annotated[bool, typer.Option("--log-json", help="Log JSON lines, at a terminal too.")]
LogLevel = Annotated[Level, typer.Option("--log-level", help="How much to log.")]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        "--metrics-port",
        min=0,
        max=65_535,
        metavar="PORT",
        help="Serve /metrics, /livez and /readyz on this port; 0 takes a free one, and the log says which.",
        show_default=False,
    ),
]
MetricsHost = Annotated[
    str,
    typer.Option(
        "--metrics-host", metavar="HOST", help="The address to serve metrics on. Whoever reaches it reads them."
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
    """Everything in one process, for your desk: works on jobs, does the upkeep, and shows what happens.

    Ctrl-C finishes what runs and ends; a second Ctrl-C hurries.
    """
    log_to_stderr(log_level, as_json=False)
    async with at.app(app) as holdfast:
        holdfast.require_ledger()
        queues = _queues(holdfast, queue)
        worker = Worker(holdfast, queues=queues, concurrency=concurrency)
        with run_until_signal(worker.drain):
            note(f"holdfast dev · {redact(holdfast.settings.url)} · queues {', '.join(queues)}")
            note(f"tasks: {', '.join(sorted(holdfast.tasks)) or 'none'}")
            note("ready; submit from your code or with `holdfast submit`, Ctrl-C ends")
            await _warn(holdfast, queues)
            # With that setting the worker has a relay of its own.
            own = not holdfast.settings.outbox_relay
            async with LiveEventView(holdfast.engine, queues), run_relay(holdfast, wanted=own):
                await worker.run()
        note("drained; nothing is lost, open jobs wait for the next start")


async def worker(
    at: EngineTarget,
    app: App,
    queue: WorkQueues = None,
    concurrency: Concurrency = None,
    processes: Annotated[int, typer.Option("--processes", "-p", min=1, help="Worker processes.")] = 1,
    no_upkeep: Annotated[
        bool, typer.Option("--no-upkeep", help="Leave promoting and pruning to other processes.")
    ] = False,
    name: Annotated[
        str | None, typer.Option(help="Begins the worker's name in logs and histories.", show_default=False)
    ] = None,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = LOOPBACK,
    log_json: LogJson = False,
    log_level: LogLevel = Level.INFO,
    supervisor: Annotated[
        int | None, typer.Option(hidden=True, help="The process that started this one for --processes.")
    ] = None,
) -> None:
    """Work on jobs until told to stop.

    SIGTERM or Ctrl-C drains: takes nothing new, finishes what runs within the grace time
    (HOLDFAST_DRAIN_GRACE_S), gives back the rest and ends with exit code 0. A second signal hurries.
    With --processes the first process serves its metrics on --metrics-port, the next on the port after it, and so on.
    """
    log_to_stderr(log_level, as_json=log_json)
    holdfast = at.app(app)
    if processes > 1:
        call = WorkerCommand(
            at=at,
            app=app,
            queues=queue,
            concurrency=concurrency,
            upkeep=not no_upkeep,
            name=name,
            log_json=log_json,
            log_level=log_level,
            metrics_port=metrics_port,
            metrics_host=metrics_host,
        )
        await supervise(holdfast, call, processes)
        return
    async with holdfast:
        holdfast.require_ledger()
        queues = _queues(holdfast, queue)
        work = Worker(holdfast, queues=queues, concurrency=concurrency, upkeep=not no_upkeep, name=name)
        with run_until_signal(work.drain):
            await _warn(holdfast, queues)
            readiness = partial(worker_readiness, holdfast, work, upkeep=not no_upkeep)
            async with watch_parent(supervisor, work.drain), metrics(holdfast, metrics_host, metrics_port, readiness):
                ended = await work.run()
    _log.info("worker %s ended: %s", work.incarnation, ended, extra={"incarnation": work.incarnation})


async def upkeep(
    at: EngineTarget,
    app: Annotated[str | None, typer.Argument(metavar="APP", help="Take its queues.", show_default=False)] = None,
    queue: Annotated[
        list[str] | None,
        typer.Option(
            "--queue",
            "-q",
            metavar="NAME",
            help="Keep this queue; may be repeated. Default: the app's queues, or all that have ever had a job.",
            show_default=False,
        ),
    ] = None,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = LOOPBACK,
    log_json: LogJson = False,
    log_level: LogLevel = Level.INFO,
) -> None:
    """Promote, reclaim and prune, and publish the outbox's events, without working on jobs.

    Workers do this by themselves; it is for when they run with --no-upkeep, or while none runs.
    """
    log_to_stderr(log_level, as_json=log_json)
    holdfast = at.app(app) if app else Holdfast(settings=at.settings())
    async with holdfast:
        holdfast.require_ledger()
        queues = _queues(holdfast, queue) if app or queue else []
        keeper = Upkeep(holdfast.engine, queues, holdfast.settings, holdfast.ledger_backend)
        with run_until_signal(keeper.stop):
            async with (
                run_webhook_worker(holdfast.engine, holdfast.ledger_backend, holdfast.settings),
                run_relay(holdfast),
                metrics(holdfast, metrics_host, metrics_port, partial(upkeep_readiness, holdfast, keeper)),
            ):
                _log.info("upkeep started on %s: queues %s", redact(holdfast.settings.url), ", ".join(queues) or "all")
                await keeper.run()
    _log.info("upkeep ended")


@asynccontextmanager
async def metrics(
    app: Holdfast, host: str, port: int | None, readiness: AskReadiness | None = None
) -> AsyncIterator[None]:
    """While the block runs: serve metrics and health, if that was asked for."""
    if port is None:
        yield
        return
    async with serve_metrics(host, port, lambda: render_metrics(app), readiness):
        yield


def _queues(app: Holdfast, asked: list[str] | None) -> list[str]:
    if asked:
        return list(dict.fromkeys(asked))
    return sorted({DEFAULT_QUEUE} | {task.queue for task in app.tasks.values()})


async def _warn(app: Holdfast, queues: list[str]) -> None:
    """Say at the start if the store may forget (requirement Q11). A file on this machine is left to the doctor."""
    if app.settings.url.startswith("sqlite:"):
        return
    try:
        findings = await app.engine.diagnose(queues)
    except EngineUnavailable as exc:
        # Some servers do not let us ask; that is no reason not to work.
        _log.warning("whether the store may forget could not be found out: %s", exc)
        return
    for finding in findings:
        if not finding.ok and not finding.warning:
            _log.warning("%s: %s; %s", finding.check, finding.message, finding.advice)
