"""A Cluster of which one node goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import pytest

from holdfast.core.job import Lease
from holdfast.engine.redis.engine import RedisEngine
from holdfast.testing.contract import Rig
from holdfast.verification.chaos.topologies import ClusterRedis
from tests.harness import RedisHarness, closing
from tests.servers import find_server
from tools.servers import REDIS

#: How long a hung node is waited for, here.
REPLY_S: Final = 1.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterRedis]:
    """Three masters that nobody replaces: what is killed stays away until it is healed, and has its data then."""
    topology = ClusterRedis(
        tmp_path_factory.mktemp("outage"),
        binary=find_server(REDIS),
        replicas=0,
        node_timeout_ms=60_000,
        aof=True,
        # With `everysec` a write may wait for an fsync that is under way, and die with the server.
        options={"cluster-require-full-coverage": "no", "appendfsync": "always"},
    )
    try:
        topology.start()
        yield topology
    finally:
        topology.stop()


class Scene:
    """One queue on each node. `hit` is the one whose node goes away; the list of queues is with it."""

    def __init__(self, cluster: ClusterRedis, harness: RedisHarness, engine: RedisEngine) -> None:
        self.cluster, self.harness, self.engine = cluster, harness, engine
        by_node: dict[str, str] = {}
        for number in range(100):
            queue = f"q{number}"
            by_node.setdefault(cluster.owner(harness.keys(queue).control.decode()), queue)
        self.down = cluster.owner(harness.names.queues)
        self.hit = by_node.pop(self.down)
        self.well = list(by_node.values())
        self.queues = [self.well[0], self.hit, self.well[1]]
        self.held: set[Lease] = set()

    def rig(self, queue: str) -> Rig:
        return Rig(self.harness, self.engine, queue)

    def kill(self) -> None:
        self.cluster.node(self.down).kill()

    async def raw(self, queue: str, *words: Any) -> Any:
        """A command to the node of a queue, past everybody."""
        node = self.cluster.node(self.cluster.owner(self.harness.keys(queue).control.decode()))
        return await asyncio.to_thread(node.call, *words)

    async def heal(self) -> None:
        await asyncio.to_thread(self.cluster.heal)

    async def claim(self, limit: int = 10, wait_ms: int = 0) -> list[Any]:
        """As a worker does."""
        claims = await self.engine.claim("w1", self.queues, limit, wait_ms, self.held.copy)
        leases = {claim.lease for claim in claims}
        assert not self.held & leases, "claimed twice"
        self.held |= leases
        return claims

    async def claim_all(self, number: int) -> list[Any]:
        claims: list[Any] = []
        async with asyncio.timeout(10):
            while len(claims) < number:
                claims += await self.claim(wait_ms=100)
        return claims


@pytest.fixture
async def scene(cluster: ClusterRedis, namespace: str) -> AsyncIterator[Scene]:
    async with closing(RedisHarness(cluster.url, namespace)) as harness:
        engine = RedisEngine(cluster.url, harness.names, reply_timeout_s=REPLY_S, connect_timeout_s=REPLY_S)
        await engine.open()
        scene = Scene(cluster, harness, engine)
        try:
            yield scene
        finally:
            await scene.heal()
            await engine.close()
