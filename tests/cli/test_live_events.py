"""The events that `holdfast dev` prints."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from holdfast import Holdfast
from holdfast.cli.live_view import LiveEventView


class _SlowEngine:
    """An engine that reads the feed of one queue only while a gate is open."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.reading, self.may_read = asyncio.Event(), asyncio.Event()

    def clone(self) -> _SlowEngine:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def close(self) -> None:
        """Leave the engine to its app."""

    async def read_feed(self, queue: str, *arguments: Any) -> Any:
        if queue == "slow":
            self.reading.set()
            await self.may_read.wait()
        return await self._engine.read_feed(queue, *arguments)


async def test_events_that_are_being_read_at_the_end_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    app = Holdfast(f"sqlite:///{tmp_path / 'holdfast.db'}")

    @app.task
    async def work() -> None: ...

    async with app:
        engine = _SlowEngine(app.engine)
        engine.may_read.set()
        async with LiveEventView(engine, ["default", "slow"]):
            engine.may_read.clear()
            engine.reading.clear()
            await engine.reading.wait()
            engine.may_read.set()
            await asyncio.sleep(0)
            engine.may_read.clear()
            engine.reading.clear()
            job = await work.submit()
            # The next pass has read the event, and waits for the other queue.
            await engine.reading.wait()
            asyncio.get_running_loop().call_later(0.05, engine.may_read.set)
    assert job.id in capsys.readouterr().out
