"""Test deployments with an outbox on a real database, relays, and a memory broker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from holdfast import Holdfast
from holdfast.brokers.memory import MemoryBroker
from holdfast.execution.backend import backend_of
from holdfast.ledger.port.messages import OutboxEvent, OutboxStatus, OutboxStore
from holdfast.observe.counters import Counters
from holdfast.outbox.destinations import Destination, build_destinations
from holdfast.outbox.relay import Relay
from holdfast.outbox.writer import NewOutboxEvent
from holdfast.settings import Settings
from holdfast.testing import drain
from holdfast.upkeep.relay_service import run_relay


async def until(condition: Callable[[], Awaitable[bool]] | Callable[[], bool], seconds: float = 15) -> None:
    """Poll the condition until it holds; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        result = condition()
        if await result if isinstance(result, Awaitable) else result:
            return
        assert time.monotonic() < deadline, "the condition did not become true in time"
        await asyncio.sleep(0.01)


class Deployment:
    """An app with its outbox in the ledger and a memory broker as the default destination."""

    def __init__(self, app: Holdfast, broker: str, url: str) -> None:
        self.app = app
        self.broker = MemoryBroker.named(broker)
        self.url = url

    async def store(self) -> OutboxStore:
        backend = backend_of(self.app)
        assert backend.outbox is not None
        return await backend.outbox.open()

    async def write(self, *events: NewOutboxEvent) -> list[str]:
        """Write the events in one transaction, on a separate connection."""
        async with transaction(self.url) as connection:
            return await self.app.outbox.add_many(connection, events)

    async def events(self, **filters: Any) -> list[OutboxEvent]:
        """Return the events in the order in which they were written."""
        return (await (await self.store()).find(None, limit=1_000, **filters))[::-1]

    async def statuses(self) -> list[str]:
        return [event.status.value for event in await self.events()]

    async def all_have_status(self, status: OutboxStatus) -> bool:
        return {event.status for event in await self.events()} <= {status}

    def bodies(self, topic: str = "orders") -> list[Any]:
        """Return the data of the published CloudEvents, in order."""
        return [msgspec.json.decode(message.body or b"")["data"] for message in self.broker.messages(topic)]

    @asynccontextmanager
    async def relay(self, settings: Settings | None = None, **destinations: Destination) -> AsyncIterator[Relay]:
        """Run a relay during the block, then stop it gracefully."""
        effective = settings or self.app.settings
        relay = Relay(await self.store(), build_destinations(effective, None) | destinations, effective, Counters())
        running = asyncio.create_task(relay.run())
        try:
            yield relay
        finally:
            relay.stop()
            await asyncio.wait_for(running, 20)


@asynccontextmanager
async def transaction(url: str) -> AsyncIterator[Any]:
    """Open a connection in a transaction that is committed at the end."""
    if url.startswith("sqlite:"):
        import aiosqlite

        async with aiosqlite.connect(url.removeprefix("sqlite:///")) as file:
            yield file
            await file.commit()
        return
    import asyncpg

    connection = await asyncpg.connect(url)
    try:
        async with connection.transaction():
            yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def run_jobs(app: Holdfast, queues: list[str]) -> AsyncIterator[None]:
    """Run a relay and a worker for these queues."""

    async def run() -> None:
        while True:
            await drain(app, queues)
            await asyncio.sleep(0.02)

    worker = asyncio.create_task(run())
    try:
        async with run_relay(app):
            yield
    finally:
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)
