"""A Cluster of which one node becomes unreachable."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import pytest

from holdfast.core.job import Lease
from holdfast.engine.redis.engine import RedisEngine
from holdfast.testing.contract import Rig
from holdfast.verification.chaos.topologies import ClusterRedis
from tests.engine.harness import RedisHarness, closing
from tests.servers import find_server
from tools.servers import REDIS

#: Reply timeout for a hung node in these tests.
REPLY_S: Final = 1.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterRedis]:
    """Three masters without replicas: a killed node is unreachable until `heal`, and keeps its data."""
    topology = ClusterRedis(
        tmp_path_factory.mktemp("outage"),
        binary=find_server(REDIS),
        replicas=0,
        node_timeout_ms=60_000,
        aof=True,
        # With `everysec` a write may wait for an fsync that is under way, and be lost with the server.
        options={"cluster-require-full-coverage": "no", "appendfsync": "always"},
    )
    try:
        topology.start()
        yield topology
    finally:
        topology.stop()


class OutageRig:
    """One queue on each node. The node of `down_queue` is killed; it also has the list of queues."""

    def __init__(self, cluster: ClusterRedis, harness: RedisHarness, engine: RedisEngine) -> None:
        self.cluster, self.harness, self.engine = cluster, harness, engine
        by_node: dict[str, str] = {}
        for number in range(100):
            queue = f"q{number}"
            by_node.setdefault(cluster.owner(harness.keys(queue).control.decode()), queue)
        self.down_node = cluster.owner(harness.names.queues)
        self.down_queue = by_node.pop(self.down_node)
        self.up_queues = list(by_node.values())
        self.queues = [self.up_queues[0], self.down_queue, self.up_queues[1]]
        self.in_flight: set[Lease] = set()

    def rig(self, queue: str) -> Rig:
        return Rig(self.harness, self.engine, queue)

    def kill(self) -> None:
        self.cluster.node(self.down_node).kill()

    async def send_command(self, queue: str, *command: Any) -> Any:
        """Send a command directly to the node of a queue."""
        node = self.cluster.node(self.cluster.owner(self.harness.keys(queue).control.decode()))
        return await asyncio.to_thread(node.call, *command)

    async def heal(self) -> None:
        await asyncio.to_thread(self.cluster.heal)

    async def claim(self, limit: int = 10, wait_ms: int = 0) -> list[Any]:
        """Claim as a worker does."""
        claims = await self.engine.claim("w1", self.queues, limit, wait_ms, self.in_flight.copy)
        leases = {claim.lease for claim in claims}
        assert not self.in_flight & leases, "claimed twice"
        self.in_flight |= leases
        return claims

    async def claim_all(self, number: int) -> list[Any]:
        claims: list[Any] = []
        async with asyncio.timeout(10):
            while len(claims) < number:
                claims += await self.claim(wait_ms=100)
        return claims


@pytest.fixture
async def outage(cluster: ClusterRedis, namespace: str) -> AsyncIterator[OutageRig]:
    async with closing(RedisHarness(cluster.url, namespace)) as harness:
        engine = RedisEngine(cluster.url, harness.names, reply_timeout_s=REPLY_S, connect_timeout_s=REPLY_S)
        await engine.open()
        outage = OutageRig(cluster, harness, engine)
        try:
            yield outage
        finally:
            await outage.heal()
            await engine.close()
