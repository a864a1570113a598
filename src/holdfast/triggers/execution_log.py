"""Rows of `queue_executions`, written in batches beside the work (requirement L6).

The ledger being down stops no message. Rows are kept meanwhile, up to a limit; what is dropped then is counted, and
told once. A record that is written twice is one row.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import deque
from typing import Final

from holdfast.core.retry import Backoff
from holdfast.errors import Unavailable
from holdfast.ledger.port.messages import Execution, TriggerStore
from holdfast.triggers.state import TriggerCounters

_log: Final = logging.getLogger("holdfast.trigger")

#: Rows that are kept while the ledger is away.
LIMIT: Final = 20_000
_BATCH: Final = 500
#: How long the first row of a batch waits for others.
_LINGER_S: Final = 0.02


class ExecutionLog:
    """One trigger's rows on their way to the ledger. One event loop."""

    def __init__(self, book: TriggerStore, counts: TriggerCounters, *, limit: int = LIMIT) -> None:
        self._book = book
        self._counts = counts
        self._limit = limit
        self._waiting: deque[Execution] = deque()
        self._there = asyncio.Event()
        self._hurry = asyncio.Event()
        self._losing = False
        self._writing = asyncio.create_task(self._write(), name="holdfast-trigger-records")

    def put(self, execution: Execution) -> None:
        """Never waits."""
        if len(self._waiting) >= self._limit:
            self._counts.records_lost += 1
            if not self._losing:
                self._losing = True
                _log.warning(
                    "the ledger has been away for so long that records of messages are dropped from now on "
                    "(%d are kept); the messages themselves are safe",
                    self._limit,
                )
            return
        self._waiting.append(execution)
        self._there.set()

    async def close(self, patience_s: float) -> None:
        """Write what is there, for so long at most; says how much was left."""
        self._hurry.set()
        self._there.set()
        await asyncio.wait({self._writing}, timeout=max(0.0, patience_s))
        if not self._writing.done():
            self._writing.cancel()
            await asyncio.wait({self._writing})
            _log.warning("%d records of messages were not written: the ledger is away", len(self._waiting))

    async def _write(self) -> None:
        backoff = Backoff()
        while self._waiting or not self._hurry.is_set():
            await self._there.wait()
            if len(self._waiting) < _BATCH:
                await self._linger(_LINGER_S)
            batch = [self._waiting[number] for number in range(min(_BATCH, len(self._waiting)))]
            if batch:
                try:
                    await self._record(batch)
                except Unavailable as exc:
                    _log.warning("%d records of messages wait for the ledger: %s", len(self._waiting), exc)
                    await asyncio.sleep(backoff.next_s())
                    continue
                backoff.reset()
                for _ in batch:
                    self._waiting.popleft()
                self._losing = False
            if not self._waiting:
                self._there.clear()

    async def _linger(self, seconds: float) -> None:
        if not self._hurry.is_set():
            try:
                async with asyncio.timeout(seconds):
                    await self._hurry.wait()
            except TimeoutError:
                return

    async def _record(self, batch: list[Execution]) -> None:
        try:
            await self._book.record_executions(batch)
        except Unavailable:
            raise
        except Exception as exc:  # noqa: BLE001 - told, counted, and the next one is written
            if len(batch) > 1:
                # One of them is to blame: the others are written all the same.
                for one in batch:
                    await self._record([one])
                return
            self._counts.records_lost += 1
            _log.exception("a record of message %s cannot be written: %s", batch[0].message_id, type(exc).__name__)


def execution_id(*parts: str) -> str:
    """The same for the same outcome of the same message."""
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return digest.hexdigest()[:32]
