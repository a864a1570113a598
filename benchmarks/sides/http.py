"""The HTTP service in one process, and its callers in another, which speaks HTTP over plain sockets."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any, Final

import msgspec

from benchmarks.model import percentile
from benchmarks.sides.channel import ARGUMENT, Answer, Spec, in_parallel, main, serve
from benchmarks.usage import cpu_s, resident_bytes
from holdfast import Holdfast
from holdfast.core.principal import Principal, Role
from holdfast.http import create_api
from holdfast.http.server import HttpServer, bind

_ROOT: Final = Principal(name="bench", role=Role.ADMIN, tenants=frozenset({"*"}))
_LISTS: Final = ("?limit=50", "?state=cancelled", "?tenant_id=tenant-1", "?task=noop&state=succeeded", "?error=nothing")


async def server(spec: Spec) -> None:
    """`holdfast serve --no-worker --no-upkeep`, with one task."""
    app = Holdfast(spec.url, **spec.settings)

    @app.task
    async def noop(argument: dict[str, Any]) -> int:
        return 1

    api = create_api(app, worker=False, upkeep=False)
    http = HttpServer(api, bind("127.0.0.1", 0))
    running = await start(http)
    _, token = await api.state.service.operations.tokens.create(_ROOT, name="bench", role=Role.ADMIN, tenants=["*"])

    async def where() -> Answer:
        return {"url": http.address, "flavour": token}

    async def usage() -> Answer:
        return {"bytes": resident_bytes(), "cpu_s": cpu_s()}

    await serve({"where": where, "usage": usage})
    http.stop()
    await running


async def start(http: HttpServer) -> asyncio.Task[None]:
    """The server's task, once it serves."""
    running = asyncio.create_task(http.run_until_stopped())
    while not http.started:  # noqa: ASYNC110 - it has no event for this
        await asyncio.sleep(0.01)
    return running


async def caller(spec: Spec) -> None:
    """Asks."""
    role = _Caller(spec.url, spec.flavour)
    await serve({"submit": role.submit, "open_streams": role.open_streams, "list": role.list})
    role.close()


class _Caller:
    def __init__(self, url: str, token: str) -> None:
        self._host, _, port = url.removeprefix("http://").partition(":")
        self._port = int(port)
        self._head = f"host: {self._host}\r\nauthorization: Bearer {token}\r\n"
        self._streams: list[asyncio.StreamWriter] = []

    async def submit(self, connections: int, jobs: int) -> Answer:
        """Single jobs; each connection sends its next request once it has the answer."""
        body = msgspec.json.encode({"task": "noop", "payload": {"argument": ARGUMENT}})
        request = self._request("POST", "/api/v1/jobs", body)
        free: asyncio.Queue[HttpConnection] = asyncio.Queue()
        for _ in range(connections):
            free.put_nowait(HttpConnection(*await asyncio.open_connection(self._host, self._port)))
        took_ms: list[float] = []

        async def one() -> None:
            connection = free.get_nowait()
            began = time.perf_counter()
            await connection.send(request, 202)
            took_ms.append((time.perf_counter() - began) * 1e3)
            free.put_nowait(connection)

        began = time.perf_counter()
        await in_parallel(connections, jobs, one)
        seconds = time.perf_counter() - began
        while not free.empty():
            free.get_nowait().close()
        return {"rate": jobs / seconds, "p99_ms": percentile(sorted(took_ms), 0.99)}

    async def open_streams(self, count: int) -> Answer:
        """Open one stream per job; the jobs do not end."""
        connection = HttpConnection(*await asyncio.open_connection(self._host, self._port))
        opened = 0
        for _ in range(count):
            body = msgspec.json.encode({"task": "noop", "payload": {"argument": {}}, "delay_s": 3_600})
            job_id = msgspec.json.decode(await connection.send(self._request("POST", "/api/v1/jobs", body), 202))[
                "job_id"
            ]
            reader, writer = await asyncio.open_connection(self._host, self._port)
            writer.write(self._request("GET", f"/api/v1/stream?job_id={job_id}"))
            self._streams.append(writer)
            opened += await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        connection.close()
        return {"open": opened}

    async def list(self, pages: int) -> Answer:
        """First pages of several lists."""
        connection = HttpConnection(*await asyncio.open_connection(self._host, self._port))
        durations: dict[str, float] = {}
        for query in _LISTS:
            request, times = self._request("GET", f"/api/v1/jobs{query}"), list[float]()
            for _ in range(pages):
                began = time.perf_counter()
                await connection.send(request, 200)
                times.append((time.perf_counter() - began) * 1e3)
            durations[query] = statistics.median(times)
        connection.close()
        return {"median_ms": durations}

    def close(self) -> None:
        for writer in self._streams:
            writer.close()

    def _request(self, method: str, path: str, body: bytes = b"") -> bytes:
        head = f"{method} {path} HTTP/1.1\r\n{self._head}"
        if body:
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        return f"{head}\r\n".encode() + body


class HttpConnection:
    """One connection that stays open."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, request: bytes, status: int) -> bytes:
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
        body = await self._reader.readexactly(length)
        if not head.startswith(b"HTTP/1.1 %d" % status):
            raise RuntimeError(f"{head!r} {body!r}")
        return body

    def close(self) -> None:
        self._writer.close()


if __name__ == "__main__":
    main({"server": server, "caller": caller})
