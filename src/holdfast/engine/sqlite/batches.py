"""Large batches cut into steps, and their answers put together again."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from holdfast.engine.port import MAX_BATCH

T = TypeVar("T")


def steps_of(queues: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Which places of a batch go together: one queue, at most `MAX_BATCH`, in order."""
    by_queue: dict[str, list[int]] = {}
    for at, queue in enumerate(queues):
        by_queue.setdefault(queue, []).append(at)
    return [
        (queue, places[start : start + MAX_BATCH])
        for queue, places in by_queue.items()
        for start in range(0, len(places), MAX_BATCH)
    ]


async def all_of(steps: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All of them at once, so that they share a commit; the first error once all have ended."""
    results = await asyncio.gather(*steps, return_exceptions=True)
    good: list[T] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        good.append(result)
    return good


def in_order(steps: Sequence[tuple[str, Sequence[int]]], answers: Sequence[Sequence[T]]) -> list[T]:
    """The answers of the steps, each in its place."""
    placed: dict[int, T] = {}
    for (_, places), step in zip(steps, answers, strict=True):
        placed.update(zip(places, step, strict=True))
    return [placed[at] for at in range(len(placed))]
