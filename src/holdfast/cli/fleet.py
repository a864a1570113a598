"""`holdfast worker --processes N`: the same call once more for each process, kept running by the supervisor."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from holdfast.app import Holdfast
from holdfast.cli.command import Connection
from holdfast.cli.redact import redact
from holdfast.cli.signals import on_signals
from holdfast.extras import require
from holdfast.worker.supervisor import Supervisor

_log: Final = logging.getLogger("holdfast.cli")

#: Where metrics are served unless told otherwise.
LOOPBACK: Final = "127.0.0.1"

_LOOK_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCall:
    """What a person asked of `holdfast worker`, beside how many."""

    at: Connection
    app: str
    queues: list[str] | None
    concurrency: int | None
    upkeep: bool
    name: str | None
    log_json: bool
    log_level: str
    metrics_port: int | None = None
    metrics_host: str = LOOPBACK

    def words(self, number: int = 0) -> list[str]:
        """The call for one process; each serves its metrics on a port of its own."""
        port = self.metrics_port + number if self.metrics_port else self.metrics_port
        given = {
            "--metrics-port": port,
            "--metrics-host": None if port is None else self.metrics_host,
            "--url": self.at.url,
            "--namespace": self.at.namespace,
            "--concurrency": self.concurrency,
            "--name": self.name,
            "--log-level": self.log_level,
        }
        words = [word for option, value in given.items() if value is not None for word in (option, str(value))]
        words += [word for queue in self.queues or [] for word in ("--queue", queue)]
        words += [] if self.upkeep else ["--no-upkeep"]
        words += ["--log-json"] if self.log_json else []
        return [sys.executable, "-m", "holdfast", "worker", self.app, *words, "--supervisor", str(os.getpid())]


async def supervise(app: Holdfast, call: WorkerCall, processes: int) -> None:
    """Run them until told to stop. An app, an engine or an extra that is not there is reported here, once."""
    if call.upkeep and app.settings.delivers:
        require("sending webhooks", "httpcore")
    async with app:
        app.require_ledger()
    supervisor = Supervisor(call.words, processes, app.settings.drain_grace_s)
    with on_signals(supervisor.stop):
        _log.info("supervisor started: %d worker processes on %s", processes, redact(app.settings.url))
        await supervisor.run()
    _log.info("all worker processes have ended")


@asynccontextmanager
async def under(supervisor: int | None, drain: Callable[[], None]) -> AsyncIterator[None]:
    """While the block runs: drain if the supervisor dies, since nobody could end this process any more."""
    if supervisor is None:
        yield
        return
    watching = asyncio.create_task(_drain_when_orphaned(supervisor, drain))
    try:
        yield
    finally:
        watching.cancel()


async def _drain_when_orphaned(supervisor: int, drain: Callable[[], None]) -> None:
    while os.getppid() == supervisor:  # noqa: ASYNC110 - nothing tells a process that its parent has died
        await asyncio.sleep(_LOOK_S)
    _log.error("the supervisor (process %d) is gone; draining", supervisor)
    drain()
