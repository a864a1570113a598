"""Retention (requirement L5): drops finished jobs from the ledger when their time is over.

In small batches with a pause between them, so that nothing else waits for it, and twice as long as the batch took, so
that it keeps up with whatever was recorded and never has more than a third of one connection's time. Any number may do
so at once: each takes rows that the others have not locked, and who finds none comes back later.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Final

from holdfast.errors import LedgerUnavailable
from holdfast.settings import Settings
from holdfast.upkeep.loop import forever

if TYPE_CHECKING:
    from holdfast.ledger.port import Ledger
    from holdfast.ledger.retention import Marks

_log: Final = logging.getLogger("holdfast.upkeep")

#: Rows of one transaction, about 50 ms of work.
BATCH: Final = 4_000
#: Between two batches while there is more: so many times as long as the batch took, and at least …
_BREATHS: Final = 2.0
_BREATH_S: Final = 0.02
#: … after the last batch, and if there was nothing at all; but no longer than a tenth of what is kept.
_SOON_S: Final = 30.0
_PAUSE_S: Final = 300.0
_SHARE: Final = 0.1
#: Old jobs that were kept (for an open dead letter, say) are looked at again after this long.
_AFRESH_S: Final = 6 * 3_600.0
_DAY_MS: Final = 86_400_000


class Archivist:
    """Prunes the ledger until cancelled."""

    def __init__(
        self,
        ledger: Ledger,
        settings: Settings,
        random: Random | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self._keep_ms = round(settings.retention_days * _DAY_MS)
        self._monotonic = monotonic
        self._marks: Marks = {}
        self._afresh_at = 0.0
        self._random = random or Random()

    async def run(self) -> None:
        """Prune, again and again."""
        await forever("archivist", self.turn)

    async def turn(self) -> float:
        """One batch; how long to pause."""
        if self._monotonic() >= self._afresh_at:
            self._marks = {}
            self._afresh_at = self._monotonic() + _AFRESH_S
        began = self._monotonic()
        try:
            gone = await self._ledger.prune(self._keep_ms, BATCH, self._marks)
        except LedgerUnavailable as exc:
            _log.warning("nothing was pruned, the ledger does not answer: %s", exc)
            gone = 0
        # A batch may be a little short, as a job's rows go together.
        if gone >= BATCH // 2:
            return max(_BREATH_S, _BREATHS * (self._monotonic() - began))
        pause_s = min(_SOON_S if gone else _PAUSE_S, max(1.0, self._keep_ms / 1_000 * _SHARE))
        return pause_s * self._random.uniform(0.8, 1.2)
