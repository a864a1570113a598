"""Dead letters that are in the ledger: tells the engine, which has kept the job in `dlq_pending` until now (rule 18).

    commit of the item, unacknowledged → dlq_recorded → failed → acknowledged

Every step may be repeated, so a crash between any two costs nothing: what is unacknowledged is sent again.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from holdfast.core.states import FINAL, State
from holdfast.engine.port import Engine
from holdfast.errors import TransitionInvalid, UnknownJob
from holdfast.ledger.port import DeadLetter, Ledger

_log: Final = logging.getLogger("holdfast.projector")

#: Letters told at a time.
_TOGETHER: Final = 50
_PAGE: Final = 500

_ACTOR: Final = "ledger"
_REASON: Final = "the dead letter is recorded"
_STEPS: Final = ((State.DLQ_PENDING, State.DLQ_RECORDED), (State.DLQ_RECORDED, State.FAILED))


class DeadLetters:
    """Tells one engine what its ledger has recorded."""

    def __init__(self, engine: Engine, ledger: Ledger) -> None:
        assert ledger.projection is not None
        self._engine = engine
        self._ledger = ledger
        self._projection = ledger.projection

    async def send(self, queue: str) -> int:
        """Tell all that is to be told; how many were left, because their jobs are elsewhere at the moment."""
        while True:
            letters = await self._projection.unacked(queue, _PAGE)
            left = 0
            for start in range(0, len(letters), _TOGETHER):
                some = letters[start : start + _TOGETHER]
                told = await asyncio.gather(*(self._tell(letter) for letter in some))
                done = [letter for letter, ended in zip(some, told, strict=True) if ended]
                if done:
                    await self._projection.ack(done)
                left += len(some) - len(done)
            if left or len(letters) < _PAGE:
                return left

    async def _tell(self, letter: DeadLetter) -> bool:
        """Move the job to its end; whether the letter is done with."""
        key = letter.key
        for was, to in _STEPS:
            try:
                await self._engine.move(key.queue, key.job_id, to, actor=_ACTOR, reason=_REASON, expected=was)
            except TransitionInvalid:
                if not await self._is_past(letter, to):
                    return False
            except UnknownJob:
                return await self._is_over(letter)
        return True

    async def _is_past(self, letter: DeadLetter, to: State) -> bool:
        """Whether the engine had heard of it already."""
        (view,) = await self._engine.get(letter.key.queue, [letter.key.job_id])
        if view is None:
            return await self._is_over(letter)
        if view.state is to or view.state in FINAL:
            return True
        _log.warning(
            "job %s has a dead letter %s, but is %s: the engine went on from an earlier point; waiting for its end",
            view.job_id,
            letter.dlq_id,
            view.state,
        )
        return False

    async def _is_over(self, letter: DeadLetter) -> bool:
        """The engine does not know the job: it has ended long ago, or is lost and will be restored as it was."""
        if await self._ledger.recovery.still_open([letter.key]):
            return False
        _log.info("job %s of dead letter %s is gone from the engine; it had ended", letter.key.job_id, letter.dlq_id)
        return True
