"""Open a queue's intake, for the first time or after its engine may have lost data.

With a ledger, a queue accepts jobs only while its feed has a reader that was attached in the current epoch. A wipe
removes the reader together with everything else; a restart or a fail-over begins a new epoch. The caller that notices
(a submission refused with `FeedDetached`, a projector whose feed has forked) calls `reopen_intake`: it restores the
idempotency keys that the ledger knows to the engine, then attaches the reader. A job that the ledger already had is
therefore still a duplicate.

No keys are restored if the feed still has the entry that the ledger read last: a job's key and its feed entry are
written in one step, and a replica gets all steps in order (decision 0019).

Any number of callers may do this at once, also in other processes: a key that is known is not changed. A ledger outage
must not stop intake: for a submission the queue is then opened without its keys, and a warning is logged. The wait for
the ledger's first answer is short (`LedgerProbe`); after that answer, all keys are waited for. Callers that need the
ledger anyway (projector, reconciler, replays) pass `insist`: nothing is opened without it, and they retry later.
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
from holdfast.engine.port.feed import FeedPort, FeedReadPort
from holdfast.errors import FeedDetached, InvalidOption, LedgerUnavailable, SchemaMismatch

if TYPE_CHECKING:
    from holdfast.ledger.port.ledger import FeedPosition, Ledger, ProjectionReadPort


_log: Final = logging.getLogger("holdfast.ledger")

T = TypeVar("T")

#: A ledger that does not answer within this time is unreachable …
_ANSWER_S: Final = 2.0
#: … and is not waited for again for this long.
_SILENT_S: Final = 5.0
#: A ledger that fails this often in a row is down.
_TRIES: Final = 3


class LedgerProbe:
    """Limits the wait for the ledger's first answer. Used on one event loop."""

    def __init__(self, answer_s: float = _ANSWER_S, silent_s: float = _SILENT_S) -> None:
        self._answer_s = answer_s
        self._silent_s = silent_s
        self._silent_until = 0.0
        self._in_flight: set[asyncio.Task[Any]] = set()

    async def call(self, query: Coroutine[Any, Any, T]) -> T:
        """Run the query.

        Raises `LedgerUnavailable` if it gets no answer in time, or if a recent query got none.
        """
        if time.monotonic() < self._silent_until:
            query.close()
            raise LedgerUnavailable("the ledger did not answer a moment ago")
        task = asyncio.create_task(query)
        # Not cancelled after the timeout: cancelling would also wait for the server.
        self._in_flight.add(task)
        task.add_done_callback(self._on_done)
        await asyncio.wait({task}, timeout=self._answer_s)
        if task.done():
            return task.result()
        self._silent_until = time.monotonic() + self._silent_s
        raise LedgerUnavailable(f"the ledger did not answer within {self._answer_s:g} s")

    async def close(self) -> None:
        """Cancel the queries in flight."""
        for task in (tasks := list(self._in_flight)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._in_flight.discard(task)
        if not task.cancelled():
            # Retrieved, or asyncio would log it.
            task.exception()


async def reopen_intake(
    engine: FeedPort, ledger: Ledger | None, queue: str, probe: LedgerProbe | None = None, *, insist: bool = False
) -> int:
    """Restore the queue's keys, then attach its reader; return the number of keys. Repeatable.

    With `insist`, raises the ledger's error and opens nothing. Without it, the queue is opened without its keys.
    """
    count = 0
    # Read first: if another epoch begins meanwhile, the reader is attached to the old one and intake stays closed.
    epoch = await engine.epoch(queue)
    if ledger is not None:
        try:
            count = await _restore_keys_with_retries(engine, ledger, queue, probe)
        except (LedgerUnavailable, SchemaMismatch, InvalidOption) as exc:
            if insist:
                raise
            # A ledger without tables or of another namespace counts as down; opening it reports that.
            _log.warning(
                "queue %s accepts jobs without the idempotency keys of the ledger, "
                "a repeated submission of an earlier job may be accepted: %s",
                queue,
                exc,
            )
    await engine.attach_reader(queue, epoch, keys_restored=count > 0)
    if count:
        _log.warning("engine lost data of queue %s; restored %d idempotency keys", queue, count)
    return count


class RecoveringSubmitter:
    """Submits jobs of the ledger one by one; reopens the queue's intake first where necessary."""

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


async def _restore_keys_with_retries(engine: FeedPort, ledger: Ledger, queue: str, probe: LedgerProbe | None) -> int:
    """Restore the keys, with retries: one broken connection does not mean that the ledger is down."""
    backoff = Backoff()
    while True:
        try:
            return await _restore_keys(engine, ledger, queue, probe)
        except LedgerUnavailable:
            raise_if_cancelled()
            if backoff.failures == _TRIES - 1:
                raise
            await asyncio.sleep(backoff.next_s())


async def _restore_keys(engine: FeedPort, ledger: Ledger, queue: str, probe: LedgerProbe | None) -> int:
    if ledger.projection is None:
        return 0
    queues = ledger.recovery.queues()
    # A queue that the ledger does not know has no keys; a search in a large ledger would delay its first job.
    if queue not in await (queues if probe is None else probe.call(queues)):
        return 0
    if await has_what_was_read(engine, ledger.projection, queue):
        return 0
    count = 0
    async for keys in ledger.recovery.submission_keys(queue, engine.options.idempotency_window_ms, MAX_BATCH):
        await engine.restore_keys(queue, keys)
        count += len(keys)
    return count


async def is_in_feed(engine: FeedReadPort, queue: str, position: FeedPosition) -> bool:
    """Whether the feed has this entry, with its nonce."""
    entries = await engine.read_feed(queue, position.position, 1)
    return bool(entries) and (entries[0].position, entries[0].nonce) == (position.position, position.nonce)


async def has_what_was_read(engine: FeedReadPort, projection: ProjectionReadPort, queue: str) -> bool:
    """Whether the engine has everything that the ledger has read.

    That is so if its feed has the entry that was read last.
    """
    position = await projection.position(queue)
    while position.position:
        if await is_in_feed(engine, queue, position):
            return True
        # Otherwise the entry may have been trimmed, because the ledger has read further.
        before, position = position, await projection.position(queue)
        if position == before:
            break
    return False
