"""Redis behind Sentinel: dead, silent and wrong sentinels, and a demoted master."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from holdfast.aio import serve_tcp
from holdfast.engine.redis.engine import RedisEngine
from holdfast.engine.redis.net.connection import SentinelAddresses, parse_url
from holdfast.errors import EngineUnavailable
from holdfast.testing.contract import Rig
from holdfast.verification.chaos.redis_nodes import call_redis as ask
from tests.conftest import MakeServer
from tests.engine.harness import RedisHarness, closing

pytestmark = pytest.mark.redis


@pytest.fixture
async def harness(sentinel_url: str, namespace: str) -> AsyncIterator[RedisHarness]:
    async with closing(RedisHarness(sentinel_url, namespace)) as harness:
        yield harness


@asynccontextmanager
async def sentinel(port_to_name: Callable[[], int | None], *, after_s: float = 0.0) -> AsyncIterator[int]:
    """A sentinel that answers every command with a port of this machine, or not at all (None). Yields its own port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1_000):
            await asyncio.sleep(after_s)
            if port := port_to_name():
                writer.write(f"*2\r\n$9\r\n127.0.0.1\r\n${len(str(port))}\r\n{port}\r\n".encode())

    async with serve_tcp(serve, "127.0.0.1") as port:
        yield port


def topology(harness: RedisHarness) -> tuple[list[int], int, int, str]:
    """Ports of the sentinels, of the master and of its replica, and the name of the service."""
    seeds = parse_url(harness.url)
    assert isinstance(seeds, SentinelAddresses)
    sentinels = [address.port for address in seeds.addresses]
    master = int(ask(sentinels[0], "SENTINEL", "GET-MASTER-ADDR-BY-NAME", seeds.service)[1])
    (row,) = ask(sentinels[0], "SENTINEL", "REPLICAS", seeds.service)
    return sentinels, master, int(dict(zip(row[::2], row[1::2], strict=True))["port"]), seeds.service


def sentinel_url_for(service: str, *ports: int, query: str = "", user: str = "") -> str:
    return f"redis+sentinel://{user}{','.join(f'127.0.0.1:{port}' for port in ports)}/{service}{query}"


async def is_submitted_to_master(harness: RedisHarness, url: str) -> bool:
    """Whether a job submitted by `url` arrives at the harness's server."""
    engine = RedisEngine(url, harness.names, connect_timeout_s=1.0)
    try:
        await engine.open()
        rig = Rig(harness, engine)
        job_id = await rig.submit_one()
    finally:
        await engine.close()
    return bool(await harness.redis.exists(harness.keys(rig.queue).job(job_id)))


async def test_dead_and_silent_sentinels_are_skipped(harness: RedisHarness, unused_tcp_port: int) -> None:
    (one, two, _), _, _, service = topology(harness)
    assert await is_submitted_to_master(harness, sentinel_url_for(service, unused_tcp_port, one, two))
    async with sentinel(lambda: None) as silent, asyncio.timeout(0.9):
        # Two of three agree: the third is not waited for.
        assert await is_submitted_to_master(harness, sentinel_url_for(service, silent, one, two))
    async with sentinel(lambda: None) as silent:
        assert await is_submitted_to_master(harness, sentinel_url_for(service, silent, unused_tcp_port, one))


async def test_a_sentinel_that_names_a_replica_is_rejected(harness: RedisHarness) -> None:
    (one, *_), _, replica, service = topology(harness)
    async with sentinel(lambda: replica) as wrong:
        assert await is_submitted_to_master(harness, sentinel_url_for(service, wrong, one))
        with pytest.raises(EngineUnavailable, match=f"{replica} is a slave, not a master"):
            await is_submitted_to_master(harness, sentinel_url_for(service, wrong))


async def test_a_sentinel_that_names_a_former_master_is_outvoted(harness: RedisHarness, make_redis: MakeServer) -> None:
    """The former master still has that role, as after a restart."""
    former = make_redis()
    _, master, _, service = topology(harness)
    async with (
        sentinel(lambda: former.port) as wrong,
        sentinel(lambda: master, after_s=0.05) as one,
        sentinel(lambda: master, after_s=0.05) as two,
    ):
        assert await is_submitted_to_master(harness, sentinel_url_for(service, wrong, one, two))
    assert ask(former.port, "DBSIZE") == 0


async def test_a_sentinel_that_names_a_closed_port_is_reported(harness: RedisHarness, unused_tcp_port: int) -> None:
    (one, *_), _, _, service = topology(harness)
    async with sentinel(lambda: unused_tcp_port) as wrong:
        assert await is_submitted_to_master(harness, sentinel_url_for(service, wrong, one))
        with pytest.raises(EngineUnavailable, match=f"cannot reach a master of '{service}'.*{unused_tcp_port}"):
            await is_submitted_to_master(harness, sentinel_url_for(service, wrong))


async def test_an_unknown_service_is_reported(harness: RedisHarness) -> None:
    ports, *_ = topology(harness)
    with pytest.raises(EngineUnavailable, match=r"do not know service 'orders'.*redis.sentinel://HOSTS/SERVICE"):
        await is_submitted_to_master(harness, sentinel_url_for("orders", *ports))


async def test_wrong_passwords_are_reported_without_their_value(harness: RedisHarness) -> None:
    ports, _, _, service = topology(harness)
    with pytest.raises(EngineUnavailable, match="sentinel_password in HOLDFAST_URL") as of_sentinel:
        await is_submitted_to_master(harness, sentinel_url_for(service, *ports, query="?sentinel_password=hunter2"))
    with pytest.raises(EngineUnavailable, match="password") as of_master:
        await is_submitted_to_master(harness, sentinel_url_for(service, *ports, user="ann:hunter2@"))
    assert "hunter2" not in f"{of_sentinel.value} {of_master.value}"


async def test_the_masters_password_is_in_the_url(make_redis: MakeServer) -> None:
    master = make_redis()
    ask(master.port, "CONFIG", "SET", "requirepass", "of-master")
    async with sentinel(lambda: master.port) as port:
        url = sentinel_url_for("any", port, user=":of-master@")
        engine = RedisEngine(url)
        await engine.open()
        assert await engine.queues() == []
        await engine.close()


async def test_after_a_fail_over_everything_goes_to_the_new_master(make_redis: MakeServer, namespace: str) -> None:
    old, new = make_redis(), make_redis()
    named_port = old.port
    async with sentinel(lambda: named_port) as port, closing(RedisHarness(new.url, namespace)) as harness:
        engine = RedisEngine(sentinel_url_for("any", port), harness.names)
        rig = Rig(harness, engine)
        await engine.open()
        lost = await rig.submit_one()
        assert await rig.state(lost)
        waiting = asyncio.create_task(engine.wait_feed({rig.queue: "9999999999999-0"}, 5_000))
        async with asyncio.timeout(5):
            while "blocked_clients:1" not in ask(old.port, "INFO", "clients"):  # noqa: ASYNC110 - only the server knows
                await asyncio.sleep(0.01)
        # As a sentinel does it, without closing the old master's connections.
        named_port = new.port
        ask(old.port, "REPLICAOF", "127.0.0.1", new.port)
        with pytest.raises(EngineUnavailable, match="READONLY"):
            await rig.submit_one()
        job_id = await rig.submit_one()
        # Reads go to the new master too.
        assert await engine.get(rig.queue, [lost]) == [None]
        assert await harness.redis.exists(harness.keys(rig.queue).job(job_id))
        with pytest.raises(EngineUnavailable):
            await waiting
        await engine.close()
