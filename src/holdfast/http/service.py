"""State shared by all requests: app, operations, authentication and event streams.

The service serves while `running` is entered, optionally with a worker and upkeep. It starts even if the engine is
unreachable: until the engine answers, requests get a 503 and `/readyz` reports it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from functools import cached_property
from types import FrameType
from typing import Any, Final

from holdfast.app import Holdfast
from holdfast.core.job import DEFAULT_QUEUE
from holdfast.core.principal import Principal
from holdfast.core.retry import Backoff
from holdfast.errors import EngineUnavailable, NoLedger
from holdfast.execution.backend import backend_of
from holdfast.http.api_docs import render
from holdfast.http.auth import Authenticator, DevAuthenticator, bearer_token
from holdfast.http.debug_run import DebugRunner
from holdfast.http.event_hub import EventHub
from holdfast.http.html import Html
from holdfast.http.openapi import document
from holdfast.http.operation import OPERATIONS, Scope
from holdfast.http.sse import LedgerWatch
from holdfast.http.token_watch import TokenWatch
from holdfast.ledger.queries.jobs import Queries
from holdfast.neighbours.watch import Neighbours
from holdfast.operations.access import token_id_of
from holdfast.operations.operations import Operations
from holdfast.upkeep.relay_service import run_relay
from holdfast.upkeep.upkeep import Upkeep
from holdfast.worker.webhook_worker import run_webhook_worker
from holdfast.worker.worker import Worker

_log: Final = logging.getLogger("holdfast.http")

_Handler = Callable[[int, FrameType | None], Any]


class Service:
    """One HTTP service on one app. Use it only on the event loop on which `running` was entered."""

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
        self.backend = backend_of(app)
        self.body_limit = settings.http_body_limit
        self.run_endpoint = settings.run_endpoint if run_endpoint is None else run_endpoint
        self.metrics_open = settings.metrics_open
        self.authenticator: Authenticator = (DevAuthenticator if dev else Authenticator)(self)
        self.worker = Worker(app, queues=queues_of(app), upkeep=upkeep) if worker else None
        self._with_upkeep = upkeep and not worker
        self._operations: Operations | None = None
        #: The process is shutting down: waiting requests answer at once with the current state.
        self.ending = asyncio.Event()
        self._opened = asyncio.Event()
        self._hub: EventHub | None = None
        self._ledger_watch: LedgerWatch | None = None
        self._token_watch: TokenWatch | None = None
        self._documents: dict[bool, dict[str, Any]] = {}
        self._docs: dict[bool, Html] = {}
        self._ending_streams: asyncio.Task[None] | None = None

    # For handlers ------------------------------------------------------------------------------------

    @property
    def operations(self) -> Operations:
        """Operations on jobs and queues. Raises `EngineUnavailable` until the engine has been reached."""
        if self._operations is None:
            raise EngineUnavailable("the service has not connected to the engine yet")
        return self._operations

    @property
    def queries(self) -> Queries:
        """Queries on the ledger. Raises `NoLedger`."""
        ledger = self.operations.ledger
        if ledger is None:
            raise NoLedger("a list of jobs")
        return ledger.queries

    @property
    def hub(self) -> EventHub:
        """Source of the event streams."""
        if self._hub is None:
            self._hub = EventHub(self.operations.engine)
        return self._hub

    @property
    def ledger_watch(self) -> LedgerWatch:
        """Waits for ledger progress. Raises `NoLedger`."""
        if self._ledger_watch is None:
            ledger = self.operations.ledger
            if ledger is None:
                raise NoLedger("a job's history")
            self._ledger_watch = LedgerWatch(ledger.projection)
        return self._ledger_watch

    @cached_property
    def debug_runner(self) -> DebugRunner:
        """Runs single jobs in this process."""
        return DebugRunner(self.backend)

    def check_open(self) -> None:
        """Raise `EngineUnavailable` until the engine has been reached."""
        assert self.operations is not None

    def document(self, *, with_tasks: bool) -> dict[str, Any]:
        """Return the OpenAPI document, built once per variant."""
        if with_tasks not in self._documents:
            self._documents[with_tasks] = document(OPERATIONS, self.app if with_tasks else None)
        return self._documents[with_tasks]

    def docs(self, *, with_tasks: bool) -> Html:
        """Return the OpenAPI document as markup, rendered once per variant."""
        if with_tasks not in self._docs:
            with_token = not isinstance(self.authenticator, DevAuthenticator)
            self._docs[with_tasks] = render(self.document(with_tasks=with_tasks), with_token=with_token)
        return self._docs[with_tasks]

    def end(self) -> None:
        """Answer waiting requests and end streams, because the process is shutting down. Can be repeated."""
        if not self.ending.is_set():
            self.ending.set()
            self._ending_streams = asyncio.get_running_loop().create_task(self._end_streams())

    async def _end_streams(self) -> None:
        if self._hub is not None:
            await self._hub.close()
        if self._ledger_watch is not None:
            await self._ledger_watch.close()
        if self._token_watch is not None:
            await self._token_watch.close()

    def ending_with_token(
        self, scope: Scope, principal: Principal, end: Callable[[], None], abort: Callable[[], None]
    ) -> AbstractContextManager[None]:
        """End a request if its token becomes invalid while the block runs."""
        if self._token_watch is None:
            self._token_watch = TokenWatch(self._find_valid)
        return self._token_watch.watching(token_id_of(bearer_token(scope) or ""), principal, end, abort)

    async def _find_valid(self, token_ids: Sequence[str]) -> dict[str, Principal]:
        return await self.operations.tokens.find_valid(token_ids)

    async def verify(self, text: str) -> Principal:
        """Return the principal of a token. Raises `Unauthorized`."""
        return await self.operations.tokens.verify(text)

    # Start and stop --------------------------------------------------------------------------------

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve while the block runs. Everything started here has stopped when the block is left."""
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
            self._operations = self._hub = self._ledger_watch = self._token_watch = None
            await self.app.close()

    async def _open(self) -> None:
        backoff = Backoff()
        while True:
            try:
                await self.app.open()
            except EngineUnavailable as exc:
                _log.error("cannot reach the engine, requests get a 503 until it recovers: %s", exc)
                await asyncio.sleep(backoff.next_s())
            else:
                self._operations = Operations.for_app(self.app)
                self._opened.set()
                return

    def _start(self) -> list[asyncio.Task[object]]:
        if self.worker is not None:
            return [asyncio.create_task(self.worker.run(), name="holdfast-http-worker")]
        if self._with_upkeep:
            return [asyncio.create_task(self._run_upkeep(), name="holdfast-http-upkeep")]
        return [asyncio.create_task(self._run_neighbours(), name="holdfast-http-neighbours")]

    async def _run_neighbours(self) -> None:
        """Let leases of killed workers expire; other processes reclaim them."""
        await self._opened.wait()
        neighbours = Neighbours.from_settings(self.backend.engine, self.backend.settings, lambda: None)
        if neighbours is not None:
            await neighbours.run()

    async def _run_upkeep(self) -> None:
        await self._opened.wait()
        backend, settings = self.backend, self.backend.settings
        async with (
            run_webhook_worker(backend.engine, backend.ledger, settings),
            run_relay(self.app, enabled=settings.outbox_relay),
        ):
            await Upkeep(backend.engine, [], settings, backend.ledger).run()

    async def _end(self, helpers: list[asyncio.Task[object]]) -> None:
        if self.worker is not None:
            # Drained, not cancelled: running jobs may finish within the grace time.
            self.worker.drain()
            with suppress(Exception):
                await asyncio.wait_for(asyncio.shield(helpers[-1]), self.app.settings.drain_grace_s)
        for task in helpers:
            task.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)


