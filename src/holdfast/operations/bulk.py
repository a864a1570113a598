"""Apply one operation to many items at a steady rate, with a result for each.

A failed item does not affect the others, unless a store is down or a queue refuses new jobs: then the rest, or the rest
of that queue, is left unchanged, and repeating the call continues where this one stopped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, TypeVar

import msgspec

from holdfast.errors import EngineUnavailable, HoldfastError, IntakeRefused, InvalidOption, Unavailable

DEFAULT_RATE: Final = 50.0
#: Items run concurrently; a high rate needs more than one.
_MAX_BATCH: Final = 50
_BATCHES_PER_S: Final = 20

T = TypeVar("T")


class BulkResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one item."""

    id: str
    done: bool
    #: Nothing had to be done, as `code` and `message` say.
    skipped: bool = False
    #: The new job, if the item became one; of a skipped item, the job that it already became.
    job_id: str = ""
    code: str = ""
    message: str = ""


class BulkReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the whole call."""

    #: Matching items before anything was done.
    matched: int
    dry_run: bool
    results: list[BulkResult] = []
    #: Why items were not processed; empty if all were.
    stopped: str = ""
    #: Dead letters that match and were replayed before; they are not among the results.
    replayed_before: int = 0

    @property
    def done(self) -> int:
        return sum(result.done for result in self.results)

    @property
    def skipped(self) -> int:
        return self.replayed_before + sum(result.skipped for result in self.results)

    @property
    def failed(self) -> int:
        return sum(not result.done and not result.skipped for result in self.results)


Progress = Callable[[BulkResult], None]


def no_progress(_: BulkResult) -> None:
    """Ignore progress."""


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
    """Call `act` for every item, at most `rate_per_s` times a second.

    `act` raises `HoldfastError` for an item that fails. The error becomes the result of that item.
    """
    if not 0 < rate_per_s <= 1_000_000:
        raise InvalidOption(f"the rate must be more than 0 and at most 1000000 per second, got {rate_per_s:g}")
    results: list[BulkResult] = []
    #: By queue: why its remaining items are skipped.
    stopped_queues: dict[str | None, str] = {}
    down = ""
    size = max(1, min(_MAX_BATCH, int(rate_per_s / _BATCHES_PER_S)))
    due = time.monotonic()
    batch: list[T] = []

    async def run_batch() -> None:
        nonlocal due, down
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        due = max(due, time.monotonic() - 1.0) + len(batch) / rate_per_s
        outcomes = await asyncio.gather(*(_one(act, name, item) for item in batch))
        for item, (result, exc) in zip(batch, outcomes, strict=True):
            results.append(result)
            progress(result)
            if isinstance(exc, EngineUnavailable | IntakeRefused):
                # Other queues may be on a part of the store that answers.
                stopped_queues.setdefault(queue(item), str(exc))
            elif isinstance(exc, Unavailable):
                down = down or str(exc)
        batch.clear()

    async for item in items:
        if queue(item) not in stopped_queues:
            batch.append(item)
        if len(batch) >= size:
            await run_batch()
        if down:
            break
    if batch and not down:
        await run_batch()
    return BulkReport(
        matched=matched,
        dry_run=False,
        results=results,
        stopped="; ".join(filter(None, [*stopped_queues.values(), down])),
    )


async def _one(
    act: Callable[[T], Awaitable[BulkResult]], name: Callable[[T], str], item: T
) -> tuple[BulkResult, HoldfastError | None]:
    """Return the result of one item, and the error if it failed."""
    try:
        return await act(item), None
    except HoldfastError as exc:
        return BulkResult(id=name(item), done=False, code=exc.code, message=str(exc)), exc
