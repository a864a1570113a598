"""What a client may send before its token is checked: bounded in size, number and time."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from fastapi import FastAPI, Request

from holdfast.http.protocol import ConnectionLimits
from holdfast.http.server import HttpServer, bind
from tests.cli.harness import TIMEOUT_S, Shell, environment
from tests.http.test_serving import _serve, _wait_ready

_QUICK: Final = ConnectionLimits(head_s=0.3, body_s=0.3, body_bytes=1_000, connections=8)
_GET: Final = b"GET /names HTTP/1.1\r\nhost: x\r\n"
_POST: Final = b"POST /names HTTP/1.1\r\nhost: x\r\n"
_CHUNKED: Final = _POST + b"transfer-encoding: chunked\r\n\r\n"
_MIB: Final = 1024 * 1024


class Site:
    """A server whose `/names` reads the body and answers with the names of the headers, after `go`."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.calls = 0
        self.go = asyncio.Event()
        self.go.set()

    async def exchange(self, *parts: bytes, pause_s: float = 0.0) -> bytes:
        """Send the parts and read until the server closes the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        reading = asyncio.create_task(_read_all(reader))
        with suppress(ConnectionError):
            for part in parts:
                if reading.done():
                    break
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(pause_s)
        async with asyncio.timeout(TIMEOUT_S):
            received = await reading
        writer.transport.abort()
        return received


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    received = b""
    with suppress(ConnectionError):
        while data := await reader.read(65_536):
            received += data
    return received


@asynccontextmanager
async def _site(limits: ConnectionLimits | None = None) -> AsyncIterator[Site]:
    api = FastAPI()
    sock = bind("127.0.0.1", 0)
    site = Site(sock.getsockname()[1])

    @api.api_route("/names", methods=["GET", "POST"])
    async def names(request: Request) -> list[str]:
        await request.body()
        site.calls += 1
        await site.go.wait()
        return [name for name, _ in request.headers.items()]

    server = HttpServer(api, sock, limits) if limits else HttpServer(api, sock)
    running = asyncio.create_task(server.run_until_stopped())
    while not server.started:  # noqa: ASYNC110 - it has no event to wait for
        await asyncio.sleep(0.01)
    try:
        yield site
    finally:
        server.stop()
        server.stop()
        await running


def _problem(received: bytes, status: int, code: str) -> None:
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()), received[:300]
    assert b"content-type: application/problem+json" in head
    assert b"connection: close" in head
    assert json.loads(body)["code"] == code


@pytest.mark.parametrize(
    ("parts", "status", "code"),
    [
        ([b"GET /", b"a" * 100_000], 414, "ADDRESS_TOO_LONG"),
        ([b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\n\r\n"], 414, "ADDRESS_TOO_LONG"),
        ([_GET, b"a: b\r\n" * 101], 431, "HEADERS_TOO_LARGE"),
        ([_GET, b"a: " + b"b" * 100_000], 431, "HEADERS_TOO_LARGE"),
        ([_GET, b"a" * 100_000], 431, "HEADERS_TOO_LARGE"),
        ([_GET + b"a: " + b"b" * 70_000 + b"\r\n\r\n"], 431, "HEADERS_TOO_LARGE"),
        ([_CHUNKED, b"5;", *[b"e" * 100_000] * 6], 431, "HEADERS_TOO_LARGE"),
        ([_CHUNKED, b"1\r\na\r\n0\r\n", *[b"a: " + b"b" * 10_000 + b"\r\n"] * 60], 431, "HEADERS_TOO_LARGE"),
        ([b"\r\n" * 50_000], 431, "HEADERS_TOO_LARGE"),
        ([b"GE\x00 / HTTP/1.1\r\n\r\n"], 400, "MALFORMED_REQUEST"),
    ],
    ids=range(10),
)
async def test_requests_that_are_too_large(parts: list[bytes], status: int, code: str) -> None:
    async with _site() as site:
        _problem(await site.exchange(*parts), status, code)
        # Others are not affected.
        assert b"200 OK" in await site.exchange(_GET + b"connection: close\r\n\r\n")
        assert site.calls == 1


async def test_ordinary_requests_are_within_the_limits() -> None:
    async with _site() as site:
        head = _GET + b"connection: close\r\n" + b"a: b\r\n" * 97 + b"c: " + b"d" * 60_000 + b"\r\n\r\n"
        assert b"200 OK" in await site.exchange(head)
        # In small parts, with a body larger than a head may be.
        head = _POST + b"connection: close\r\ncontent-length: 2000000\r\n\r\n"
        parts = [head[:10], head[10:50], head[50:], *[b"x" * 100_000] * 20]
        assert b"200 OK" in await site.exchange(*parts, pause_s=0.001)


@pytest.mark.parametrize(
    ("parts", "answered"),
    [
        ([], False),
        ([_GET], True),
        ([*_GET] * 1_000, True),
        ([b"\r\n"] * 1_000, True),
        ([_POST + b"content-length: 100000\r\n\r\n", *[b"x"] * 1_000], True),
        ([_CHUNKED, *[b"1;ext\r\nx\r\n"] * 1_000], True),
    ],
    ids=["nothing", "half a head", "slow head", "blank lines", "slow body", "slow chunks"],
)
async def test_requests_that_are_too_slow(parts: list[Any], answered: bool) -> None:
    async with _site(_QUICK) as site:
        pieces = [bytes([part]) if isinstance(part, int) else part for part in parts]
        received = await site.exchange(*pieces, pause_s=0.02)
        assert site.calls == 0
        if answered:
            _problem(received, 408, "REQUEST_TOO_SLOW")
        else:
            assert received == b""


async def test_a_body_may_take_long_if_it_keeps_its_pace() -> None:
    async with _site(_QUICK) as site:
        head = _POST + b"connection: close\r\ncontent-length: 20000\r\n\r\n"
        # 50 parts of 400 bytes, 20 ms apart: three times the period, and several times the rate.
        assert b"200 OK" in await site.exchange(head, *[b"x" * 400] * 50, pause_s=0.02)


async def test_time_to_answer_is_not_time_to_arrive() -> None:
    """A handler that takes long, and a client that waits between requests: neither is late."""
    async with _site(_QUICK) as site:
        site.go.clear()
        asking = asyncio.create_task(site.exchange(_GET + b"connection: close\r\n\r\n"))
        while not site.calls:  # noqa: ASYNC110 - counted by the handler
            await asyncio.sleep(0.01)
        await asyncio.sleep(3 * _QUICK.head_s)
        site.go.set()
        assert b"200 OK" in await asking
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        for _ in range(2):
            writer.write(_GET + b"\r\n")
            assert b"200 OK" in await reader.readuntil(b"]")
            await asyncio.sleep(3 * _QUICK.head_s)
        writer.close()


async def test_the_rest_of_an_answered_request_is_not_read_for_ever() -> None:
    """The body of a request that was refused, to a path that does not exist."""
    async with _site(_QUICK) as site:
        head = b"POST /other HTTP/1.1\r\ncontent-length: 100000000\r\n\r\n"
        began = time.monotonic()
        received = await site.exchange(head, *[b"x" * 10_000] * 2_000, pause_s=0.02)
        assert b"404 Not Found" in received
        assert time.monotonic() - began < 30


async def test_trailers_are_not_headers() -> None:
    async with _site() as site:
        head = _POST + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
        received = await site.exchange(head, b"1\r\na\r\n0\r\nauthorization: Bearer x\r\n\r\n")
        assert b"200 OK" in received
        assert b"authorization" not in received


async def test_pipelined_requests() -> None:
    async with _site() as site:
        received = await site.exchange((_GET + b"\r\n") * 50 + _GET + b"connection: close\r\n\r\n")
        assert received.count(b"200 OK") == 51
        # A malformed request does not disturb the answers to those before it.
        received = await site.exchange((_GET + b"\r\n") * 3 + _GET + b"a: b\r\n" * 200)
        assert received.count(b"200 OK") == 3
        assert b"431" not in received
        site.calls = 0
        site.go.clear()
        flood = asyncio.create_task(site.exchange(*[(_GET + b"\r\n") * 1_000] * 20))
        await asyncio.sleep(0.2)
        site.go.set()
        assert (await flood).count(b"200 OK") <= 65


async def test_connections_are_counted() -> None:
    async with _site(_QUICK) as site:
        site.go.clear()
        busy = [asyncio.create_task(site.exchange(_GET + b"connection: close\r\n\r\n")) for _ in range(8)]
        while site.calls < 8:  # noqa: ASYNC110 - counted by the handler
            await asyncio.sleep(0.01)
        _problem(await site.exchange(_GET + b"\r\n"), 503, "TOO_MANY_CONNECTIONS")
        site.go.set()
        assert all(b"200 OK" in received for received in await asyncio.gather(*busy))
        assert b"200 OK" in await site.exchange(_GET + b"connection: close\r\n\r\n")


def test_headers_do_not_fill_the_memory(tmp_path: Path) -> None:
    """Eight clients without a token send 8 MiB of headers each to `holdfast serve`."""
    shell = Shell(tmp_path, environment(tmp_path))
    with (
        _serve(shell, "--dev", "--no-upkeep") as (process, base),
        httpx.Client(base_url=base, trust_env=False) as client,
    ):
        _wait_ready(client)
        before = _rss(process.process.pid)
        port = int(base.rpartition(":")[2])
        clients = [socket.create_connection(("127.0.0.1", port), TIMEOUT_S) for _ in range(8)]
        headers = (b"name: " + b"v" * 250 + b"\r\n") * (_MIB // 258)
        for data in (_GET, *[headers] * 8):
            for each in clients:
                with suppress(ConnectionError):
                    each.sendall(data)
        grown = _rss(process.process.pid) - before
        assert grown < 16 * _MIB, f"the process grew by {grown / _MIB:.0f} MiB"
        assert all(b" 431 " in each.recv(4_096) for each in clients)
        for each in clients:
            each.close()
        assert client.get("/healthz").status_code == 200
        assert process.end() == 0


def _rss(pid: int) -> int:
    fields = Path(f"/proc/{pid}/status").read_text()
    return int(fields.partition("VmRSS:")[2].split()[0]) * 1024
