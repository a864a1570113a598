"""The engine contract on every engine: SQLite, and Redis in the current, a middle and the oldest supported version,
behind Sentinel, and as a Cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast.engine.redis import claims
from holdfast.testing.contract import EngineContract, EngineHarness
from holdfast.testing.contract.harness import LONG_WAIT_MS
from tests.engine.harness import RedisHarness, SqliteHarness, closing


class TestSqlite(EngineContract):
    @pytest.fixture
    async def harness(self, tmp_path: Path) -> AsyncIterator[EngineHarness]:
        async with closing(SqliteHarness(tmp_path / "holdfast.db")) as harness:
            yield harness


@pytest.mark.redis
class TestRedis(EngineContract):
    @pytest.fixture(
        params=["redis_url", "redis_62_url", "redis_60_url", "sentinel_url", "cluster_url"],
        ids=["current", "6.2", "6.0.9", "sentinel", "cluster"],
    )
    async def harness(
        self, request: pytest.FixtureRequest, namespace: str, monkeypatch: pytest.MonkeyPatch
    ) -> AsyncIterator[EngineHarness]:
        # A worker that was not woken must not pass because its wait ended.
        monkeypatch.setattr(claims, "_MAX_BLOCK_MS", LONG_WAIT_MS)
        async with closing(RedisHarness(request.getfixturevalue(request.param), namespace)) as harness:
            yield harness
