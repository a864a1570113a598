"""The tools that fault tests rely on do what they say: servers that die and come back, a proxy that misbehaves."""

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


def bare(url: str) -> Redis:
    """A client that neither retries nor waits long."""
    return Redis.from_url(url, retry=None, socket_timeout=2)


async def test_a_server_comes_back_under_its_address(make_redis: MakeServer) -> None:
    server = make_redis(appendonly="yes", appendfsync="always")
    async with bare(server.url) as redis:
        await redis.set("kept", "yes")
    first = server.pid
    server.kill()
    async with bare(server.url) as redis:
        with pytest.raises(RedisConnectionError):
            await redis.ping()
    server.start()
    async with bare(server.url) as redis:
        assert await redis.get("kept") == b"yes"
        server.restart()
    async with bare(server.url) as redis:
        assert await redis.get("kept") == b"yes"
    assert server.pid != first
    server.stop()
    server.stop()


async def test_a_stopped_server_answers_nothing_until_it_goes_on(make_redis: MakeServer) -> None:
    server = make_redis()
    async with bare(server.url) as redis:
        await redis.ping()
        server.pause()
        asking = asyncio.ensure_future(redis.ping())
        done, _ = await asyncio.wait([asking], timeout=0.2)
        assert not done
        server.resume()
        assert await asking


async def test_old_versions_are_what_they_say(make_redis: MakeServer) -> None:
    async with bare(make_redis(REDIS_60, maxmemory="50mb").url) as redis:
        info = await redis.info()
        assert info["redis_version"] == "6.0.9"
        assert info["maxmemory"] == 50 * 1024 * 1024


async def test_a_lost_reply_is_lost_after_the_work_is_done(redis_url: str, namespace: str) -> None:
    async with bare(redis_url) as direct, Proxy(port_of(redis_url)) as proxy, bare(proxy.url) as redis:
        proxy.lose_reply(to=b"INCR")
        await redis.ping()
        with pytest.raises(RedisConnectionError):
            await redis.incr(namespace)
        assert await direct.get(namespace) == b"1"
        assert proxy.lost == 1
        assert await redis.incr(namespace) == 2


async def test_a_stall_holds_everything_and_a_cut_ends_it(redis_url: str) -> None:
    async with Proxy(port_of(redis_url)) as proxy, bare(proxy.url) as redis:
        await redis.ping()
        proxy.stall()
        asking = asyncio.ensure_future(redis.ping())
        done, _ = await asyncio.wait([asking], timeout=0.1)
        assert not done
        proxy.flow()
        assert await asking
        assert proxy.connections == 1
        await proxy.cut()
        with pytest.raises(RedisConnectionError):
            await redis.ping()
        proxy.refuse = True
        with pytest.raises(RedisConnectionError):
            await redis.ping()
        proxy.refuse = False
        proxy.delay_s = 0.05
        began = asyncio.get_running_loop().time()
        await redis.ping()
        assert asyncio.get_running_loop().time() - began >= 0.05


async def test_a_client_gives_up_on_a_server_that_does_not_answer(make_redis: MakeServer) -> None:
    server = make_redis()
    server.pause()
    async with Redis.from_url(server.url, retry=None, socket_timeout=0.1) as redis:
        with pytest.raises((RedisTimeoutError, RedisConnectionError)):
            await redis.ping()


def test_every_server_of_the_catalogue_is_here_or_says_how_to_get_it() -> None:
    for server in SERVERS:
        assert find(server) is not None or server.how_to_install
    if os.environ.get("CI") == "true":
        assert all(find(server) for server in SERVERS)


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2].partition("/")[0])
