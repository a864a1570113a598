"""Delivers webhooks: a small worker on the deliveries' queue, in every process that does upkeep, if webhooks are used.

Deliveries are jobs, so leases, retries, dead letters and draining are the worker's own; only the task is built in.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from holdfast.core.retry import Retry
from holdfast.engine.port import Engine
from holdfast.execution.spec import TaskPolicy, TaskSpec
from holdfast.extras import require
from holdfast.ledger.port.ledger import Ledger
from holdfast.observe.tracing import tracer_for
from holdfast.settings import Settings
from holdfast.webhooks.deliveries import QUEUE, TASK, verify_payload
from holdfast.worker.worker import Worker

if TYPE_CHECKING:
    from holdfast.webhooks.sender import Resolve, WebhookSender


_log: Final = logging.getLogger("holdfast.webhooks")

#: Deliveries on their way at a time: a receiver that is slow to answer must not keep the others waiting.
CONCURRENCY: Final = 20

_MULTIPLIER: Final = 4.0
_CAP_S: Final = 3_600.0
#: Around the attempt's own limit, for what that does not see.
_SLACK_S: Final = 5.0


class WebhookWorker:
    """`start`, then `stop`, on one event loop. The engine is the caller's, and open."""

    def __init__(
        self, engine: Engine, settings: Settings, *, name: str = "postman", resolve: Resolve | None = None
    ) -> None:
        """Raises `MissingExtra` where no HTTP client is installed. `resolve`: the system's resolver if None."""
        require("sending webhooks", "httpcore")
        from holdfast.webhooks.sender import WebhookSender, resolve_host

        self._post = _WebhookApp(engine, settings, WebhookSender(settings, resolve or resolve_host))
        # Somebody else keeps the ledger; the promoter for this queue's retries is its own.
        self._worker = Worker(self._post, [QUEUE], CONCURRENCY, name=name)
        self._running: asyncio.Task[Any] | None = None

    def start(self) -> None:
        """Begin."""
        self._running = asyncio.create_task(self._worker.run(), name="holdfast-postman")

    def drain(self) -> None:
        """Take nothing new."""
        self._worker.drain()

    async def stop(self, hurry: asyncio.Event | None = None) -> None:
        """Finish what is on its way, or once `hurry` is set leave that, too, to others."""
        if self._running is None:
            return
        self._worker.drain()
        hurrying = asyncio.create_task((hurry or asyncio.Event()).wait())
        await asyncio.wait({self._running, hurrying}, return_when=asyncio.FIRST_COMPLETED)
        if not self._running.done():
            self._worker.drain()
        hurrying.cancel()
        try:
            await self._running
        except Exception:  # noqa: BLE001 - at its end; the deliveries' leases run out, and others take them
            _log.exception("the postman ended in an unexpected way")


@asynccontextmanager
async def run_webhook_worker(engine: Engine, ledger: Ledger | None, settings: Settings) -> AsyncIterator[None]:
    """Delivers while the block runs, if webhooks are used; for processes without a worker."""
    if ledger is None or not settings.webhooks_enabled:
        yield
        return
    postman = WebhookWorker(engine, settings)
    postman.start()
    try:
        yield
    finally:
        await postman.stop()


class _WebhookApp:
    """What a worker needs of an app, with the one task."""

    #: No effects, and no bookkeeping.
    ledger_backend: Ledger | None = None
    outbox_backend = None

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
        self._plans = {TASK: TaskSpec(TASK, self._deliver, policy)}

    @property
    def specs(self) -> Mapping[str, TaskSpec]:
        return self._plans

    def guard_runner(self, ledger: Ledger | None) -> None:
        """Nobody has to allow a delivery."""

    async def open(self) -> None:
        """Its owner has."""

    async def _deliver(self, url: str, webhook_id: str, event: str, body: str, seal: str = "") -> dict[str, Any]:
        counts = self.engine.counts
        try:
            address = verify_payload(self.settings, url, webhook_id, event, body, seal)
            trace = self._tracer.headers() if self._tracer is not None else {}
            status = await self._sender.send(address, webhook_id, body.encode(), trace)
        except Exception:
            counts.webhooks_failed += 1
            raise
        counts.webhooks_delivered += 1
        _log.info("webhook %s (%s) delivered, status %d", webhook_id, event, status)
        return {"status": status}
