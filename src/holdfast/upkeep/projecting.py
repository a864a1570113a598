"""The projector in a thread of its own, with an event loop, an engine and a ledger of its own: a large batch takes
some hundred milliseconds of the interpreter, which tasks on the worker's loop would otherwise wait for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

from holdfast.core.backoff import Backoff
from holdfast.engine.port import Engine
from holdfast.errors import HoldfastError, Unavailable
from holdfast.extras import loop_factory
from holdfast.ledger.port import Ledger
from holdfast.own_thread import OwnThread
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
        self._thread = OwnThread("holdfast-projector", self._live, loop_factory())

    def start(self) -> None:
        """Begin to project."""
        self._thread.start()

    async def stop(self) -> None:
        """Give the feeds back, end the thread, and wait for it."""
        await self._thread.stop()

    # From here on: the projector's own thread --------------------------------------------------------

    async def _live(self) -> None:
        try:
            if await self._connect():
                await self.projector.run()
        finally:
            await self._engine.close()
            await self._ledger.close()

    async def _connect(self) -> bool:
        """Open the engine, however long that takes; the ledger connects when it is first needed."""
        backoff = Backoff()
        while not self._thread.stopping:
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
