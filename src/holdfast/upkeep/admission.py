"""Opens a queue's intake after its engine has lost its memory, or for the first time.

With a ledger, a queue takes jobs only while its feed has a registered reader; a wipe takes that away together with
everything else. Whoever finds it gone (a submission that is answered `FeedUnread`, a projector whose feed has forked)
calls `admit`: the idempotency keys that the ledger knows go back into the engine first, then the reader is registered.
So a job that was submitted before the wipe is still a duplicate after it.

Any number may do so at once, here or in other processes: a key that is known stays as it is. The ledger being down must
not stop intake: then the queue is opened without its keys, and the log says so.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from holdfast.engine.port import MAX_BATCH, Engine
from holdfast.errors import LedgerUnavailable

if TYPE_CHECKING:
    from holdfast.ledger.port import Ledger

_log: Final = logging.getLogger("holdfast.admission")


async def admit(engine: Engine, ledger: Ledger | None, queue: str) -> int:
    """Refill the queue's keys, then register its reader; how many keys the ledger gave. Repeatable."""
    count = 0
    if ledger is not None:
        try:
            count = await _refill(engine, ledger, queue)
        except LedgerUnavailable as exc:
            _log.warning(
                "queue %s takes jobs again although the ledger cannot be asked for its idempotency keys; "
                "a second submission of a job from before may be accepted: %s",
                queue,
                exc,
            )
    await engine.register_reader(queue)
    if count:
        _log.warning("the engine had lost its memory of queue %s; %d idempotency keys are known again", queue, count)
    return count


async def _refill(engine: Engine, ledger: Ledger, queue: str) -> int:
    # A queue that the ledger has never heard of has no keys; a search in a large ledger would delay its first job.
    if ledger.projection is None or queue not in await ledger.recovery.queues():
        return 0
    count = 0
    async for keys in ledger.recovery.submission_keys(queue, engine.options.idempotency_window_ms, MAX_BATCH):
        await engine.remember_keys(queue, keys)
        count += len(keys)
    return count
