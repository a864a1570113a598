"""An app's settings and what was made from them, and how both are changed: for good, or for a block."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from holdfast.clock import Clock
from holdfast.links import Links
from holdfast.settings import OUTSIDE, Settings, is_in_memory

A = TypeVar("A")


class Setup(NamedTuple):
    """What an app works with."""

    #: What code has named. The environment is not part of it: it is read again with every change.
    given: Mapping[str, Any]
    settings: Settings
    clock: Clock
    links: Links


def changed(given: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """What code has named after a change. With a move into memory, stores that were named for another engine go."""
    url = overrides.get("url")
    moved = isinstance(url, str) and is_in_memory(url)
    return {name: value for name, value in given.items() if not (moved and name in OUTSIDE)} | dict(overrides)


class Reconfigured(Generic[A]):
    """What `app.configure(…)` returns: the change has been made. As a block, it is undone at the block's end.

    `async with` closes the app first. So does `with`, as far as that is possible without an event loop: stores in
    memory, and the connections of `submit_sync`.
    """

    def __init__(self, app: A, close: Callable[[], Awaitable[None]], undo: Callable[[bool], None]) -> None:
        self._app = app
        self._close = close
        self._undo = undo

    def __enter__(self) -> A:
        return self._app

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._undo(error is None)

    async def __aenter__(self) -> A:
        return self._app

    async def __aexit__(self, error: type[BaseException] | None, *_: object) -> None:
        await self._close()
        self._undo(error is None)