@contextmanager
def _on_termination(end: Callable[[], None]) -> Iterator[None]:
    """Call `end` on the event loop at SIGTERM and SIGINT, before the server's handler.

    ASGI servers send `lifespan.shutdown` after all requests have finished, and a stream never finishes: without this a
    server waits for its clients, or disconnects them after its own timeout. A signal that the server does not handle
    keeps its default. Does nothing outside the main thread, where Python allows no handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    replaced: dict[signal.Signals, tuple[_Handler, _Handler]] = {}
    for number in (signal.SIGTERM, signal.SIGINT):
        previous = signal.getsignal(number)
        if callable(previous):
            replaced[number] = previous, _call_first(previous, loop, end)
            signal.signal(number, replaced[number][1])
    try:
        yield
    finally:
        for number, (previous, own) in replaced.items():
            # Keep a handler that was installed meanwhile.
            if signal.getsignal(number) is own:
                signal.signal(number, previous)


def _call_first(previous: _Handler, loop: asyncio.AbstractEventLoop, end: Callable[[], None]) -> _Handler:
    def handle(number: int, frame: FrameType | None) -> Any:
        loop.call_soon_threadsafe(end)
        return previous(number, frame)

    return handle


def queues_of(app: Holdfast) -> list[str]:
    """Queues of the app's tasks, and the default queue."""
    return sorted({DEFAULT_QUEUE} | {task.queue for task in app.tasks.values()})
