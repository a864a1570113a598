"""When a server counts as silent, and that work on it is abandoned."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from holdfast.engine.redis.net.client import Purpose, RedisClient
from holdfast.engine.redis.net.connection import SILENT_S, RedisAddress
from holdfast.engine.redis.net.errors import Unreachable
from holdfast.verification.chaos.servers import RedisServer
from tests.conftest import MakeServer
from tests.worker.support import eventually

pytestmark = pytest.mark.redis


@pytest.fixture
def server(make_redis: MakeServer) -> RedisServer:
    return make_redis()


@pytest.fixture
async def client(server: RedisServer) -> AsyncIterator[RedisClient]:
    made = RedisClient(RedisAddress(port=server.port), 5.0, 5.0)
    yield made
    server.resume()
    made.close()


async def ping(client: RedisClient) -> bytes:
    return bytes(await client.call(Purpose.OTHER, b"PING"))


async def test_work_on_a_silent_server_is_abandoned(server: RedisServer, client: RedisClient) -> None:
    assert await client.run_unless_silent(lambda: ping(client)) == b"PONG"
    server.pause()
    waiting = asyncio.create_task(ping(client))
    with pytest.raises(Unreachable, match="does not reply"):
        await client.run_unless_silent(lambda: ping(client))
    assert client.silent
    started = time.monotonic()
    with pytest.raises(Unreachable):
        await client.run_unless_silent(lambda: ping(client))
    assert time.monotonic() - started < SILENT_S, "not waited for again"
    server.resume()
    assert await waiting == b"PONG"
    assert not client.silent


async def test_a_blocking_call_is_not_silent_before_its_end(server: RedisServer, client: RedisClient) -> None:
    silences: list[float] = []
    client.report_silence = lambda: silences.append(time.monotonic())
    await client.call(Purpose.WAIT, b"BLPOP", b"nothing", 0.8, blocks_s=0.8)
    assert not silences
    blocked = asyncio.create_task(client.call(Purpose.WAIT, b"BLPOP", b"nothing", 0.5, blocks_s=0.5))
    started = time.monotonic()
    await asyncio.sleep(0)
    server.pause()
    await eventually(lambda: silences, "the server to be silent")
    assert silences[0] - started >= 0.5 + SILENT_S - 0.01
    server.resume()
    await blocked


async def test_a_blocked_loop_is_not_silence(client: RedisClient) -> None:
    """The reply is in the socket all the time."""
    await ping(client)
    call = asyncio.create_task(client.run_unless_silent(lambda: ping(client)))
    await asyncio.sleep(0)
    time.sleep(2 * SILENT_S)  # noqa: ASYNC251 - as a task that blocks the loop
    assert await call == b"PONG"


async def test_connections_being_opened_are_abandoned_too(server: RedisServer, client: RedisClient) -> None:
    # It waits for the epoch of the server.
    client.sends_epoch = True
    server.pause()
    opening = asyncio.create_task(client.connect(Purpose.SUBMIT))
    await eventually(lambda: client.silent, "the connection attempt to be silent")
    client.abandon()
    with pytest.raises(Unreachable):
        await opening
