"""One message from raw to acknowledged (requirements T5, T8).

    parse ─► key ─► guard ─► runtime ─► ack ─► record
      │       │       │         ├─ failed: again after base × multiplier^n; at last a dead letter with its history
      │       │       │         ├─ failed for good: by the ack policy
      │       │       │         └─ something is down: held, for as long as it takes
      │       │       └─ denied: by the ack policy
      │       └─ came before: acknowledged; somebody is at it: look again
      └─ unparsable, too large: a dead letter

A message is acknowledged only once it is safe: handed over, in the dead letters, or given up by policy.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
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
    IntakeRefused,
    LedgerUnavailable,
    PayloadTooLarge,
    SchemaMismatch,
    Unavailable,
    UsageError,
)
from holdfast.ledger.port.messages import Execution, ExecutionStatus
from holdfast.observe.redact import redact_and_truncate
from holdfast.triggers.config import AckPolicy, DedupDown, TriggerConfig
from holdfast.triggers.dedup import AlreadyHandled, DedupStore, DedupTicket
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

_log: Final = logging.getLogger("holdfast.trigger")

#: Between two looks at a key that somebody else is at: doubled each time.
_LOOK_FIRST_S: Final = 0.02
_LOOK_CAP_S: Final = 1.0
#: However large the multiplier: no retry is further off, and no message that is requeued again and again.
_RETRY_CAP_S: Final = 86_400.0
_REQUEUE_CAP_S: Final = 60.0

#: How the log describes the answer to the broker.
_ENDED: Final = {
    AckPolicy.ACK: "acknowledged",
    AckPolicy.NACK: "refused, for the broker to drop",
    AckPolicy.REQUEUE: "refused, to be delivered again",
    AckPolicy.DLQ: "dead-lettered",
}

Act = Callable[[RuntimeCall], Any]


class Handler:
    """What a trigger's workers do with each message. One event loop."""

    def __init__(
        self,
        config: TriggerConfig,
        adapter: QueueAdapter,
        act: Act,
        *,
        ask: Act | None,
        dedup: DedupStore | None,
        counts: TriggerCounters,
        record: Callable[[Execution], None] | None,
        clock: Clock,
        monotonic: Callable[[], float],
        payload_limit: int,
    ) -> None:
        """`ask` raises `Denied`; None: nobody is asked here. `dedup` None: duplicates are not known here."""
        self._config = config
        self._adapter = adapter
        self._act = act
        self._ask = ask
        self._dedup = dedup
        self._counts = counts
        self._record = record
        self._clock = clock
        self._monotonic = monotonic
        self._payload_limit = payload_limit
        self._parser = parser_of(config.parser_type)
        self._names = HeaderNames(config.event_name_header, config.dedup_header, config.tenant_header)
        #: Keys are this group's own: other groups read the same messages for purposes of their own.
        self._keys = f"{config.queue_name}:{config.consumer_group}:"
        self._window_ms = config.idempotency_window_ms
        self._without_keys = False

    async def handle(self, item: InFlightMessage) -> Next:
        """One look at it. Never raises, unless cancelled."""
        if not self._adapter.owns(item.raw):
            return await self._drop(item)
        if not item.started_at_ms:
            self._begin(item)
        if item.ending is None:
            later = await self._hand_over(item)
            if later is not None:
                return later
        assert item.ending is not None
        return await self._finish(item, item.ending)

    async def abandon(self, item: InFlightMessage) -> None:
        """It waits for something, and will not be looked at again here: whoever gets it next may begin at once, or
        knows that it has run."""
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
            self._say(logging.WARNING, item, "released", "its key stays reserved for a while: %s", exc)

    # From raw to handed over -------------------------------------------------------------------------

    def _begin(self, item: InFlightMessage) -> None:
        item.started_at_ms, item.began_s = self._clock.now_ms(), self._monotonic()
        if _log.isEnabledFor(item.level):
            item.trace_id = trace_id_of(item.raw)
            self._say(item.level, item, "received", "received, delivery %d", item.raw.deliveries)

    async def _hand_over(self, item: InFlightMessage) -> RetryAfter | OnHold | None:
        """None: it has an ending now."""
        try:
            call = item.call or self._open(item)
        except (ParseError, PayloadTooLarge) as exc:
            item.trace_id = trace_id_of(item.raw)
            self._say(logging.ERROR, item, "unparsable", "cannot be used: %s", error_reason(exc))
            item.ending = Disposition(AckPolicy.DLQ, ExecutionStatus.UNPARSABLE, error_reason(exc))
            return None
        except _ForeignTenant as exc:
            await self._give_up(item, self._config.ack_policy, ExecutionStatus.REJECTED, exc, str(exc))
            return None
        try:
            run = await self._run(item, call)
        except _KeyBusy:
            return RetryAfter(min(_LOOK_CAP_S, _LOOK_FIRST_S * 2.0 ** min(item.looks, 16)))
        except Denied as exc:
            await self._give_up(item, self._config.ack_policy, ExecutionStatus.REJECTED, exc)
        except PayloadTooLarge as exc:
            await self._give_up(item, AckPolicy.DLQ, ExecutionStatus.FAILED, exc)
        except (Unavailable, IntakeRefused, SchemaMismatch) as exc:
            self._say(logging.DEBUG, item, "held", "waits: %s", error_reason(exc))
            return OnHold(error_reason(exc))
        except (Fatal, UsageError) as exc:
            await self._give_up(item, self._config.ack_policy, ExecutionStatus.FAILED, exc)
        except asyncio.CancelledError as exc:
            if is_own_cancellation(exc):
                raise
            # The runtime has cancelled itself: this worker is to go on.
            return await self._failed(item, RuntimeError("the run was cancelled"))
        except Exception as exc:  # noqa: BLE001 - whatever a runtime raises is a failed try
            return await self._failed(item, exc)
        else:
            status = ExecutionStatus.DUPLICATE if run.duplicate else ExecutionStatus.SUCCESS
            item.run, item.ending = run, Disposition(AckPolicy.ACK, status)
            if _log.isEnabledFor(item.level):
                words = "duplicate of run %s" if run.duplicate else "submitted, run %s"
                self._say(item.level, item, "handed_over", words, run.run_id or "without an id")
        return None

    def _open(self, item: InFlightMessage) -> RuntimeCall:
        config = self._config
        envelope = MessageEnvelope.from_raw(item.raw, config.queue_name, self._parser, self._names, self._payload_limit)
        tenant_id = self._own(envelope.tenant_id)
        item.envelope = msgspec.structs.replace(envelope, tenant_id=tenant_id) if config.tenants else envelope
        item.trace_id = envelope.trace_id
        if config.tenants and envelope.tenant_id not in (None, tenant_id):
            raise _ForeignTenant(
                f"tenant {redact_and_truncate(envelope.tenant, REASON_LIMIT)} is none of this trigger's tenants"
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
            self._say(logging.DEBUG, item, "parsed", "parsed")
        return item.call

    def _own(self, tenant_id: str | None) -> str | None:
        """The tenant, if messages may be for it; else the first that they may be for: nothing is written for others."""
        tenants = self._config.tenants
        return tenant_id if not tenants or tenant_id in tenants else tenants[0]

    async def _run(self, item: InFlightMessage, call: RuntimeCall) -> RuntimeResult:
        """One try, under the message's key if this trigger keeps keys. What has run is not run again."""
        if self._dedup is not None and call.key and item.ticket is None and item.run is None:
            answer = await self._reserve(self._dedup, item, call)
            if isinstance(answer, AlreadyHandled):
                return RuntimeResult(answer.run_id, duplicate=True)
            item.ticket = answer
        if item.run is None:
            if self._ask is not None:
                await self._ask(call)
            self._counts.calls += 1
            item.run = await self._act(call)
        if item.ticket is not None:
            await self._conclude(item, item.ticket, item.run)
        return item.run

    async def _failed(self, item: InFlightMessage, exc: Exception) -> RetryAfter | None:
        """Another try after base × multiplier^n, or the dead letters: whatever the policy says of other endings."""
        reason, tries, config = error_reason(exc), item.retries + 1, self._config
        item.add_failure(f"try {tries} at {to_datetime(self._clock.now_ms()).isoformat()}: {reason}")
        if item.retries >= config.max_retries:
            await self._give_up(
                item, AckPolicy.DLQ, ExecutionStatus.FAILED, exc, f"given up after {tries} tries: {reason}"
            )
            return None
        wait_s = retry_delay_s(config.retry_backoff_base, config.retry_backoff_multiplier, item.retries, _RETRY_CAP_S)
        item.retries += 1
        self._counts.retries += 1
        self._say(
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
        self, dedup: DedupStore, item: InFlightMessage, call: RuntimeCall
    ) -> DedupTicket | AlreadyHandled | None:
        try:
            answer = await dedup.reserve(call.tenant_id, call.key, clean(item.raw.message_id))
        except LedgerUnavailable as exc:
            if self._config.dedup_down is DedupDown.HOLD:
                raise
            self._warn_without_keys(exc)
            return None
        if answer == "busy":
            item.looks += 1
            raise _KeyBusy
        return answer

    async def _conclude(self, item: InFlightMessage, ticket: DedupTicket, run: RuntimeResult) -> None:
        assert self._dedup is not None
        try:
            await self._dedup.complete(ticket, run.run_id, self._window_ms)
        except LedgerUnavailable as exc:
            if self._config.dedup_down is DedupDown.HOLD:
                # Not acknowledged before it is known: a duplicate would run.
                raise
            self._warn_without_keys(exc)
            # Else it would be renewed for ever, and every duplicate would wait for it.
            self._dedup.abandon(ticket)
        else:
            self._without_keys = False
        item.ticket = None

    def _warn_without_keys(self, exc: LedgerUnavailable) -> None:
        if not self._without_keys:
            self._without_keys = True
            _log.warning(
                "trigger %s goes on without knowing duplicates, which may run: %s",
                self._config.name,
                exc,
                extra={"trigger": self._config.name},
            )

    # Endings -----------------------------------------------------------------------------------------

    async def _give_up(
        self, item: InFlightMessage, how: AckPolicy, status: ExecutionStatus, exc: Exception, reason: str = ""
    ) -> None:
        reason = reason or error_reason(exc)
        stage = "denied" if status is ExecutionStatus.REJECTED else "failed"
        self._say(logging.WARNING, item, stage, "%s, goes by %s: %s", status.value, how.value, reason)
        item.ending = Disposition(how, status, reason)
        await self.abandon(item)

    async def _finish(self, item: InFlightMessage, ending: Disposition) -> Next:
        if ending.how is AckPolicy.REQUEUE and item.raw.deliveries > 1 and item.patience is None:
            # It has been here before, and would be here again at once.
            item.patience = Backoff()
            base, multiplier = self._config.retry_backoff_base, self._config.retry_backoff_multiplier
            return RetryAfter(retry_delay_s(base, multiplier, item.raw.deliveries - 2, _REQUEUE_CAP_S))
        try:
            await self._tell(item, ending)
        except Exception as exc:  # noqa: BLE001 - what a client raises is no reason to lose a message, or to stop
            if ending.how is AckPolicy.DLQ:
                item.patience = item.patience or Backoff()
                self._say(logging.ERROR, item, "dead_letter", "its dead letter waits: %s", error_reason(exc))
                return RetryAfter(item.patience.next_s())
            self._say(logging.WARNING, item, ending.how.value, "the broker was not told: %s", error_reason(exc))
        self._note(item, ending)
        return "off"

    async def _tell(self, item: InFlightMessage, ending: Disposition) -> None:
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
            self._say(level, item, ending.how.value, _ENDED[ending.how])

    def _note(self, item: InFlightMessage, ending: Disposition) -> None:
        counts = self._counts
        counts.consumed[ending.status] += 1
        if ending.status is ExecutionStatus.DUPLICATE:
            counts.dedup_hits += 1
        counts.durations.add_one(self._monotonic() - item.began_s)
        if self._record is not None:
            self._record(self._execution(item, ending))

    def _execution(self, item: InFlightMessage, ending: Disposition) -> Execution:
        envelope, config = item.envelope, self._config
        if envelope is not None:
            tenant_id, event_name = envelope.tenant, envelope.event
        else:
            guess, event_name = tenant_and_event_hint(item.raw, self._names)
            tenant_id = self._own(guess) or guess
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
        self._say(logging.DEBUG, item, "dropped", "is somebody else's by now")
        await self.abandon(item)
        return "off"

    def _say(self, level: int, item: InFlightMessage, stage: str, words: str, *values: object) -> None:
        """A line that names the message. Never its payload."""
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
        _log.log(level, f"message %s: {words}", item.raw.message_id, *values, extra=about)


class _ForeignTenant(Exception):
    """The message is for a tenant that it may not be for."""


class _KeyBusy(Exception):
    """Somebody is at this key."""
