"""A coroutine with a thread and an event loop of its own, for what must not wait for the user's code, nor the other way
round: renewing leases, projecting."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final

_log: Final = logging.getLogger("holdfast.thread")


class OwnThread:
    """`start`, then `stop`, both from one other event loop. A daemon: it keeps no process alive."""

    def __init__(
        self,
        name: str,
        live: Callable[[], Coroutine[Any, Any, None]],
        loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
    ) -> None:
        """`live` is cancelled by `stop`, and must then come to its end."""
        self._live = live
        self._loop_factory = loop_factory
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        #: Whether it is to end. Read it where a cancellation may come too early to be noticed.
        self.stopping = False

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    async def stop(self) -> None:
        """End it, and wait for that."""
        self.stopping = True
        if self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(self._cancel)
            except RuntimeError:
                # It has ended by itself in this moment.
                _log.debug("%s had closed its loop already", self._thread.name)
        await asyncio.to_thread(self._thread.join)

    # From here on: the thread itself -----------------------------------------------------------------

    def _main(self) -> None:
        with asyncio.Runner(loop_factory=self._loop_factory) as runner:
            self._loop = runner.get_loop()
            try:
                runner.run(self._run())
            except asyncio.CancelledError:
                _log.debug("%s ends", self._thread.name)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        self._task = asyncio.current_task()
        await self._live()
