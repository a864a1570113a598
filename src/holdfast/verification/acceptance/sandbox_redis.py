"""What a run does to Redis beside the engine: what other programs would do, and removing all that it has written.

Every key of a run has the run's name in it. The run is entered in one more key, a hash of all runs, before it writes
anything, and struck out when all is removed; so a run that was killed is known to the next one. Keys are found with
`SCAN`, which blocks nobody; what it cannot find in time is named first (the streams), or expires by itself.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from holdfast.engine.redis.keys import KeyNames, QueueKeys
from holdfast.engine.redis.net.client import Purpose, RedisClient
from holdfast.engine.redis.net.connection import ClusterSeeds, SentinelAddresses, parse_url
from holdfast.engine.redis.net.topologies import ClusterClient, SentinelClient
from holdfast.errors import EngineUnavailable
from holdfast.settings import Settings
from holdfast.verification.acceptance.sandbox import PREFIX, is_stale

#: Runs that have not removed everything yet, by when they began.
RUNS: Final = f"{PREFIX}runs"

_SCAN_COUNT: Final = 1_000
#: About twenty million keys; a bigger store is not looked through to its end.
_SCAN_S: Final = 15.0


class RedisSandbox:
    """One run's hand on Redis: a single server, Sentinel's master, or a Cluster."""

    def __init__(self, settings: Settings, name: str) -> None:
        """`settings` are the run's own, with its name as namespace."""
        self._settings = settings
        self._client = _client(settings)
        self._name = name

    def close(self) -> None:
        self._client.close()

    def keys(self, queue: str) -> QueueKeys:
        """The run's names for a queue."""
        return QueueKeys(queue, _names(self._settings))

    # As another program would ----------------------------------------------------------------------

    async def add(self, stream: bytes, fields: Mapping[str, str]) -> None:
        """A plain `XADD`."""
        await self._do("XADD", stream, "*", *(word for pair in fields.items() for word in pair))

    async def entries(self, stream: bytes) -> list[dict[str, str]]:
        """All entries of a stream, oldest first."""
        found = [fields for _, fields in await self._do("XRANGE", stream, "-", "+")]
        return [
            {name.decode(): value.decode() for name, value in zip(fields[::2], fields[1::2], strict=True)}
            for fields in found
        ]

    async def lose(self, queue: str, job_id: str) -> None:
        """Take a delayed job out of Redis, as a wipe or a cut append-only file would."""
        keys = self.keys(queue)
        await self._do("ZREM", keys.delayed, job_id)
        await self._do("UNLINK", keys.job(job_id))

    async def waiting(self, queue: str) -> tuple[int, int]:
        """Messages in the queue's lines, and how many of them are pending."""
        length = pending = 0
        for stream in self.keys(queue).streams:
            if await self._do("EXISTS", stream):
                length += await self._do("XLEN", stream)
                pending += await self._pending(stream)
        return length, pending

    async def _pending(self, stream: bytes) -> int:
        rows = await self._client.call(Purpose.OTHER, b"XINFO", b"GROUPS", stream)
        groups = [dict(zip(row[::2], row[1::2], strict=True)) for row in rows]
        # A line that no worker has ever read from has no group.
        return sum(int(group[b"pending"]) for group in groups if group[b"name"] == self._settings.group.encode())

    # Coming and going --------------------------------------------------------------------------------

    async def register(self, now_ms: int) -> None:
        """Say that this run is under way."""
        await self._do("HSET", RUNS, self._name, now_ms)

    async def stale_runs(self, now_ms: int) -> list[str]:
        """Runs that were killed before they had removed everything."""
        names = [name.decode() for name in await self._do("HKEYS", RUNS)]
        return [name for name in names if is_stale(name, now_ms)]

    async def remove(self, name: str, queues: list[str]) -> bool:
        """Remove all keys of a run; False if the store was too big to look through to its end."""
        names = _names(self._settings.model_copy(update={"namespace": name}))
        # The streams first, by name: they do not expire.
        for queue in queues:
            keys = QueueKeys(queue, names)
            for key in (*keys.streams, keys.feed, keys.wake, keys.notices, keys.result, keys.dlq):
                await self._do("UNLINK", key)
        whole = await self._remove_found(name)
        await self._do("HDEL", RUNS, name)
        return whole

    async def _remove_found(self, name: str) -> bool:
        give_up_at = time.monotonic() + _SCAN_S
        for node in await self._client.masters():
            cursor = b"0"
            while True:
                words = ("SCAN", cursor, "MATCH", f"*{name}*", "COUNT", _SCAN_COUNT)
                cursor, found = await node.call(Purpose.OTHER, *words)
                for key in found:
                    await self._do("UNLINK", key)
                if cursor == b"0":
                    break
                if time.monotonic() > give_up_at:
                    return False
        return True

    async def _do(self, command: str, key: bytes | str, *arguments: Any) -> Any:
        name = key.encode() if isinstance(key, str) else key
        try:
            return await self._client.call(Purpose.OTHER, command.encode(), name, *arguments)
        except EngineUnavailable as exc:
            if "NOPERM" not in str(exc):
                raise
            raise EngineUnavailable(f"{exc}; allow the keys of this check: ACL SETUSER … ~*{PREFIX}*") from exc


def _names(settings: Settings) -> KeyNames:
    return KeyNames(
        namespace=settings.namespace,
        stream_task=settings.stream_task,
        stream_result=settings.stream_result,
        stream_dlq=settings.stream_dlq,
        group=settings.group,
        queue_retry=settings.queue_retry,
        queue_suspended=settings.queue_suspended,
    )


def _client(settings: Settings) -> RedisClient:
    place = parse_url(settings.url)
    timeouts = (settings.connect_timeout_s, settings.reply_timeout_s)
    if isinstance(place, SentinelAddresses):
        return SentinelClient(place, *timeouts)
    if isinstance(place, ClusterSeeds):
        return ClusterClient(place, *timeouts)
    return RedisClient(place, *timeouts)
