"""The projector in a thread of its own, with an event loop, an engine and a ledger of its own: a large batch takes
some hundred milliseconds of the interpreter, which tasks on the worker's loop would otherwise wait for."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final

from holdfast.core.backoff import Backoff
from holdfast.engine.port import Engine
from holdfast.errors import HoldfastError, Unavailable
from holdfast.ledger.port import Ledger
from holdfast.upkeep.projector import Projector

_log: Final = logging.getLogger("holdfast.projector")


class Projecting:
    """`start`, then `stop`, both from one event loop. `engine` and `ledger` are siblings made for it, not open yet."""

    def __init__(
        self,
        engine: Engine,
        ledger: Ledger,
        queues: Sequence[str] = (),
        *,
        name: str = "",
        forked: Callable[[str], None] | None = None,
    ) -> None:
        """`forked` is called on the loop that makes this, with the queue of a feed that has forked."""
        self._engine = engine
        self._ledger = ledger
        self._home = asyncio.get_running_loop()
        self._forked = forked
        self.projector = Projector(engine, ledger, queues, name=name, forked=self._tell)
        self._thread = threading.Thread(target=self._main, name="holdfast-projector", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping = False

    def start(self) -> None:
        """Begin to project."""
        self._thread.start()

    async def stop(self) -> None:
        """Give the feeds back, end the thread, and wait for it."""
        self._stopping = True
        if self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(self._cancel)
            except RuntimeError:
                # It has ended by itself in this moment.
                _log.debug("the projector's loop was closed already")
        await asyncio.to_thread(self._thread.join)

    # From here on: the projector's own thread --------------------------------------------------------

    def _main(self) -> None:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            self._loop = runner.get_loop()
            try:
                runner.run(self._live())
            except asyncio.CancelledError:
                _log.debug("the projector ends")

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _live(self) -> None:
        self._task = asyncio.current_task()
        try:
            if await self._connect():
                await self.projector.run()
        finally:
            await self._engine.close()
            await self._ledger.close()

    async def _connect(self) -> bool:
        """Open the engine, however long that takes; the ledger connects when it is first needed."""
        backoff = Backoff()
        while not self._stopping:
            try:
                await self._engine.open()
                return True
            except Unavailable as exc:
                _log.info("the projector cannot reach the engine, trying again: %s", exc)
            except HoldfastError:
                _log.exception("the projector cannot work with this engine")
                return False
            await asyncio.sleep(backoff.next_s())
        return False

    def _tell(self, queue: str) -> None:
        if self._forked is None:
            return
        try:
            self._home.call_soon_threadsafe(self._forked, queue)
        except RuntimeError:
            _log.debug("the worker's loop is closed")


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
