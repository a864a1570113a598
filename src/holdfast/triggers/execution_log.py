"""Write rows of `queue_executions` in batches, in the background (L6).

A ledger outage does not stop messages. Rows are buffered up to a limit; further ones are dropped, counted, and logged
once. A record that is written twice is one row.
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

_log: Final = logging.getLogger("holdfast.triggers")

#: Rows buffered while the ledger is unreachable.
LIMIT: Final = 20_000
_BATCH: Final = 500
#: How long the first row of a batch waits for others.
_LINGER_S: Final = 0.02


class ExecutionLog:
    """Buffer of one trigger's rows. Use it in one event loop."""

    def __init__(self, book: TriggerStore, counts: TriggerCounters, *, limit: int = LIMIT) -> None:
        self._book = book
        self._counts = counts
        self._limit = limit
        self._waiting: deque[Execution] = deque()
        self._has_rows = asyncio.Event()
        self._closing = asyncio.Event()
        self._losing = False
        self._writing = asyncio.create_task(self._write(), name="holdfast-trigger-records")

    def put(self, execution: Execution) -> None:
        """Buffer a row. Never waits; drops it if the buffer is full."""
        if len(self._waiting) >= self._limit:
            self._counts.records_lost += 1
            if not self._losing:
                self._losing = True
                _log.warning(
                    "ledger unreachable, execution records beyond %d are dropped; messages are not affected",
                    self._limit,
                )
            return
        self._waiting.append(execution)
        self._has_rows.set()

    async def write(self, execution: Execution) -> None:
        """Write a row before returning, and not through the buffer. Raises `Unavailable`."""
        await self._record([execution])

    async def close(self, timeout_s: float) -> None:
        """Write the buffered rows within the timeout; log how many were not written."""
        self._closing.set()
        self._has_rows.set()
        await asyncio.wait({self._writing}, timeout=max(0.0, timeout_s))
        if not self._writing.done():
            self._writing.cancel()
            await asyncio.wait({self._writing})
            _log.warning("%d execution records not written: ledger unreachable", len(self._waiting))

    async def _write(self) -> None:
        backoff = Backoff()
        while self._waiting or not self._closing.is_set():
            await self._has_rows.wait()
            if len(self._waiting) < _BATCH:
                await self._linger(_LINGER_S)
            batch = [self._waiting[number] for number in range(min(_BATCH, len(self._waiting)))]
            if batch:
                try:
                    await self._record(batch)
                except Unavailable as exc:
                    _log.warning("cannot write %d execution records, retrying: %s", len(self._waiting), exc)
                    await asyncio.sleep(backoff.next_s())
                    continue
                backoff.reset()
                for _ in batch:
                    self._waiting.popleft()
                self._losing = False
            if not self._waiting:
                self._has_rows.clear()

    async def _linger(self, seconds: float) -> None:
        if not self._closing.is_set():
            try:
                async with asyncio.timeout(seconds):
                    await self._closing.wait()
            except TimeoutError:
                return

    async def _record(self, batch: list[Execution]) -> None:
        try:
            await self._book.record_executions(batch)
        except Unavailable:
            raise
        except Exception as exc:  # noqa: BLE001 - logged and counted, then the next one is written
            if len(batch) > 1:
                # One record is invalid: write each alone, so that the others are not lost.
                for one in batch:
                    await self._record([one])
                return
            self._counts.records_lost += 1
            _log.exception("execution record of message %s not written: %s", batch[0].message_id, type(exc).__name__)


def execution_id(*parts: str) -> str:
    """Deterministic id: the same for the same outcome of the same message."""
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return digest.hexdigest()[:32]
