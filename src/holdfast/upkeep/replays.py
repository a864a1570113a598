"""Finishes replays of dead letters that a crash has left between their mark in the ledger and the engine.

Any number of processes may do so at once, beside those that replay: the engine recognises a job that it has.
"""

from __future__ import annotations

import logging
from random import Random
from typing import Final

from holdfast.dlq.letters import Letters
from holdfast.engine.port import Engine
from holdfast.errors import LedgerUnavailable
from holdfast.ledger.port import Ledger
from holdfast.upkeep.admission import AdmittingDesk
from holdfast.upkeep.loop import forever

_log: Final = logging.getLogger("holdfast.upkeep")

_BATCH: Final = 100
_PAUSE_S: Final = 5.0


class Replays:
    """Looks for them until cancelled."""

    def __init__(self, engine: Engine, ledger: Ledger, random: Random | None = None) -> None:
        self._letters = Letters(engine, ledger, AdmittingDesk(engine, ledger))
        self._random = random or Random()

    async def run(self) -> None:
        """Finish what is found, again and again."""
        await forever("replays", self.turn)

    async def turn(self) -> float:
        """All that is found; how long to pause."""
        try:
            count = await self._letters.carry_on(_BATCH)
        except LedgerUnavailable as exc:
            _log.info("no replay could be finished, the ledger does not answer: %s", exc)
            count = 0
        if count:
            _log.warning("finished %d replays of dead letters that were left half-way", count)
        return _PAUSE_S * self._random.uniform(0.8, 1.2)
