"""Finish what an interrupted process left: approval decisions, replays, webhook notifications.

Any number of processes may run each of these at once, and alongside the processes where operators act.

- `ApprovalDelivery` passes decisions to the engine where the voting process could not, and expires approval requests
  past their deadline. The engine moves a job once.
- `ReplaySubmission` finishes replays that a crash left between their mark in the ledger and the engine. The engine
  recognises a job that it has.
- `WebhookDispatcher` finds in the ledger what subscribers are to be notified of, and submits a delivery for each
  (requirement H7). A delivery is a job: it waits, is retried, and is dead-lettered if the receiver does not accept it.
  Its idempotency key is the delivery's id. The ledger's row is marked only after the ledger has the delivery as well: a
  wiped engine loses none, and what a dispatcher submits again after a crash is recognised as a duplicate.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from random import Random
from typing import Any, Final, TypeVar

from holdfast.core.job import EMPTY_META, MAX_BATCH, Envelope, JobKey, KeyReuse, Meta, Receipt, new_job_ids
from holdfast.engine.port import Engine
from holdfast.engine.port.jobs import JobRefused
from holdfast.errors import FeedDetached, LedgerUnavailable
from holdfast.ledger.port.ledger import Ledger
from holdfast.ledger.reopen_intake import LedgerProbe, RecoveringSubmitter, reopen_intake
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
#: Pause between checks for undelivered decisions and expired approval requests.
_APPROVAL_PAUSE_S: Final = 1.0


class ApprovalDelivery:
    """Delivers decisions and expires approval requests until cancelled."""

    def __init__(self, engine: Engine, ledger: Ledger, random: Random | None = None) -> None:
        self._approvals = ApprovalOperations(engine, ledger)
        self._failure_log = LogThrottle(_log)
        self._random = random or Random()

    async def run(self) -> None:
        """Repeat `run_once` until cancelled."""
        await run_forever("approval delivery", self.run_once)

    async def run_once(self) -> float:
        """Handle everything that is due; returns the seconds to pause."""
        try:
            while await self._approvals.expire(_BATCH) == _BATCH:
                pass
            await self._approvals.deliver_pending(_BATCH)
        except LedgerUnavailable as exc:
            self._failure_log.log(logging.WARNING, "ledger unreachable, approvals are delayed: %s", exc)
        else:
            self._failure_log.reset()
        return _APPROVAL_PAUSE_S * self._random.uniform(1.0, 1.2)


_REPLAY_PAUSE_S: Final = 5.0


class ReplaySubmission:
    """Finishes interrupted replays until cancelled."""

    def __init__(self, engine: Engine, ledger: Ledger, random: Random | None = None) -> None:
        self._dead_letters = DeadLetterOperations(engine, ledger, RecoveringSubmitter(engine, ledger))
        self._random = random or Random()

    async def run(self) -> None:
        """Repeat `run_once` until cancelled."""
        await run_forever("replays", self.run_once)

    async def run_once(self) -> float:
        """Finish all interrupted replays; returns the seconds to pause."""
        try:
            count = await self._dead_letters.submit_pending(_BATCH)
        except LedgerUnavailable as exc:
            _log.info("ledger unreachable, interrupted replays are delayed: %s", exc)
            count = 0
        if count:
            _log.warning("finished %d interrupted replays of dead letters", count)
        return _REPLAY_PAUSE_S * self._random.uniform(0.8, 1.2)


_webhooks_log: Final = logging.getLogger("holdfast.webhooks")

#: Pause between passes when there is nothing left to send, and rows read at a time.
_DISPATCH_PAUSE_S: Final = 1.0
_LIMIT: Final = 200
#: How long to wait for the ledger to record deliveries.
_RECORD_TIMEOUT_MS: Final = 2_000

Row = TypeVar("Row")


class WebhookDispatcher:
    """Submits webhook deliveries until cancelled. The caller owns engine and ledger."""

    def __init__(self, engine: Engine, ledger: Ledger, settings: Settings, random: Random | None = None) -> None:
        self._engine = engine
        self._ledger = ledger
        self._settings = settings
        self._subscribers = Subscribers(settings.webhooks)
        self._probe = LedgerProbe()
        self._random = random or Random()

    async def run(self) -> None:
        """Dispatch repeatedly until cancelled."""
        try:
            await run_forever("webhook dispatcher", self._run_pass)
        finally:
            await self._probe.close()

    async def run_once(self) -> int:
        """Submit the deliveries of pending notifications, at least a page of each kind; returns the rows handled."""
        notifications = self._ledger.notifications
        count = await self._notify(
            notifications.finished_jobs, job_deliveries, lambda rows: notifications.mark.jobs([row.key for row in rows])
        )
        if self._subscribers.any_for("approval"):
            count += await self._notify(notifications.approvals, approval_deliveries, notifications.mark.approvals)
        if self._subscribers.any_for("alert"):
            count += await self._notify(notifications.alerts, alert_deliveries, notifications.mark.alerts)
        return count

    async def _run_pass(self) -> float:
        try:
            count = await self.run_once()
        except LedgerUnavailable as exc:
            _webhooks_log.warning("ledger unreachable, webhooks are delayed: %s", exc)
            count = 0
        # Jitter: dispatchers of several processes should not all query at the same moment.
        return 0.0 if count >= _LIMIT else _DISPATCH_PAUSE_S * self._random.uniform(0.8, 1.2)

    async def _notify(
        self,
        find: Callable[[int, Collection[str]], Awaitable[list[Row]]],
        deliveries_of: Callable[[Row, Subscribers], Iterable[WebhookDelivery]],
        mark: Callable[[Sequence[Row]], Awaitable[Any]],
    ) -> int:
        """Submit the deliveries of a page of rows, and of further pages while rows of limited tenants fill one.

        Returns the number of rows whose deliveries are submitted and recorded.
        """
        count, limited = 0, set[str]()
        while True:
            rows = await find(_LIMIT, limited)
            of_rows = [list(deliveries_of(row, self._subscribers)) for row in rows]
            keys = await self._submit_all([each for of_row in of_rows for each in of_row])
            # One over an intake limit has no key: a later pass submits it again.
            over = {each.tenant_id for of_row in of_rows for each in of_row if each.webhook_id not in keys}
            accepted = [
                row
                for row, of_row in zip(rows, of_rows, strict=True)
                if all(each.webhook_id in keys for each in of_row)
            ]
            if accepted and await self._is_recorded(list(keys.values())):
                # Only now: a marked row is never read again.
                await mark(accepted)
                count += len(accepted)
            if len(rows) < _LIMIT or over <= limited:
                return count
            limited |= over

    async def _submit_all(self, deliveries: Sequence[WebhookDelivery]) -> dict[str, JobKey]:
        """Submit the deliveries; returns by their ids the jobs, new or known, of those within intake limits."""
        ids = new_job_ids(len(deliveries))
        envelopes = [self._envelope(job_id, delivery) for job_id, delivery in zip(ids, deliveries, strict=True)]
        keys: dict[str, JobKey] = {}
        for start in range(0, len(envelopes), MAX_BATCH):
            batch = envelopes[start : start + MAX_BATCH]
            for each, got in zip(batch, await self._submit(batch), strict=True):
                if isinstance(got, Receipt):
                    keys[each.idempotency_key] = JobKey(each.tenant_id, QUEUE, got.job_id)
        return keys

    async def _submit(self, envelopes: Sequence[Envelope]) -> list[Receipt | JobRefused]:
        try:
            return await self._engine.submit_each(envelopes)
        except FeedDetached as exc:
            # The first delivery ever, or the first after a wipe.
            await reopen_intake(self._engine, self._ledger, exc.queue, self._probe, insist=True)
            return await self._engine.submit_each(envelopes)

    async def _is_recorded(self, keys: Sequence[JobKey]) -> bool:
        """Whether the ledger has all of these jobs; if not, the next pass submits them again."""
        projection = self._ledger.projection
        if projection is None or not keys:
            return True
        return await projection.wait_recorded(keys, _RECORD_TIMEOUT_MS) >= set(keys)

    def _envelope(self, job_id: str, delivery: WebhookDelivery) -> Envelope:
        return Envelope(
            job_id=job_id,
            task=TASK,
            payload=sign_payload(self._settings, delivery),
            queue=QUEUE,
            tenant_id=delivery.tenant_id,
            idempotency_key=delivery.webhook_id,
            trace_id=delivery.trace_id,
            # The delivery's attempts are spans in the trace of the job it notifies about.
            meta=Meta(traceparent=delivery.traceparent) if delivery.traceparent else EMPTY_META,
            durable=True,
            on_key_reuse=KeyReuse.RETURN,
        )
