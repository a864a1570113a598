"""Waiting for a job's end without polling: one subscription per engine, one channel per awaited job."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

import hiredis

from holdfast.core.job import JobView
from holdfast.core.states import FINAL
from holdfast.engine.redis.client import Purpose, translate
from holdfast.engine.redis.connection import Subscription
from holdfast.engine.redis.store import Store
from holdfast.errors import EngineUnavailable

_log: Final = logging.getLogger("holdfast.engine.redis")

#: Messages can be lost with a connection: look again this often.
_LOOK_AGAIN_S: Final = 2.0


class Answers:
    """Tells callers when the job they wait for has ended."""

    def __init__(self, store: Store, get: Callable[[str, str], Awaitable[JobView | None]]) -> None:
        self._store = store
        self._get = get
        self._subscription: Subscription | None = None
        self._opening = asyncio.Lock()
        self._waiting: dict[bytes, set[asyncio.Event]] = {}

    async def wait_final(self, queue: str, job_id: str, wait_ms: int) -> JobView | None:
        deadline = asyncio.get_running_loop().time() + wait_ms / 1000
        view = await self._get(queue, job_id)
        if view is None or view.state in FINAL or wait_ms <= 0:
            return view
        ended = asyncio.Event()
        channel = self._store.keys(queue).waiters + b":" + job_id.encode()
        try:
            while True:
                ended.clear()
                await self._register(queue, job_id, channel, ended)
                view = await self._get(queue, job_id)
                left = deadline - asyncio.get_running_loop().time()
                if view is None or view.state in FINAL:
                    await self._forget(queue, job_id)
                    return view
                if left <= 0:
                    return view
                try:
                    async with asyncio.timeout(min(left, _LOOK_AGAIN_S)):
                        await ended.wait()
                except TimeoutError:
                    continue
        finally:
            self._unregister(channel, ended)

    def close(self) -> None:
        """Stop listening."""
        if self._subscription is not None:
            self._subscription.close()

    async def _register(self, queue: str, job_id: str, channel: bytes, ended: asyncio.Event) -> None:
        subscription = await self._connected()
        first = channel not in self._waiting
        self._waiting.setdefault(channel, set()).add(ended)
        if first:
            await _subscribe(subscription, channel)
        try:
            await self._store.client.call(Purpose.OTHER, b"HSET", self._store.keys(queue).waiters, job_id, 1)
        except EngineUnavailable as exc:
            # Full, or read-only: nobody will call us, but we can still look.
            _log.debug("waiting for job %s by looking now and then: %s", job_id, exc)

    async def _forget(self, queue: str, job_id: str) -> None:
        """The job had ended when we asked to be told: nobody else would take our name off the list."""
        try:
            await self._store.client.call(Purpose.OTHER, b"HDEL", self._store.keys(queue).waiters, job_id)
        except EngineUnavailable as exc:
            _log.debug("job %s stays on the list of awaited jobs: %s", job_id, exc)

    def _unregister(self, channel: bytes, ended: asyncio.Event) -> None:
        waiting = self._waiting.get(channel)
        if waiting is None:
            return
        waiting.discard(ended)
        if not waiting:
            del self._waiting[channel]
            if self._subscription is not None and self._subscription.usable:
                self._subscription.post(b"UNSUBSCRIBE", channel)

    async def _connected(self) -> Subscription:
        async with self._opening:
            if self._subscription is None or not self._subscription.usable:
                subscription = await self._store.client.subscription(self._on_message)
                for channel in list(self._waiting):
                    await _subscribe(subscription, channel)
                self._subscription = subscription
            return self._subscription

    def _on_message(self, channel: bytes) -> None:
        for ended in self._waiting.get(channel, ()):
            ended.set()


async def _subscribe(subscription: Subscription, channel: bytes) -> None:
    try:
        await subscription.send(b"SUBSCRIBE", channel)
    except (OSError, hiredis.ReplyError) as exc:
        raise translate(exc) from exc
