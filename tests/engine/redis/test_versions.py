"""Reclaim uses the commands of the server's version, tested on real servers of those versions (Q5)."""

from __future__ import annotations

import pytest

from holdfast.core.verdict import SettleResult
from holdfast.testing.contract.harness import QUEUE, Rig, ids
from tests.conftest import MakeServer
from tests.engine.harness import RedisHarness, closing
from tools.servers import REDIS, REDIS_60, REDIS_62, Server

pytestmark = pytest.mark.redis


@pytest.mark.parametrize(
    ("server", "reclaims_with", "never"),
    [
        pytest.param(REDIS, "xautoclaim", "xclaim", id="current"),
        pytest.param(REDIS_62, "xautoclaim", "xclaim", id="6.2"),
        pytest.param(REDIS_60, "xclaim", "xautoclaim", id="6.0.9"),
    ],
)
async def test_a_lost_lease_is_reclaimed_by_the_versions_own_command(
    make_redis: MakeServer, namespace: str, server: Server, reclaims_with: str, never: str
) -> None:
    """On a separate server, so that its command statistics are those of one reclaim."""
    async with closing(RedisHarness(make_redis(server).url, namespace)) as harness:
        rig = await Rig.on(harness)
        first = await rig.start_one("w1")
        assert await rig.engine.reclaim("w2", [QUEUE], 1) == [], "its lease has not expired"
        await rig.lose_leases()
        await harness.redis.config_resetstat()
        (reclaimed,) = await rig.engine.reclaim("w2", [QUEUE], 1)
        calls = await harness.redis.info("commandstats")
        assert calls[f"cmdstat_{reclaims_with}"]["calls"] == 1
        assert calls["cmdstat_xpending"]["calls"] >= 1, "its previous worker is read first"
        assert f"cmdstat_{never}" not in calls
        assert (ids([reclaimed]), reclaimed.attempt) == ([first.job_id], 2)
        assert await rig.succeed(first) == [SettleResult.STALE]
        assert await rig.succeed(reclaimed) == [SettleResult.APPLIED]
