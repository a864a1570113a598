"""Send webhooks: a small worker on the queue of deliveries.

It runs in every process with upkeep, if webhooks are enabled. Deliveries are jobs with a built-in task: leases,
retries, dead letters and draining are those of any worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from holdfast.core.announcement import AnnouncedTask
from holdfast.core.retry import Retry
from holdfast.engine.port import Engine
from holdfast.execution.spec import TaskPolicy, TaskSpec
from holdfast.extras import require
from holdfast.ledger.port.ledger import Ledger
from holdfast.ledger.port.messages import OutboxOpener
from holdfast.observe.tracing import tracer_for
from holdfast.settings import Settings
from holdfast.webhooks.deliveries import QUEUE, TASK, verify_payload
from holdfast.worker.worker import Worker

if TYPE_CHECKING:
    from holdfast.webhooks.sender import Resolve, WebhookSender


_log: Final = logging.getLogger("holdfast.webhooks")

#: Concurrent deliveries: a slow receiver must not delay the others.
CONCURRENCY: Final = 20

_MULTIPLIER: Final = 4.0
_CAP_S: Final = 3_600.0
#: Added to the timeout of the HTTP request, for the work around it.
_SLACK_S: Final = 5.0


class WebhookWorker:
    """Worker for webhook deliveries: `start`, then `stop`, on one event loop.

    The caller opens and closes the engine.
    """

    def __init__(
        self, engine: Engine, settings: Settings, *, name: str = "webhooks", resolve: Resolve | None = None
    ) -> None:
        """`resolve` defaults to the system's resolver. Raises `MissingExtra` if no HTTP client is installed."""
        require("sending webhooks", "httpcore")
        from holdfast.webhooks.sender import WebhookSender, resolve_host

        backend = _WebhookBackend(engine, settings, WebhookSender(settings, resolve or resolve_host))
        # The process runs the ledger's tasks; this worker has its own promoter for the retries of its queue.
        # Nor can a delivery end its process: one that is lost with the process's other jobs is released.
        self._worker = Worker(
            _WebhookApp(backend), [QUEUE], CONCURRENCY, name=name, has_started=lambda worker, job_id: False
        )
        self._running: asyncio.Task[Any] | None = None

    def start(self) -> None:
        """Start the worker."""
        self._running = asyncio.create_task(self._worker.run(), name="holdfast-webhook-worker")

    def drain(self) -> None:
        """Claim nothing more."""
        self._worker.drain()

    async def stop(self, stop_now: asyncio.Event | None = None) -> None:
        """Finish deliveries in flight; once `stop_now` is set, leave them to other processes."""
        if self._running is None:
            return
        self._worker.drain()
        stopping_now = asyncio.create_task((stop_now or asyncio.Event()).wait())
        await asyncio.wait({self._running, stopping_now}, return_when=asyncio.FIRST_COMPLETED)
        if not self._running.done():
            self._worker.drain()
        stopping_now.cancel()
        try:
            await self._running
        except Exception:  # noqa: BLE001 - at shutdown; the leases of the deliveries expire
            _log.exception("webhook worker failed unexpectedly")


@asynccontextmanager
async def run_webhook_worker(engine: Engine, ledger: Ledger | None, settings: Settings) -> AsyncIterator[None]:
    """Run a webhook worker during the block, if webhooks are enabled; for processes without a worker."""
    if ledger is None or not settings.webhooks_enabled:
        yield
        return
    worker = WebhookWorker(engine, settings)
    worker.start()
    try:
        yield
    finally:
        await worker.stop()


class _WebhookApp:
    """Minimal app for the constructor of `Worker`."""

    def __init__(self, backend: _WebhookBackend) -> None:
        self._backend = backend


class _WebhookBackend:
    """The backend of a worker with one built-in task."""

    #: None: no effects, and no ledger tasks.
    ledger: Ledger | None = None
    outbox: OutboxOpener | None = None

    def __init__(self, engine: Engine, settings: Settings, sender: WebhookSender) -> None:
        self.engine = engine
        self.settings = settings
        self._sender = sender
        self._tracer = tracer_for(settings.tracing)
        policy = TaskPolicy(
            retry=Retry(
                max_attempts=settings.webhook_attempts,
                base=settings.webhook_backoff_s,
                multiplier=_MULTIPLIER,
                cap=_CAP_S,
            ),
            timeout_ms=round((settings.webhook_timeout_s + _SLACK_S) * 1000),
        )
        self._specs = {TASK: TaskSpec(TASK, self._deliver, policy)}

    @property
    def specs(self) -> Mapping[str, TaskSpec]:
        return self._specs

    def guard_runner(self, ledger: Ledger | None) -> None:
        """Return None: deliveries are not guarded."""

    def announcements(self) -> list[AnnouncedTask]:
        """Return none: only upkeep submits deliveries."""
        return []

    async def open(self) -> None:
        """Do nothing: the caller has opened the engine."""

    async def _deliver(
        self, url: str, webhook_id: str, event: str, body: str, signature: str = "", seal: str = ""
    ) -> dict[str, Any]:
        counters = self.engine.counters
        try:
            address = verify_payload(self.settings, url, webhook_id, event, body, signature or seal)
            trace = self._tracer.headers() if self._tracer is not None else {}
            status = await self._sender.send(address, webhook_id, body.encode(), trace)
        except Exception:
            counters.webhooks_failed += 1
            raise
        counters.webhooks_delivered += 1
        _log.info("webhook %s (%s) delivered, status %d", webhook_id, event, status)
        return {"status": status}
