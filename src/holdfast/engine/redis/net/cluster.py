"""Client for Redis Cluster.

`ClusterClient` (decision 0018) has one client per node and picks it by the slot of the key. All keys of a queue share a
hash tag, so one node runs a script. The slot map is read from the first node that answers, and again when a node does
not answer or redirects; meanwhile the slots of the other nodes keep their routes. A redirect (`MOVED`, `ASK`) means
that nothing was applied, so the command is sent to the node it names. Nothing else is sent twice.

While a node is silent, the other nodes are asked every `_REPEAT_S` whether it still has slots (decision 0041). If it
has none, all connections to it are closed, and its calls fail as they do when a single Redis restarts.
"""

from __future__ import annotations

import asyncio
import logging
from binascii import crc_hqx
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

from holdfast.engine.redis.net.client import Purpose, RedisClient
from holdfast.engine.redis.net.connection import ClusterSeeds, PubSubConnection, split_host_port
from holdfast.engine.redis.net.errors import Redirected, ScriptError, Unreachable
from holdfast.engine.redis.net.script import Script
from holdfast.errors import EngineUnavailable

_log: Final = logging.getLogger("holdfast.engine.redis")

_SLOTS: Final = 16_384
#: Maximum of redirects for one command; more means that nodes disagree.
_HOPS: Final = 5
#: Timeout for the slot map of one node, and how long it is waited for alone, before the next is asked too.
_CLUSTER_ANSWER_S: Final = 1.0
_NEXT_NODE_S: Final = 0.1
#: Interval of queries for the slot map while a node is silent.
_REPEAT_S: Final = 0.5
#: How long the reads of other nodes are waited for after the first has returned.
_READ_GRACE_S: Final = 0.25
#: Longest blocking call.
_MAX_BLOCK_MS: Final = 2_000

_T = TypeVar("_T")

_UNKNOWN: Final[Sequence[RedisClient | None]] = (None,) * _SLOTS


def slot_of(key: bytes) -> int:
    """Slot of a key: CRC16 of the part between the first `{` and the next `}`, or of the whole key."""
    start = key.find(b"{") + 1
    if start:
        end = key.find(b"}", start)
        if end > start:
            key = key[start:end]
    return crc_hqx(key, 0) % _SLOTS


def key_of(command: Sequence[Any]) -> bytes:
    """The first key that a command names."""
    name = command[0]
    if name in (b"XREAD", b"XREADGROUP"):
        key = command[command.index(b"STREAMS") + 1]
    else:
        key = command[2 if name == b"XINFO" else 1]
    return key if isinstance(key, bytes) else str(key).encode()


