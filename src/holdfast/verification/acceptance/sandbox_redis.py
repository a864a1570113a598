"""A run's direct access to Redis: act as another program, and remove everything the run wrote.

Every key of a run contains the run's name. A run is registered in a hash of all runs before it writes anything, and
deregistered when everything is removed, so that the next run finds a killed one. Keys are found with `SCAN`, which does
not block other clients. Streams do not expire, so they are removed first, by name; keys not found in time expire.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from holdfast.engine.redis.keys import KeyNames, QueueKeys
from holdfast.engine.redis.net.client import Purpose, RedisClient
from holdfast.engine.redis.net.cluster import ClusterClient
from holdfast.engine.redis.net.connection import ClusterSeeds, SentinelAddresses, parse_url
from holdfast.engine.redis.net.sentinel import SentinelClient
from holdfast.errors import EngineUnavailable
from holdfast.settings import Settings
from holdfast.verification.acceptance.sandbox import PREFIX, is_stale

#: Hash of the runs that have not removed everything yet, with their start times.
RUNS: Final = f"{PREFIX}runs"

_SCAN_COUNT: Final = 1_000
#: Time for about 20 million keys; a larger store is not scanned to its end.
_SCAN_S: Final = 15.0


class RedisSandbox:
    """Direct access to Redis for one run: a single server, Sentinel's master, or a Cluster."""

    def __init__(self, settings: Settings, name: str) -> None:
        """`settings` are the run's own, with its name as namespace."""
        self._settings = settings
        self._client = _client(settings)
        self._name = name

    def close(self) -> None:
        self._client.close()

    def keys(self, queue: str) -> QueueKeys:
        """The run's keys for a queue."""
        return QueueKeys(queue, _names(self._settings))

    # Access as another program ---------------------------------------------------------------------

    async def add(self, stream: bytes, fields: Mapping[str, str]) -> None:
        """Add an entry with a plain `XADD`."""
        await self._do("XADD", stream, "*", *(word for pair in fields.items() for word in pair))

    async def entries(self, stream: bytes) -> list[dict[str, str]]:
        """All entries of a stream, oldest first."""
        found = [fields for _, fields in await self._do("XRANGE", stream, "-", "+")]
        return [
            {name.decode(): value.decode() for name, value in zip(fields[::2], fields[1::2], strict=True)}
            for fields in found
        ]

    async def lose(self, queue: str, job_id: str) -> None:
        """Remove a delayed job from Redis, as a wipe or a truncated append-only file would."""
        keys = self.keys(queue)
        await self._do("ZREM", keys.delayed, job_id)
        await self._do("UNLINK", keys.job(job_id))

    async def waiting(self, queue: str) -> tuple[int, int]:
        """Number of messages in the queue's streams, and how many of them are pending."""
        length = pending = 0
        for stream in self.keys(queue).streams:
            if await self._do("EXISTS", stream):
                length += await self._do("XLEN", stream)
                pending += await self._pending(stream)
        return length, pending

    async def _pending(self, stream: bytes) -> int:
        rows = await self._client.call(Purpose.OTHER, b"XINFO", b"GROUPS", stream)
        groups = [dict(zip(row[::2], row[1::2], strict=True)) for row in rows]
        # A stream that no worker has read yet has no group.
        return sum(int(group[b"pending"]) for group in groups if group[b"name"] == self._settings.group.encode())

    # Registration and removal ------------------------------------------------------------------------

    async def register(self, now_ms: int) -> None:
        """Record that this run is in progress."""
        await self._do("HSET", RUNS, self._name, now_ms)

    async def stale_runs(self, now_ms: int) -> list[str]:
        """Runs that were killed before they removed everything."""
        names = [name.decode() for name in await self._do("HKEYS", RUNS)]
        return [name for name in names if is_stale(name, now_ms)]

    async def remove(self, name: str, queues: list[str]) -> bool:
        """Remove all keys of a run. Returns False if the store is too large to scan to its end."""
        names = _names(self._settings.model_copy(update={"namespace": name}))
        # The streams first, by name: they do not expire.
        for queue in queues:
            keys = QueueKeys(queue, names)
            for key in (*keys.streams, keys.feed, keys.wake, keys.notices, keys.result, keys.dlq):
                await self._do("UNLINK", key)
        complete = await self._remove_found(name)
        await self._do("HDEL", RUNS, name)
        return complete

    async def _remove_found(self, name: str) -> bool:
        deadline = time.monotonic() + _SCAN_S
        for node in await self._client.masters():
            cursor = b"0"
            while True:
                words = ("SCAN", cursor, "MATCH", f"*{name}*", "COUNT", _SCAN_COUNT)
                cursor, found = await node.call(Purpose.OTHER, *words)
                for key in found:
                    await self._do("UNLINK", key)
                if cursor == b"0":
                    break
                if time.monotonic() > deadline:
                    return False
        return True

    async def _do(self, command: str, key: bytes | str, *arguments: Any) -> Any:
        name = key.encode() if isinstance(key, str) else key
        try:
            return await self._client.call(Purpose.OTHER, command.encode(), name, *arguments)
        except EngineUnavailable as exc:
            if "NOPERM" not in str(exc):
                raise
            raise EngineUnavailable(f"{exc}; allow the keys of this check with ACL SETUSER … ~*{PREFIX}*") from exc


def _names(settings: Settings) -> KeyNames:
    return KeyNames(
        namespace=settings.namespace,
        stream_task=settings.stream_task,
        stream_result=settings.stream_result,
        stream_dlq=settings.stream_dlq,
        group=settings.group,
        queue_retry=settings.queue_retry,
        queue_suspended=settings.queue_suspended,
        cluster=settings.on_cluster,
    )


def _client(settings: Settings) -> RedisClient:
    address = parse_url(settings.url)
    timeouts = (settings.connect_timeout_s, settings.reply_timeout_s)
    if isinstance(address, SentinelAddresses):
        return SentinelClient(address, *timeouts)
    if isinstance(address, ClusterSeeds):
        return ClusterClient(address, *timeouts)
    return RedisClient(address, *timeouts)
