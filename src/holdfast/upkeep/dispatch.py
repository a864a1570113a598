"""Finish what an interrupted process left: approval decisions, replays, webhook notifications.

Any number of processes may run each of these at once, and alongside the processes where operators act.

- `ApprovalDelivery` passes decisions to the engine where the voting process could not, and expires approval requests
  past their deadline. The engine moves a job once.
- `ReplaySubmission` finishes replays that a crash left between their mark in the ledger and the engine. The engine
  recognises a job that it has.
- `WebhookDispatcher` finds in the ledger what subscribers are to be notified of, and submits a delivery for each
  (requirement H7). A delivery is a job: it waits, is retried, and is dead-lettered if the receiver does not accept it.
  Its idempotency key is the delivery's id. The ledger's row is marked only after the ledger has the delivery as well,
  so an engine that is wiped loses none, and a dispatcher that crashes in between submits a duplicate.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from random import Random
from typing import Any, Final, TypeVar

from holdfast.core.job import EMPTY_META, MAX_BATCH, Envelope, JobKey, Meta, Receipt, new_job_ids
from holdfast.engine.port import Engine
from holdfast.errors import FeedDetached, LedgerUnavailable
from holdfast.ledger.intake_recovery import LedgerProbe, RecoveringSubmitter, reopen_intake
from holdfast.ledger.port.ledger import Ledger
from holdfast.operations.approvals import ApprovalOperations
from holdfast.operations.dead_letters import DeadLetterOperations
from holdfast.settings import Settings
from holdfast.upkeep.loop import LogThrottle, run_forever
from holdfast.webhooks.deliveries import (
    QUEUE,
    TASK,
    Subscribers,
    WebhookDelivery,
    alert_deliveries,
    approval_deliveries,
    job_deliveries,
    sign_payload,
)

_log: Final = logging.getLogger("holdfast.upkeep")

_BATCH: Final = 100
#: How late an answer may be that its own process could not carry on, and a deadline.
_LOOK_S: Final = 1.0


class ApprovalDelivery:
    """Looks for them until cancelled."""

    def __init__(self, engine: Engine, ledger: Ledger, random: Random | None = None) -> None:
        self._approvals = ApprovalOperations(engine, ledger)
        self._complaint = LogThrottle(_log)
        self._random = random or Random()

    async def run(self) -> None:
        """Carry on, again and again."""
        await run_forever("registrar", self.run_once)

    async def run_once(self) -> float:
        """Everything that is due; how long to pause."""
        try:
            while await self._approvals.expire(_BATCH) == _BATCH:
                pass
            await self._approvals.deliver_pending(_BATCH)
        except LedgerUnavailable as exc:
            self._complaint.log(logging.WARNING, "approvals wait, the ledger does not answer: %s", exc)
        else:
            self._complaint.reset()
        return _LOOK_S * self._random.uniform(1.0, 1.2)


_REPLAY_PAUSE_S: Final = 5.0


class ReplaySubmission:
    """Looks for them until cancelled."""

    def __init__(self, engine: Engine, ledger: Ledger, random: Random | None = None) -> None:
        self._letters = DeadLetterOperations(engine, ledger, RecoveringSubmitter(engine, ledger))
        self._random = random or Random()

    async def run(self) -> None:
        """Finish what is found, again and again."""
        await run_forever("replays", self.run_once)

    async def run_once(self) -> float:
        """All that is found; how long to pause."""
        try:
            count = await self._letters.submit_pending(_BATCH)
        except LedgerUnavailable as exc:
            _log.info("no replay could be finished, the ledger does not answer: %s", exc)
            count = 0
        if count:
            _log.warning("finished %d replays of dead letters that were left half-way", count)
        return _REPLAY_PAUSE_S * self._random.uniform(0.8, 1.2)


_webhooks_log: Final = logging.getLogger("holdfast.webhooks")

#: How soon news is looked for when there was none, and rows of one look.
_DISPATCH_PAUSE_S: Final = 1.0
_LIMIT: Final = 200
#: How long to wait until deliveries are in the ledger.
_PATIENCE_MS: Final = 2_000

Row = TypeVar("Row")


class WebhookDispatcher:
    """Looks and hands in until cancelled. Engine and ledger are the caller's."""

    def __init__(self, engine: Engine, ledger: Ledger, settings: Settings, random: Random | None = None) -> None:
        self._engine = engine
        self._ledger = ledger
        self._settings = settings
        self._subscribers = Subscribers(settings.webhooks)
        self._patience = LedgerProbe()
        self._random = random or Random()

    async def run(self) -> None:
        """Look, again and again."""
        try:
            await run_forever("courier", self._turn)
        finally:
            await self._patience.close()

    async def run_once(self) -> int:
        """One look at everything; how many rows were told of."""
        telling = self._ledger.notifications
        told = await self._tell(
            telling.finished_jobs, job_deliveries, lambda rows: telling.mark.jobs([row.key for row in rows])
        )
        if self._subscribers.any_for("approval"):
            told += await self._tell(telling.approvals, approval_deliveries, telling.mark.approvals)
        if self._subscribers.any_for("alert"):
            told += await self._tell(telling.alerts, alert_deliveries, telling.mark.alerts)
        return told

    async def _turn(self) -> float:
        try:
            told = await self.run_once()
        except LedgerUnavailable as exc:
            _webhooks_log.warning("nobody is told anything, the ledger does not answer: %s", exc)
            told = 0
        # Jitter: couriers side by side should not all look at the same moment.
        return 0.0 if told >= _LIMIT else _DISPATCH_PAUSE_S * self._random.uniform(0.8, 1.2)

    async def _tell(
        self,
        look: Callable[[int], Awaitable[list[Row]]],
        deliveries_of: Callable[[Row, Subscribers], Iterable[WebhookDelivery]],
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

    async def _hand_in(self, deliveries: Sequence[WebhookDelivery]) -> list[JobKey]:
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
        except FeedDetached as exc:
            # The first delivery ever, or the first after a wipe.
            await reopen_intake(self._engine, self._ledger, exc.queue, self._patience, insist=True)
            return await self._engine.submit(envelopes)

    async def _remembered(self, keys: Sequence[JobKey]) -> bool:
        """Whether the ledger has all of these jobs; if not, they are handed in again at the next look."""
        projection = self._ledger.projection
        if projection is None or not keys:
            return True
        return await projection.wait_recorded(keys, _PATIENCE_MS) >= set(keys)

    def _envelope(self, job_id: str, delivery: WebhookDelivery) -> Envelope:
        return Envelope(
            job_id=job_id,
            task=TASK,
            payload=sign_payload(self._settings, delivery),
            queue=QUEUE,
            tenant_id=delivery.tenant_id,
            idempotency_key=delivery.webhook_id,
            trace_id=delivery.trace_id,
            # Its attempts are spans in the trace of the job that it is about.
            meta=Meta(traceparent=delivery.traceparent) if delivery.traceparent else EMPTY_META,
            durable=True,
        )
