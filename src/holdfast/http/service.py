"""What all requests share: the app, its offices, the gate, the hub of event streams, and, by a setting, a worker.

`running` is the service's life. An engine that does not answer yet is no reason not to start: requests get a 503 and
`/readyz` says so until it does.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cached_property
from types import FrameType
from typing import Any, Final

import msgspec

from holdfast.app import Holdfast
from holdfast.core.job import DEFAULT_QUEUE
from holdfast.core.principal import Principal
from holdfast.core.retry import Backoff
from holdfast.errors import EngineUnavailable, NoLedger
from holdfast.http.api_docs import render
from holdfast.http.auth import Authenticator, DevAuthenticator
from holdfast.http.debug_run import DebugRunner
from holdfast.http.event_hub import EventHub
from holdfast.http.html import Html
from holdfast.http.openapi import document
from holdfast.http.operation import OPERATIONS
from holdfast.http.sse import LedgerWatch
from holdfast.ledger.queries.jobs import Queries
from holdfast.operations.operations import Operations
from holdfast.settings import Settings
from holdfast.upkeep.relay_service import run_relay
from holdfast.upkeep.upkeep import Upkeep
from holdfast.worker.webhook_worker import run_webhook_worker
from holdfast.worker.worker import Worker

_log: Final = logging.getLogger("holdfast.http")

_Handler = Callable[[int, FrameType | None], Any]


class Service:
    """One HTTP service on one app. Belongs to the event loop that `running` is entered on."""

    def __init__(
        self,
        app: Holdfast,
        *,
        dev: bool = False,
        worker: bool = False,
        upkeep: bool = False,
        run_endpoint: bool | None = None,
    ) -> None:
        settings = app.settings
        self.app = app
        self.body_limit = settings.http_body_limit
        self.run_endpoint = settings.run_endpoint if run_endpoint is None else run_endpoint
        self.metrics_open = settings.metrics_open
        self.authenticator: Authenticator = (DevAuthenticator if dev else Authenticator)(self)
        self.worker = Worker(app, queues=queues_of(app), upkeep=upkeep) if worker else None
        self._with_upkeep = upkeep and not worker
        self._offices: Operations | None = None
        #: The process is about to end: whoever waits is told now what there is.
        self.ending = asyncio.Event()
        self._opened = asyncio.Event()
        self._hub: EventHub | None = None
        self._tides: LedgerWatch | None = None
        self._documents: dict[bool, dict[str, Any]] = {}
        self._docs: dict[bool, Html] = {}
        self._ending_streams: asyncio.Task[None] | None = None

    # What handlers ask for ---------------------------------------------------------------------------

    @property
    def operations(self) -> Operations:
        """Raises `EngineUnavailable` while the engine has not been reached yet."""
        if self._offices is None:
            raise EngineUnavailable("the service has not reached its engine yet")
        return self._offices

    @property
    def queries(self) -> Queries:
        """The ledger's answers. Raises `NoLedger`."""
        ledger = self.operations.ledger
        if ledger is None:
            raise NoLedger("a list of jobs")
        return ledger.queries

    @property
    def hub(self) -> EventHub:
        """Where event streams come from."""
        if self._hub is None:
            self._hub = EventHub(self.operations.engine, _key_of(self.app.settings))
        return self._hub

    @property
    def ledger_watch(self) -> LedgerWatch:
        """Who waits for the ledger to follow the feeds. Raises `NoLedger`."""
        if self._tides is None:
            ledger = self.operations.ledger
            if ledger is None:
                raise NoLedger("the story of a job")
            self._tides = LedgerWatch(ledger.projection)
        return self._tides

    @cached_property
    def debug_runner(self) -> DebugRunner:
        """Where single jobs are run."""
        return DebugRunner(self.app)

    def check_open(self) -> None:
        """Raises `EngineUnavailable` while the engine has not been reached yet."""
        assert self.operations is not None

    def document(self, *, with_tasks: bool) -> dict[str, Any]:
        """The OpenAPI document."""
        if with_tasks not in self._documents:
            self._documents[with_tasks] = document(OPERATIONS, self.app if with_tasks else None)
        return self._documents[with_tasks]

    def docs(self, *, with_tasks: bool) -> Html:
        """The OpenAPI document as markup."""
        if with_tasks not in self._docs:
            with_token = not isinstance(self.authenticator, DevAuthenticator)
            self._docs[with_tasks] = render(self.document(with_tasks=with_tasks), with_token=with_token)
        return self._docs[with_tasks]

    def end(self) -> None:
        """The process is about to end: answer requests that wait, end streams. Can be repeated."""
        if not self.ending.is_set():
            self.ending.set()
            self._ending_streams = asyncio.get_running_loop().create_task(self._end_streams())

    async def _end_streams(self) -> None:
        """Streams have no end of their own."""
        if self._hub is not None:
            await self._hub.close()
        if self._tides is not None:
            await self._tides.close()

    async def verify(self, text: str) -> Principal:
        """Whose token it is (see `people.tokens`)."""
        return await self.operations.tokens.verify(text)

    # Life ------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve while the block runs; what was started here is ended before it is left."""
        self.ending.clear()
        opening = asyncio.create_task(self._open(), name="holdfast-http-opening")
        await asyncio.wait({opening}, timeout=self.app.settings.connect_timeout_s)
        helpers = [opening, *self._start()]
        try:
            with _on_termination(self.end):
                yield
        finally:
            await self._end_streams()
            await self._end(helpers)
            self._offices = self._hub = self._tides = None
            await self.app.close()

    async def _open(self) -> None:
        backoff = Backoff()
        while True:
            try:
                await self.app.open()
            except EngineUnavailable as exc:
                _log.error("the engine cannot be reached, requests get a 503 until it can: %s", exc)
                await asyncio.sleep(backoff.next_s())
            else:
                self._offices = Operations.for_app(self.app)
                self._opened.set()
                return

    def _start(self) -> list[asyncio.Task[object]]:
        if self.worker is not None:
            return [asyncio.create_task(self.worker.run(), name="holdfast-http-worker")]
        if self._with_upkeep:
            return [asyncio.create_task(self._keep(), name="holdfast-http-upkeep")]
        return []

    async def _keep(self) -> None:
        await self._opened.wait()
        app = self.app
        async with (
            run_webhook_worker(app.engine, app.ledger_backend, app.settings),
            run_relay(app, wanted=app.settings.outbox_relay),
        ):
            await Upkeep(app.engine, [], app.settings, app.ledger_backend).run()

    async def _end(self, helpers: list[asyncio.Task[object]]) -> None:
        if self.worker is not None:
            # Drained, not cancelled: what runs may finish within the grace time.
            self.worker.drain()
            with suppress(Exception):
                await asyncio.wait_for(asyncio.shield(helpers[-1]), self.app.settings.drain_grace_s)
        for task in helpers:
            task.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)


