"""News of commits by NOTIFY, over one connection for all who wait.

It is made when somebody first waits, and made again when it breaks. Whenever it begins to listen everybody is woken
once, since something may have been missed.
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

#: How often to make sure that the connection still carries something; a half-open one is silent, too.
_PROBE_EVERY_S: Final = 15.0
#: PostgreSQL's limit is 8000 bytes.
_LONGEST_PAYLOAD: Final = 7_000


def payload(queue: str, position: str) -> str:
    """What NOTIFY carries."""
    said = json.dumps([queue, position])
    # A queue with an absurd name: everybody looks.
    return said if len(said) <= _LONGEST_PAYLOAD else "[]"


class NotifyListener:
    """Of one store, on one event loop."""

    def __init__(self, connect: Callable[[], Awaitable[asyncpg.Connection]], name: str, channel: str = CHANNEL) -> None:
        self._connect = connect
        self._name = name
        self._channel = channel
        self._room = CommitWaiters(self._waiting)
        self._task: asyncio.Task[None] | None = None

    def of(self, queue: str) -> AbstractContextManager[CommitWaiter]:
        """Be told when this queue's feed has moved in the ledger."""
        return self._room.waiting_for(queue)

    async def close(self) -> None:
        """Stop listening."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def _waiting(self, change: int) -> None:
        if change > 0 and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._listen(), name="holdfast-ledger-news")

    async def _listen(self) -> None:
        backoff = Backoff()
        while True:
            try:
                connection = await self._connect()
            except (HoldfastError, *DOWN) as exc:
                _log.debug("cannot listen to the ledger %s: %s", self._name, exc)
            else:
                try:
                    await self._hear(connection, backoff)
                except (HoldfastError, *DOWN) as exc:
                    _log.debug("the ledger %s has hung up: %s", self._name, exc)
                finally:
                    # Not `close`, which would wait for an answer.
                    connection.terminate()
            raise_if_cancelled()
            await asyncio.sleep(backoff.next_s())

    async def _hear(self, connection: asyncpg.Connection, backoff: Backoff) -> None:
        """Until the connection breaks."""
        gone = asyncio.Event()
        connection.add_termination_listener(lambda _: gone.set())
        await connection.add_listener(self._channel, self._heard)
        backoff.reset()
        self._room.notify_all()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_PROBE_EVERY_S):
                    await gone.wait()
                    return
            await connection.execute("SELECT 1")

    def _heard(self, _connection: Any, _pid: int, _channel: str, said: object) -> None:
        try:
            queue, _position = json.loads(str(said))
        except (ValueError, TypeError):
            # Somebody else's, or shortened.
            self._room.notify_all()
        else:
            self._room.notify([str(queue)])
