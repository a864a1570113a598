"""Shared by the Redis-only tests: a harness on a real server of each supported version, and on a Cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.engine.harness import RedisHarness, closing


@pytest.fixture(
    params=["redis_url", "redis_62_url", "redis_60_url", "cluster_url"], ids=["current", "6.2", "6.0.9", "cluster"]
)
async def redis_harness(request: pytest.FixtureRequest, namespace: str) -> AsyncIterator[RedisHarness]:
    async with closing(RedisHarness(request.getfixturevalue(request.param), namespace)) as harness:
        yield harness
