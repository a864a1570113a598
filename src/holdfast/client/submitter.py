"""Submission of jobs, coalesced into shared engine calls per event loop.

`BatchingSubmitter`: callers that submit at the same moment share a call, so that a hundred concurrent submissions cost
about as much as a batch of a hundred. Each call is judged on its own, in the order of arrival: limits and reused keys
refuse only the callers concerned. A single caller waits for one iteration of the loop and one round trip. Each
queue has separate calls: a queue that refuses intake refuses only its own callers. The number of calls in flight is
limited per server, so that a server which does not reply delays only its own queues.

A durable submission returns once the ledger has the job. Submissions that shared a call wait together, and the next
calls are sent meanwhile. If the engine has lost its data (`FeedDetached`), its idempotency keys are restored from the
ledger before the call is repeated; all callers wait for the same restore.

`TracedSubmitter` wraps another submitter: a span for each call, and its trace context on every job.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from holdfast.core.job import MAX_BATCH, Envelope, JobInfo, JobKey, Receipt
from holdfast.core.retry import Backoff
from holdfast.core.states import FINAL, State
from holdfast.engine.port import Engine
from holdfast.errors import EngineUnavailable, FeedDetached, FeedFull, InvalidOption, LedgerUnavailable, NotDurableYet
from holdfast.guard.runner import GuardRunner
from holdfast.ledger.reopen_intake import LedgerProbe, reopen_intake
from holdfast.observe.tracing import Tracer
from holdfast.operations.jobs import read_from_ledger
from holdfast.webhooks.deliveries import WebhookPolicy

if TYPE_CHECKING:
    from holdfast.ledger.port.ledger import Ledger, ProjectionReadPort


_log: Final = logging.getLogger("holdfast.client")

T = TypeVar("T")

#: Concurrent shared calls per server: the next batch forms while they run.
_MAX_CALLS: Final = 2
#: Concurrent calls of `submit_many`, whose batches are already full.
_MAX_BULK_CALLS: Final = 4

#: Most restores of idempotency keys for one call, in case the store is wiped repeatedly.
_MAX_RESTORES: Final = 5
_DURABLE_TIMEOUT_S: Final = 30.0
#: Interval at which a job that only the ledger has is read again while a caller waits for its end.
_LOOKUP_INTERVAL_S: Final = 0.5

_Waiting = tuple[Envelope, "asyncio.Future[Receipt]"]


class Submitter(Protocol):
    """Submission and lookup of jobs; inline mode has its own implementation."""

    async def submit(self, envelope: Envelope) -> Receipt: ...
    async def submit_many(self, envelopes: Iterable[Envelope]) -> list[Receipt]: ...
    async def get(self, queue: str, job_id: str) -> JobInfo | None:
        """Return the job as the engine has it, or as the ledger does; None if neither knows it.

        Raises `LedgerUnavailable` if the engine does not know it and the ledger does not answer.
        """
        ...

    async def wait_final(self, queue: str, job_id: str, wait_ms: int) -> JobInfo | None:
        """Return the job once it has ended, or as it is after at most `wait_ms`; otherwise like `get`."""
        ...

    async def cancel(self, queue: str, job_id: str, actor: str, reason: str) -> None: ...


class BatchingSubmitter(Submitter):
    """Batched submission to an engine. Runs on one event loop."""

    def __init__(
        self,
        engine: Engine,
        ledger: Ledger | None = None,
        *,
        durable_timeout_s: float = _DURABLE_TIMEOUT_S,
        guards: GuardRunner | None = None,
        webhook_policy: WebhookPolicy | None = None,
    ) -> None:
        """`guards` reviews every job before it is sent; `webhook_policy` checks and sets its webhook."""
        self._webhooks = webhook_policy
        self._engine = engine
        self._guards = guards
        self._ledger = ledger
        self._durable_timeout_s = durable_timeout_s
        #: Called with every durable submission that the engine has accepted and that waits for the ledger.
        self.on_accepted: Callable[[Receipt], None] = lambda _: None
        #: Running restores of idempotency keys, by queue.
        self._restores: dict[str, asyncio.Task[int]] = {}
        self._ledger_probe = LedgerProbe()
        self._waits: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[str, deque[_Waiting]] = {}
        self._calls: set[asyncio.Task[None]] = set()
        #: Number of shared calls in flight, by server.
        self._busy: dict[object, int] = {}
        self._bulk_calls: set[asyncio.Task[list[Receipt]]] = set()
        self._scheduled = False

    async def close(self) -> None:
        """Cancel waiting callers; submissions being sent may be accepted all the same."""
        for pending in self._waiting.values():
            for _, future in pending:
                future.cancel()
        self._waiting.clear()
        tasks = [*self._calls, *self._bulk_calls, *self._waits, *self._restores.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._ledger_probe.close()

    async def submit(self, envelope: Envelope) -> Receipt:
        """Submit one job; when this returns, it is accepted, and a durable job is in the ledger as well.

        Raises `NotDurableYet` if a durable job is accepted, but not in the ledger yet. The job is sent even if the
        caller is cancelled meanwhile.
        """
        if envelope.durable:
            self._check_durable()
        webhooks = self._webhooks
        if webhooks is not None and (webhooks.has_subscribers or envelope.meta.webhook):
            envelope = webhooks.apply(envelope)
        if self._guards is not None and self._guards.applies_to(envelope):
            envelope = await self._guards.review(envelope)
        future: asyncio.Future[Receipt] = self._loop.create_future()
        pending = self._waiting.get(envelope.queue)
        if pending is None:
            pending = self._waiting[envelope.queue] = deque()
            self._call_soon()
        # Otherwise a call is scheduled already, or the server has its limit.
        pending.append((envelope, future))
        return await future

    async def submit_many(self, envelopes: Iterable[Envelope]) -> list[Receipt]:
        """Submit in concurrent batches, each accepted whole or not at all.

        If one fails, its error is raised; the others may be accepted. Guards review all jobs first: if one is denied,
        none is accepted.
        """
        if self._webhooks is not None:
            envelopes = map(self._webhooks.apply, envelopes)
        if self._guards is not None:
            envelopes = await self._guards.review_all(envelopes)
        source, receipts = iter(envelopes), list[Receipt]()
        calls: deque[asyncio.Task[list[Receipt]]] = deque()
        try:
            while batch := list(islice(source, MAX_BATCH)):
                call = self._loop.create_task(self._call_durably(batch))
                calls.append(call)
                self._bulk_calls.add(call)
                call.add_done_callback(self._bulk_calls.discard)
                while len(calls) >= _MAX_BULK_CALLS:
                    receipts += await calls.popleft()
                # Batches are built on this loop: let the calls and other work run.
                await asyncio.sleep(0)
            while calls:
                receipts += await calls.popleft()
        finally:
            await asyncio.gather(*calls, return_exceptions=True)
        return receipts

    async def get(self, queue: str, job_id: str) -> JobInfo | None:
        (view,) = await self._engine.get(queue, [job_id])
        return view or await self._find_in_ledger(queue, job_id, until_final=False)

    async def wait_final(self, queue: str, job_id: str, wait_ms: int) -> JobInfo | None:
        view = await self._engine.wait_final(queue, job_id, wait_ms)
        if (
            view is None
            and (view := await self._find_in_ledger(queue, job_id, until_final=True))
            and view.state not in FINAL
        ):
            # The engine has lost it; it is restored from the ledger, or the ledger is about to learn its end.
            await asyncio.sleep(min(_LOOKUP_INTERVAL_S, wait_ms / 1000))
        return view

    async def _find_in_ledger(self, queue: str, job_id: str, *, until_final: bool) -> JobInfo | None:
        """A job that the engine does not know: its record has expired, or the engine has lost its data."""
        if self._ledger is None:
            return None
        return await read_from_ledger(self._ledger, queue, job_id, until_final=until_final)

    async def cancel(self, queue: str, job_id: str, actor: str, reason: str) -> None:
        await self._engine.move(queue, job_id, State.CANCELLED, actor=actor, reason=reason)

    def _call_soon(self) -> None:
        """Schedule a call; submissions that arrive before it runs are included."""
        if self._waiting and not self._scheduled and self._next_queue() is not None:
            self._scheduled = True
            call = self._loop.create_task(self._send_next())
            self._calls.add(call)
            call.add_done_callback(self._on_sent)

    def _on_sent(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        self._call_soon()

    def _next_queue(self) -> str | None:
        """The first waiting queue whose server can get another call."""
        if len(self._calls) < _MAX_CALLS:
            return next(iter(self._waiting), None)
        server_of, busy = self._engine.server_of, self._busy
        return next((queue for queue in self._waiting if busy.get(server_of(queue), 0) < _MAX_CALLS), None)

    async def _send_next(self) -> None:
        self._scheduled = False
        queue = self._next_queue()
        if queue is None:
            return
        pending = self._waiting[queue]
        batch = [pending.popleft() for _ in range(min(len(pending), MAX_BATCH))]
        # Move the queue to the end if it has more, so that all queues are served in rotation.
        del self._waiting[queue]
        if pending:
            self._waiting[queue] = pending
        server = self._engine.server_of(queue)
        self._busy[server] = self._busy.get(server, 0) + 1
        self._call_soon()
        try:
            await self._send(batch)
        finally:
            self._busy[server] -= 1
            if not self._busy[server]:
                del self._busy[server]

    async def _send(self, batch: list[_Waiting]) -> None:
        try:
            receipts = await self._call(self._engine.submit_each, [envelope for envelope, _ in batch])
        except asyncio.CancelledError:
            for _, future in batch:
                future.cancel()
            raise
        except Exception as exc:  # noqa: BLE001 - every caller gets it
            for _, future in batch:
                if not future.done():
                    future.set_exception(exc)
            return
        durable: list[tuple[Envelope, Receipt, asyncio.Future[Receipt]]] = []
        for (envelope, future), receipt in zip(batch, receipts, strict=True):
            if not isinstance(receipt, Receipt):
                if not future.done():
                    future.set_exception(receipt)
            elif envelope.durable:
                self.on_accepted(receipt)
                durable.append((envelope, receipt, future))
            elif not future.done():
                future.set_result(receipt)
        # The first job of a duplicate may be in any state; the others need not wait for it.
        for repeated in (False, True):
            group = [each for each in durable if each[1].duplicate is repeated]
            if group:
                wait = self._loop.create_task(self._answer_durable(group))
                self._waits.add(wait)
                wait.add_done_callback(self._waits.discard)

    async def _call(self, submit: Callable[[Sequence[Envelope]], Awaitable[T]], envelopes: Sequence[Envelope]) -> T:
        try:
            return await self._submit_with_restore(submit, envelopes)
        except EngineUnavailable as exc:
            # One log line per call, however many callers wait for it (requirement Q11).
            _log.critical("%d jobs could not be submitted: %s", len(envelopes), exc)
            raise
        except FeedFull as exc:
            # Not an operator's pause: alert (requirement Q15).
            _log.critical("%d jobs were refused: %s", len(envelopes), exc)
            raise

    async def _submit_with_restore(
        self, submit: Callable[[Sequence[Envelope]], Awaitable[T]], envelopes: Sequence[Envelope]
    ) -> T:
        """Submit; if the engine has lost a queue's data, restore its keys and repeat.

        Jobs that were already accepted are recognised as duplicates.
        """
        restores = _MAX_RESTORES + len({envelope.queue for envelope in envelopes})
        while True:
            try:
                return await submit(envelopes)
            except FeedDetached as exc:
                restores -= 1
                if not restores:
                    raise
                await self._reopen_intake(exc.queue)

    async def _reopen_intake(self, queue: str) -> None:
        restore = self._restores.get(queue)
        if restore is None:
            restore = self._loop.create_task(reopen_intake(self._engine, self._ledger, queue, self._ledger_probe))
            self._restores[queue] = restore
            restore.add_done_callback(lambda _: self._restores.pop(queue, None))
        # Other callers wait for it as well: it continues if this one is cancelled.
        await asyncio.shield(restore)

    # Durable ---------------------------------------------------------------------------------------

    async def _call_durably(self, envelopes: Sequence[Envelope]) -> list[Receipt]:
        durable = any(envelope.durable for envelope in envelopes)
        if durable:
            self._check_durable()
        receipts = await self._call(self._engine.submit, envelopes)
        if durable:
            pairs = zip(envelopes, receipts, strict=True)
            keys = [_key(envelope, receipt) for envelope, receipt in pairs if envelope.durable]
            began = time.monotonic()
            missing = set(keys) - await self._find_recorded(keys)
            if missing:
                raise self._not_durable(next(key for key in keys if key in missing), began)
        return receipts

    async def _answer_durable(self, group: list[tuple[Envelope, Receipt, asyncio.Future[Receipt]]]) -> None:
        began = time.monotonic()
        try:
            present = await self._find_recorded([_key(envelope, receipt) for envelope, receipt, _ in group])
        except asyncio.CancelledError:
            # The submitter was closed; the jobs are accepted all the same.
            for envelope, receipt, future in group:
                if not future.done():
                    future.set_exception(self._not_durable(_key(envelope, receipt), began))
            raise
        except Exception as exc:  # noqa: BLE001 - every caller gets it
            for _, _, future in group:
                if not future.done():
                    future.set_exception(exc)
            return
        for envelope, receipt, future in group:
            key = _key(envelope, receipt)
            if future.done():
                continue
            if key in present:
                future.set_result(receipt)
            else:
                future.set_exception(self._not_durable(key, began))

    async def _find_recorded(self, keys: Sequence[JobKey]) -> set[JobKey]:
        """Wait for the ledger; returns the jobs that it has within the timeout. An outage is not an error."""
        projection = self._projection()
        if projection is None:
            return set(keys)
        found: set[JobKey] = set()
        deadline, backoff = time.monotonic() + self._durable_timeout_s, Backoff()
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or len(found) == len(set(keys)):
                return found
            try:
                found |= await projection.wait_recorded([key for key in keys if key not in found], round(left_s * 1000))
            except LedgerUnavailable as exc:
                _log.warning("durable submissions wait for the ledger: %s", exc)
                await asyncio.sleep(min(left_s, backoff.next_s()))

    def _projection(self) -> ProjectionReadPort | None:
        """None in embedded mode, where the engine's commit is the ledger's."""
        assert self._ledger is not None
        return self._ledger.projection

    def _check_durable(self) -> None:
        if self._ledger is None:
            raise InvalidOption(
                "durable=True needs a ledger; set HOLDFAST_LEDGER (postgresql://… or sqlite:///…), or omit it"
            )

    def _not_durable(self, key: JobKey, began: float) -> NotDurableYet:
        return NotDurableYet(key.job_id, timedelta(seconds=round(time.monotonic() - began, 1)))


def _key(envelope: Envelope, receipt: Receipt) -> JobKey:
    """The accepted job: for a duplicate, the first one."""
    return JobKey(envelope.tenant_id, envelope.queue, receipt.job_id)


class TracedSubmitter(Submitter):
    """Submits through another submitter, in a span."""

    def __init__(self, submitter: Submitter, tracer: Tracer) -> None:
        self._submitter = submitter
        self._tracer = tracer

    async def submit(self, envelope: Envelope) -> Receipt:
        with self._tracer.submit_span([envelope]) as ((traced,), span):
            receipt = await self._submitter.submit(traced)
            if receipt.duplicate:
                span.set_attributes({"holdfast.job_id": receipt.job_id, "holdfast.duplicate": True})
        return receipt

    async def submit_many(self, envelopes: Iterable[Envelope]) -> list[Receipt]:
        batch = list(envelopes)
        if not batch:
            return []
        with self._tracer.submit_span(batch) as (traced, _):
            return await self._submitter.submit_many(traced)

    async def get(self, queue: str, job_id: str) -> JobInfo | None:
        return await self._submitter.get(queue, job_id)

    async def wait_final(self, queue: str, job_id: str, wait_ms: int) -> JobInfo | None:
        return await self._submitter.wait_final(queue, job_id, wait_ms)

    async def cancel(self, queue: str, job_id: str, actor: str, reason: str) -> None:
        await self._submitter.cancel(queue, job_id, actor, reason)
