"""The ledger's effects as single calls: those of one event loop that come at the same moment share a transaction.

A hundred concurrent effects cost about as much as a batch of a hundred. A caller that is alone waits for one turn of
the loop and one round trip. What was asked for goes through even if the caller is cancelled meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Generic, TypeVar

from holdfast.errors import LedgerUnavailable
from holdfast.ledger.port import Effects, Held, JobKey, Outcome, Reservation, Step

A = TypeVar("A")
B = TypeVar("B")

#: The most that share a transaction: more would keep the first ones waiting.
MAX_BATCH: Final = 200
#: Shared calls on their way at a time: while they are, the next batch forms.
_MAX_CALLS: Final = 2


class Desk:
    """In front of a ledger's effects. One event loop."""

    def __init__(self, effects: Effects) -> None:
        self._reserve = _Line(effects.reserve)
        self._conclude = _Line(effects.conclude)
        self._look = _Line(effects.look)
        self._steps = _Line(effects.steps)
        self._record = _Line(effects.record_steps)

    async def reserve(self, wish: Reservation) -> Held:
        """The key's row after the wish; ours if it has our token."""
        return await self._reserve.put(wish)

    async def conclude(self, outcome: Outcome) -> bool:
        """Whether the token still held its key."""
        return await self._conclude.put(outcome)

    async def look(self, tenant_id: str, key: str) -> Held | None:
        """The key's row."""
        return await self._look.put((tenant_id, key))

    async def steps(self, job: JobKey) -> list[Step]:
        """What the job has recorded, by position."""
        return await self._steps.put(job)

    async def record(self, step: Step) -> Step:
        """The step as it is recorded now."""
        return await self._record.put(step)


class _Line(Generic[A, B]):
    """Callers of one method."""

    def __init__(self, call: Callable[[Sequence[A]], Awaitable[list[B]]]) -> None:
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[A, asyncio.Future[B]]] = deque()
        self._calls: set[asyncio.Task[None]] = set()
        self._scheduled = False

    async def put(self, item: A) -> B:
        future: asyncio.Future[B] = self._loop.create_future()
        self._waiting.append((item, future))
        if not self._scheduled and len(self._calls) < _MAX_CALLS:
            self._scheduled = True
            self._loop.call_soon(self._flush)
        return await future

    def _flush(self) -> None:
        self._scheduled = False
        while self._waiting and len(self._calls) < _MAX_CALLS:
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_BATCH))]
            call = self._loop.create_task(self._send(batch))
            self._calls.add(call)
            call.add_done_callback(self._sent)

    def _sent(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        self._flush()

    async def _send(self, batch: list[tuple[A, asyncio.Future[B]]]) -> None:
        try:
            answers = await self._call([item for item, _ in batch])
        except asyncio.CancelledError:
            for _, future in batch:
                future.cancel()
            raise
        except Exception as exc:  # noqa: BLE001 - every caller gets it
            if len(batch) > 1 and not isinstance(exc, LedgerUnavailable):
                # One of them is to blame, and nothing was written: let the others through.
                for one in batch:
                    await self._send([one])
                return
            for _, future in batch:
                if not future.done():
                    future.set_exception(exc)
            return
        for (_, future), answer in zip(batch, answers, strict=True):
            if not future.done():
                future.set_result(answer)
