"""`app.outbox`: events written in the user's transaction and published by a relay after the commit.

    async with connection.transaction():
        await connection.execute("UPDATE orders …")
        await app.outbox.add(connection, "orders", key=order_id, payload={"order": order_id, "state": "paid"})

The event exists if and only if the transaction is committed. Events of one destination, topic and key are published in
the order in which they were written. Nothing here commits.

Transactional enqueue is an outbox event that a relay submits as a job. The event's id is the job's id, so that an event
submitted twice is one job. Its topic is the queue. The payload is plain JSON; programs in other languages write
`{"task": …, "payload": {…}}` and leave out the rest.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from holdfast.core.codec import encode_json
from holdfast.core.job import DEFAULT_TENANT, EMPTY_META, Envelope, InstantMs, KeyReuse, Meta, new_job_ids
from holdfast.core.publishing import lane_of
from holdfast.core.text import check_name, check_text
from holdfast.errors import InvalidOption, InvalidPayload, PayloadTooLarge
from holdfast.ledger.port.messages import ENGINE_DESTINATION, OutboxEvent
from holdfast.outbox.sql_drivers import OutboxRow, insert_events, insert_events_sync
from holdfast.settings import Settings

#: Destination of events that do not name one.
DEFAULT_DESTINATION: Final = "default"

#: Header with the encoding of a payload that is not JSON. Not published.
ENCODING: Final = "holdfast-encoding"
_BASE64: Final = "base64"

#: Headers that the relay sets.
_RESERVED: Final = frozenset({ENCODING, "x-dedup-key", "x-tenant-id"})

#: In bytes of UTF-8: together they must fit into an index row.
_NAME_LIMIT: Final = 255
_KEY_LIMIT: Final = 1_000
_HEADERS_LIMIT: Final = 64 * 1024


class NewOutboxEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event for `add_many`, with the parameters of `add`."""

    topic: str
    payload: Any
    key: str | None = None
    headers: Mapping[str, str] | None = None
    destination: str = DEFAULT_DESTINATION
    tenant_id: str = DEFAULT_TENANT
    event_id: str | None = None


class Outbox:
    """Writes events. Needs only the user's connection, no engine and no ledger."""

    def __init__(self, settings: Settings) -> None:
        self._limit = settings.payload_limit

    async def add(
        self,
        connection: Any,
        topic: str,
        *,
        payload: Any,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        destination: str = DEFAULT_DESTINATION,
        tenant_id: str = DEFAULT_TENANT,
        event_id: str | None = None,
    ) -> str:
        """Write an event in the open transaction of this connection.

        Returns the event's id, which is the same in every delivery.

        `connection`: SQLAlchemy's `AsyncConnection` or `AsyncSession`, a connection of asyncpg or aiosqlite, psycopg's
        `AsyncConnection`. `payload`: bytes, or anything that can be encoded as JSON. `key`: events with the same key
        are published in order; without a key there is no order. `destination`: one of the relay's `outbox_targets`.

        Raises `UsageError` for another kind of connection, one without the table `outbox_events`, or one in autocommit
        mode; `PayloadTooLarge`; `Conflict` if the id exists; and errors of the driver.
        """
        event = NewOutboxEvent(
            topic=topic,
            payload=payload,
            key=key,
            headers=headers,
            destination=destination,
            tenant_id=tenant_id,
            event_id=event_id,
        )
        (written,) = await self.add_many(connection, [event])
        return written

    def add_sync(
        self,
        connection: Any,
        topic: str,
        *,
        payload: Any,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        destination: str = DEFAULT_DESTINATION,
        tenant_id: str = DEFAULT_TENANT,
        event_id: str | None = None,
    ) -> str:
        """`add` on a blocking connection: of sqlite3, SQLAlchemy (also a `Session`), psycopg or Django."""
        event = NewOutboxEvent(
            topic=topic,
            payload=payload,
            key=key,
            headers=headers,
            destination=destination,
            tenant_id=tenant_id,
            event_id=event_id,
        )
        (written,) = self.add_many_sync(connection, [event])
        return written

    async def add_many(self, connection: Any, events: Iterable[NewOutboxEvent]) -> list[str]:
        """Write events in this order, in one statement. Returns their ids. All are validated first."""
        rows = self._rows(events)
        if rows:
            await insert_events(connection, rows)
        return [row.id for row in rows]

    def add_many_sync(self, connection: Any, events: Iterable[NewOutboxEvent]) -> list[str]:
        """`add_many` on a blocking connection."""
        rows = self._rows(events)
        if rows:
            insert_events_sync(connection, rows)
        return [row.id for row in rows]

    def _rows(self, events: Iterable[NewOutboxEvent]) -> list[OutboxRow]:
        listed = list(events)
        fresh = iter(new_job_ids(len(listed)))
        return [self._row(event, next(fresh)) for event in listed]

    def _row(self, event: NewOutboxEvent, fresh_id: str) -> OutboxRow:
        topic = _require_text(event.topic, "topic", _NAME_LIMIT)
        destination = _require_text(event.destination, "destination", _NAME_LIMIT)
        if destination == ENGINE_DESTINATION:
            raise InvalidOption(
                "destination 'holdfast' is for jobs; use task.options(connection=…).submit(…), or another destination"
            )
        # An empty key means no key, as in brokers.
        key = _require_text(event.key, "key", _KEY_LIMIT) if event.key else None
        event_id = fresh_id if event.event_id is None else _require_text(event.event_id, "event_id", _NAME_LIMIT)
        payload, headers = self._payload(event, _headers(event.headers))
        return OutboxRow(
            tenant_id=_require_text(event.tenant_id, "tenant_id", _NAME_LIMIT),
            id=event_id,
            destination=destination,
            topic=topic,
            key=key,
            lane=lane_of(destination, topic, key, event_id),
            payload=payload,
            headers=msgspec.json.encode(headers).decode() if headers else None,
        )

    def _payload(self, event: NewOutboxEvent, headers: dict[str, str]) -> tuple[str, dict[str, str]]:
        what = f"the payload of an event for topic {event.topic!r}"
        if isinstance(event.payload, bytes | bytearray | memoryview):
            raw = bytes(event.payload)
            if len(raw) > self._limit:
                raise PayloadTooLarge(what, len(raw), self._limit)
            return b64encode(raw).decode(), {**headers, ENCODING: _BASE64}
        return encode_json(event.payload, what, self._limit).decode(), headers


