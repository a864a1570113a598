"""The blocking door: an event loop in a thread of its own, for callers that have none.

For Django views, scripts and threads. One per app, started with the first blocking call; a process that
was forked after that gets a new one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from holdfast.errors import UsageError
from holdfast.forking import leave_to_parent, on_fork

T = TypeVar("T")


class Door:
    """Runs coroutines for callers that block until they are done."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        on_fork(self)

    def after_fork(self) -> None:
        """In a child process: threads do not survive a fork, and the lock may have been held by one of them."""
        self._lock = threading.Lock()
        leave_to_parent((self._loop, self._thread))
        self._loop = self._thread = None

    @property
    def opened(self) -> bool:
        """Whether its thread runs, in this process."""
        return self._loop is not None

    def call(self, what: str, make: Callable[[], Coroutine[Any, Any, T]], instead: str) -> T:
        """The result of `make()`; `UsageError` where blocking would stop a running event loop."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            future = asyncio.run_coroutine_threadsafe(make(), self._open())
        else:
            raise UsageError(f"{what} would block the event loop that runs here; use `{instead}`")
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `last` on the door's loop, then end its thread. Does nothing if it was never opened."""
        if not self.opened:
            return
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(last(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()

    def _open(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_serve, args=(self._loop,), name="holdfast-door", daemon=True)
                self._thread.start()
            return self._loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()
