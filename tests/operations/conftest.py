"""One deployment on both pairs of stores, and one on Redis without a ledger."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.guard.conftest import app as app
from tests.guard.conftest import app_without_ledger as app_without_ledger
from tests.guard.conftest import make_app as make_app
from tests.guard.conftest import stores as stores
from tests.operations.deployment import SampleDeployment, run_deployment


@pytest_asyncio.fixture(
    params=["sqlite", pytest.param("redis+postgres", marks=[pytest.mark.redis, pytest.mark.postgres])]
)
async def deployment(request: pytest.FixtureRequest, tmp_path: Path, namespace: str) -> AsyncIterator[SampleDeployment]:
    if request.param == "sqlite":
        deployment = SampleDeployment(f"sqlite:///{tmp_path / 'holdfast.db'}", None, namespace)
    else:
        url, ledger = request.getfixturevalue("redis_url"), request.getfixturevalue("postgres_url")
        deployment = SampleDeployment(url, ledger, namespace)
    async with run_deployment(deployment):
        yield deployment


@pytest_asyncio.fixture
async def without_ledger(redis_url: str, namespace: str) -> AsyncIterator[SampleDeployment]:
    """Redis without a ledger."""
    async with run_deployment(SampleDeployment(redis_url, None, namespace)) as deployment:
        yield deployment
