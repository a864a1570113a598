"""Finds in the ledger what others are to be told by webhook, and hands in a delivery for each (requirement H7).

A delivery is a job like any other: it waits, is retried, and ends in the dead letters if nobody takes it. Its
idempotency key is the delivery's id, and the ledger's row is marked after that, once the ledger has the delivery, too:
an engine that is wiped loses none. So a courier that dies in between hands the same delivery in again, which is a
duplicate; and any number of couriers may work side by side.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, Final, TypeVar

from holdfast.core.job import EMPTY_META, Envelope, Meta, Receipt, new_job_ids
from holdfast.engine.port import MAX_BATCH, Engine
from holdfast.errors import FeedUnread, LedgerUnavailable
from holdfast.ledger.keys import JobKey
from holdfast.settings import Settings
from holdfast.upkeep.admission import Patience, admit
from holdfast.upkeep.loop import forever
from holdfast.webhooks.messages import QUEUE, TASK, Delivery, Subscribers, of_alert, of_approval, of_job
from holdfast.webhooks.seal import sealed

if TYPE_CHECKING:
    from holdfast.ledger.port import Ledger

_log: Final = logging.getLogger("holdfast.webhooks")

#: How soon news is looked for when there was none, and rows of one look.
_PAUSE_S: Final = 1.0
_LIMIT: Final = 200
#: How long to wait until deliveries are in the ledger.
_PATIENCE_MS: Final = 2_000

Row = TypeVar("Row")


class Courier:
    """Looks and hands in until cancelled. Engine and ledger are the caller's."""

    def __init__(self, engine: Engine, ledger: Ledger, settings: Settings, random: Random | None = None) -> None:
        self._engine = engine
        self._ledger = ledger
        self._settings = settings
        self._subscribers = Subscribers(settings.webhooks)
        self._patience = Patience()
        self._random = random or Random()

    async def run(self) -> None:
        """Look, again and again."""
        try:
            await forever("courier", self._turn)
        finally:
            await self._patience.close()

    async def turn(self) -> int:
        """One look at everything; how many rows were told of."""
        telling = self._ledger.telling
        told = await self._tell(telling.jobs, of_job, lambda rows: telling.mark.jobs([row.key for row in rows]))
        if self._subscribers.any_for("approval"):
            told += await self._tell(telling.approvals, of_approval, telling.mark.approvals)
        if self._subscribers.any_for("alert"):
            told += await self._tell(telling.alerts, of_alert, telling.mark.alerts)
        return told

    async def _turn(self) -> float:
        try:
            told = await self.turn()
        except LedgerUnavailable as exc:
            _log.warning("nobody is told anything, the ledger does not answer: %s", exc)
            told = 0
        # Jitter: couriers side by side should not all look at the same moment.
        return 0.0 if told >= _LIMIT else _PAUSE_S * self._random.uniform(0.8, 1.2)

    async def _tell(
        self,
        look: Callable[[int], Awaitable[list[Row]]],
        deliveries_of: Callable[[Row, Subscribers], Iterable[Delivery]],
        mark: Callable[[Sequence[Row]], Awaitable[Any]],
    ) -> int:
        rows = await look(_LIMIT)
        if rows:
            deliveries = [delivery for row in rows for delivery in deliveries_of(row, self._subscribers)]
            if not await self._remembered(await self._hand_in(deliveries)):
                return 0
            # Only now: what is marked is never looked at again.
            await mark(rows)
        return len(rows)

    async def _hand_in(self, deliveries: Sequence[Delivery]) -> list[JobKey]:
        """The jobs that deliver them, new or known."""
        ids = new_job_ids(len(deliveries))
        envelopes = [self._envelope(job_id, delivery) for job_id, delivery in zip(ids, deliveries, strict=True)]
        keys: list[JobKey] = []
        for start in range(0, len(envelopes), MAX_BATCH):
            batch = envelopes[start : start + MAX_BATCH]
            receipts = await self._submit(batch)
            keys += [JobKey(each.tenant_id, QUEUE, got.job_id) for each, got in zip(batch, receipts, strict=True)]
        return keys

    async def _submit(self, envelopes: Sequence[Envelope]) -> list[Receipt]:
        try:
            return await self._engine.submit(envelopes)
        except FeedUnread as exc:
            # The first delivery ever, or the first after a wipe.
            await admit(self._engine, self._ledger, exc.queue, self._patience, insist=True)
            return await self._engine.submit(envelopes)

    async def _remembered(self, keys: Sequence[JobKey]) -> bool:
        """Whether the ledger has all of these jobs; if not, they are handed in again at the next look."""
        projection = self._ledger.projection
        if projection is None or not keys:
            return True
        return await projection.wait_present(keys, _PATIENCE_MS) >= set(keys)

    def _envelope(self, job_id: str, delivery: Delivery) -> Envelope:
        return Envelope(
            job_id=job_id,
            task=TASK,
            payload=sealed(self._settings, delivery),
            queue=QUEUE,
            tenant_id=delivery.tenant_id,
            idempotency_key=delivery.webhook_id,
            trace_id=delivery.trace_id,
            # Its attempts are spans in the trace of the job that it is about.
            meta=Meta(traceparent=delivery.traceparent) if delivery.traceparent else EMPTY_META,
            durable=True,
        )
