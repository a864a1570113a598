"""What is left in Redis when every job has ended: nothing but memories that expire."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import MovedError

from holdfast.core.job import DEFAULT_QUEUE
from holdfast.engine.redis.keys import RETRY_CONSUMER, KeyNames, QueueKeys
from holdfast.verification.chaos.deployment import Deployment
from holdfast.verification.chaos.redis_nodes import ask
from holdfast.verification.chaos.workload import SIDE_QUEUE, TENANTS

QUEUES: Final = (DEFAULT_QUEUE, SIDE_QUEUE)
#: A lane for each tenant, and some to spare.
_LANES: Final = len(TENANTS) + 2
_PAGE: Final = 500
#: Told by name; all are counted.
_SHOWN: Final = 5
#: A worker that has nothing to do is heard of at least every ten seconds.
_ALIVE_MS: Final = 30_000
_SIZES: Final = {"stream": "XLEN", "zset": "ZCARD", "hash": "HLEN", "set": "SCARD", "list": "LLEN"}


def masters(deployment: Deployment) -> list[int]:
    """The ports of all servers that have data of their own."""
    servers = deployment.topology.servers if deployment.topology is not None else {}
    return [server.port for server in servers.values() if ask(server.port, "ROLE")[0] == "master"]


class Leftovers:
    """Looks through the whole store, on all of its masters."""

    def __init__(self, ports: Callable[[], list[int]], *, group: str, feed_tail: int, cluster: bool) -> None:
        """`ports`: of the servers that are masters at the time."""
        names = KeyNames(cluster=cluster)
        self._ports = ports
        self._group = group
        self._feed_tail = feed_tail
        self._keys = [QueueKeys(queue, names) for queue in QUEUES]
        self._queues = names.queues.encode()

    async def find(self) -> list[str]:
        """Everything that should not be there; a sentence each."""
        found: list[str] = []
        for port in self._ports():
            client = Redis(port=port, decode_responses=False)
            try:
                found += [said async for said in self._on(client)]
            finally:
                await client.aclose()
        return found

    async def _on(self, client: Redis) -> AsyncIterator[str]:
        unknown, everlasting = list[str](), list[str]()
        async for names in _pages(client):
            forgettable = [name for name in names if self._expires(name)]
            pipeline = client.pipeline(transaction=False)
            for name in forgettable:
                pipeline.pttl(name)
            everlasting += [
                _text(name) for name, ttl in zip(forgettable, await pipeline.execute(), strict=True) if ttl == -1
            ]
            unknown += [_text(name) for name in names if not self._expires(name) and not self._is_known(name)]
        if unknown:
            yield f"{len(unknown)} keys that nobody knows: {_some(unknown)}"
        if everlasting:
            yield f"{len(everlasting)} records without an end: {_some(everlasting)}"
        for keys in self._keys:
            if await _is_at_home(client, keys):
                async for said in self._of_queue(client, keys):
                    yield said

    async def _of_queue(self, client: Redis, keys: QueueKeys) -> AsyncIterator[str]:
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
            yield f"{_text(keys.workers)} has {dead} workers that are dead"
        workers = await client.zrangebyscore(keys.workers, alive_since, "+inf")
        for line in (line for lane in range(_LANES) for line in keys.lane(lane)):
            async for said in self._of_line(client, line, {RETRY_CONSUMER.encode(), *workers}):
                yield said
        # All of it is read. A tail is cut before it is a tenth longer, to itself and the entry at the position.
        allowed = self._feed_tail + max(1, self._feed_tail // 10)
        if (size := await client.xlen(keys.feed)) > allowed:
            yield f"{_text(keys.feed)} has {size} entries; {allowed} may stay"

    async def _of_line(self, client: Redis, line: bytes, alive: set[bytes]) -> AsyncIterator[str]:
        if not await client.exists(line):
            return
        if messages := await client.xlen(line):
            yield f"{_text(line)} has {messages} messages"
        for group in await client.xinfo_groups(line):
            if group["pending"]:
                yield f"{_text(line)} has {group['pending']} pending entries in group {_text(group['name'])}"
            if _text(group["name"]) != self._group:
                continue
            consumers = [each["name"] for each in await client.xinfo_consumers(line, group["name"])]
            if dead := [_text(name) for name in consumers if name not in alive]:
                yield f"{_text(line)} has {len(dead)} consumers that are dead: {_some(dead)}"

    def _expires(self, name: bytes) -> bool:
        """Records of jobs and idempotency keys."""
        return any(name.startswith((keys.job(""), keys.idempotency("", "")[: -len("0::")])) for keys in self._keys)

    def _is_known(self, name: bytes) -> bool:
        if name == self._queues:
            return True
        for keys in self._keys:
            lines = {line for lane in range(_LANES) for line in keys.lane(lane)}
            others = {
                keys.result, keys.dlq, keys.retry, keys.suspended, keys.feed, keys.wake, keys.notices, keys.delayed,
                keys.pending_retries, keys.waiting_approval, keys.dlq_pending, keys.control, keys.lanes, keys.workers,
                keys.waiters,
            }  # fmt: skip
            if name in lines | others:
                return True
        return False


async def feed_ends(ports: Sequence[int], *, cluster: bool) -> dict[str, str]:
    """By queue: the last entry of its feed."""
    names, found = KeyNames(cluster=cluster), {}
    for port in ports:
        client = Redis(port=port)
        try:
            for queue in QUEUES:
                keys = QueueKeys(queue, names)
                if await _is_at_home(client, keys) and (last := await client.xrevrange(keys.feed, count=1)):
                    found[queue] = _text(last[0][0])
        finally:
            await client.aclose()
    return found


async def _is_at_home(client: Redis, keys: QueueKeys) -> bool:
    """Whether this server has the queue; on a Cluster one of them does."""
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
