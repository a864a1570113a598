"""Carries people's answers into the engine where whoever took them could not, and ends what nobody answered in time.

Any number of processes may do so at once, beside those where people vote: the engine moves a job once.
"""

from __future__ import annotations

import logging
from random import Random
from typing import Final

from holdfast.engine.port import Engine
from holdfast.errors import LedgerUnavailable
from holdfast.guard.approvals import Approvals
from holdfast.ledger.port import Ledger
from holdfast.upkeep.complaint import Complaint
from holdfast.upkeep.loop import forever

_log: Final = logging.getLogger("holdfast.upkeep")

_BATCH: Final = 100
#: How late an answer may be that its own process could not carry on, and a deadline.
_LOOK_S: Final = 1.0


class Registrar:
    """Looks for them until cancelled."""

    def __init__(self, engine: Engine, ledger: Ledger, random: Random | None = None) -> None:
        self._approvals = Approvals(engine, ledger)
        self._complaint = Complaint(_log)
        self._random = random or Random()

    async def run(self) -> None:
        """Carry on, again and again."""
        await forever("registrar", self.turn)

    async def turn(self) -> float:
        """Everything that is due; how long to pause."""
        try:
            while await self._approvals.expire(_BATCH) == _BATCH:
                pass
            await self._approvals.carry_on(_BATCH)
        except LedgerUnavailable as exc:
            self._complaint.say(logging.WARNING, "approvals wait, the ledger does not answer: %s", exc)
        else:
            self._complaint.over()
        return _LOOK_S * self._random.uniform(1.0, 1.2)
