"""The way in: submissions of one event loop, coalesced into shared calls of the engine.

Callers that submit at the same moment share a call, so that a hundred concurrent ones cost about as much
as a batch of a hundred. A caller that is alone waits for one turn of the loop and one round trip.
Each queue has calls of its own: a queue that refuses intake refuses only its own callers.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final, Protocol

from holdfast.core.job import Envelope, JobView, Receipt
from holdfast.core.states import State
from holdfast.engine.port import MAX_BATCH, Engine
from holdfast.errors import EngineUnavailable, FeedFull

_log: Final = logging.getLogger("holdfast.submit")

#: Shared calls on their way at a time: while they are, the next batch forms.
_MAX_CALLS: Final = 2
#: Calls on their way in `submit_many`, where the batches are full already.
_MAX_BULK_CALLS: Final = 4

_Waiting = tuple[Envelope, "asyncio.Future[Receipt]"]


class Desk(Protocol):
    """Where jobs are handed in and asked about; inline mode has its own."""

    async def submit(self, envelope: Envelope) -> Receipt: ...
    async def submit_many(self, envelopes: Iterable[Envelope]) -> list[Receipt]: ...
    async def get(self, queue: str, job_id: str) -> JobView | None: ...
    async def wait_final(self, queue: str, job_id: str, wait_ms: int) -> JobView | None: ...
    async def cancel(self, queue: str, job_id: str, actor: str, reason: str) -> None: ...


class Submitter(Desk):
    """The desk in front of an engine. One event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[str, deque[_Waiting]] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._scheduled = False

    async def submit(self, envelope: Envelope) -> Receipt:
        """Accepted once this returns. The submission goes through even if the caller is cancelled meanwhile."""
        future: asyncio.Future[Receipt] = self._loop.create_future()
        line = self._waiting.get(envelope.queue)
        if line is None:
            line = self._waiting[envelope.queue] = deque()
        line.append((envelope, future))
        if not self._scheduled and len(self._calls) < _MAX_CALLS:
            self._scheduled = True
            self._loop.call_soon(self._flush)
        return await future

    async def submit_many(self, envelopes: Iterable[Envelope]) -> list[Receipt]:
        """In batches, several on their way. If one fails the error is raised; the others may be accepted."""
        source, receipts = iter(envelopes), list[Receipt]()
        calls: deque[asyncio.Task[list[Receipt]]] = deque()
        try:
            while batch := list(islice(source, MAX_BATCH)):
                calls.append(self._loop.create_task(self._call(batch)))
                while len(calls) >= _MAX_BULK_CALLS:
                    receipts += await calls.popleft()
                # Batches are made on this loop: let the calls out, and other work in.
                await asyncio.sleep(0)
            while calls:
                receipts += await calls.popleft()
        finally:
            await asyncio.gather(*calls, return_exceptions=True)
        return receipts

    async def get(self, queue: str, job_id: str) -> JobView | None:
        return (await self._engine.get(queue, [job_id]))[0]

    async def wait_final(self, queue: str, job_id: str, wait_ms: int) -> JobView | None:
        return await self._engine.wait_final(queue, job_id, wait_ms)

    async def cancel(self, queue: str, job_id: str, actor: str, reason: str) -> None:
        await self._engine.move(queue, job_id, State.CANCELLED, actor=actor, reason=reason)

    def _flush(self) -> None:
        self._scheduled = False
        while self._waiting and len(self._calls) < _MAX_CALLS:
            queue, line = next(iter(self._waiting.items()))
            batch = [line.popleft() for _ in range(min(len(line), MAX_BATCH))]
            # To the end of the order if there is more, so that queues take turns.
            del self._waiting[queue]
            if line:
                self._waiting[queue] = line
            call = self._loop.create_task(self._send(batch))
            self._calls.add(call)
            call.add_done_callback(self._sent)

    def _sent(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        self._flush()

    async def _send(self, batch: list[_Waiting]) -> None:
        try:
            receipts = await self._call([envelope for envelope, _ in batch])
        except asyncio.CancelledError:
            for _, future in batch:
                future.cancel()
            raise
        except Exception as exc:  # noqa: BLE001 - every caller gets it
            for _, future in batch:
                if not future.done():
                    future.set_exception(exc)
            return
        for (_, future), receipt in zip(batch, receipts, strict=True):
            if not future.done():
                future.set_result(receipt)

    async def _call(self, envelopes: Sequence[Envelope]) -> list[Receipt]:
        try:
            return await self._engine.submit(envelopes)
        except EngineUnavailable as exc:
            # One line for the call, however many wait for it (requirement Q11).
            _log.critical("%d jobs could not be submitted: %s", len(envelopes), exc)
            raise
        except FeedFull as exc:
            # Nobody paused this on purpose: someone has to know (requirement Q15).
            _log.critical("%d jobs were refused: %s", len(envelopes), exc)
            raise
