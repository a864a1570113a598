"""Transactional enqueue: a job as an event of the outbox, handed in by a relay once the transaction is committed.

The event's id is the job's id, so that an event which is handed in twice is one job. Its topic is the queue. What is
written is plain JSON; programs in other languages write `{"task": …, "payload": {…}}` and leave out the rest.
"""

from __future__ import annotations

from typing import Final

import msgspec

from holdfast.core.checks import check_name, check_text
from holdfast.core.job import EMPTY_META, Envelope, Instant, Meta
from holdfast.errors import InvalidOption, InvalidPayload
from holdfast.ledger.outbox_store import HOLDFAST, OutboxEvent, lane_of
from holdfast.outbox.drivers import Row

#: In `last_error` of an event that was sent: its idempotency key was known, and this is the job that was there first.
DUPLICATE: Final = "duplicate of job "


class _Job(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The payload of an event for the destination `holdfast`."""

    task: str
    #: Arguments, byte by byte as they were checked.
    payload: msgspec.Raw
    idempotency_key: str = ""
    trace_id: str = ""
    meta: Meta = EMPTY_META
    delay_ms: Instant = 0
    run_at_ms: Instant = 0
    hold: bool = False


_decoder: Final = msgspec.json.Decoder(_Job)


def row_of(envelope: Envelope) -> Row:
    """The event for this job."""
    job = _Job(
        task=envelope.task,
        payload=msgspec.Raw(envelope.payload),
        idempotency_key=envelope.idempotency_key,
        trace_id=envelope.trace_id,
        meta=envelope.meta,
        delay_ms=envelope.delay_ms,
        run_at_ms=envelope.run_at_ms,
        hold=envelope.hold,
    )
    return Row(
        tenant_id=envelope.tenant_id,
        id=envelope.job_id,
        destination=HOLDFAST,
        topic=envelope.queue,
        key=None,
        # Jobs of one idempotency key are submitted in the order in which they were written: the first one stands.
        lane=lane_of(HOLDFAST, envelope.queue, None, envelope.idempotency_key or envelope.job_id),
        payload=msgspec.json.encode(job).decode(),
        headers=None,
    )


def envelope_of(event: OutboxEvent) -> Envelope:
    """The job of this event. Raises `InvalidPayload` for what never becomes one: the same as a submission refuses."""
    try:
        job = _decoder.decode(event.payload.encode())
        for what, name in (("task", job.task), ("topic", event.topic), ("id", event.id), ("tenant", event.tenant_id)):
            check_name(name, f"its {what}")
        for what, text in (("idempotency_key", job.idempotency_key), ("trace_id", job.trace_id)):
            check_text(text or None, f"its {what}")
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError, InvalidOption) as exc:
        raise InvalidPayload(f"the event is no job: {exc}") from exc
    payload = bytes(job.payload)
    if payload[:1] not in (b"{", b"["):
        raise InvalidPayload("the event is no job: its payload must be an object or an array of arguments")
    return Envelope(
        job_id=event.id,
        task=job.task,
        payload=payload,
        queue=event.topic,
        tenant_id=event.tenant_id,
        idempotency_key=job.idempotency_key,
        trace_id=job.trace_id,
        meta=job.meta if job.meta != EMPTY_META else EMPTY_META,
        delay_ms=job.delay_ms,
        run_at_ms=job.run_at_ms,
        hold=job.hold,
    )


def first_job(event: OutboxEvent) -> str:
    """The job that has its idempotency key, if that is not the event's own."""
    return event.last_error.removeprefix(DUPLICATE) if event.last_error.startswith(DUPLICATE) else ""
