"""Fixtures: an app on a SQLite engine, with its outbox in each kind of ledger."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from holdfast import Holdfast
from holdfast.brokers.memory import MemoryBroker
from tests.outbox.support import Deployment

MakeDeployment = Callable[..., Any]


@pytest.fixture
async def make_deployment(ledger_url: str, tmp_path: Path, namespace: str) -> AsyncIterator[MakeDeployment]:
    """Create apps: `await make_deployment(outbox_max_attempts=2)`. Apps of one test share stores and broker."""
    async with AsyncExitStack() as opened:

        async def make(**settings: Any) -> Deployment:
            options = {
                "outbox_targets": {"default": {"type": "memory", "connection": {"name": namespace}}},
                "outbox_backoff_base_s": 0.05,
                **settings,
            }
            app = Holdfast(f"sqlite:///{tmp_path / 'engine.db'}", ledger=ledger_url, **options)
            await opened.enter_async_context(app)
            return Deployment(app, namespace, ledger_url)

        yield make
    MemoryBroker.reset(namespace)


@pytest.fixture
async def deployment(make_deployment: MakeDeployment) -> Deployment:
    deployment: Deployment = await make_deployment()
    return deployment
