"""What all verbs share: the client, the keys, the scripts, the groups."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

from holdfast.engine.port import EngineOptions, RetryVia
from holdfast.engine.redis.client import Client, Lane, Script, ScriptError
from holdfast.engine.redis.keys import PARKING, WAKE_GROUP, Keys, Names
from holdfast.observe.counts import Counts

_AUTOCLAIM_SINCE = (6, 2)
#: How long a queue counts as introduced.
_KNOWN_S: Final = 60.0
_UNBOUNDED: Final = 10**15


@cache
def _script(name: str) -> Script:
    return Script(name)


class Store:
    """One Redis, as the engine's verbs use it."""

    def __init__(self, client: Client, names: Names, options: EngineOptions, counts: Counts) -> None:
        self.client = client
        self.names = names
        self.options = options
        self.counts = counts
        self.version: tuple[int, ...] = (0,)
        self._keys: dict[str, Keys] = {}
        self._known: dict[str, float] = {}

    @property
    def has_autoclaim(self) -> bool:
        """Redis 6.2 and later: `XAUTOCLAIM`, `XPENDING … IDLE`, `XTRIM MINID`."""
        return self.version >= _AUTOCLAIM_SINCE

    def keys(self, queue: str) -> Keys:
        """The queue's keys."""
        keys = self._keys.get(queue)
        if keys is None:
            keys = self._keys[queue] = Keys(queue, self.names)
        return keys

    @property
    def feed_limit(self) -> int:
        """Entries kept while no reader is registered. A ledger wants all: after a wipe, work goes on before one is."""
        return _UNBOUNDED if self.options.ledger else self.options.feed_limit

    def parking(self, queue: str) -> str:
        """The consumer that holds the queue's waiting retries; empty if they wait in a set."""
        return PARKING if self.options.retry_via.get(queue) is RetryVia.PENDING else ""

    def nonce(self) -> str:
        """Tells this feed entry from any other at the same position."""
        return os.urandom(6).hex()

    async def prepare(self) -> None:
        """Learn the server's version."""
        info: bytes = await self.client.call(Lane.OTHER, b"INFO", b"server")
        for line in info.decode().splitlines():
            if line.startswith("redis_version:"):
                self.version = tuple(int(part) for part in line.partition(":")[2].split(".")[:3] if part.isdigit())

    async def now_ms(self) -> int:
        """Redis's clock."""
        seconds, microseconds = await self.client.call(Lane.OTHER, b"TIME")
        return int(seconds) * 1000 + int(microseconds) // 1000

    async def introduce(self, queue: str, *, again: bool = False) -> None:
        """Make the queue known to `queues`; now and then again, since a store that was wiped has forgotten it."""
        now = time.monotonic()
        if again or self._known.get(queue, 0.0) < now:
            await self.client.run(Lane.OTHER, _script("introduce"), [self.names.queues.encode()], [queue])
            self._known[queue] = now + _KNOWN_S

    async def create_groups(self, queue: str) -> None:
        """Groups on all lines, from the beginning: never `$`, which would skip what waits already."""
        keys = self.keys(queue)
        self._known.pop(queue, None)
        waiting = await self.client.run(
            Lane.OTHER, _script("groups"), [*keys.streams, keys.wake], [self.names.group, WAKE_GROUP]
        )
        if waiting:
            # The store was wiped, and jobs have come since.
            await self.introduce(queue)

    async def run(self, lane: Lane, name: str, queue: str, keys: Sequence[bytes], arguments: Sequence[Any]) -> Any:
        """A script on one queue. Groups that are gone (the store was wiped) are made again, once."""
        try:
            return await self.client.run(lane, _script(name), keys, arguments)
        except ScriptError as exc:
            if "NOGROUP" not in str(exc):
                raise
        await self.create_groups(queue)
        return await self.client.run(lane, _script(name), keys, arguments)
