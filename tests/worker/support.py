"""What worker tests share: a worker beside the test, and an engine that fails on demand."""

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
from holdfast.worker.worker import WorkerExit

PATIENCE_S = 60.0


async def eventually(condition: Callable[[], Any | Awaitable[Any]], what: str = "it") -> Any:
    """Wait until the condition holds; it may be async. Fails loudly instead of hanging."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = condition()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return found
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:g} s for {what} in vain"
        await asyncio.sleep(0.005)


@asynccontextmanager
async def working(app: Holdfast, **options: Any) -> AsyncIterator[Worker]:
    """A worker that runs while the block does, and is drained at its end."""
    worker = Worker(app, **options)
    running = asyncio.create_task(worker.run())
    await eventually(lambda: worker.ready or running.done(), "the worker to be ready")
    try:
        yield worker
    finally:
        worker.drain()
        async with asyncio.timeout(PATIENCE_S):
            assert await running in set(WorkerExit)


class Faults:
    """How the engines of an app misbehave; shared by all of them."""

    def __init__(self) -> None:
        #: Names of methods that fail before they do anything.
        self.down: set[str] = set()
        #: Names of methods that do their work and then lose the reply, once each.
        self.lose_reply: set[str] = set()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def count(self, method: str) -> int:
        return sum(name == method for name, _ in self.calls)


class FaultyEngine:
    """An engine with faults; everything else is the real one."""

    def __init__(self, engine: Engine, faults: Faults) -> None:
        self._engine = engine
        self._faults = faults

    @property
    def real(self) -> Engine:
        """The one without faults, whose file an embedded ledger is in."""
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
