"""An HTTP service on its own store, behind a real server in a thread, and clients with tokens."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import httpx
from fastapi import FastAPI

from holdfast import Context, Fatal, Holdfast, Retry
from holdfast.core.principal import Principal, Role
from holdfast.http import create_api
from holdfast.http.server import HttpServer, bind
from holdfast.http.service import Service
from holdfast.ledger.port.messages import Execution, ExecutionStatus, TriggerHeartbeat

T = TypeVar("T")

TIMEOUT_S: Final = 60.0
ROOT: Final = Principal(name="root", role=Role.ADMIN, tenants=frozenset({"*"}))


def sample(url: str, **settings: Any) -> Holdfast:
    """An app with a task of every kind."""
    app = Holdfast(url, **settings)

    @app.task
    async def add(a: float, b: float = 1) -> float:
        return a + b

    @app.task
    async def refuse(reason: str = "no") -> None:
        raise Fatal(reason)

    @app.task(retry=Retry(max_retries=0), on_exhausted="suspend")
    async def park() -> None:
        raise ValueError("parked")

    @app.task(retry=Retry(max_retries=3, base=60, jitter=None))
    async def flaky(ctx: Context) -> str:
        raise ValueError("not yet")

    return app


class Deployment:
    """The service, its address, and its clients."""

    def __init__(self, api: FastAPI, base: str, loop: asyncio.AbstractEventLoop) -> None:
        self.api = api
        self.base = base
        self._loop = loop
        self._tokens: dict[tuple[str, Role, tuple[str, ...]], str] = {}
        self._clients: list[httpx.Client] = []

    @property
    def service(self) -> Service:
        service: Service = self.api.state.service
        return service

    def call(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine on the server's own loop."""

        async def run() -> T:
            return await make()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(TIMEOUT_S)

    def token(self, name: str = "ada", role: Role = Role.ADMIN, tenants: tuple[str, ...] = ("*",)) -> str:
        """The token of a principal, made once."""
        key = (name, role, tenants)
        if key not in self._tokens:
            tokens = self.service.operations.tokens
            _, self._tokens[key] = self.call(lambda: tokens.create(ROOT, name=name, role=role, tenants=list(tenants)))
        return self._tokens[key]

    def client(self, name: str = "ada", role: Role = Role.ADMIN, tenants: tuple[str, ...] = ("*",)) -> httpx.Client:
        """A client with the token of a principal."""
        return self.anonymous(authorization=f"Bearer {self.token(name, role, tenants)}")

    def anonymous(self, **headers: str) -> httpx.Client:
        """A client without a token."""
        client = httpx.Client(base_url=self.base, headers=headers, timeout=TIMEOUT_S, trust_env=False)
        self._clients.append(client)
        return client

    def close(self) -> None:
        for client in self._clients:
            client.close()


async def record_trigger(service: Service, name: str = "publish") -> None:
    """Record a heartbeat of a trigger, and an execution for each of two tenants."""
    ledger = service.operations.ledger
    assert ledger is not None
    health = {"status": "healthy", "running": True, "adapter_healthy": True, "active_workers": 4, "paused": False}
    now_ms = time.time_ns() // 1_000_000
    heartbeat = TriggerHeartbeat(
        name=name, process="host-1-4711", queue_name="orders", adapter="kafka", health=health, seen_at_ms=now_ms
    )
    await ledger.triggers.heartbeat([heartbeat], expire_after_ms=60_000)
    rows = [
        Execution(
            tenant_id=tenant,
            id=f"{name}-{tenant}",
            message_id="orders/0/17",
            queue_name="orders",
            event_name="order.placed",
            status=status,
            started_at_ms=now_ms - 40,
            completed_at_ms=now_ms,
            agent_run_id="job-1",
            trace_id="queue-orders/0/17",
        )
        for tenant, status in (("default", ExecutionStatus.SUCCESS), ("acme", ExecutionStatus.DUPLICATE))
    ]
    await ledger.triggers.record_executions(rows)


@contextmanager
def serving(app: Holdfast, *, api: FastAPI | None = None, **options: Any) -> Iterator[Deployment]:
    """A real server on a free port of loopback, while the block runs."""
    api = api or create_api(app, **options)
    ready, ended = threading.Event(), threading.Event()
    found: dict[str, Any] = {}

    async def serve() -> None:
        server = HttpServer(api, bind("127.0.0.1", 0))
        found.update(server=server, loop=asyncio.get_running_loop())
        running = asyncio.create_task(server.run_until_stopped())
        while not server.started and not running.done():  # noqa: ASYNC110 - it has no event to wait for
            await asyncio.sleep(0.01)
        found["base"] = server.address
        ready.set()
        await running

    def run_server() -> None:
        try:
            asyncio.run(serve())
        except BaseException as exc:  # noqa: BLE001 - raised in the test
            found["error"] = exc
        finally:
            ready.set()
            ended.set()

    thread = threading.Thread(target=run_server, name="http-deployment", daemon=True)
    thread.start()
    assert ready.wait(TIMEOUT_S)
    if "base" not in found:
        raise found["error"]
    deployment = Deployment(api, found["base"], found["loop"])
    try:
        yield deployment
    finally:
        deployment.close()
        found["loop"].call_soon_threadsafe(found["server"].stop)
        assert ended.wait(TIMEOUT_S), "the server did not end"
        thread.join()
        if "error" in found:
            raise found["error"]