class ClusterClient(RedisClient):
    """One client per master of a Cluster."""

    max_block_ms = _MAX_BLOCK_MS

    def __init__(self, seeds: ClusterSeeds, connect_timeout_s: float, reply_timeout_s: float) -> None:
        super().__init__(seeds.addresses[0], connect_timeout_s, reply_timeout_s)
        self._seeds = seeds.addresses
        self._nodes: dict[tuple[str, int], RedisClient] = {}
        #: The node of each slot; None: to be learned.
        self._routes: Sequence[RedisClient | None] = _UNKNOWN
        #: The last known routes, even if outdated.
        self._last_routes: Sequence[RedisClient | None] = _UNKNOWN
        #: Shared by the calls that need it.
        self._learning: asyncio.Task[None] | None = None
        self._inquiry: asyncio.Task[None] | None = None
        #: Queried first for the slot map: it answered last time.
        self._guide: tuple[str, int] | None = None

    # Calls -----------------------------------------------------------------------------------------

    async def call(self, purpose: Purpose, *command: Any, blocks_s: float = 0.0) -> Any:
        return await self._follow(
            slot_of(key_of(command)),
            lambda node: node.call(purpose, *command, blocks_s=blocks_s),
            lambda node: node.call_asking(purpose, *command),
        )

    async def run(self, purpose: Purpose, script: Script, keys: Sequence[bytes], arguments: Sequence[Any]) -> Any:
        return await self._follow(
            slot_of(keys[0]),
            lambda node: node.run(purpose, script, keys, arguments),
            lambda node: node.run_asking(purpose, script, keys, arguments),
        )

    async def call_dedicated(self, *command: Any, blocks_s: float) -> Any:
        return await self._follow(
            slot_of(key_of(command)),
            lambda node: node.call_dedicated(*command, blocks_s=blocks_s),
            lambda node: node.call_asking(Purpose.OTHER, *command),
        )

    async def read(
        self, purpose: Purpose | None, head: Sequence[Any], streams: Mapping[bytes, Any], blocks_s: float
    ) -> list[Any]:
        """Read each slot concurrently. Returns when the first read has found something."""
        by_slot: dict[int, dict[bytes, Any]] = {}
        for stream, position in streams.items():
            by_slot.setdefault(slot_of(stream), {})[stream] = position
        if len(by_slot) == 1:
            return await super().read(purpose, head, streams, blocks_s)
        return await _first(
            [super(ClusterClient, self).read(None, head, part, blocks_s) for part in by_slot.values()],
            all_of_them=b"BLOCK" not in head,
        )

    async def subscription(self, on_message: Callable[[bytes], None]) -> PubSubConnection:
        """Subscribe on any node: each receives what is published on the others."""
        return await self._any(lambda node: node.subscription(on_message))

    async def time_ms(self, key: bytes | None = None) -> int:
        if key is None:
            return await self._any(lambda node: node.time_ms())
        return int(await self._follow(slot_of(key), lambda node: node.time_ms(), lambda node: node.time_ms()))

    async def epoch(self, purpose: Purpose, key: bytes) -> bytes:
        def read_epoch(node: RedisClient) -> Awaitable[bytes]:
            return node.epoch(purpose, key)

        return bytes(await self._follow(slot_of(key), read_epoch, read_epoch))

    # Nodes -----------------------------------------------------------------------------------------

    def node_of(self, key: bytes) -> RedisClient | None:
        return self._last_routes[slot_of(key)]

    def contact(self, key: bytes) -> object:
        node = self._last_routes[slot_of(key)]
        return node.contact(key) if node is not None else None

    async def masters(self) -> list[RedisClient]:
        """The current masters, from a fresh slot map: callers use each node and would not notice a change."""
        await self._learn_routes()
        return self._list_nodes()

    def _list_nodes(self) -> list[RedisClient]:
        return [node for node in dict.fromkeys(self._routes) if node is not None]

    def drop(self, purpose: Purpose) -> None:
        for node in self._nodes.values():
            node.drop(purpose)

    def drop_all(self) -> None:
        for node in self._nodes.values():
            node.drop_all()

    def close(self) -> None:
        self._closed = True
        if self._inquiry is not None:
            self._inquiry.cancel()
        for node in self._nodes.values():
            node.close()
        self._nodes.clear()
        self._routes = _UNKNOWN

    async def _follow(
        self,
        slot: int,
        send: Callable[[RedisClient], Awaitable[Any]],
        send_asking: Callable[[RedisClient], Awaitable[Any]],
    ) -> Any:
        """Send to the node that has the slot, and follow redirects."""
        node, way = self._routes[slot] or await self._find(slot), send
        for _ in range(_HOPS):
            try:
                return await way(node)
            except Redirected as exc:
                address = self._address(node, exc)
                if exc.is_ask:
                    node, way = self._node(*address), send_asking
                else:
                    node, way = await self._on_moved(slot, address), send
            except ScriptError:
                raise
            except EngineUnavailable:
                # The node may be gone or no longer a master: the next call reads the slot map.
                self._drop_routes(node)
                raise
        self._drop_routes(node)
        raise EngineUnavailable("the nodes of the Redis Cluster disagree on which has the queue's slot; retry")

    async def _any(self, send: Callable[[RedisClient], Awaitable[_T]]) -> _T:
        """Send to the first master that answers."""
        if self._routes is _UNKNOWN:
            await self._learn_routes()
        failure = EngineUnavailable("no node of the Redis Cluster has slots")
        # The one that answered last comes first: others may hang.
        nodes = sorted(self._list_nodes(), key=lambda node: (node.silent, _address_of(node) != self._guide))
        for node in nodes:
            try:
                return await (send(node) if node is nodes[-1] else node.run_unless_silent(partial(send, node)))
            except EngineUnavailable as exc:
                failure = exc
        self._routes = _UNKNOWN
        raise failure

    async def _find(self, slot: int) -> RedisClient:
        if self._routes[slot] is None:
            await self._learn_routes()
        node = self._routes[slot]
        if node is None:
            raise EngineUnavailable("no node of the Redis Cluster has the queue's slot; check whether a master is down")
        return node

    async def _on_moved(self, slot: int, address: tuple[str, int]) -> RedisClient:
        """Read the slot map again: other slots may have moved too. The redirect overrides it for this slot."""
        if self._routes[slot] is not self._node(*address):
            await self._learn_routes()
            # The queried node may not know slots of the new one, which is then dropped.
            self._routes = [*self._routes[:slot], self._node(*address), *self._routes[slot + 1 :]]
        return self._node(*address)

    def _drop_routes(self, node: RedisClient) -> None:
        """Make the next call for a slot of this node read the slot map. The other slots keep their routes."""
        if node in self._routes:
            self._routes = [None if each is node else each for each in self._routes]
        if self._guide == _address_of(node):
            self._guide = None

    async def _learn_routes(self) -> None:
        """Read the slot map; calls at the same time share the result."""
        self._require_open()
        if self._learning is None:
            self._learning = asyncio.create_task(self._read_routes())
            self._learning.add_done_callback(self._on_learned)
        # Other calls wait for it as well: it continues if this one is cancelled.
        await asyncio.shield(self._learning)

    def _on_learned(self, learning: asyncio.Task[None]) -> None:
        self._learning = None
        if not learning.cancelled():
            # Retrieved, so that asyncio does not log it if all callers were cancelled.
            learning.exception()

    async def _read_routes(self) -> None:
        """Read the slot map from the first node that answers. A node that is slow does not delay the next."""
        addresses = [self._guide] if self._guide else []
        addresses += [*self._nodes, *((seed.host, seed.port) for seed in self._seeds)]
        ordered = sorted(dict.fromkeys(addresses), key=lambda address: self._node(*address).silent)
        failures: list[str] = []
        queries: set[asyncio.Task[tuple[str, int, Sequence[Any]]]] = set()
        try:
            while ordered or queries:
                if ordered:
                    queries.add(asyncio.create_task(self._query_slots(*ordered.pop(0))))
                timeout_s = _NEXT_NODE_S if ordered else None
                done, queries = await asyncio.wait(queries, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                for query in done:
                    try:
                        host, port, rows = query.result()
                    except EngineUnavailable as exc:
                        failures.append(str(exc))
                        continue
                    self._guide = (host, port)
                    self._routes = self._last_routes = self._routes_from(rows, host)
                    self._drop_unused_nodes()
                    return
        finally:
            for query in queries:
                query.cancel()
            await asyncio.gather(*queries, return_exceptions=True)
        self._guide = None
        raise Unreachable(f"cannot read the slot map from any node of the Redis Cluster ({'; '.join(failures)})")

    async def _query_slots(self, host: str, port: int) -> tuple[str, int, Sequence[Any]]:
        try:
            async with asyncio.timeout(min(_CLUSTER_ANSWER_S, self._connect_timeout_s)):
                rows = await self._node(host, port).call(Purpose.OTHER, b"CLUSTER", b"SLOTS")
        except EngineUnavailable as exc:
            raise Unreachable(f"{host}:{port}: {exc}") from exc
        except TimeoutError as exc:
            raise Unreachable(f"{host}:{port} does not answer") from exc
        if not rows:
            raise Unreachable(f"{host}:{port} has no slot map")
        return host, port, rows

    # Silent nodes ----------------------------------------------------------------------------------

    def _on_silence(self) -> None:
        if self._inquiry is None and not self._closed:
            self._inquiry = asyncio.create_task(self._inquire())
            self._inquiry.add_done_callback(self._on_inquired)

    async def _inquire(self) -> None:
        """While a node is silent, ask the others who has its slots. Drop its connections once it has none."""
        while silent := [node for node in self._nodes.values() if node.silent]:
            for node in silent:
                # Every node publishes for all: waiters for jobs of other nodes use another.
                node.drop_subscriptions()
            try:
                await self._learn_routes()
            except EngineUnavailable as exc:
                _log.debug("cannot read the slot map: %s", exc)
            else:
                used = set(self._routes)
                for node in silent:
                    if node not in used:
                        _log.info("%s:%d has no slots any more; closing its connections", *_address_of(node))
                        node.abandon()
            await asyncio.sleep(_REPEAT_S)

    def _on_inquired(self, inquiry: asyncio.Task[None]) -> None:
        self._inquiry = None
        if not inquiry.cancelled() and (exc := inquiry.exception()) is not None:
            _log.error("asking for the slot map failed unexpectedly", exc_info=exc)

    # Routes ----------------------------------------------------------------------------------------

    def _routes_from(self, rows: Sequence[Any], queried: str) -> list[RedisClient | None]:
        routes: list[RedisClient | None] = [None] * _SLOTS
        for first, last, (host, port, *_), *_ in rows:
            # A node that does not know its own address has the one it was queried at.
            name = host.decode() if host and host != b"?" else queried
            routes[first : last + 1] = [self._node(name, port)] * (last + 1 - first)
        return routes

    def _drop_unused_nodes(self) -> None:
        """Close nodes that have no slots and no calls in flight."""
        used = set(self._routes)
        for address, node in list(self._nodes.items()):
            if node not in used and node.idle:
                node.close()
                del self._nodes[address]

    def _node(self, host: str, port: int) -> RedisClient:
        node = self._nodes.get((host, port))
        if node is None:
            self._require_open()
            address = replace(self._seeds[0], host=host, port=port)
            timeouts = self._connect_timeout_s, self._reply_timeout_s
            node = self._nodes[host, port] = RedisClient(address, *timeouts, unblocks=True)
            node.late_s, node.sends_epoch = self.late_s, self.sends_epoch
            node.report_silence = self._on_silence
        return node

    def _address(self, node: RedisClient, redirection: Redirected) -> tuple[str, int]:
        host, port = split_host_port(redirection.address)
        return host if host not in ("", "?") else node.address.host, int(port)


def _address_of(node: RedisClient) -> tuple[str, int]:
    return node.address.host, node.address.port


async def _first(reads: Sequence[Awaitable[list[Any]]], *, all_of_them: bool) -> list[Any]:
    """Results of reads on several nodes, once the first one found something or all have ended.

    All block for the same time. A node that does not answer does not delay the others: reads that have not returned
    soon after the first are cancelled. An error is raised only if all have failed.
    """
    waiting = {asyncio.ensure_future(read) for read in reads}
    replies: list[Any] = []
    failure: EngineUnavailable | None = None
    grace_s: float | None = None
    try:
        while waiting and (all_of_them or not replies) and not isinstance(failure, ScriptError):
            done, waiting = await asyncio.wait(waiting, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            for read in done:
                try:
                    replies += read.result()
                    grace_s = _READ_GRACE_S
                except EngineUnavailable as exc:
                    failure = exc
    finally:
        for read in waiting:
            read.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    if failure is not None and (grace_s is None or isinstance(failure, ScriptError)) and not replies:
        raise failure
    return replies
