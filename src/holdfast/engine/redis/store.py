"""What all verbs share: the client, the keys, the scripts, the groups."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from functools import cache
from typing import Any, Final

from holdfast.engine.port.jobs import EngineOptions, RetryVia
from holdfast.engine.redis.keys import RETRY_CONSUMER, STREAMS_PER_LANE, WAKE_GROUP, KeyNames, LaneCache, QueueKeys
from holdfast.engine.redis.net.client import Purpose, RedisClient, Script, ScriptError
from holdfast.engine.redis.net.outages import Outages
from holdfast.errors import EngineUnavailable
from holdfast.observe.counters import Counters

_AUTOCLAIM_SINCE = (6, 2)
#: How long a queue counts as introduced.
_KNOWN_S: Final = 60.0
_UNBOUNDED: Final = 10**15
#: A script whose lanes change under our eyes this often in a row has more tenants than it can follow.
_TRIES: Final = 10


@cache
def _script(name: str) -> Script:
    return Script(name)


class RedisStore:
    """One Redis, as the engine's verbs use it."""

    def __init__(self, client: RedisClient, names: KeyNames, options: EngineOptions, counts: Counters) -> None:
        self.client = client
        self.names = names
        self.options = options
        self.counts = counts
        self.version: tuple[int, ...] = (0,)
        self._keys: dict[str, QueueKeys] = {}
        self._known: dict[str, float] = {}
        self._lanes: dict[str, LaneCache] = {}
        self.outages = Outages(
            lambda queue: client.call(Purpose.OTHER, b"HGET", self.keys(queue).control, b"lanes"),
            lambda queue: client.node_of(self.keys(queue).control),
            apart=names.cluster,
        )

    @property
    def has_autoclaim(self) -> bool:
        """Redis 6.2 and later: `XAUTOCLAIM`, `XPENDING … IDLE`, `XTRIM MINID`."""
        return self.version >= _AUTOCLAIM_SINCE

    def keys(self, queue: str) -> QueueKeys:
        """The queue's keys."""
        keys = self._keys.get(queue)
        if keys is None:
            keys = self._keys[queue] = QueueKeys(queue, self.names)
        return keys

    def lanes(self, queue: str) -> LaneCache:
        """What is known of the queue's lanes."""
        lanes = self._lanes.get(queue)
        if lanes is None:
            lanes = self._lanes[queue] = LaneCache()
        return lanes

    async def streams_in_use(self, queue: str, purpose: Purpose) -> list[tuple[int, bytes]]:
        """Index and stream of every line that may have messages."""
        keys = self.keys(queue)
        in_use: bytes = await self.client.call(purpose, b"HGET", keys.control, b"lanes") or b""
        lanes = [0, *sorted(int(lane) for lane in in_use.split())]
        return [
            (lane * STREAMS_PER_LANE + offset, stream)
            for lane in lanes
            for offset, stream in enumerate(keys.lane(lane))
        ]

    @property
    def feed_limit(self) -> int:
        """Entries kept while no reader is registered. A ledger wants all: after a wipe, work goes on before one is."""
        return _UNBOUNDED if self.options.ledger else self.options.feed_limit

    def retry_consumer(self, queue: str) -> str:
        """The consumer that holds the queue's waiting retries; empty if they wait in a set."""
        return RETRY_CONSUMER if self.options.retry_via.get(queue) is RetryVia.PENDING else ""

    def nonce(self) -> str:
        """Tells this feed entry from any other at the same position."""
        return os.urandom(6).hex()

    async def detect_version(self) -> None:
        """Learn the server's version; of several, the oldest of those that answer."""
        versions: list[tuple[int, ...]] = []
        failure: EngineUnavailable | None = None
        for node in await self.client.masters():
            try:
                versions.append(await _version(node))
            except EngineUnavailable as exc:
                failure = exc
        if failure is not None and not versions:
            raise failure
        self.version = min(versions)

    async def now_ms(self, queue: str | None = None) -> int:
        """Redis's clock; on a Cluster, that of the node which has the queue."""
        return await self.client.time_ms(None if queue is None else self.keys(queue).control)

    async def register_queue(self, queue: str, *, again: bool = False) -> None:
        """Make the queue known to `queues`; now and then again, since a store that was wiped has forgotten it."""
        now = time.monotonic()
        if again or self._known.get(queue, 0.0) < now:
            try:
                await self.client.run(Purpose.OTHER, _script("introduce"), [self.names.queues.encode()], [queue])
            except EngineUnavailable:
                # On a Cluster the list is on a node of its own; without it, queues that are on it already go on. So is
                # one that is introduced again, unless that node was wiped: then a later submission puts it there.
                if not self.names.cluster or (queue not in self._known and not again):
                    raise
                if queue not in self._known:
                    return
            self._known[queue] = now + _KNOWN_S

    async def create_groups(self, queue: str) -> None:
        """Groups on all lines, from the beginning: never `$`, which would skip what waits already."""
        keys = self.keys(queue)
        if queue in self._known:
            # Introduce it again, if the list can be reached.
            self._known[queue] = 0.0
        names, arguments = self._declare(
            queue, [*keys.streams, keys.wake], [self.names.group, WAKE_GROUP], self.lanes(queue).all()
        )
        waiting = await self.client.run(Purpose.OTHER, _script("groups"), names, arguments)
        if waiting:
            # The store was wiped, and jobs have come since.
            await self.register_queue(queue)

    async def run(
        self, purpose: Purpose, name: str, queue: str, keys: Sequence[bytes], arguments: Sequence[Any]
    ) -> Any:
        """A script on one queue. Groups that are gone (the store was wiped) are made again, once."""
        try:
            return await self.client.run(purpose, _script(name), keys, arguments)
        except ScriptError as exc:
            if "NOGROUP" not in str(exc):
                raise
        await self.create_groups(queue)
        return await self.client.run(purpose, _script(name), keys, arguments)

    async def run_with_lanes(
        self,
        purpose: Purpose,
        name: str,
        queue: str,
        keys: Sequence[bytes],
        arguments: Sequence[Any],
        lanes: Collection[int],
    ) -> Any:
        """A script that touches lines: with these lanes declared beside lane 0, and more if it needs them."""
        for _ in range(_TRIES):
            reply = await self.run(purpose, name, queue, *self._declare(queue, keys, arguments, lanes))
            if type(reply) is not list or not reply or reply[0] != b"lanes":
                return reply
            lanes = {*lanes, *self.lanes(queue).add(reply[1:])}
        raise EngineUnavailable(
            f"the tenants of queue {queue!r} come and go faster than they can be followed; try again"
        )

    async def run_after_read(
        self,
        read: Sequence[Any],
        blocks_s: float,
        name: str,
        queue: str,
        keys: Sequence[bytes],
        arguments: Sequence[Any],
        lanes: Collection[int],
    ) -> Any:
        """`run_on_lines` behind a read that blocks, see the client; None if it did not run and has to be called."""
        names, given = self._declare(queue, keys, arguments, lanes)
        waited, reply = await self.client.run_after_read(Purpose.WAIT, read, blocks_s, _script(name), names, given)
        if not waited:
            # NOGROUP or UNBLOCKED: the store is new, or was wiped. Nobody could wait for anything else.
            await self.create_groups(queue)
        if reply is not None and reply[0] == b"lanes":
            self.lanes(queue).add(reply[1:])
            return None
        return reply

    def _declare(
        self, queue: str, keys: Sequence[bytes], arguments: Sequence[Any], lanes: Collection[int]
    ) -> tuple[Sequence[bytes], Sequence[Any]]:
        if not lanes:
            return keys, [*arguments, b""]
        of_queue = self.keys(queue)
        streams = [stream for lane in lanes for stream in of_queue.lane(lane)]
        return [*keys, *streams], [*arguments, " ".join(map(str, lanes))]


async def _version(node: RedisClient) -> tuple[int, ...]:
    info: bytes = await node.call(Purpose.OTHER, b"INFO", b"server")
    for line in info.decode().splitlines():
        if line.startswith("redis_version:"):
            return tuple(int(part) for part in line.partition(":")[2].split(".")[:3] if part.isdigit())
    return (0,)
