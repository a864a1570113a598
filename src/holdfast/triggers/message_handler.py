"""Handle one message from receipt to acknowledgement (T5, T8).

    parse ─► key ─► guard ─► runtime ─► ack ─► record
      │       │       │         ├─ failed: retry after base × multiplier^n; finally a dead letter with its history
      │       │       │         ├─ failed permanently: by the ack policy
      │       │       │         └─ a dependency is down: held until it is back
      │       │       └─ denied: recorded, then a dead letter under the policy `dlq`, else acknowledged
      │       └─ duplicate: acknowledged; key in use elsewhere: check again later
      └─ unparsable, too large: a dead letter

A message is acknowledged only after the runtime accepted it, its dead letter was written, its denial was recorded, or
the ack policy drops it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from holdfast.aio import is_own_cancellation
from holdfast.brokers.port import QueueAdapter
from holdfast.clock import Clock, to_datetime
from holdfast.core.retry import Backoff
from holdfast.core.text import clean
from holdfast.errors import (
    Denied,
    Fatal,
    IntakeLimited,
    IntakeRefused,
    LedgerUnavailable,
    PayloadTooLarge,
    QueueLimitReached,
    SchemaMismatch,
    Unavailable,
    UsageError,
)
from holdfast.ledger.port.messages import Execution, ExecutionStatus
from holdfast.observe.redact import redact_and_truncate
from holdfast.triggers.config import AckPolicy, DedupDown, QueueTriggerConfig
from holdfast.triggers.dedup import AlreadyHandled, DedupTicket, IdempotencyStore
from holdfast.triggers.envelope import (
    HeaderNames,
    MessageEnvelope,
    ParseError,
    key_or_hash,
    parser_of,
    tenant_and_event_hint,
    trace_id_of,
)
from holdfast.triggers.execution_log import execution_id
from holdfast.triggers.runtime import RuntimeCall, RuntimeResult
from holdfast.triggers.state import (
    REASON_LIMIT,
    Disposition,
    InFlightMessage,
    Next,
    OnHold,
    RetryAfter,
    TriggerCounters,
    error_reason,
    retry_delay_s,
)

_log: Final = logging.getLogger("holdfast.triggers")

#: Delay between two checks of a key that is in use elsewhere, doubled each time.
_CHECK_FIRST_S: Final = 0.02
_CHECK_CAP_S: Final = 1.0
#: Limits of the delay before a retry, and before a redelivered message is requeued again.
_RETRY_CAP_S: Final = 86_400.0
_REQUEUE_CAP_S: Final = 60.0

#: How the log describes the answer to the broker.
_ANSWERS: Final = {
    AckPolicy.ACK: "acknowledged",
    AckPolicy.NACK: "refused, the broker drops it",
    AckPolicy.REQUEUE: "refused, will be redelivered",
    AckPolicy.DLQ: "dead-lettered",
}

Act = Callable[[RuntimeCall], Any]


class MessageHandler:
    """Handles the messages of one trigger. Use it in one event loop."""

    def __init__(
        self,
        config: QueueTriggerConfig,
        adapter: QueueAdapter,
        act: Act,
        *,
        check: Act | None,
        dedup: IdempotencyStore | None,
        counts: TriggerCounters,
        record: Callable[[Execution], None] | None,
        record_now: Callable[[Execution], Awaitable[None]] | None,
        clock: Clock,
        monotonic: Callable[[], float],
        payload_limit: int,
    ) -> None:
        """`check` raises `Denied`; None: no guards run. `dedup` None: duplicates are not detected.

        `record` buffers an execution record, `record_now` writes it; both are None without a ledger.
        """
        self._config = config
        self._adapter = adapter
        self._act = act
        self._check = check
        self._dedup = dedup
        self._counts = counts
        self._record = record
        self._record_now = record_now
        self._clock = clock
        self._monotonic = monotonic
        self._payload_limit = payload_limit
        self._parser = parser_of(config.parser_type)
        self._names = HeaderNames(config.event_name_header, config.dedup_header, config.tenant_header)
        #: Keys are scoped to the group: other groups handle the same messages independently.
        self._keys = f"{config.queue_name}:{config.consumer_group}:"
        self._window_ms = config.idempotency_window_ms
        self._without_dedup = False

    async def handle(self, item: InFlightMessage) -> Next:
        """Handle a message as far as possible now. Never raises, unless cancelled."""
        if not self._adapter.owns(item.raw):
            return await self._drop(item)
        if not item.started_at_ms:
            self._begin(item)
        if item.ending is None:
            next_step = await self._process(item)
            if next_step is not None:
                return next_step
        assert item.ending is not None
        return await self._finish(item, item.ending)

    async def abandon(self, item: InFlightMessage) -> None:
        """Stop handling a message here: release its key, or complete it if the message has run."""
        ticket, item.ticket = item.ticket, None
        if ticket is None or self._dedup is None:
            return
        try:
            if item.run is None:
                await self._dedup.release(ticket)
            else:
                await self._dedup.complete(ticket, item.run.run_id, self._window_ms)
        except LedgerUnavailable as exc:
            self._dedup.abandon(ticket)
            self._log_step(logging.WARNING, item, "released", "key not released, its lease will expire: %s", exc)

    # Parse and run -----------------------------------------------------------------------------------

    def _begin(self, item: InFlightMessage) -> None:
        item.started_at_ms, item.began_s = self._clock.now_ms(), self._monotonic()
        if _log.isEnabledFor(item.level):
            item.trace_id = trace_id_of(item.raw)
            self._log_step(item.level, item, "received", "received, delivery %d", item.raw.deliveries)

    async def _process(self, item: InFlightMessage) -> RetryAfter | OnHold | None:
        """Parse and run the message. None: `item.ending` is set."""
        try:
            call = item.call or self._parse(item)
        except (ParseError, PayloadTooLarge) as exc:
            item.trace_id = trace_id_of(item.raw)
            self._log_step(logging.ERROR, item, "unparsable", "unparsable: %s", error_reason(exc))
            item.ending = Disposition(AckPolicy.DLQ, ExecutionStatus.UNPARSABLE, error_reason(exc))
            return None
        except _ForeignTenant as exc:
            await self._deny(item, exc, str(exc))
            return None
        try:
            run = await self._run(item, call)
        except _KeyBusy:
            return RetryAfter(min(_CHECK_CAP_S, _CHECK_FIRST_S * 2.0 ** min(item.key_checks, 16)))
        except Denied as exc:
            await self._deny(item, exc)
        except PayloadTooLarge as exc:
            await self._dispose(item, AckPolicy.DLQ, ExecutionStatus.FAILED, exc)
        except (IntakeLimited, QueueLimitReached) as exc:
            self._log_step(logging.DEBUG, item, "held", "on hold: %s", error_reason(exc))
            if not exc.tenant_id:
                return OnHold(error_reason(exc))
            # Messages of other tenants continue; this one is repeated without using up an attempt.
            item.limited = item.limited or Backoff()
            return RetryAfter(item.limited.next_s())
        except (Unavailable, IntakeRefused, SchemaMismatch) as exc:
            self._log_step(logging.DEBUG, item, "held", "on hold: %s", error_reason(exc))
            return OnHold(error_reason(exc))
        except (Fatal, UsageError) as exc:
            await self._dispose(item, self._config.ack_policy, ExecutionStatus.FAILED, exc)
        except asyncio.CancelledError as exc:
            if is_own_cancellation(exc):
                raise
            # The runtime cancelled itself; this worker continues.
            return await self._on_failure(item, RuntimeError("the run was cancelled"))
        except Exception as exc:  # noqa: BLE001 - any exception of a runtime is a failed attempt
            return await self._on_failure(item, exc)
        else:
            status = ExecutionStatus.DUPLICATE if run.duplicate else ExecutionStatus.SUCCESS
            item.run, item.ending = run, Disposition(AckPolicy.ACK, status)
            if _log.isEnabledFor(item.level):
                text = "duplicate of run %s" if run.duplicate else "submitted, run %s"
                self._log_step(item.level, item, "handed_over", text, run.run_id or "without an id")
        return None

    def _parse(self, item: InFlightMessage) -> RuntimeCall:
        config = self._config
        envelope = MessageEnvelope.from_raw(item.raw, config.queue_name, self._parser, self._names, self._payload_limit)
        tenant_id = self._allowed_tenant(envelope.tenant_id)
        item.envelope = msgspec.structs.replace(envelope, tenant_id=tenant_id) if config.tenants else envelope
        item.trace_id = envelope.trace_id
        if config.tenants and envelope.tenant_id not in (None, tenant_id):
            raise _ForeignTenant(
                f"tenant {redact_and_truncate(envelope.tenant, REASON_LIMIT)} is not one of this trigger's tenants"
            )
        item.call = RuntimeCall(
            event_name=envelope.event,
            context=envelope.context(),
            focus=config.focus,
            tenant_id=item.envelope.tenant,
            trace_id=envelope.trace_id,
            traceparent=envelope.traceparent,
            key=key_or_hash(self._keys + (envelope.dedup_key or envelope.message_id)) if config.enable_dedup else "",
            window_ms=self._window_ms,
            trigger=config.name,
            message_json=envelope.json,
        )
        if _log.isEnabledFor(logging.DEBUG):
            self._log_step(logging.DEBUG, item, "parsed", "parsed")
        return item.call

    def _allowed_tenant(self, tenant_id: str | None) -> str | None:
        """The tenant if allowed, else the first allowed one: nothing is written for other tenants."""
        tenants = self._config.tenants
        return tenant_id if not tenants or tenant_id in tenants else tenants[0]

    async def _run(self, item: InFlightMessage, call: RuntimeCall) -> RuntimeResult:
        """Make one attempt, under the message's key if dedup is on. Does not repeat a successful run."""
        if self._dedup is not None and call.key and item.ticket is None and item.run is None:
            answer = await self._reserve(self._dedup, item, call)
            if isinstance(answer, AlreadyHandled):
                return RuntimeResult(answer.run_id, duplicate=True)
            item.ticket = answer
        if item.run is None:
            if self._check is not None:
                await self._check(call)
            self._counts.calls += 1
            item.run = await self._act(call)
        if item.ticket is not None:
            await self._conclude(item, item.ticket, item.run)
        return item.run

    async def _on_failure(self, item: InFlightMessage, exc: Exception) -> RetryAfter | None:
        """Retry after base × multiplier^n; dead-letter after the last attempt, regardless of the ack policy."""
        reason, attempts, config = error_reason(exc), item.retries + 1, self._config
        item.add_failure(f"attempt {attempts} at {to_datetime(self._clock.now_ms()).isoformat()}: {reason}")
        if item.retries >= config.max_retries:
            await self._dispose(
                item, AckPolicy.DLQ, ExecutionStatus.FAILED, exc, f"failed after {attempts} attempts: {reason}"
            )
            return None
        wait_s = retry_delay_s(config.retry_backoff_base, config.retry_backoff_multiplier, item.retries, _RETRY_CAP_S)
        item.retries += 1
        self._counts.retries += 1
        self._log_step(
            logging.WARNING,
            item,
            "retry",
            "retry %d of %d in %g s: %s",
            item.retries,
            config.max_retries,
            wait_s,
            reason,
        )
        return RetryAfter(wait_s)

    # Keys --------------------------------------------------------------------------------------------

    async def _reserve(
        self, dedup: IdempotencyStore, item: InFlightMessage, call: RuntimeCall
    ) -> DedupTicket | AlreadyHandled | None:
        try:
            answer = await dedup.reserve(call.tenant_id, call.key, clean(item.raw.message_id))
        except LedgerUnavailable as exc:
            if self._config.dedup_down is DedupDown.HOLD:
                raise
            self._warn_without_dedup(exc)
            return None
        if answer == "busy":
            item.key_checks += 1
            raise _KeyBusy
        return answer

    async def _conclude(self, item: InFlightMessage, ticket: DedupTicket, run: RuntimeResult) -> None:
        assert self._dedup is not None
        try:
            await self._dedup.complete(ticket, run.run_id, self._window_ms)
        except LedgerUnavailable as exc:
            if self._config.dedup_down is DedupDown.HOLD:
                # The message must not be acknowledged before its key is completed: otherwise a duplicate would run.
                raise
            self._warn_without_dedup(exc)
            # Otherwise the key would be renewed forever, and every duplicate would wait for it.
            self._dedup.abandon(ticket)
        else:
            self._without_dedup = False
        item.ticket = None

    def _warn_without_dedup(self, exc: LedgerUnavailable) -> None:
        if not self._without_dedup:
            self._without_dedup = True
            _log.warning(
                "trigger %s continues without dedup, duplicates may run: %s",
                self._config.name,
                exc,
                extra={"trigger": self._config.name},
            )

    # Endings -----------------------------------------------------------------------------------------

    async def _deny(self, item: InFlightMessage, exc: Exception, reason: str = "") -> None:
        """A denied message is not redelivered: the guard would deny it again, without end."""
        how = AckPolicy.DLQ if self._config.ack_policy is AckPolicy.DLQ else AckPolicy.ACK
        await self._dispose(item, how, ExecutionStatus.REJECTED, exc, reason)

    async def _dispose(
        self, item: InFlightMessage, how: AckPolicy, status: ExecutionStatus, exc: Exception, reason: str = ""
    ) -> None:
        reason = reason or error_reason(exc)
        stage = "denied" if status is ExecutionStatus.REJECTED else "failed"
        self._log_step(logging.WARNING, item, stage, "%s, disposition %s: %s", status.value, how.value, reason)
        item.ending = Disposition(how, status, reason)
        await self.abandon(item)

    async def _finish(self, item: InFlightMessage, ending: Disposition) -> Next:
        if ending.how is AckPolicy.REQUEUE and item.raw.deliveries > 1 and item.backoff is None:
            # The message was requeued before and would be redelivered immediately.
            item.backoff = Backoff()
            base, multiplier = self._config.retry_backoff_base, self._config.retry_backoff_multiplier
            return RetryAfter(retry_delay_s(base, multiplier, item.raw.deliveries - 2, _REQUEUE_CAP_S))
        if ending.status is ExecutionStatus.REJECTED and self._record_now is not None:
            try:
                await self._record_now(self._execution(item, ending))
            except Unavailable as exc:
                item.backoff = item.backoff or Backoff()
                self._log_step(logging.WARNING, item, "denied", "denial not recorded, retrying: %s", error_reason(exc))
                return RetryAfter(item.backoff.next_s())
        try:
            await self._answer_broker(item, ending)
        except Exception as exc:  # noqa: BLE001 - a client error must not lose the message or stop the worker
            if ending.how is AckPolicy.DLQ:
                item.backoff = item.backoff or Backoff()
                self._log_step(
                    logging.ERROR, item, "dead_letter", "dead letter not written, retrying: %s", error_reason(exc)
                )
                return RetryAfter(item.backoff.next_s())
            self._log_step(
                logging.WARNING, item, ending.how.value, "answer not sent to the broker: %s", error_reason(exc)
            )
        self._record_ending(item, ending)
        return "off"

    async def _answer_broker(self, item: InFlightMessage, ending: Disposition) -> None:
        match ending.how:
            case AckPolicy.ACK:
                await self._adapter.ack(item.raw)
                self._counts.acknowledged += 1
            case AckPolicy.NACK:
                await self._adapter.nack(item.raw, False)
            case AckPolicy.REQUEUE:
                await self._adapter.nack(item.raw, True)
            case AckPolicy.DLQ:
                await self._adapter.send_to_dlq(item.raw, ending.reason, item.history)
                self._counts.dead_letters += 1
        level = logging.WARNING if ending.how is AckPolicy.DLQ else item.level
        if _log.isEnabledFor(level):
            self._log_step(level, item, ending.how.value, _ANSWERS[ending.how])

    def _record_ending(self, item: InFlightMessage, ending: Disposition) -> None:
        counts = self._counts
        counts.consumed[ending.status] += 1
        if ending.status is ExecutionStatus.DUPLICATE:
            counts.dedup_hits += 1
        counts.durations.add_one(self._monotonic() - item.began_s)
        # A denial is recorded before the broker is answered.
        if self._record is not None and ending.status is not ExecutionStatus.REJECTED:
            self._record(self._execution(item, ending))

    def _execution(self, item: InFlightMessage, ending: Disposition) -> Execution:
        envelope, config = item.envelope, self._config
        if envelope is not None:
            tenant_id, event_name = envelope.tenant, envelope.event
        else:
            guess, event_name = tenant_and_event_hint(item.raw, self._names)
            tenant_id = self._allowed_tenant(guess) or guess
        run_id = clean(item.run.run_id) if item.run is not None else ""
        return Execution(
            tenant_id=tenant_id,
            id=execution_id(config.queue_name, config.consumer_group, item.raw.message_id, ending.status, run_id),
            message_id=key_or_hash(item.raw.message_id),
            queue_name=config.queue_name,
            event_name=event_name,
            status=ending.status,
            started_at_ms=item.started_at_ms,
            completed_at_ms=self._clock.now_ms(),
            agent_run_id=run_id,
            error_message=clean(ending.reason),
            retry_count=item.retries,
            trace_id=item.trace_id,
        )

    async def _drop(self, item: InFlightMessage) -> Next:
        self._counts.lost_messages += 1
        self._log_step(logging.DEBUG, item, "dropped", "no longer owned by this consumer")
        await self.abandon(item)
        return "off"

    def _log_step(self, level: int, item: InFlightMessage, stage: str, text: str, *values: object) -> None:
        """Log a line about the message, never with its payload."""
        if not _log.isEnabledFor(level):
            return
        about = {
            "trigger": self._config.name,
            "queue": self._config.queue_name,
            "message_id": item.raw.message_id,
            "trace_id": item.trace_id,
            "stage": stage,
        }
        if item.envelope is not None:
            about["event_name"] = item.envelope.event
            about["tenant_id"] = item.envelope.tenant
        _log.log(level, f"message %s: {text}", item.raw.message_id, *values, extra=about)


class _ForeignTenant(Exception):
    """The tenant of the message is not allowed."""


class _KeyBusy(Exception):
    """The key is reserved elsewhere."""
