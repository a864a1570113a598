"""The tools of the fault tests: servers that are killed and restarted, and a proxy that injects faults."""

from __future__ import annotations

import asyncio
import os

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from holdfast.verification.chaos.proxy import Proxy
from tests.conftest import MakeServer
from tools.servers import REDIS_60, SERVERS, find

pytestmark = pytest.mark.redis


def plain_client(url: str) -> Redis:
    """A client without retries and with a short timeout."""
    return Redis.from_url(url, retry=None, socket_timeout=2)


async def test_a_restarted_server_has_its_address_and_data(make_redis: MakeServer) -> None:
    server = make_redis(appendonly="yes", appendfsync="always")
    async with plain_client(server.url) as redis:
        await redis.set("kept", "yes")
    first = server.pid
    server.kill()
    async with plain_client(server.url) as redis:
        with pytest.raises(RedisConnectionError):
            await redis.ping()
    server.start()
    async with plain_client(server.url) as redis:
        assert await redis.get("kept") == b"yes"
        server.restart()
    async with plain_client(server.url) as redis:
        assert await redis.get("kept") == b"yes"
    assert server.pid != first
    server.stop()
    server.stop()


async def test_a_paused_server_does_not_answer_until_it_is_resumed(make_redis: MakeServer) -> None:
    server = make_redis()
    async with plain_client(server.url) as redis:
        await redis.ping()
        server.pause()
        ping = asyncio.ensure_future(redis.ping())
        done, _ = await asyncio.wait([ping], timeout=0.2)
        assert not done
        server.resume()
        assert await ping


async def test_an_old_version_is_the_requested_one(make_redis: MakeServer) -> None:
    async with plain_client(make_redis(REDIS_60, maxmemory="50mb").url) as redis:
        info = await redis.info()
        assert info["redis_version"] == "6.0.9"
        assert info["maxmemory"] == 50 * 1024 * 1024


async def test_a_lost_reply_is_lost_after_the_command_is_applied(redis_url: str, namespace: str) -> None:
    async with plain_client(redis_url) as direct, Proxy(port_of(redis_url)) as proxy, plain_client(proxy.url) as redis:
        proxy.lose_reply(to=b"INCR")
        await redis.ping()
        with pytest.raises(RedisConnectionError):
            await redis.incr(namespace)
        assert await direct.get(namespace) == b"1"
        assert proxy.lost == 1
        assert await redis.incr(namespace) == 2


async def test_a_stall_blocks_traffic_and_a_cut_ends_connections(redis_url: str) -> None:
    async with Proxy(port_of(redis_url)) as proxy, plain_client(proxy.url) as redis:
        await redis.ping()
        proxy.stall()
        ping = asyncio.ensure_future(redis.ping())
        done, _ = await asyncio.wait([ping], timeout=0.1)
        assert not done
        proxy.flow()
        assert await ping
        assert proxy.connections == 1
        await proxy.cut()
        with pytest.raises(RedisConnectionError):
            await redis.ping()
        proxy.refuse = True
        with pytest.raises(RedisConnectionError):
            await redis.ping()
        proxy.refuse = False
        proxy.delay_s = 0.05
        started = asyncio.get_running_loop().time()
        await redis.ping()
        assert asyncio.get_running_loop().time() - started >= 0.05


async def test_a_client_times_out_on_a_paused_server(make_redis: MakeServer) -> None:
    server = make_redis()
    server.pause()
    async with Redis.from_url(server.url, retry=None, socket_timeout=0.1) as redis:
        with pytest.raises((RedisTimeoutError, RedisConnectionError)):
            await redis.ping()


def test_every_server_is_installed_or_has_instructions() -> None:
    for server in SERVERS:
        assert find(server) is not None or server.how_to_install
    if os.environ.get("CI") == "true":
        assert all(find(server) for server in SERVERS)


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2].partition("/")[0])
