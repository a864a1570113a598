"""Check that Redis holds only expiring records once every job has ended."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import MovedError

from holdfast.core.job import DEFAULT_QUEUE
from holdfast.engine.redis.keys import RETRY_CONSUMER, KeyNames, QueueKeys
from holdfast.verification.chaos.deployment import Deployment
from holdfast.verification.chaos.redis_nodes import call_redis
from holdfast.verification.chaos.workload import SIDE_QUEUE, TENANTS

QUEUES: Final = (DEFAULT_QUEUE, SIDE_QUEUE)
#: A lane for each tenant, and some spare ones.
_LANES: Final = len(TENANTS) + 2
_PAGE: Final = 500
#: Names listed in a finding; all are counted.
_SHOWN: Final = 5
#: An idle worker reports at least every 10 s.
_ALIVE_MS: Final = 30_000
_SIZES: Final = {"stream": "XLEN", "zset": "ZCARD", "hash": "HLEN", "set": "SCARD", "list": "LLEN"}


def masters(deployment: Deployment) -> list[int]:
    """Ports of all master servers."""
    servers = deployment.topology.servers if deployment.topology is not None else {}
    return [server.port for server in servers.values() if call_redis(server.port, "ROLE")[0] == "master"]


class Leftovers:
    """Searches the whole store, on all its masters."""

    def __init__(self, ports: Callable[[], list[int]], *, group: str, feed_tail: int, cluster: bool) -> None:
        """`ports` returns the ports of the current masters."""
        names = KeyNames(cluster=cluster)
        self._ports = ports
        self._group = group
        self._feed_tail = feed_tail
        self._keys = [QueueKeys(queue, names) for queue in QUEUES]
        self._common = {names.queues.encode(), names.owners.encode(), names.tasks.encode()}

    async def find(self) -> list[str]:
        """Find everything that should not be there; one sentence each."""
        found: list[str] = []
        for port in self._ports():
            client = Redis(port=port, decode_responses=False)
            try:
                found += [finding async for finding in self._find_on(client)]
            finally:
                await client.aclose()
        return found

    async def _find_on(self, client: Redis) -> AsyncIterator[str]:
        unknown, persistent = list[str](), list[str]()
        async for names in _pages(client):
            expiring = [name for name in names if self._expires(name)]
            pipeline = client.pipeline(transaction=False)
            for name in expiring:
                pipeline.pttl(name)
            persistent += [
                _text(name) for name, ttl in zip(expiring, await pipeline.execute(), strict=True) if ttl == -1
            ]
            unknown += [_text(name) for name in names if not self._expires(name) and not self._is_known(name)]
        if unknown:
            yield f"{len(unknown)} unknown keys: {_some(unknown)}"
        if persistent:
            yield f"{len(persistent)} records without expiry: {_some(persistent)}"
        for keys in self._keys:
            if await _has_queue(client, keys):
                async for finding in self._find_of_queue(client, keys):
                    yield finding

    async def _find_of_queue(self, client: Redis, keys: QueueKeys) -> AsyncIterator[str]:
        for name in (
            keys.retry,
            keys.delayed,
            keys.pending_retries,
            keys.waiting_approval,
            keys.dlq_pending,
            keys.suspended,
            keys.waiters,
        ):
            if size := await _size(client, name):
                yield f"{_text(name)} has {size} entries"
        alive_since = await _now_ms(client) - _ALIVE_MS
        if dead := await client.zcount(keys.workers, "-inf", f"({alive_since}"):
            yield f"{_text(keys.workers)} has {dead} dead workers"
        workers = await client.zrangebyscore(keys.workers, alive_since, "+inf")
        for stream in (stream for lane in range(_LANES) for stream in keys.lane(lane)):
            async for finding in self._find_of_stream(client, stream, {RETRY_CONSUMER.encode(), *workers}):
                yield finding
        # A feed that is read to its end is trimmed to its tail, plus the entry at the position, before it exceeds the
        # tail by a tenth.
        allowed = self._feed_tail + max(1, self._feed_tail // 10)
        if (size := await client.xlen(keys.feed)) > allowed:
            yield f"{_text(keys.feed)} has {size} entries; at most {allowed} are allowed"

    async def _find_of_stream(self, client: Redis, stream: bytes, alive: set[bytes]) -> AsyncIterator[str]:
        if not await client.exists(stream):
            return
        if messages := await client.xlen(stream):
            yield f"{_text(stream)} has {messages} messages"
        for group in await client.xinfo_groups(stream):
            if group["pending"]:
                yield f"{_text(stream)} has {group['pending']} pending entries in group {_text(group['name'])}"
            if _text(group["name"]) != self._group:
                continue
            consumers = [each["name"] for each in await client.xinfo_consumers(stream, group["name"])]
            if dead := [_text(name) for name in consumers if name not in alive]:
                yield f"{_text(stream)} has {len(dead)} dead consumers: {_some(dead)}"

    def _expires(self, name: bytes) -> bool:
        """Whether it is a record of a job or an idempotency key, which must expire."""
        return any(name.startswith((keys.job(""), keys.idempotency("", "")[: -len("0::")])) for keys in self._keys)

    def _is_known(self, name: bytes) -> bool:
        if name in self._common:
            return True
        for keys in self._keys:
            streams = {stream for lane in range(_LANES) for stream in keys.lane(lane)}
            others = {
                keys.result, keys.dlq, keys.retry, keys.suspended, keys.feed, keys.wake, keys.notices, keys.delayed,
                keys.pending_retries, keys.waiting_approval, keys.dlq_pending, keys.control, keys.lanes, keys.workers,
                keys.waiters, keys.worker_ids, keys.replaced_workers,
            }  # fmt: skip
            if name in streams | others:
                return True
        return False


async def feed_ends(ports: Sequence[int], *, cluster: bool) -> dict[str, str]:
    """Queue → id of the last entry of its feed."""
    names, found = KeyNames(cluster=cluster), {}
    for port in ports:
        client = Redis(port=port)
        try:
            for queue in QUEUES:
                keys = QueueKeys(queue, names)
                if await _has_queue(client, keys) and (last := await client.xrevrange(keys.feed, count=1)):
                    found[queue] = _text(last[0][0])
        finally:
            await client.aclose()
    return found


async def _has_queue(client: Redis, keys: QueueKeys) -> bool:
    """Whether this server has the queue; on a Cluster one master does."""
    try:
        await client.exists(keys.feed)
    except MovedError:
        return False
    return True


async def _pages(client: Redis) -> AsyncIterator[list[bytes]]:
    page: list[bytes] = []
    async for name in client.scan_iter(count=_PAGE):
        page.append(name)
        if len(page) == _PAGE:
            yield page
            page = []
    yield page


async def _size(client: Redis, name: bytes) -> int:
    kind = _text(await client.type(name))
    return int(await client.execute_command(_SIZES[kind], name)) if kind in _SIZES else 0  # type: ignore[no-untyped-call]


async def _now_ms(client: Redis) -> int:
    seconds, microseconds = await client.time()
    return int(seconds) * 1000 + int(microseconds) // 1000


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _some(names: Sequence[str]) -> str:
    return ", ".join(sorted(names)[:_SHOWN]) + (" …" if len(names) > _SHOWN else "")