@contextmanager
def _on_termination(end: Callable[[], None]) -> Iterator[None]:
    """Call `end` on the event loop at SIGTERM and SIGINT, before the server's own handler.

    ASGI servers send `lifespan.shutdown` when all requests are answered, and a stream is a request without an end:
    without this a server waits for its clients, or cuts them off after its own time limit. A signal that the server
    does not handle keeps its default. Does nothing outside the main thread, where Python allows no handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    replaced: dict[signal.Signals, tuple[_Handler, _Handler]] = {}
    for number in (signal.SIGTERM, signal.SIGINT):
        previous = signal.getsignal(number)
        if callable(previous):
            replaced[number] = previous, _ending_first(previous, loop, end)
            signal.signal(number, replaced[number][1])
    try:
        yield
    finally:
        for number, (previous, own) in replaced.items():
            # A handler that was installed since stays.
            if signal.getsignal(number) is own:
                signal.signal(number, previous)


def _ending_first(previous: _Handler, loop: asyncio.AbstractEventLoop, end: Callable[[], None]) -> _Handler:
    def handle(number: int, frame: FrameType | None) -> Any:
        loop.call_soon_threadsafe(end)
        return previous(number, frame)

    return handle


def _key_of(settings: Settings) -> bytes:
    """What all processes of this deployment know, and no caller: where the stores are, with their passwords."""
    secret = settings.webhook_secret
    known = [settings.url, settings.ledger or "", settings.namespace, secret.get_secret_value() if secret else ""]
    return hashlib.sha256(msgspec.json.encode(known)).digest()


def queues_of(app: Holdfast) -> list[str]:
    """The queues that the app's tasks name, and the default one."""
    return sorted({DEFAULT_QUEUE} | {task.queue for task in app.tasks.values()})
