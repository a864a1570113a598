"""An app on SQLite with its outbox in each kind of ledger."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from holdfast import Holdfast
from holdfast.brokers.memory import MemoryBroker
from tests.outbox.support import World

MakeWorld = Callable[..., Any]


@pytest.fixture
async def make_world(ledger_url: str, tmp_path: Path, namespace: str) -> AsyncIterator[MakeWorld]:
    """`await make_world(outbox_max_attempts=2)`; apps of one test share stores and broker."""
    async with AsyncExitStack() as opened:

        async def make(**settings: Any) -> World:
            given = {
                "outbox_targets": {"default": {"type": "memory", "connection": {"name": namespace}}},
                "outbox_backoff_base_s": 0.05,
                **settings,
            }
            app = Holdfast(f"sqlite:///{tmp_path / 'engine.db'}", ledger=ledger_url, **given)
            await opened.enter_async_context(app)
            return World(app, namespace, ledger_url)

        yield make
    MemoryBroker.reset(namespace)


@pytest.fixture
async def world(make_world: MakeWorld) -> World:
    made: World = await make_world()
    return made
