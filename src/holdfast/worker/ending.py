"""How a worker ends: give back what has not started, let the rest finish, settle everything, leave.

Whatever the engine does meanwhile, this comes to an end: what cannot be told is left to its lease.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from holdfast.engine.port import Engine
from holdfast.errors import EngineUnavailable
from holdfast.settings import Settings
from holdfast.worker.fetcher import Fetcher
from holdfast.worker.run import Held, Stop
from holdfast.worker.runner import Runner
from holdfast.worker.settler import Settler

_log: Final = logging.getLogger("holdfast.worker")

_LOOK_S: Final = 0.01
#: How long a worker in a hurry waits for a store that is away.
_LAST_WORD_S: Final = 5.0
#: What a run that was cancelled may take beyond its grace time.
_MARGIN_S: Final = 1.0


class Ending:
    """The drain of one worker, once nothing fetches any more."""

    def __init__(self, held: Held, settings: Settings, hurry: asyncio.Event, cancel_grace_s: float) -> None:
        self._held = held
        self._settings = settings
        self._hurry = hurry
        self._cancel_grace_s = cancel_grace_s

    async def finish(self, runner: Runner, fetcher: Fetcher, settler: Settler) -> None:
        """Returns when every lease in hand is settled, or cannot be."""
        runner.refuse()
        await self._give_back_lost(fetcher)
        await self._until_judged(self._settings.drain_grace_s, self._hurry)
        runner.stop_all(Stop.DRAIN)
        await self._until_judged(self._cancel_grace_s + _MARGIN_S, None)
        if not await self._until_settled(settler):
            _log.error("%d verdicts were not answered; their jobs will run again", settler.abandon())

    async def leave(self, engine: Engine, worker: str, queues: Sequence[str]) -> None:
        """Tell the engine that this worker will not come back."""
        try:
            async with asyncio.timeout(_LAST_WORD_S):
                await engine.leave(worker, queues)
        except (EngineUnavailable, TimeoutError) as exc:
            _log.warning("the worker could not take leave of the engine: %s", exc)

    async def _give_back_lost(self, fetcher: Fetcher) -> None:
        # The claim that was cut off may have been answered: those leases are ours, and must not wait to run out.
        try:
            async with asyncio.timeout(_LAST_WORD_S):
                await fetcher.recover_lost()
        except (EngineUnavailable, TimeoutError) as exc:
            _log.warning("claims on their way are left to run out: %s", exc)
        except Exception:  # noqa: BLE001 - what is in hand must be ended all the same
            _log.exception("giving back claims on their way failed in an unexpected way; they are left to run out")

    async def _until_judged(self, seconds: float, cut_short: asyncio.Event | None) -> None:
        deadline = asyncio.get_running_loop().time() + seconds
        while any(not run.judged for run in self._held):
            left_s = deadline - asyncio.get_running_loop().time()
            if left_s <= 0 or (cut_short is not None and cut_short.is_set()):
                return
            await asyncio.sleep(min(_LOOK_S, left_s))

    async def _until_settled(self, settler: Settler) -> bool:
        now = asyncio.get_running_loop().time
        # After a lease's time others run these jobs anyway.
        deadline = now() + self._settings.visibility_timeout_s + _LAST_WORD_S
        hurries = False
        while not await settler.flush(_LOOK_S):
            if self._hurry.is_set() and not hurries:
                hurries = True
                deadline = min(deadline, now() + _LAST_WORD_S)
            if now() >= deadline:
                return False
        return True
