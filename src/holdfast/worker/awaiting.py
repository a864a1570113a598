"""What a task began through its context: known until it is awaited.

A coroutine that is made and not awaited does nothing, in silence: a job whose charge was forgotten would succeed.
"""

from __future__ import annotations

import inspect
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

R = TypeVar("R")

#: So many are kept before those that have ended are dropped.
_PRUNE_AT: Final = 64


class Begun:
    """Coroutines of one run, by what the task called."""

    __slots__ = ("_calls", "_prune_at")

    def __init__(self) -> None:
        self._calls: list[tuple[str, Coroutine[Any, Any, Any]]] = []
        self._prune_at = _PRUNE_AT

    def add(self, call: str, coroutine: Coroutine[Any, Any, R]) -> Coroutine[Any, Any, R]:
        """The coroutine, which is known from now on as `call`."""
        if len(self._calls) >= self._prune_at:
            self._calls = [each for each in self._calls if not _has_ended(each[1])]
            # Of many that are open at the same time each would be looked at again for every further one.
            self._prune_at = max(_PRUNE_AT, 2 * len(self._calls))
        self._calls.append((call, coroutine))
        return coroutine

    def end(self) -> list[str]:
        """The function has ended: what it did not await, in words. Nothing of that begins any more."""
        left = []
        for call, coroutine in self._calls:
            if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                coroutine.close()
                left.append(f"{call} was not awaited")
            elif not _has_ended(coroutine):
                left.append(f"{call} was still running")
        self._calls.clear()
        return left


def _has_ended(coroutine: Coroutine[Any, Any, Any]) -> bool:
    return inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED
