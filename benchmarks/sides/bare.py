"""The floor: the least that a loop on Redis Streams can do, without any guarantee.

Submit is a pipelined XADD, work is XREADGROUP of 500, decoding their JSON, and one XACK for all. No leases
that are looked after, no fencing, no results, no retries, no deduplication. Once with redis-py, once with
packed commands on a raw transport.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Sequence
from typing import Any, Final, Protocol

import msgspec
from redis.asyncio import Redis

from benchmarks.board import Gauge
from benchmarks.sides.channel import ARGUMENT, Answer, Spec, at_low_load, in_parallel, main, serve, timed
from benchmarks.sides.wire import Wire
from benchmarks.usage import resident_bytes

_STREAM, _GROUP = b"bare:stream", b"bare:group"
_BATCH: Final = 500
_IN_FLIGHT: Final = 4
_BLOCK_MS: Final = 1_000
_CONNECTIONS: Final = 100

_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder().decode

#: A stream entry as it is read: id and payload.
Entry = tuple[bytes, bytes]


class Link(Protocol):
    """The three commands, by either client."""

    def add(self, payloads: Sequence[bytes]) -> Awaitable[object]: ...
    async def read(self, consumer: str, block_ms: int | None) -> list[Entry]: ...
    async def acknowledge(self, ids: Sequence[bytes]) -> None: ...
    async def prepare(self) -> None: ...
    async def close(self) -> None: ...


class PyLink(Link):
    """By redis-py."""

    def __init__(self, url: str) -> None:
        self._redis: Redis = Redis.from_url(url, max_connections=_CONNECTIONS)

    async def prepare(self) -> None:
        await self._redis.xgroup_create(_STREAM, _GROUP, "0", mkstream=True)

    async def add(self, payloads: Sequence[bytes]) -> None:
        if len(payloads) == 1:
            await self._redis.xadd(_STREAM, {b"payload": payloads[0]})
            return
        async with self._redis.pipeline(transaction=False) as pipeline:
            for payload in payloads:
                pipeline.xadd(_STREAM, {b"payload": payload})
            await pipeline.execute()

    async def read(self, consumer: str, block_ms: int | None) -> list[Entry]:
        reply: Any = await self._redis.xreadgroup(
            _GROUP.decode(), consumer, {_STREAM: ">"}, count=_BATCH, block=block_ms
        )
        return [(entry, fields[b"payload"]) for entry, fields in reply[0][1]] if reply else []

    async def acknowledge(self, ids: Sequence[bytes]) -> None:
        await self._redis.xack(_STREAM, _GROUP, *ids)

    async def close(self) -> None:
        await self._redis.aclose()


class RawLink(Link):
    """By hand."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    async def prepare(self) -> None:
        await self._wire.call(b"XGROUP", b"CREATE", _STREAM, _GROUP, b"0", b"MKSTREAM")

    def add(self, payloads: Sequence[bytes]) -> Awaitable[object]:
        return self._wire.send((b"XADD", _STREAM, b"*", b"payload", payload) for payload in payloads)

    async def read(self, consumer: str, block_ms: int | None) -> list[Entry]:
        wait = () if block_ms is None else (b"BLOCK", block_ms)
        head = (b"XREADGROUP", b"GROUP", _GROUP, consumer, b"COUNT", _BATCH)
        reply = await self._wire.call(*head, *wait, b"STREAMS", _STREAM, b">")
        return [(entry, fields[1]) for entry, fields in reply[0][1]] if reply else []

    async def acknowledge(self, ids: Sequence[bytes]) -> None:
        await self._wire.call(b"XACK", _STREAM, _GROUP, *ids)

    async def close(self) -> None:
        self._wire.close()


class Producer:
    """Adds."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def single(self, jobs: int) -> Answer:
        """One by one, each awaited."""
        with timed(jobs) as answer:
            for _ in range(jobs):
                await self._add_one()
        return answer

    async def bulk(self, jobs: int) -> Answer:
        """In batches, several on their way."""
        waiting: deque[asyncio.Future[object]] = deque()
        with timed(jobs) as answer:
            for start in range(0, jobs, _BATCH):
                batch = [_payload() for _ in range(min(_BATCH, jobs - start))]
                waiting.append(asyncio.ensure_future(self._link.add(batch)))
                if len(waiting) >= _IN_FLIGHT:
                    await waiting.popleft()
            await asyncio.gather(*waiting)
        return answer

    async def concurrent(self, jobs: int, callers: int) -> Answer:
        """Many callers at once, each adding one by one."""
        with timed(jobs) as answer:
            await in_parallel(callers, jobs, self._add_one)
        return answer

    async def paced(self, jobs: int) -> Answer:
        """At low load, each with the instant of its submission."""
        await at_low_load(jobs, lambda sent_ns: self._link.add([_encode(sent_ns)]))
        return {}

    async def _add_one(self) -> None:
        await self._link.add([_payload()])


class Work:
    """Reads until the stream is empty, or for ever."""

    def __init__(self, link: Link, gauge: Gauge, consumer: str) -> None:
        self._link = link
        self._gauge = gauge
        self._consumer = consumer
        self._late_ns: list[int] = []
        self._running: asyncio.Task[None] | None = None

    async def start(self, limit: int | None) -> Answer:
        """Empty the stream."""
        self._running = asyncio.create_task(self._drain())
        return {}

    async def listen(self) -> Answer:
        """Wait for what comes, and note how late it is."""
        self._running = asyncio.create_task(self._listen())
        return {}

    async def report(self) -> Answer:
        """What was used, once the stream was empty."""
        if self._running is not None:
            await self._running
        return {"cpu_s": self._gauge.cpu_s, "rss": resident_bytes()}

    async def latencies(self) -> Answer:
        """Of what came since the last question."""
        late_ns, self._late_ns = self._late_ns, []
        return {"late_ns": late_ns}

    async def stop(self) -> None:
        """End."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _drain(self) -> None:
        link, tick = self._link, self._gauge.tick
        # Counted by the batch, so the first one's reading belongs to it.
        self._gauge.begin()
        while entries := await link.read(self._consumer, None):
            for _, payload in entries:
                _decode(payload)
            tick(len(entries))
            await link.acknowledge([entry for entry, _ in entries])

    async def _listen(self) -> None:
        while True:
            entries = await self._link.read(self._consumer, _BLOCK_MS)
            for _, payload in entries:
                self._late_ns.append(time.monotonic_ns() - _decode(payload))
            if entries:
                await self._link.acknowledge([entry for entry, _ in entries])


async def produce(spec: Spec) -> None:
    """The role of a submitting process. It makes the group too: each starts on an empty server."""
    link = await _connect(spec)
    await link.prepare()
    role = Producer(link)
    try:
        await serve({"single": role.single, "bulk": role.bulk, "concurrent": role.concurrent, "paced": role.paced})
    finally:
        await link.close()


async def work(spec: Spec) -> None:
    """The role of a worker process."""
    link, gauge = await _connect(spec), Gauge(spec.board_path, spec.row)
    role = Work(link, gauge, f"worker-{spec.row}")
    try:
        await serve({"start": role.start, "listen": role.listen, "report": role.report, "latencies": role.latencies})
        await role.stop()
    finally:
        await link.close()


async def _connect(spec: Spec) -> Link:
    return RawLink(await Wire.connect(spec.url)) if spec.flavour == "raw" else PyLink(spec.url)


def _payload() -> bytes:
    return _encode({"argument": ARGUMENT})


if __name__ == "__main__":
    main({"produce": produce, "work": work})
