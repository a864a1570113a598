"""Opens a queue's intake after its engine has lost its memory, may have lost some of it, or for the first time.

With a ledger, a queue takes jobs only while its feed has a reader that was registered in this very memory: a wipe takes
the registration away together with everything else, a restart or a replica that takes over is another incarnation.
Whoever finds out (a submission that is answered `FeedUnread`, a projector whose feed has forked) calls `admit`: the
idempotency keys that the ledger knows go back into the engine first, then the reader is registered. So a job that the
ledger had before is still a duplicate after it.

Nothing has to go back if the feed still has the entry that the ledger read last: a job's key and its feed entry are
written in one step, and a replica gets all steps in order (decision 0019).

Any number may do so at once, here or in other processes: a key that is known stays as it is. The ledger being down must
not stop intake: for a submission the queue is then opened without its keys, and the log says so. It does not wait for
long to find that out (`Patience`); but once the ledger has answered, all keys are waited for. Whoever cannot go on
without the ledger anyway (projector, reconciler, replays) opens nothing without it (`insist`), and tries again later.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Final, TypeVar

from holdfast.aio import raise_if_cancelled
from holdfast.core.job import MAX_BATCH, Envelope, Receipt
from holdfast.core.retry import Backoff
from holdfast.engine.port import Engine
from holdfast.errors import FeedDetached, InvalidOption, LedgerUnavailable, SchemaMismatch

if TYPE_CHECKING:
    from holdfast.ledger.port.ledger import Ledger, Projection


_log: Final = logging.getLogger("holdfast.admission")

T = TypeVar("T")

#: A ledger that has not answered by then does not answer …
_ANSWER_S: Final = 2.0
#: … and is not waited for again so soon.
_SILENT_S: Final = 5.0
#: A ledger that has failed so often in a row is down.
_TRIES: Final = 3


class LedgerProbe:
    """How long somebody waits for the ledger's first answer. One event loop."""

    def __init__(self, answer_s: float = _ANSWER_S, silent_s: float = _SILENT_S) -> None:
        self._answer_s = answer_s
        self._silent_s = silent_s
        self._silent_until = 0.0
        self._questions: set[asyncio.Task[Any]] = set()

    async def call(self, question: Coroutine[Any, Any, T]) -> T:
        """The answer. Raises `LedgerUnavailable` if there is none in time, or was none a moment ago."""
        if time.monotonic() < self._silent_until:
            question.close()
            raise LedgerUnavailable("the ledger did not answer a moment ago")
        asked = asyncio.create_task(question)
        # Not cancelled when it takes too long: that, too, would wait for the server.
        self._questions.add(asked)
        asked.add_done_callback(self._answered)
        await asyncio.wait({asked}, timeout=self._answer_s)
        if asked.done():
            return asked.result()
        self._silent_until = time.monotonic() + self._silent_s
        raise LedgerUnavailable(f"the ledger has not answered for {self._answer_s:g} s")

    async def close(self) -> None:
        """Nobody wants to know any longer."""
        for question in (questions := list(self._questions)):
            question.cancel()
        await asyncio.gather(*questions, return_exceptions=True)

    def _answered(self, asked: asyncio.Task[Any]) -> None:
        self._questions.discard(asked)
        if not asked.cancelled():
            # Looked at, so that asyncio does not complain.
            asked.exception()


async def reopen_intake(
    engine: Engine, ledger: Ledger | None, queue: str, patience: LedgerProbe | None = None, *, insist: bool = False
) -> int:
    """Refill the queue's keys, then register its reader; how many keys the ledger gave. Repeatable.

    With `insist` raises what the ledger raises, and nothing is opened; without, the queue is opened all the same.
    """
    count = 0
    # Before anything else: if another memory takes over meanwhile, what is registered is not the one that takes jobs.
    incarnation = await engine.epoch(queue)
    if ledger is not None:
        try:
            count = await _refill_in_earnest(engine, ledger, queue, patience)
        except (LedgerUnavailable, SchemaMismatch, InvalidOption) as exc:
            if insist:
                raise
            # Without its tables, or with somebody else's, it is as good as down: who opens it is told.
            _log.warning(
                "queue %s takes jobs again although the ledger cannot be asked for its idempotency keys; "
                "a second submission of a job from before may be accepted: %s",
                queue,
                exc,
            )
    await engine.attach_reader(queue, incarnation, reminded=count > 0)
    if count:
        _log.warning("the engine had lost its memory of queue %s; %d idempotency keys are known again", queue, count)
    return count


class RecoveringSubmitter:
    """Takes jobs of the ledger one by one, and opens the queue's intake before, where that is needed."""

    def __init__(self, engine: Engine, ledger: Ledger) -> None:
        self._engine = engine
        self._ledger = ledger

    async def submit(self, envelope: Envelope) -> Receipt:
        """Raises what the engine's `submit` raises, and `LedgerUnavailable`."""
        try:
            (receipt,) = await self._engine.submit([envelope])
        except FeedDetached as exc:
            await reopen_intake(self._engine, self._ledger, exc.queue, insist=True)
            (receipt,) = await self._engine.submit([envelope])
        return receipt


async def _refill_in_earnest(engine: Engine, ledger: Ledger, queue: str, patience: LedgerProbe | None) -> int:
    """Try again if it fails: one connection that breaks is no ledger that is down, and would cost all keys."""
    backoff = Backoff()
    while True:
        try:
            return await _refill(engine, ledger, queue, patience)
        except LedgerUnavailable:
            raise_if_cancelled()
            if backoff.failures == _TRIES - 1:
                raise
            await asyncio.sleep(backoff.next_s())


async def _refill(engine: Engine, ledger: Ledger, queue: str, patience: LedgerProbe | None) -> int:
    if ledger.projection is None:
        return 0
    question = ledger.recovery.queues()
    # A queue that the ledger has never heard of has no keys; a search in a large ledger would delay its first job.
    if queue not in await (question if patience is None else patience.call(question)):
        return 0
    if await _has_read(engine, ledger.projection, queue):
        return 0
    count = 0
    async for keys in ledger.recovery.submission_keys(queue, engine.options.idempotency_window_ms, MAX_BATCH):
        await engine.restore_keys(queue, keys)
        count += len(keys)
    return count


async def _has_read(engine: Engine, projection: Projection, queue: str) -> bool:
    """Whether the engine has all that the ledger has read: its feed has the entry that was read last."""
    position = await projection.position(queue)
    while position.position:
        entries = await engine.read_feed(queue, position.position, 1)
        if entries and (entries[0].position, entries[0].nonce) == (position.position, position.nonce):
            return True
        # Or it was trimmed, because the ledger has read on.
        before, position = position, await projection.position(queue)
        if position == before:
            break
    return False
