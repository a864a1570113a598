"""Redis Cluster: slots, redirections in and after a migration, waits that span nodes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any, Final

import hiredis
import pytest

from holdfast.core.verdict import SettleResult
from holdfast.engine.port import Engine
from holdfast.engine.port.feed import SubmissionKey
from holdfast.engine.redis.engine import RedisEngine
from holdfast.engine.redis.keys import KeyNames
from holdfast.engine.redis.net.client import Purpose, RedisClient
from holdfast.engine.redis.net.cluster import ClusterClient, key_of, slot_of
from holdfast.engine.redis.net.connection import ClusterSeeds, PipelinedConnection, RedisAddress, parse_url
from holdfast.engine.redis.net.errors import translate
from holdfast.errors import EngineUnavailable
from holdfast.testing.contract import Rig
from holdfast.verification.chaos.redis_nodes import call_redis as ask
from tests.engine.harness import RedisHarness, closing

pytestmark = pytest.mark.redis

_QUEUE: Final = "moving"


class Slot:
    """One slot of a shared Cluster, and its migration to another node."""

    def __init__(self, url: str, key: bytes) -> None:
        seeds = parse_url(url)
        assert isinstance(seeds, ClusterSeeds)
        self.number = slot_of(key)
        self.ports = [address.port for address in seeds.addresses]
        self.source = next(
            row[2][1] for row in ask(self.ports[0], "CLUSTER", "SLOTS") if row[0] <= self.number <= row[1]
        )
        self.target = next(port for port in self.ports if port != self.source)

    def begin(self) -> None:
        source_id, target_id = (ask(port, "CLUSTER", "MYID") for port in (self.source, self.target))
        ask(self.target, "CLUSTER", "SETSLOT", self.number, "IMPORTING", source_id)
        ask(self.source, "CLUSTER", "SETSLOT", self.number, "MIGRATING", target_id)

    def migrate(self) -> int:
        """Migrate all keys and return how many there were."""
        keys = ask(self.source, "CLUSTER", "GETKEYSINSLOT", self.number, 10_000)
        if keys:
            ask(self.source, "MIGRATE", "127.0.0.1", self.target, "", 0, 5_000, "KEYS", *keys)
        return len(keys)

    def end(self) -> None:
        target_id = ask(self.target, "CLUSTER", "MYID")
        for port in (self.target, *(port for port in self.ports if port != self.target)):
            ask(port, "CLUSTER", "SETSLOT", self.number, "NODE", target_id)

    def move(self) -> int:
        self.begin()
        count = self.migrate()
        self.end()
        return count


@pytest.fixture
async def harness(cluster_url: str, namespace: str) -> AsyncIterator[RedisHarness]:
    async with closing(RedisHarness(cluster_url, namespace)) as harness:
        yield harness


@pytest.fixture
async def rig(harness: RedisHarness) -> Rig:
    return Rig(harness, await harness.make(), _QUEUE)


@pytest.fixture
def slot(harness: RedisHarness) -> Slot:
    return Slot(harness.url, harness.keys(_QUEUE).control)


def test_slots_match_the_server(harness: RedisHarness) -> None:
    port = parse_url(harness.url).addresses[0].port  # type: ignore[union-attr]
    random_source = random.Random(7)
    keys = ["", "a", "{a}", "{}a", "{a}{b}", "a{", "a}{b", "x{a:b}:stream:task", "{{a}}b", "ü{ß}"]
    keys += ["".join(random_source.choices("ab{}:-", k=random_source.randint(1, 12))) for _ in range(200)]
    for key in keys:
        assert slot_of(key.encode()) == ask(port, "CLUSTER", "KEYSLOT", key), key


def test_the_key_of_a_command() -> None:
    assert key_of((b"HGETALL", b"k")) == b"k"
    assert key_of((b"SMEMBERS", "k")) == b"k"
    assert key_of((b"XINFO", b"CONSUMERS", b"k", b"g")) == b"k"
    assert key_of((b"XREAD", b"COUNT", 1, b"STREAMS", b"k", b"0")) == b"k"


async def test_all_keys_of_a_queue_are_in_one_slot(harness: RedisHarness, rig: Rig, slot: Slot) -> None:
    await rig.submit(3, tenant_id="acme")
    await rig.succeed(*await rig.claim())
    assert {slot_of(key) async for keys in harness._own_keys() for key in keys} == {
        slot.number,
        slot_of(harness.names.queues.encode()),
    }


async def test_a_migrated_slot_keeps_its_jobs(rig: Rig, slot: Slot) -> None:
    accepted = set(await rig.submit(20))
    running = await rig.claim(limit=5)
    assert slot.move() > 20
    assert await rig.succeed(*running) == [SettleResult.APPLIED] * 5
    accepted |= set(await rig.submit(5))
    rest = await rig.claim(limit=100)
    assert {claim.job_id for claim in (*running, *rest)} == accepted
    assert await rig.succeed(*rest) == [SettleResult.APPLIED] * 20
    assert await rig.open_jobs() == 0


async def test_a_waiting_claim_is_woken_on_the_slots_new_node(harness: RedisHarness, rig: Rig, slot: Slot) -> None:
    await rig.succeed(await rig.start_one())
    waiting = asyncio.create_task(rig.engine.claim("w1", [_QUEUE], 10, 5_000))
    other = Rig(harness, await harness.make(), _QUEUE)
    await _until_blocked(slot.source)
    slot.move()
    job_id = await other.submit_one()
    claims = await waiting or await rig.engine.claim("w1", [_QUEUE], 10, 5_000)
    assert [claim.job_id for claim in claims] == [job_id]


async def test_during_a_migration_nothing_is_applied_partially(harness: RedisHarness, rig: Rig, slot: Slot) -> None:
    accepted = set(await rig.submit(20))
    (running,) = await rig.claim(limit=1)
    slot.begin()
    # Half of the records have moved, the other keys have not.
    records = [key for key in ask(slot.source, "CLUSTER", "GETKEYSINSLOT", slot.number, 1_000) if ":job:" in key]
    assert len(records) == 20
    ask(slot.source, "MIGRATE", "127.0.0.1", slot.target, "", 0, 5_000, "KEYS", *records[:10])
    with pytest.raises(EngineUnavailable, match="moving the queue's slot"):
        await rig.succeed(running)
    with pytest.raises(EngineUnavailable, match="moving the queue's slot"):
        await rig.submit(1)
    # Other queues of the same node are not reported as unreachable.
    names = (f"q{number}" for number in range(100))
    neighbour = next(name for name in names if Slot(harness.url, harness.keys(name).control).source == slot.source)
    other = await harness.make()
    feed, unreachable = await other.for_each_queue([_QUEUE, neighbour], other.stats)
    assert (list(feed), list(unreachable)) == ([neighbour], [_QUEUE])
    slot.migrate()
    slot.end()
    assert await rig.succeed(running) == [SettleResult.APPLIED]
    rest = await rig.claim(limit=100)
    assert {claim.job_id for claim in (running, *rest)} == accepted
    assert await rig.succeed(*rest) == [SettleResult.APPLIED] * 19


async def test_an_already_migrated_key_is_read_from_the_new_node(rig: Rig, slot: Slot) -> None:
    """The script has one key, so the source node redirects with `ASK` instead of `TRYAGAIN`."""
    slot.begin()
    try:
        key = SubmissionKey("default", "order-17", "j1", 2**42)
        await rig.engine.restore_keys(_QUEUE, [key])
        assert await rig.engine.read_feed(_QUEUE, "", 10) == []
        assert not (await rig.engine.get_control(_QUEUE)).paused
        assert ask(slot.source, "CLUSTER", "COUNTKEYSINSLOT", slot.number) == 0
        assert ask(slot.target, "CLUSTER", "COUNTKEYSINSLOT", slot.number) == 1
    finally:
        slot.migrate()
        slot.end()
    await rig.submit_one()
    assert len(await rig.engine.read_feed(_QUEUE, "", 10)) == 1


async def test_a_wait_spans_nodes_and_leaks_no_connection(harness: RedisHarness) -> None:
    queues = [f"q{number}" for number in range(5)]
    ports = [Slot(harness.url, harness.keys(queue).control).source for queue in queues]
    waiter, submitter = await harness.make(), await harness.make()
    connections: list[int] = []
    for round_number in range(20):
        waiting = asyncio.create_task(waiter.claim("w1", queues, 10, 5_000))
        await _until_blocked(*ports)
        rig = Rig(harness, submitter, queues[round_number % 5])
        job_id = await rig.submit_one()
        async with asyncio.timeout(3):
            claims = await waiting
        assert [claim.job_id for claim in claims] == [job_id]
        await rig.succeed(*claims)
        connections.append(sum(_connections(port) for port in set(ports)))
    assert connections[-1] <= connections[4] + 1
    await _until(lambda: not any(_blocked(port) for port in set(ports)))


async def test_listeners_and_readers_of_the_feed_span_nodes(harness: RedisHarness) -> None:
    queues = [f"q{number}" for number in range(5)]
    engine, other = await harness.make(), await harness.make()
    assert await engine.listen(queues, 1) == []
    for queue in queues:
        listening = asyncio.create_task(engine.listen(queues, 5_000))
        rig = Rig(harness, other, queue)
        await other.set_control(queue, (await other.get_control(queue)))
        notices = await listening
        assert {notice.queue for notice in notices} == {queue}
        reading = asyncio.create_task(engine.wait_feed(await _feed_ends(engine, queues), 5_000))
        await rig.submit_one()
        assert await reading == [queue]
    assert sorted(await engine.wait_feed(dict.fromkeys(queues, ""), 0)) == queues


async def test_every_master_is_diagnosed(harness: RedisHarness, rig: Rig) -> None:
    findings = await rig.engine.diagnose([_QUEUE])
    states = [finding for finding in findings if finding.check.startswith("cluster of 127.0.0.1:")]
    assert [finding.ok for finding in states] == [True] * 3
    assert "16384 of 16384 slots" in states[0].message


async def test_a_plain_url_of_a_node_is_refused_with_the_right_scheme(harness: RedisHarness, namespace: str) -> None:
    ports = parse_url(harness.url).addresses  # type: ignore[union-attr]
    messages = []
    for address in ports:
        engine = RedisEngine(f"redis://127.0.0.1:{address.port}", KeyNames(namespace))
        try:
            await engine.queues()
        except EngineUnavailable as exc:
            messages.append(str(exc))
        finally:
            await engine.close()
    assert len(messages) == 2
    assert all("redis+cluster://" in text for text in messages)


async def test_unusable_seeds_are_skipped(
    cluster_url: str, redis_url: str, namespace: str, unused_tcp_port: int
) -> None:
    standalone = redis_url.removeprefix("redis://").partition("/")[0]
    reachable = cluster_url.removeprefix("redis+cluster://").rpartition(",")[2]
    async with closing(RedisHarness(f"redis+cluster://{reachable}", namespace)) as harness:
        engine = RedisEngine(f"redis+cluster://127.0.0.1:{unused_tcp_port},{standalone},{reachable}", harness.names)
        await engine.open()
        assert await Rig(harness, engine).submit_one()
        await engine.close()
    engine = RedisEngine(f"redis+cluster://127.0.0.1:{unused_tcp_port},{standalone}")
    with pytest.raises(EngineUnavailable, match=f"{unused_tcp_port}.*cluster support disabled"):
        await engine.open()
    await engine.close()


async def test_circular_redirections_end_in_an_error(monkeypatch: pytest.MonkeyPatch, cluster_url: str) -> None:
    seeds = parse_url(cluster_url)
    assert isinstance(seeds, ClusterSeeds)
    one, two = seeds.addresses[:2]
    sent: list[RedisAddress] = []

    async def redirect_back(node: RedisClient, purpose: Purpose, *command: Any, blocks_s: float = 0.0) -> Any:
        if command[0] == b"CLUSTER":
            return await original(node, purpose, *command)
        sent.append(node.address)
        target = one if node.address.port == two.port else two
        raise translate(hiredis.ReplyError(f"MOVED {slot_of(b'k')} {target.host}:{target.port}"))

    original = RedisClient.call
    monkeypatch.setattr(RedisClient, "call", redirect_back)
    client = ClusterClient(seeds, 1.0, 1.0)
    with pytest.raises(EngineUnavailable, match="disagree"):
        await client.call(Purpose.OTHER, b"GET", b"k")
    assert 2 <= len(sent) < 10
    client.close()


async def test_a_node_known_only_from_a_redirection_is_closed_too(
    monkeypatch: pytest.MonkeyPatch, cluster_url: str
) -> None:
    """During a fail-over, the queried node may still have the old slot owners."""
    seeds = parse_url(cluster_url)
    assert isinstance(seeds, ClusterSeeds)
    client = ClusterClient(seeds, 1.0, 1.0)
    original = client._routes_from
    routes: list[RedisClient | None] = []

    def route_all_to_first(rows: Any, queried: str) -> list[RedisClient | None]:
        routes[:] = original(rows, queried)
        return [routes[0]] * len(routes)

    monkeypatch.setattr(client, "_routes_from", route_all_to_first)
    opened = _record_connections(monkeypatch)
    await client.masters()
    key = next(key for key in (b"%d" % number for number in range(1_000)) if routes[slot_of(key)] is not routes[0])
    for _ in range(2):
        assert await client.call(Purpose.OTHER, b"GET", key) is None
    assert len(opened) >= 2
    client.close()
    assert not [connection for connection in opened if connection.usable]


@pytest.mark.parametrize("url", ["redis_url", "sentinel_url", "cluster_url"])
async def test_close_also_closes_connections_being_opened(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, url: str
) -> None:
    engine = RedisEngine(request.getfixturevalue(url))
    opened = _record_connections(monkeypatch)
    epoch_task = asyncio.create_task(engine.epoch("default"))
    reading, may_read = asyncio.Event(), asyncio.Event()
    original = PipelinedConnection.read_epoch

    async def read_slowly(connection: PipelinedConnection) -> None:
        reading.set()
        await may_read.wait()
        await original(connection)

    monkeypatch.setattr(PipelinedConnection, "read_epoch", read_slowly)
    await reading.wait()
    await engine.close()
    may_read.set()
    with pytest.raises(EngineUnavailable):
        await epoch_task
    assert opened
    assert not [connection for connection in opened if connection.usable]


def _record_connections(monkeypatch: pytest.MonkeyPatch) -> list[PipelinedConnection]:
    """Record all connections that are opened from now on."""
    opened: list[PipelinedConnection] = []

    def connection_made(connection: PipelinedConnection, transport: asyncio.BaseTransport) -> None:
        opened.append(connection)
        original(connection, transport)

    original = PipelinedConnection.connection_made
    monkeypatch.setattr(PipelinedConnection, "connection_made", connection_made)
    return opened


async def _feed_ends(engine: Engine, queues: list[str]) -> dict[str, str]:
    entries = {queue: await engine.read_feed(queue, "", 1_000) for queue in queues}
    return {queue: feed[-1].position if feed else "" for queue, feed in entries.items()}


def _connections(port: int) -> int:
    return len(ask(port, "CLIENT", "LIST", "TYPE", "normal").splitlines())


def _blocked(port: int) -> int:
    return int(
        dict(line.split(":", 1) for line in ask(port, "INFO", "clients").splitlines() if ":" in line)["blocked_clients"]
    )


async def _until(is_true: Any) -> None:
    async with asyncio.timeout(5):
        while not is_true():  # noqa: ASYNC110 - only the server knows
            await asyncio.sleep(0.01)


async def _until_blocked(*ports: int) -> None:
    """Wait until each port has as many blocked clients as it is named."""
    await _until(lambda: all(_blocked(port) >= ports.count(port) for port in set(ports)))
