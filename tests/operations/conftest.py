"""The same world on both pairs of stores, and on Redis alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.guard.conftest import app as app
from tests.guard.conftest import lonely as lonely
from tests.guard.conftest import make_app as make_app
from tests.guard.conftest import stores as stores
from tests.operations.deployment import World, opened


@pytest_asyncio.fixture(
    params=["sqlite", pytest.param("redis+postgres", marks=[pytest.mark.redis, pytest.mark.postgres])]
)
async def world(request: pytest.FixtureRequest, tmp_path: Path, namespace: str) -> AsyncIterator[World]:
    if request.param == "sqlite":
        world = World(f"sqlite:///{tmp_path / 'holdfast.db'}", None, namespace)
    else:
        url, ledger = request.getfixturevalue("redis_url"), request.getfixturevalue("postgres_url")
        world = World(url, ledger, namespace)
    async with opened(world):
        yield world


@pytest_asyncio.fixture
async def alone(redis_url: str, namespace: str) -> AsyncIterator[World]:
    """Redis, and no ledger."""
    async with opened(World(redis_url, None, namespace)) as world:
        yield world