def payload_of(event: OutboxEvent) -> tuple[bytes, bool]:
    """The payload as passed to `add`, and whether it is JSON."""
    if event.headers.get(ENCODING) == _BASE64:
        return b64decode(event.payload, validate=True), False
    return event.payload.encode(), True


def _require_text(text: object, what: str, limit: int) -> str:
    if not isinstance(text, str) or not text:
        raise InvalidOption(f"{what} must be a non-empty string, not {text!r}")
    if not text.isprintable():
        raise InvalidOption(f"{what} {text!r} must not contain control characters")
    # Printable text has no lone surrogates, so this cannot fail.
    size = len(text.encode())
    if size > limit:
        raise InvalidOption(f"{what} has {size} bytes of UTF-8; the limit is {limit}")
    return text


def _headers(given: Mapping[str, object] | None) -> dict[str, str]:
    """Validate headers and convert their names to lower case, as consumers see them."""
    headers: dict[str, str] = {}
    for name, value in (given or {}).items():
        lower = _require_text(name, "header name", _NAME_LIMIT).lower()
        if lower in _RESERVED:
            raise InvalidOption(f"header {name!r} is set by the relay; use event_id and tenant_id instead")
        if not isinstance(value, str) or (value and not value.isprintable()):
            raise InvalidOption(f"header {name!r} must be a string without control characters, not {value!r}")
        headers[lower] = value
    size = sum(len(name) + len(value.encode()) for name, value in headers.items())
    if size > _HEADERS_LIMIT:
        raise InvalidOption(f"headers have {size:,} bytes; the limit is {_HEADERS_LIMIT:,}")
    return headers


#: Prefix in `last_error` of a sent event whose idempotency key was known, followed by the id of the original job.
DUPLICATE: Final = "duplicate of job "


class _Job(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The payload of an event for the destination `holdfast`."""

    task: str
    #: Arguments, byte for byte as they were validated.
    payload: msgspec.Raw
    idempotency_key: str = ""
    trace_id: str = ""
    meta: Meta = EMPTY_META
    delay_ms: InstantMs = 0
    run_at_ms: InstantMs = 0
    hold: bool = False


_decoder: Final = msgspec.json.Decoder(_Job)
#: Header with the fingerprint of the job's schema.
_SCHEMA: Final = "schema"


def job_event_row(envelope: Envelope) -> OutboxRow:
    """The outbox row for a job."""
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
    return OutboxRow(
        tenant_id=envelope.tenant_id,
        id=envelope.job_id,
        destination=ENGINE_DESTINATION,
        topic=envelope.queue,
        key=None,
        # One lane per idempotency key, so that jobs are submitted in the order written and the first one wins.
        lane=lane_of(ENGINE_DESTINATION, envelope.queue, None, envelope.idempotency_key or envelope.job_id),
        payload=msgspec.json.encode(job).decode(),
        # Not in the payload, of which older relays refuse unknown keys.
        headers=msgspec.json.encode({_SCHEMA: envelope.schema}).decode() if envelope.schema else None,
    )


def envelope_from_event(event: OutboxEvent) -> Envelope:
    """The job of an event. Raises `InvalidPayload` for everything that a submission would refuse."""
    try:
        job = _decoder.decode(event.payload.encode())
        for what, name in (("task", job.task), ("topic", event.topic), ("id", event.id), ("tenant", event.tenant_id)):
            check_name(name, f"its {what}")
        for what, text in (("idempotency_key", job.idempotency_key), ("trace_id", job.trace_id)):
            check_text(text or None, f"its {what}")
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError, InvalidOption) as exc:
        raise InvalidPayload(f"the event is not a job: {exc}") from exc
    payload = bytes(job.payload)
    if payload[:1] not in (b"{", b"["):
        raise InvalidPayload("the event is not a job: its payload must be an object or an array of arguments")
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
        schema=event.headers.get(_SCHEMA, ""),
        # The writer has committed: there is no caller left to refuse.
        on_key_reuse=KeyReuse.RETURN,
    )


def original_job_id(event: OutboxEvent) -> str:
    """Id of the job that already had the idempotency key, or empty."""
    return event.last_error.removeprefix(DUPLICATE) if event.last_error.startswith(DUPLICATE) else ""
