"""`RedisStore`: client, keys, scripts and consumer groups, shared by all modules of the engine."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from functools import cache, partial
from typing import Any, Final, TypeVar

from holdfast.engine.port.jobs import EngineOptions, RetryVia
from holdfast.engine.redis import wire
from holdfast.engine.redis.keys import (
    RETRY_CONSUMER,
    STREAMS_PER_LANE,
    WAKE_GROUP,
    KeyNames,
    LaneCache,
    QueueKeys,
    parse_lanes,
)
from holdfast.engine.redis.net.client import Purpose, RedisClient
from holdfast.engine.redis.net.errors import ConnectionLost, ScriptError
from holdfast.engine.redis.net.outages import Outages
from holdfast.engine.redis.net.script import Script
from holdfast.errors import EngineUnavailable, QueueLimitReached, QueueUnverified
from holdfast.observe.counters import Counters

T = TypeVar("T")

_log: Final = logging.getLogger("holdfast.engine.redis")

_AUTOCLAIM_SINCE = (6, 2)
#: How long a queue counts as registered in the list of queues.
_KNOWN_S: Final = 60.0
#: Unreadable values in the log: how many, and the length of their names.
_LOGGED_NAMES: Final = 1_000
_LOGGED_NAME: Final = 100
_UNBOUNDED: Final = 10**15
#: What scripts report if a group or the marker does not exist.
_MISSING: Final = ("NOGROUP", "NOMARKER")
#: Calls of a script that needs other lanes each time, before the operation fails.
_TRIES: Final = 10


@cache
def _script(name: str) -> Script:
    return Script(name)


class RedisStore:
    """One Redis with its keys, lanes and outages."""

    def __init__(self, client: RedisClient, names: KeyNames, options: EngineOptions, counters: Counters) -> None:
        self.client = client
        self.names = names
        self.options = options
        self.counters = counters
        self.version: tuple[int, ...] = (0,)
        self._keys: dict[str, QueueKeys] = {}
        self._known: dict[str, float] = {}
        self._lanes: dict[str, LaneCache] = {}
        #: Values whose unreadable content was logged.
        self._unreadable: set[tuple[str, str, str]] = set()
        client.sends_epoch = options.ledger
        #: Called with a queue whose jobs wait until it is verified.
        self.verify: Callable[[str], asyncio.Task[None] | None] = lambda queue: None
        self.outages = Outages(
            lambda queue: client.call(Purpose.OTHER, b"HGET", self.keys(queue).control, b"lanes"),
            lambda queue: client.node_of(self.keys(queue).control),
            apart=names.cluster,
        )

    def note_unreadable(self, queue: str, what: str, names: Iterable[bytes]) -> None:
        """Count and log values of other programs that cannot be read; the log has each name once."""
        for name in names:
            self.counters.unreadable_values += 1
            text = wire.printable(name)[:_LOGGED_NAME]
            if (queue, what, text) not in self._unreadable and len(self._unreadable) < _LOGGED_NAMES:
                self._unreadable.add((queue, what, text))
                _log.error("%s %r of queue %s cannot be read; another program has changed it", what, text, queue)

    @property
    def has_autoclaim(self) -> bool:
        """Redis 6.2 and later: `XAUTOCLAIM`, `XPENDING … IDLE`, `XTRIM MINID`."""
        return self.version >= _AUTOCLAIM_SINCE

    def keys(self, queue: str) -> QueueKeys:
        """Return the keys of a queue."""
        keys = self._keys.get(queue)
        if keys is None:
            keys = self._keys[queue] = QueueKeys(queue, self.names)
        return keys

    def lanes(self, queue: str) -> LaneCache:
        """Return the known lanes of a queue."""
        lanes = self._lanes.get(queue)
        if lanes is None:
            lanes = self._lanes[queue] = LaneCache()
        return lanes

    async def streams_in_use(self, queue: str, purpose: Purpose) -> list[tuple[int, bytes]]:
        """Return index and key of every stream that may have messages."""
        keys = self.keys(queue)
        in_use: bytes = await self.client.call(purpose, b"HGET", keys.control, b"lanes") or b""
        lanes = [0, *parse_lanes(in_use)]
        return [
            (lane * STREAMS_PER_LANE + offset, stream)
            for lane in lanes
            for offset, stream in enumerate(keys.lane(lane))
        ]

    @property
    def feed_limit(self) -> int:
        """Feed entries kept without a reader.

        With a ledger, all of them: after a wipe, jobs move before a reader is attached.
        """
        return _UNBOUNDED if self.options.ledger else self.options.feed_limit

    def retry_consumer(self, queue: str) -> str:
        """The consumer that owns the queue's waiting retries; empty if they wait in a set."""
        return RETRY_CONSUMER if self.options.retry_via.get(queue) is RetryVia.PENDING else ""

    def nonce(self) -> str:
        """Return a random value that distinguishes a feed entry from any other at the same position."""
        return os.urandom(6).hex()

    async def detect_version(self) -> None:
        """Read the server's version; of several servers, the oldest among those that answer."""
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
        """Return the time of Redis; on a Cluster, that of the queue's node."""
        return await self.client.time_ms(None if queue is None else self.keys(queue).control)

    def is_registered(self, queue: str) -> bool:
        """Whether `register_queue` has nothing to do."""
        return self._known.get(queue, 0.0) >= time.monotonic()

    async def register_queue(self, queue: str, *, again: bool = False, owners: Sequence[str] = ()) -> None:
        """Add the queue to the list of queues. Repeated every `_KNOWN_S`, because a wipe may have removed it.

        A new queue belongs to the first of `owners` that may have another one. Raises `QueueLimitReached` if none may.
        """
        now = time.monotonic()
        if again or self._known.get(queue, 0.0) < now:
            try:
                # A queue that this process has used is not new, although a wipe may have removed it from the list.
                limit = b"" if queue in self._known else self.options.tenant_queue_limit
                add = partial(self._add_to_list, [queue, limit, *owners])
                if await self.run_on_list_node(add, waits=queue not in self._known) == b"limited":
                    raise QueueLimitReached(queue, owners[0], self.options.tenant_queue_limit)
            except EngineUnavailable:
                # On a Cluster the list may be on another node than the queue. Without that node, queues that are in
                # the list continue. With `again` the queue is in it unless the node was wiped; then a later submission
                # adds it.
                if not self.names.cluster or (queue not in self._known and not again):
                    raise
                if queue not in self._known:
                    return
            self._known[queue] = now + _KNOWN_S

    async def run_on_list_node(self, work: Callable[[], Awaitable[T]], *, waits: bool) -> T:
        """Run work on the node that has the list of queues. Unless it `waits`, it fails while that node is silent."""
        node = None if waits or not self.names.cluster else self.client.node_of(self.names.queues.encode())
        return await (work() if node is None else node.run_unless_silent(work))

    async def _add_to_list(self, arguments: Sequence[Any]) -> Any:
        names = [self.names.queues.encode(), self.names.owners.encode()]
        call = partial(self.client.run, Purpose.OTHER, _script("register_queue"), names, arguments)
        try:
            return await call()
        except ConnectionLost:
            # After a restart of the server, for example. A repetition changes nothing.
            return await call()

    async def create_groups(self, queue: str) -> None:
        """Create the marker, and the groups on all streams, from id 0: `$` would skip messages that are there."""
        keys = self.keys(queue)
        if queue in self._known:
            # Makes the next call register it again, if the list is reachable.
            self._known[queue] = 0.0
        names, arguments = self._declare(
            queue,
            [*keys.streams, keys.wake, keys.control],
            [self.names.group, WAKE_GROUP, wire.new_marker()],
            self.lanes(queue).all(),
        )
        waiting = await self.client.run(Purpose.OTHER, _script("create_groups"), names, arguments)
        if waiting:
            # The store was wiped, and jobs were submitted since.
            await self.register_queue(queue)

    async def run(
        self, purpose: Purpose, name: str, queue: str, keys: Sequence[bytes], arguments: Sequence[Any]
    ) -> Any:
        """Run a script on one queue.

        If a group or the marker is missing (a new queue, or a wipe), create them and run the script again, once. Raises
        `QueueUnverified` if the script moves jobs and the queue is not verified.
        """
        try:
            return await self._run_verified(purpose, name, queue, keys, arguments)
        except ScriptError as exc:
            if not any(missing in str(exc) for missing in _MISSING):
                raise
        await self.create_groups(queue)
        return await self._run_verified(purpose, name, queue, keys, arguments)

    async def _run_verified(
        self, purpose: Purpose, name: str, queue: str, keys: Sequence[bytes], arguments: Sequence[Any]
    ) -> Any:
        try:
            return await self.client.run(purpose, _script(name), keys, arguments)
        except ScriptError as exc:
            if not exc.is_unverified:
                raise
        try:
            # The connection may have the epoch from before: a master that has had no replicas for a while gets a new
            # one, and so does a replica that becomes the master, and both keep their connections.
            await self.client.epoch(purpose, self.keys(queue).control)
            return await self.client.run(purpose, _script(name), keys, arguments)
        except ScriptError as exc:
            if not exc.is_unverified:
                raise
        self.verify(queue)
        raise QueueUnverified(queue)

    async def run_with_lanes(
        self,
        purpose: Purpose,
        name: str,
        queue: str,
        keys: Sequence[bytes],
        arguments: Sequence[Any],
        lanes: Collection[int],
    ) -> Any:
        """Run a script with lane 0 and these lanes declared, and again with further lanes if it needs them."""
        for _ in range(_TRIES):
            reply = await self.run(purpose, name, queue, *self._declare(queue, keys, arguments, lanes))
            if type(reply) is not list or not reply or reply[0] != b"lanes":
                return reply
            lanes = {*lanes, *self.lanes(queue).add(reply[1:])}
        raise EngineUnavailable(f"the lanes of queue {queue!r} changed too often during the call; retry")

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
        """Pipeline a script with lanes behind a blocking read. None: it did not run; call `run_with_lanes`."""
        names, values = self._declare(queue, keys, arguments, lanes)
        try:
            waited, reply = await self.client.run_after_read(Purpose.WAIT, read, blocks_s, _script(name), names, values)
        except ScriptError as exc:
            if not exc.is_unverified:
                raise
            await self.client.epoch(Purpose.WAIT, self.keys(queue).control)
            return None
        if not waited:
            # NOGROUP or UNBLOCKED: the store is new, or was wiped. Without groups, no wait can succeed.
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
        queue_keys = self.keys(queue)
        streams = [stream for lane in lanes for stream in queue_keys.lane(lane)]
        return [*keys, *streams], [*arguments, " ".join(map(str, lanes))]


async def _version(node: RedisClient) -> tuple[int, ...]:
    info: bytes = await node.call(Purpose.OTHER, b"INFO", b"server")
    for line in info.decode().splitlines():
        if line.startswith("redis_version:"):
            return tuple(int(part) for part in line.partition(":")[2].split(".")[:3] if part.isdigit())
    return (0,)
