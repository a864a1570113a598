"""Notifications of commits by NOTIFY, over one connection for all waiters.

The connection is opened for the first waiter, and again when it breaks. Whenever it begins to listen, all waiters are
woken once, because a notification may have been missed.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, Final

import asyncpg

from holdfast.aio import raise_if_cancelled
from holdfast.core.retry import Backoff
from holdfast.errors import HoldfastError
from holdfast.ledger.postgres.errors import DOWN
from holdfast.ledger.waiters import CommitWaiter, CommitWaiters

_log: Final = logging.getLogger("holdfast.ledger")

CHANNEL: Final = "holdfast_ledger"
#: Run with `payload(…)` in the transaction that moves a feed; delivered when that commits.
NOTIFY: Final = f"SELECT pg_notify('{CHANNEL}', $1)"

#: Interval of probes: without them, a half-open connection looks like one without notifications.
_PROBE_EVERY_S: Final = 15.0
#: PostgreSQL's limit is 8000 bytes.
_LONGEST_PAYLOAD: Final = 7_000


def payload(queue: str, position: str) -> str:
    """The payload of NOTIFY."""
    text = json.dumps([queue, position])
    # Without a queue, all waiters check: its name is too long.
    return text if len(text) <= _LONGEST_PAYLOAD else "[]"


class NotifyListener:
    """Listens to one store, on one event loop."""

    def __init__(self, connect: Callable[[], Awaitable[asyncpg.Connection]], name: str, channel: str = CHANNEL) -> None:
        self._connect = connect
        self._name = name
        self._channel = channel
        self._waiters = CommitWaiters(self._on_waiter)
        self._task: asyncio.Task[None] | None = None

    def listen(self, queue: str) -> AbstractContextManager[CommitWaiter]:
        """A waiter that is notified when this queue's feed has moved in the ledger."""
        return self._waiters.waiting_for(queue)

    async def close(self) -> None:
        """Stop listening."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def _on_waiter(self, change: int) -> None:
        if change > 0 and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._listen(), name="holdfast-ledger-notifications")

    async def _listen(self) -> None:
        backoff = Backoff()
        while True:
            try:
                connection = await self._connect()
            except (HoldfastError, *DOWN) as exc:
                _log.debug("cannot listen for notifications of the ledger %s: %s", self._name, exc)
            else:
                try:
                    await self._receive(connection, backoff)
                except (HoldfastError, *DOWN) as exc:
                    _log.debug("lost the connection for notifications of the ledger %s: %s", self._name, exc)
                finally:
                    # Not `close`, which would wait for an answer.
                    connection.terminate()
            raise_if_cancelled()
            await asyncio.sleep(backoff.next_s())

    async def _receive(self, connection: asyncpg.Connection, backoff: Backoff) -> None:
        """Listen until the connection breaks."""
        gone = asyncio.Event()
        connection.add_termination_listener(lambda _: gone.set())
        await connection.add_listener(self._channel, self._on_notify)
        backoff.reset()
        self._waiters.notify_all()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_PROBE_EVERY_S):
                    await gone.wait()
                    return
            await connection.execute("SELECT 1")

    def _on_notify(self, _connection: Any, _pid: int, _channel: str, text: object) -> None:
        try:
            queue, _position = json.loads(str(text))
        except (ValueError, TypeError):
            # Sent by another program, or without the queue.
            self._waiters.notify_all()
        else:
            self._waiters.notify([str(queue)])
