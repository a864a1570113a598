"""Support for worker tests: a worker in the background, and an engine that fails on demand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from holdfast import Holdfast, Worker
from holdfast.engine.port import Engine
from holdfast.errors import EngineUnavailable
from holdfast.observe.counters import Counters
from holdfast.worker.recycling import WorkerExit

TIMEOUT_S = 60.0


async def eventually(condition: Callable[[], Any | Awaitable[Any]], what: str = "it") -> Any:
    """Wait until the condition holds; it may be async. Fails after `TIMEOUT_S`."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        found = condition()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return found
        assert time.monotonic() < deadline, f"timed out after {TIMEOUT_S:g} s waiting for {what}"
        await asyncio.sleep(0.005)


@asynccontextmanager
async def working(app: Holdfast, **options: Any) -> AsyncIterator[Worker]:
    """Run a worker during the block and drain it at the end."""
    worker = Worker(app, **options)
    running = asyncio.create_task(worker.run())
    await eventually(lambda: worker.ready or running.done(), "the worker to be ready")
    try:
        yield worker
    finally:
        worker.drain()
        async with asyncio.timeout(TIMEOUT_S):
            assert await running in set(WorkerExit)


class Faults:
    """Faults of an app's engines; shared by all of them."""

    def __init__(self) -> None:
        #: Names of methods that fail before they do anything.
        self.down: set[str] = set()
        #: Names of methods that do their work and then lose the reply, once each.
        self.lose_reply: set[str] = set()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def count(self, method: str) -> int:
        return sum(name == method for name, _ in self.calls)


class FaultyEngine:
    """Adds faults to a real engine."""

    def __init__(self, engine: Engine, faults: Faults) -> None:
        self._engine = engine
        self._faults = faults

    @property
    def real(self) -> Engine:
        """The engine without faults; an embedded ledger is in its file."""
        return self._engine

    def clone(self) -> FaultyEngine:
        return FaultyEngine(self._engine.clone(), self._faults)

    @property
    def counts(self) -> Counters:
        return self._engine.counters

    @counts.setter
    def counts(self, counts: Counters) -> None:
        self._engine.counters = counts

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._engine, name)
        if not asyncio.iscoroutinefunction(found):
            return found

        async def call(*args: Any, **kwargs: Any) -> Any:
            self._faults.calls.append((name, args))
            if {name, "everything"} & self._faults.down and name != "close":
                raise EngineUnavailable(f"{name}: made to fail by the test")
            reply = await found(*args, **kwargs)
            if name in self._faults.lose_reply:
                self._faults.lose_reply.discard(name)
                raise EngineUnavailable(f"{name}: the reply was lost")
            return reply

        return call
