"""The same thing done to many: one after the other at a steady pace, each with its result.

What one of them fails of hinders no other, unless it is a store that is down or a queue that takes nothing: then the
rest, or the rest of that queue, is left as it is, and the same call goes on where this one stopped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, TypeVar

import msgspec

from holdfast.errors import EngineUnavailable, HoldfastError, IntakeRefused, InvalidOption, Unavailable

DEFAULT_RATE: Final = 50.0
#: Done at once; a pace that is faster than one by one can be needs some.
_TOGETHER: Final = 50
_TURNS_PER_S: Final = 20

T = TypeVar("T")


class BulkResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one."""

    id: str
    done: bool
    #: The job that it is now, if it is one.
    job_id: str = ""
    code: str = ""
    message: str = ""


class BulkReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of all."""

    #: How many there were before anything was done.
    matched: int
    dry_run: bool
    results: list[BulkResult] = []
    #: Why the rest was left as it is; empty if nothing was.
    stopped: str = ""

    @property
    def done(self) -> int:
        return sum(result.done for result in self.results)

    @property
    def failed(self) -> int:
        return len(self.results) - self.done


Progress = Callable[[BulkResult], None]


def no_progress(_: BulkResult) -> None:
    """Nobody looks."""


async def run_bulk(
    items: AsyncIterator[T],
    act: Callable[[T], Awaitable[BulkResult]],
    name: Callable[[T], str],
    queue: Callable[[T], str | None],
    *,
    matched: int,
    rate_per_s: float = DEFAULT_RATE,
    progress: Progress = no_progress,
) -> BulkReport:
    """Do it to all, at most `rate_per_s`. `act` raises a `HoldfastError` for one that it cannot be done to."""
    if not 0 < rate_per_s <= 1_000_000:
        raise InvalidOption(f"the rate must be more than 0 a second, got {rate_per_s:g}")
    results: list[BulkResult] = []
    #: Why nothing more is tried, by queue.
    shut: dict[str | None, str] = {}
    down = ""
    size = max(1, min(_TOGETHER, int(rate_per_s / _TURNS_PER_S)))
    due = time.monotonic()
    batch: list[T] = []

    async def turn() -> None:
        nonlocal due, down
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        due = max(due, time.monotonic() - 1.0) + len(batch) / rate_per_s
        ended = await asyncio.gather(*(_one(act, name, item) for item in batch))
        for item, (result, exc) in zip(batch, ended, strict=True):
            results.append(result)
            progress(result)
            if isinstance(exc, EngineUnavailable | IntakeRefused):
                # Other queues may be on a part of the store that answers.
                shut.setdefault(queue(item), str(exc))
            elif isinstance(exc, Unavailable):
                down = down or str(exc)
        batch.clear()

    async for item in items:
        if queue(item) not in shut:
            batch.append(item)
        if len(batch) >= size:
            await turn()
        if down:
            break
    if batch and not down:
        await turn()
    return BulkReport(
        matched=matched, dry_run=False, results=results, stopped="; ".join(filter(None, [*shut.values(), down]))
    )


async def _one(
    act: Callable[[T], Awaitable[BulkResult]], name: Callable[[T], str], item: T
) -> tuple[BulkResult, HoldfastError | None]:
    """Its result, and why it is none."""
    try:
        return await act(item), None
    except HoldfastError as exc:
        return BulkResult(id=name(item), done=False, code=exc.code, message=str(exc)), exc
