"""An event as it goes over the wire: CloudEvents 1.0, structured JSON, unless the payload is wanted plain.

Headers say the same as far as a trigger needs it: `x-event-name`, `x-dedup-key` (the event's id), `x-tenant-id`; and
the writer's own are passed on.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from holdfast.brokers.port import Outgoing
from holdfast.ledger.outbox_store import OutboxEvent
from holdfast.outbox.writing import ENCODING, payload_of
from holdfast.settings import Settings

SPECVERSION: Final = "1.0"
STRUCTURED: Final = "application/cloudevents+json"
_JSON: Final = "application/json"
_BYTES: Final = "application/octet-stream"
_CONTENT_TYPE: Final = "content-type"
_EVENT_NAME: Final = "x-event-name"

Pack = Callable[[OutboxEvent], Outgoing]


class CloudEvent(msgspec.Struct):
    """The envelope's fields, by CloudEvents' names."""

    id: str
    source: str
    type: str
    time: str
    datacontenttype: str
    tenantid: str
    specversion: str = SPECVERSION
    subject: str | msgspec.UnsetType = msgspec.UNSET
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    data_base64: bytes | msgspec.UnsetType = msgspec.UNSET


def packer(settings: Settings) -> Pack:
    """Makes messages of events, as the settings want them."""
    if settings.outbox_envelope == "plain":
        return plain
    source = settings.outbox_source or f"holdfast/{settings.namespace or 'default'}"
    return lambda event: structured(event, source)


def structured(event: OutboxEvent, source: str) -> Outgoing:
    """As a CloudEvent. Raises `ValueError` for a payload that is not what the row says it is."""
    body, is_json = payload_of(event)
    if is_json:
        # It becomes part of another document, and programs in other languages write rows, too.
        msgspec.json.decode(body, type=msgspec.Raw)
    named = event.headers.get(_CONTENT_TYPE) or (_JSON if is_json else _BYTES)
    data: dict[str, Any] = {"data": msgspec.Raw(body)} if is_json else {"data_base64": body}
    envelope = CloudEvent(
        id=event.id,
        source=source,
        type=event.headers.get(_EVENT_NAME) or event.topic,
        time=_time(event.created_at_ms),
        datacontenttype=named,
        tenantid=event.tenant_id,
        subject=event.key or msgspec.UNSET,
        **data,
    )
    return _outgoing(event, msgspec.json.encode(envelope), STRUCTURED)


def plain(event: OutboxEvent) -> Outgoing:
    """The payload, and everything else in headers."""
    body, is_json = payload_of(event)
    return _outgoing(event, body, event.headers.get(_CONTENT_TYPE) or (_JSON if is_json else _BYTES))


def _outgoing(event: OutboxEvent, body: bytes, content_type: str) -> Outgoing:
    own = {name: value for name, value in event.headers.items() if name != ENCODING}
    headers = {
        _EVENT_NAME: event.topic,
        **own,
        _CONTENT_TYPE: content_type,
        "x-dedup-key": event.id,
        "x-tenant-id": event.tenant_id,
    }
    return Outgoing(event.topic, body, headers, event.key, event.id)


def _time(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
