"""Submitters that continue through failures and record every answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, pairwise
from types import TracebackType
from typing import Any, Final, Self

from holdfast.errors import IntakeRefused, NotDurableYet, Unavailable

_PAUSE_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Accepted:
    """One accepted job."""

    job_id: str
    queue: str
    durable: bool
    #: When it was asked for the last time, and when the answer came.
    requested_at: float
    at: float


#: Number, queue, durable or not → job id.
Submit = Callable[[int, str, bool], Awaitable[str]]


class Load:
    """`async with Load(submit) as load:`: submitters that each repeat a call until it succeeds.

    The same number is submitted again under the same idempotency key, so a lost answer makes no second job.
    """

    def __init__(
        self,
        submit: Submit,
        *,
        submitters: int = 8,
        durable_every: int = 4,
        queues: tuple[str, ...] = ("default",),
        pause_s: float = 0.0,
    ) -> None:
        """Each submitter rests `pause_s` after every job."""
        self._submit = submit
        self._pause_s = pause_s
        self._submitters = submitters
        self._durable_every = durable_every
        self._queues = queues
        self._numbers = count()
        self._running = False
        self._tasks: list[asyncio.Task[None]] = []
        self.accepted: list[Accepted] = []
        #: Calls that had to be repeated, by error.
        self.refused: dict[str, int] = {}

    async def __aenter__(self) -> Self:
        self._running = True
        self._tasks = [asyncio.create_task(self._go_on()) for _ in range(self._submitters)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._running = False
        if error is not None:
            for task in self._tasks:
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*self._tasks, return_exceptions=True)
            return
        await asyncio.gather(*self._tasks)

    async def until(self, condition: Callable[[Self], Any], what: str, within_s: float = 60.0) -> Any:
        """Wait until `condition` returns a true value, and return it."""
        give_up_at = time.monotonic() + within_s
        while not (value := condition(self)):
            for task in self._tasks:
                if task.done():
                    task.result()
            if time.monotonic() > give_up_at:
                raise TimeoutError(f"waited {within_s:g} s for {what} in vain; calls were refused: {self.refused}")
            await asyncio.sleep(_PAUSE_S)
        return value

    async def more(self, jobs: int, queue: str | None = None) -> None:
        """Wait until this number of submissions that start from now on is accepted."""
        now = time.monotonic()

        def enough(load: Self) -> bool:
            return sum(job.requested_at >= now and queue in (None, job.queue) for job in load.accepted) >= jobs

        await self.until(enough, f"{jobs} more accepted jobs{f' of queue {queue}' if queue else ''}")

    def first_since(self, moment: float, queue: str | None = None) -> Accepted | None:
        """The first accepted job that was submitted after this instant."""
        later = (job for job in self.accepted if job.requested_at >= moment and queue in (None, job.queue))
        return min(later, key=lambda job: job.at, default=None)

    def longest_gap(self, start: float, end: float) -> float:
        """The longest time within which nothing was accepted."""
        moments = [start, *sorted(job.at for job in self.accepted if start < job.at < end), end]
        return max(later - earlier for earlier, later in pairwise(moments))

    async def _go_on(self) -> None:
        while self._running:
            number = next(self._numbers)
            queue = self._queues[number % len(self._queues)]
            durable = self._durable_every > 0 and number // len(self._queues) % self._durable_every == 0
            await self._insist(number, queue, durable)
            if self._pause_s:
                await asyncio.sleep(self._pause_s)

    async def _insist(self, number: int, queue: str, durable: bool) -> None:
        while True:
            requested_at = time.monotonic()
            try:
                job_id = await self._submit(number, queue, durable)
            except (Unavailable, IntakeRefused, NotDurableYet) as exc:
                text = f"{type(exc).__name__}: {exc}"[:160]
                self.refused[text] = self.refused.get(text, 0) + 1
                await asyncio.sleep(_PAUSE_S)
            else:
                self.accepted.append(Accepted(job_id, queue, durable, requested_at, time.monotonic()))
                return
