"""Harnesses for the engine contract: SQLite with a manual clock, Redis whose data is aged."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import redis
from redis.asyncio import Redis, RedisCluster

from holdfast.engine.port import Engine
from holdfast.engine.port.jobs import EngineOptions
from holdfast.engine.redis.engine import RedisEngine
from holdfast.engine.redis.keys import KeyNames, QueueKeys
from holdfast.engine.redis.net.connection import ClusterSeeds, SentinelAddresses, parse_url
from holdfast.engine.redis.wire import decode_record, encode_record
from holdfast.engine.sqlite.engine import SqliteEngine
from holdfast.testing.contract import EngineHarness
from holdfast.testing.inline import ManualClock

_PAGE: Final = 1_000


class SqliteHarness(EngineHarness):
    """Engines on one file, with a manual clock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._made: list[Engine] = []
        self.clock = ManualClock()

    async def make(self, **options: Any) -> Engine:
        engine = SqliteEngine(self._path, EngineOptions(**options), self.clock)
        self._made.append(engine)
        await engine.open()
        return engine

    async def advance(self, ms: int) -> None:
        self.clock.advance(timedelta(milliseconds=ms))

    async def close(self) -> None:
        for engine in self._made:
            await engine.close()


class RedisHarness(EngineHarness):
    """Engines in one namespace of a real server. Its clock cannot be set, so everything that it times is aged."""

    def __init__(self, url: str, namespace: str) -> None:
        self.url = url
        self.names = KeyNames(namespace=namespace, cluster=isinstance(parse_url(url), ClusterSeeds))
        #: `Any`, because the client's types leave open whether replies are bytes or text.
        self.redis: Any = plain_client(url)
        self._made: list[Engine] = []

    async def make(self, **options: Any) -> Engine:
        engine = RedisEngine(self.url, self.names, EngineOptions(**options))
        self._made.append(engine)
        await engine.open()
        return engine

    def keys(self, queue: str) -> QueueKeys:
        return QueueKeys(queue, self.names)

    async def configure(self, name: str, value: Any) -> None:
        """CONFIG SET, on every server."""
        targets = {"target_nodes": RedisCluster.ALL_NODES} if self.names.cluster else {}
        await self.redis.config_set(name, value, **targets)

    async def advance(self, ms: int) -> None:
        queues = [queue.decode() for queue in await self.redis.smembers(self.names.queues)]
        for queue in queues:
            await self.age_queue(queue, ms)
        await self._age_expiries(ms)

    async def age_queue(self, queue: str, ms: int) -> None:
        """Make leases idle for longer, and everything that waits due earlier."""
        keys = self.keys(queue)
        for lane in (0, *map(int, (await self.redis.hget(keys.control, "lanes") or b"").split())):
            for stream in keys.lane(lane):
                await self._age_leases(stream, ms)
        if await self.redis.hexists(keys.control, "outage"):
            await self.redis.hincrby(keys.control, "outage", -ms)
        for due_set in (keys.retry, keys.delayed, keys.pending_retries):
            members = await self.redis.zrange(due_set, 0, -1)
            async with self.redis.pipeline() as pipe:
                for member in members:
                    pipe.zincrby(due_set, -ms, member)
                await pipe.execute()
        for parked in (keys.waiting_approval, keys.suspended):
            for member in await self.redis.zrange(parked, 0, -1):
                await self._age_record(keys.job(member.decode()), ms)

    async def close(self) -> None:
        for engine in self._made:
            await engine.close()
        async for keys in self._own_keys():
            await self.redis.delete(*keys)
        await self.redis.aclose()

    async def _age_leases(self, stream: bytes, ms: int) -> None:
        if not await self.redis.exists(stream) or not await self.redis.xinfo_groups(stream):
            return
        rows = await self.redis.xpending_range(stream, self.names.group, "-", "+", _PAGE)
        async with self.redis.pipeline() as pipe:
            for row in rows:
                # JUSTID keeps the delivery count; the owner stays the same.
                idle_ms = row["time_since_delivered"] + ms
                pipe.xclaim(
                    stream, self.names.group, row["consumer"], 0, [row["message_id"]], idle=idle_ms, justid=True
                )
            await pipe.execute()

    async def _age_record(self, key: bytes, ms: int) -> None:
        """Move the `run_at` that a parked job keeps in its record."""
        head, _, packed = (await self.redis.get(key)).partition(b"\n")
        body = decode_record(packed)
        if body.run_at != "0":
            earlier = msgspec.structs.replace(body, run_at=str(int(body.run_at) - ms))
            await self.redis.set(key, head + b"\n" + encode_record(earlier))

    async def _age_expiries(self, ms: int) -> None:
        async for keys in self._own_keys():
            async with self.redis.pipeline() as pipe:
                for key in keys:
                    pipe.pttl(key)
                remaining_by_key = dict(zip(keys, await pipe.execute(), strict=True))
                for key, remaining_ms in remaining_by_key.items():
                    if remaining_ms >= 0:
                        # A negative time deletes the key at once.
                        pipe.pexpire(key, remaining_ms - ms)
                await pipe.execute()

    async def _own_keys(self) -> AsyncIterator[list[bytes]]:
        """Yield this namespace's keys in pages, with and without a hash tag."""
        for pattern in (f"{self.names.namespace}:*", f"{{{self.names.namespace}:*"):
            page: list[bytes] = [key async for key in self.redis.scan_iter(match=pattern, count=_PAGE)]
            if page:
                yield page


def plain_client(url: str) -> Any:
    """A client as another program would use: for one server, a Cluster, or the master that the sentinels name."""
    address = parse_url(url)
    if isinstance(address, ClusterSeeds):
        return RedisCluster(host=address.addresses[0].host, port=address.addresses[0].port)
    if isinstance(address, SentinelAddresses):
        with redis.Redis(host=address.addresses[0].host, port=address.addresses[0].port) as sentinel:
            host, port = sentinel.sentinel_get_master_addr_by_name(address.service)
        return Redis(host=host, port=port, db=address.master.db)
    # Without driver info it does not look up and send its version for every connection.
    return Redis.from_url(url, driver_info=None)


H = TypeVar("H", SqliteHarness, RedisHarness)


@asynccontextmanager
async def closing(harness: H) -> AsyncIterator[H]:
    """Yield the harness, then close everything that it made."""
    try:
        yield harness
    finally:
        await harness.close()
