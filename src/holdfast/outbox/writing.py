"""`app.outbox`: events, written in the user's own transaction and published by a relay once that is committed.

    async with connection.transaction():
        await connection.execute("UPDATE orders …")
        await app.outbox.add(connection, "orders", key=order_id, payload={"order": order_id, "state": "paid"})

The event is there if the transaction is committed, and never was if it is not. Of one destination, topic and key events
are published in the order in which they were written. Nothing here commits.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from holdfast.core.codec import encode_json
from holdfast.core.job import DEFAULT_TENANT, new_job_ids
from holdfast.errors import InvalidOption, PayloadTooLarge
from holdfast.ledger.outbox_store import HOLDFAST, OutboxEvent, lane_of
from holdfast.outbox.drivers import Row, write, write_sync
from holdfast.settings import Settings

#: Where events go that name no destination.
DEFAULT_DESTINATION: Final = "default"

#: Says how a payload is written that is no JSON. Not published.
ENCODING: Final = "holdfast-encoding"
_BASE64: Final = "base64"

#: What a relay says itself.
_RESERVED: Final = frozenset({ENCODING, "x-dedup-key", "x-tenant-id"})

#: In bytes of UTF-8: together they must fit a row of an index.
_NAME_LIMIT: Final = 255
_KEY_LIMIT: Final = 1_000
_HEADERS_LIMIT: Final = 64 * 1024


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One event for `add_many`; the same words as in `add`."""

    topic: str
    payload: Any
    key: str | None = None
    headers: Mapping[str, str] | None = None
    destination: str = DEFAULT_DESTINATION
    tenant_id: str = DEFAULT_TENANT
    event_id: str | None = None


class Outbox:
    """Writes events. Needs no engine and no ledger, only the user's connection."""

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
        """Write an event on this connection, in the transaction that is open there; its id, the same in every try.

        `connection`: SQLAlchemy's `AsyncConnection` or `AsyncSession`, a connection of asyncpg or aiosqlite, psycopg's
        `AsyncConnection`.
        `payload`: bytes, or anything that can be JSON. `key`: events of one key are published in order; without one
        there is no order. `destination`: one of the relay's `outbox_targets`. Raises `UsageError` for a connection
        that is none of these, has no table `outbox_events`, or would commit by itself; `PayloadTooLarge`; `Conflict`
        if there is an event with this id; and what the driver raises.
        """
        event = Event(
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
        """`add` on a connection that blocks: of sqlite3, SQLAlchemy (also a `Session`), psycopg or Django."""
        event = Event(
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

    async def add_many(self, connection: Any, events: Iterable[Event]) -> list[str]:
        """Write events in this order, in one statement; their ids. All are checked before the first is written."""
        rows = self._rows(events)
        if rows:
            await write(connection, rows)
        return [row.id for row in rows]

    def add_many_sync(self, connection: Any, events: Iterable[Event]) -> list[str]:
        """`add_many` on a connection that blocks."""
        rows = self._rows(events)
        if rows:
            write_sync(connection, rows)
        return [row.id for row in rows]

    def _rows(self, events: Iterable[Event]) -> list[Row]:
        listed = list(events)
        fresh = iter(new_job_ids(len(listed)))
        return [self._row(event, next(fresh)) for event in listed]

    def _row(self, event: Event, fresh_id: str) -> Row:
        topic = _checked(event.topic, "topic", _NAME_LIMIT)
        destination = _checked(event.destination, "destination", _NAME_LIMIT)
        if destination == HOLDFAST:
            raise InvalidOption(
                "the destination holdfast is for jobs: task.options(connection=…).submit(…), or write to another one"
            )
        # Empty is as good as none: brokers make no difference either.
        key = _checked(event.key, "key", _KEY_LIMIT) if event.key else None
        event_id = fresh_id if event.event_id is None else _checked(event.event_id, "event_id", _NAME_LIMIT)
        payload, headers = self._payload(event, _headers(event.headers))
        return Row(
            tenant_id=_checked(event.tenant_id, "tenant_id", _NAME_LIMIT),
            id=event_id,
            destination=destination,
            topic=topic,
            key=key,
            lane=lane_of(destination, topic, key, event_id),
            payload=payload,
            headers=msgspec.json.encode(headers).decode() if headers else None,
        )

    def _payload(self, event: Event, headers: dict[str, str]) -> tuple[str, dict[str, str]]:
        what = f"the payload of an event for topic {event.topic!r}"
        if isinstance(event.payload, bytes | bytearray | memoryview):
            raw = bytes(event.payload)
            if len(raw) > self._limit:
                raise PayloadTooLarge(what, len(raw), self._limit)
            return b64encode(raw).decode(), {**headers, ENCODING: _BASE64}
        return encode_json(event.payload, what, self._limit).decode(), headers


def payload_of(event: OutboxEvent) -> tuple[bytes, bool]:
    """What was given to `add`: bytes, or JSON (then True)."""
    if event.headers.get(ENCODING) == _BASE64:
        return b64decode(event.payload, validate=True), False
    return event.payload.encode(), True


def _checked(text: object, what: str, limit: int) -> str:
    if not isinstance(text, str) or not text:
        raise InvalidOption(f"{what} must be a text that is not empty, got {text!r}")
    if not text.isprintable():
        raise InvalidOption(f"{what} {text!r} must have no control characters")
    # What is printable has no lone surrogates, so this cannot fail.
    size = len(text.encode())
    if size > limit:
        raise InvalidOption(f"{what} has {size} bytes of UTF-8, the limit is {limit}")
    return text


def _headers(given: Mapping[str, object] | None) -> dict[str, str]:
    """Names in lower case, as consumers see them."""
    headers: dict[str, str] = {}
    for name, value in (given or {}).items():
        lower = _checked(name, "the name of a header", _NAME_LIMIT).lower()
        if lower in _RESERVED:
            raise InvalidOption(f"the header {name!r} is written by the relay; give event_id and tenant_id instead")
        if not isinstance(value, str) or (value and not value.isprintable()):
            raise InvalidOption(f"the header {name!r} must be a text without control characters, got {value!r}")
        headers[lower] = value
    size = sum(len(name) + len(value.encode()) for name, value in headers.items())
    if size > _HEADERS_LIMIT:
        raise InvalidOption(f"the headers have {size:,} bytes, the limit is {_HEADERS_LIMIT:,}")
    return headers
