"""Waiting for a job's end without polling: one subscription per engine, one channel per awaited job.

Each round trip to Redis has two processes wait for a core, so a wait makes as few as it can: the subscription is under
way while the job is read for the first time, and the read after it registers the waiter in the same step.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

import hiredis
import msgspec

from holdfast.core.job import JobView
from holdfast.core.states import FINAL
from holdfast.engine.redis.client import translate
from holdfast.engine.redis.connection import Subscription
from holdfast.engine.redis.readers import Readers
from holdfast.engine.redis.store import Store
from holdfast.errors import EngineUnavailable

_log: Final = logging.getLogger("holdfast.engine.redis")

#: Messages can be lost with a connection: the job is read again this often.
_READ_AGAIN_S: Final = 2.0


class _Channel(msgspec.Struct):
    """An awaited job: Redis's answer to the subscription, and the waiters. A subscription is shared by them."""

    subscribed: asyncio.Future[Any]
    waiters: set[asyncio.Event]


class Answers:
    """Tells callers when the job they wait for has ended."""

    def __init__(self, store: Store, readers: Readers) -> None:
        self._store = store
        self._readers = readers
        self._subscription: Subscription | None = None
        self._opening = asyncio.Lock()
        self._channels: dict[bytes, _Channel] = {}

    async def wait_final(self, queue: str, job_id: str, wait_ms: int) -> JobView | None:
        deadline = asyncio.get_running_loop().time() + wait_ms / 1000
        if wait_ms <= 0:
            return await self._get(queue, job_id)
        ended = asyncio.Event()
        channel = self._store.keys(queue).waiters + b":" + job_id.encode()
        try:
            subscribing = await self._subscribe(channel, ended)
            view = await self._get(queue, job_id)
            while view is not None and view.state not in FINAL:
                await _confirmed(subscribing)
                ended.clear()
                view = await self._register(queue, job_id)
                left = deadline - asyncio.get_running_loop().time()
                if view is None or view.state in FINAL or left <= 0:
                    break
                try:
                    async with asyncio.timeout(min(left, _READ_AGAIN_S)):
                        await ended.wait()
                except TimeoutError:
                    subscribing = await self._subscribe(channel, ended)
                else:
                    view = await self._get(queue, job_id)
            return view
        finally:
            self._leave(channel, ended)

    def close(self) -> None:
        """Stop listening."""
        if self._subscription is not None:
            self._subscription.close()

    async def _get(self, queue: str, job_id: str) -> JobView | None:
        return (await self._readers.get(queue, [job_id]))[0]

    async def _register(self, queue: str, job_id: str) -> JobView | None:
        """The job; unless it has ended, its end will be published from now on."""
        try:
            return (await self._readers.get(queue, [job_id], register=True))[0]
        except EngineUnavailable as exc:
            # Full, or read-only: nothing will be published, so the job is read now and then.
            _log.debug("waiting for job %s by polling: %s", job_id, exc)
            return await self._get(queue, job_id)

    async def _subscribe(self, channel: bytes, ended: asyncio.Event) -> asyncio.Future[Any]:
        """Subscribe, if no other waiter has; Redis's answer to that."""
        subscription = await self._connected()
        awaited = self._channels.get(channel)
        if awaited is None:
            awaited = self._channels[channel] = _Channel(_call(subscription, channel), set())
        awaited.waiters.add(ended)
        return awaited.subscribed

    def _leave(self, channel: bytes, ended: asyncio.Event) -> None:
        awaited = self._channels.get(channel)
        if awaited is None:
            return
        awaited.waiters.discard(ended)
        if not awaited.waiters:
            del self._channels[channel]
            if self._subscription is not None and self._subscription.usable:
                self._subscription.post(b"UNSUBSCRIBE", channel)

    async def _connected(self) -> Subscription:
        async with self._opening:
            if self._subscription is None or not self._subscription.usable:
                self._subscription = await self._store.client.subscription(self._on_message)
                for channel, awaited in self._channels.items():
                    awaited.subscribed = _call(self._subscription, channel)
            return self._subscription

    def _on_message(self, channel: bytes) -> None:
        if (awaited := self._channels.get(channel)) is not None:
            for ended in awaited.waiters:
                ended.set()


def _call(subscription: Subscription, channel: bytes) -> asyncio.Future[Any]:
    subscribing = subscription.call(b"SUBSCRIBE", channel)
    # A job that has ended already is not waited for, and an error is then of no interest.
    subscribing.add_done_callback(lambda done: done.cancelled() or done.exception())
    return subscribing


async def _confirmed(subscribing: asyncio.Future[Any]) -> None:
    try:
        # It is shared: a waiter that is cancelled leaves it to the others.
        await asyncio.shield(subscribing)
    except (OSError, hiredis.ReplyError) as exc:
        raise translate(exc) from exc
