"""Server-sent events to one client (`EventStream`), and waiters for the ledger (`LedgerWatch`).

A stream lasts until the client disconnects or is disconnected because it does not read. `LedgerWatch` has one task per
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
from holdfast.ledger.port.ledger import ProjectionReadPort

CONTENT_TYPE: Final = "text/event-stream"
#: Interval of heartbeats.
HEARTBEAT_S: Final = 15.0
#: Reconnection delay for browsers, in milliseconds.
_OPENING: Final = b"retry: 2000\n\n"
#: ASGI extension of servers that can abort a connection (`http.server`); others close it after flushing.
ABORT: Final = "holdfast.abort"


class EventStream:
    """Sends server-sent events to one client."""

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
        """Disconnect the client, even during a write that never completes."""
        abort: Callable[[], None] | None = self._scope.get("extensions", {}).get(ABORT)
        if abort is not None:
            abort()
        if self._task is not None:
            self._task.cancel()


@asynccontextmanager
async def watch_disconnect(receive: Receive, on_gone: Callable[[], None]) -> AsyncIterator[None]:
    """Call `on_gone` if the client disconnects while the block runs."""

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
    """A waiter that reads the ledger when woken. Spurious wake-ups are allowed."""

    def wake(self) -> None: ...


#: First and last position that a waiter waits for; reaching one of them covers those in between.
_Span = tuple[Position, Position]


class LedgerWatch:
    """Wakes waiters when the ledger has reached their position. One ledger, one event loop.

    Without a projection (embedded mode) the ledger is never behind.
    """

    def __init__(self, projection: ProjectionReadPort | None) -> None:
        self._projection = projection
        self._waiting: dict[str, dict[Wakeable, _Span]] = {}
        self._watching: dict[str, asyncio.Task[None]] = {}

    def notify_at(self, queue: str, at: Position, waiter: Wakeable) -> None:
        """Wake the waiter once the ledger has this feed up to `at`."""
        if self._projection is None or at == START:
            waiter.wake()
            return
        waiting = self._waiting.setdefault(queue, {})
        first, last = waiting.get(waiter, (at, at))
        waiting[waiter] = min(first, at), max(last, at)
        if queue not in self._watching:
            watching = self._watch(queue, waiting, self._projection)
            self._watching[queue] = asyncio.create_task(watching, name="holdfast-http-ledger-watch")

    def cancel(self, queue: str, waiter: Wakeable) -> None:
        """Remove a waiter."""
        self._waiting.get(queue, {}).pop(waiter, None)

    async def close(self) -> None:
        """Stop watching; waiters are not woken."""
        watching = list(self._watching.values())
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)

    async def _watch(self, queue: str, waiting: dict[Wakeable, _Span], projection: ProjectionReadPort) -> None:
        backoff, mark = Backoff(), Mark()
        try:
            while waiting:
                try:
                    mark = await projection.wait_position_change(queue, mark, _WAIT_MS)
                    backoff.reset()
                except Exception as exc:  # noqa: BLE001 - the ledger may be unreachable; waiters are woken later
                    _log.info("event streams cannot reach the ledger, retrying: %s", exc)
                    await asyncio.sleep(backoff.next_s())
                else:
                    _wake(waiting, parse_position(mark.position) if mark.position else START)
        finally:
            del self._watching[queue]


def _wake(waiting: dict[Wakeable, _Span], reached: Position) -> None:
    for waiter, (first, last) in list(waiting.items()):
        if first > reached:
            continue
        if last > reached:
            waiting[waiter] = last, last
        else:
            del waiting[waiter]
        waiter.wake()
