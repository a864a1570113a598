"""Server-sent events to one client (`EventStream`), and notification of ledger progress (`LedgerWatch`).

A stream lasts until the client disconnects or is cut off because it does not read. `LedgerWatch` has one task per
queue, however many waiters there are; it waits for the ledger's position to change and does not poll.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, Protocol

from holdfast.core.retry import Backoff
from holdfast.http.operation import Receive, Scope, Send, wait_disconnect
from holdfast.http.subscribers import START, Position, parse_position
from holdfast.ledger.port.ledger import FeedPosition as Mark
from holdfast.ledger.port.ledger import Projection

CONTENT_TYPE: Final = "text/event-stream"
#: A comment every so often keeps proxies from hanging up, and finds clients that are gone.
HEARTBEAT_S: Final = 15.0
HEARTBEAT: Final = b": still here\n\n"
#: What browsers wait before they come back, in milliseconds.
_OPENING: Final = b"retry: 2000\n\n"
#: A server that can cut a connection off says so here (`http.server`); any other closes it when it is flushed.
ABORT: Final = "holdfast.abort"


class EventStream:
    """The sending end."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._task = asyncio.current_task()

    async def begin(self) -> None:
        headers = [
            (b"content-type", CONTENT_TYPE.encode()),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self.send(_OPENING)

    async def send(self, chunk: bytes) -> None:
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    def disconnect(self) -> None:
        """Cut the client off, in the middle of a write that never ends if need be."""
        abort: Callable[[], None] | None = self._scope.get("extensions", {}).get(ABORT)
        if abort is not None:
            abort()
        if self._task is not None:
            self._task.cancel()


@asynccontextmanager
async def watch_disconnect(receive: Receive, on_gone: Callable[[], None]) -> AsyncIterator[None]:
    """Watch for the client's going away while the block runs."""

    async def watch() -> None:
        await wait_disconnect(receive)
        on_gone()

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


_log: Final = logging.getLogger("holdfast.http")

_WAIT_MS: Final = 30_000


class Wakeable(Protocol):
    """Somebody who looks at the ledger when told to. Being told for nothing is allowed."""

    def wake(self) -> None: ...


#: The first and the last position that somebody waits for: what is between them comes with one of the two.
_Span = tuple[Position, Position]


class LedgerWatch:
    """Of one ledger, on one event loop. Without a projection the ledger is the engine's own, and never behind."""

    def __init__(self, projection: Projection | None) -> None:
        self._projection = projection
        self._waiting: dict[str, dict[Wakeable, _Span]] = {}
        self._watching: dict[str, asyncio.Task[None]] = {}

    def notify_at(self, queue: str, at: Position, waiter: Wakeable) -> None:
        """Ring once the ledger has this feed up to there."""
        if self._projection is None or at == START:
            waiter.wake()
            return
        waiting = self._waiting.setdefault(queue, {})
        first, last = waiting.get(waiter, (at, at))
        waiting[waiter] = min(first, at), max(last, at)
        if queue not in self._watching:
            watching = self._watch(queue, waiting, self._projection)
            self._watching[queue] = asyncio.create_task(watching, name="holdfast-http-tide")

    def cancel(self, queue: str, waiter: Wakeable) -> None:
        """It waits no longer."""
        self._waiting.get(queue, {}).pop(waiter, None)

    async def close(self) -> None:
        """Nobody waits any longer."""
        watching = list(self._watching.values())
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)

    async def _watch(self, queue: str, waiting: dict[Wakeable, _Span], projection: Projection) -> None:
        backoff, mark = Backoff(), Mark()
        try:
            while waiting:
                try:
                    mark = await projection.wait_position_change(queue, mark, _WAIT_MS)
                    backoff.reset()
                except Exception as exc:  # noqa: BLE001 - the ledger may be away; those who wait are told later
                    _log.info("event streams wait for the ledger: %s", exc)
                    await asyncio.sleep(backoff.next_s())
                else:
                    _ring(waiting, parse_position(mark.position) if mark.position else START)
        finally:
            del self._watching[queue]


def _ring(waiting: dict[Wakeable, _Span], tide: Position) -> None:
    for waiter, (first, last) in list(waiting.items()):
        if first > tide:
            continue
        if last > tide:
            waiting[waiter] = last, last
        else:
            del waiting[waiter]
        waiter.wake()
