"""Message conversion for RabbitMQ, and checks for messages that the protocol cannot carry."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import struct
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from aiormq import Channel, spec
from aiormq import exceptions as amqp
from aiormq.abc import DeliveredMessage
from pamqp import frame
from pamqp.header import ContentHeader

from holdfast.brokers.port import UNREADABLE, OutgoingMessage, RawMessage, dead_letter_headers, tombstone_refused
from holdfast.brokers.rabbitmq_connection import RabbitConfig
from holdfast.errors import BrokerRefused, BrokerUnavailable

_log: Final = logging.getLogger("holdfast.brokers.rabbitmq")

#: Protocol maximum for names.
_MAX_NAME_BYTES: Final = 255
#: What fits into one header frame, less the protocol's overhead.
_MAX_HEADER_BYTES: Final = 100_000
#: Reason and history of a dead letter are cut to this, so that its headers fit into a frame.
_DEAD_TEXT_CHARS: Final = 8_000
#: Class, weight and size of the body.
_fixed_part: Final = struct.Struct(">HHQ")
_PERSISTENT: Final = 2
#: Set by quorum queues; becomes `RawMessage.deliveries`.
_DELIVERY_COUNT: Final = "x-delivery-count"


def dead_letter(message: RawMessage, name: str, source: str, reason: str, history: Sequence[str]) -> OutgoingMessage:
    """The message unchanged, plus reason and history if the headers have room."""
    headers: Mapping[str, str] = dead_letter_headers(message, source, reason, history, limit=_DEAD_TEXT_CHARS)
    if _size(headers) > _MAX_HEADER_BYTES:
        _log.warning("message %s: headers full, dead letter written without reason and history", message.message_id)
        headers = message.headers
    return OutgoingMessage(name, message.body, headers, message.key, message.message_id)


async def publish(channel: Channel, message: OutgoingMessage, settings: RabbitConfig, exchange: str) -> None:
    """Publish a message and wait for the confirm. Raises if it was not confirmed."""
    headers = {**message.headers, **({settings.key_header: message.key} if message.key else {})}
    if message.body is None:
        raise tombstone_refused("RabbitMQ")
    _check(message, headers, len(message.body), settings)
    properties = spec.Basic.Properties(
        content_type=next((value for name, value in headers.items() if name.lower() == "content-type"), None),
        headers=dict(headers),
        delivery_mode=_PERSISTENT,
        message_id=message.message_id or secrets.token_hex(16),
        timestamp=datetime.now(UTC),
    )
    try:
        await channel.basic_publish(
            message.body,
            exchange=exchange,
            routing_key=message.topic,
            properties=properties,
            mandatory=True,
            wait=False,
        )
    except amqp.PublishError as exc:
        cause = (
            f"exchange {exchange!r} has no queue for {message.topic!r}; bind one first"
            if exchange
            else f"queue {message.topic!r} not found; declare it first"
        )
        raise BrokerRefused(f"RabbitMQ at {settings.address}: {cause}") from exc
    except amqp.DeliveryError as exc:
        raise BrokerUnavailable(
            f"RabbitMQ at {settings.address} rejected a message for {message.topic!r}: the queue is full or failing"
        ) from exc


def _check(message: OutgoingMessage, headers: Mapping[str, str], body_bytes: int, settings: RabbitConfig) -> None:
    """Raise `BrokerRefused` for a message that the protocol cannot carry.

    Publishing it would close the channel or the connection, with all messages in flight on it.
    """
    too_long = [
        what
        for what, text in (
            ("topic", message.topic),
            ("message id", message.message_id),
            *(("header", h) for h in headers),
        )
        if len(text.encode(errors="replace")) > _MAX_NAME_BYTES
    ]
    if too_long:
        raise BrokerRefused(f"{too_long[0]} exceeds RabbitMQ's limit of {_MAX_NAME_BYTES} bytes")
    if _size(headers) > _MAX_HEADER_BYTES:
        raise BrokerRefused(f"headers exceed the limit of {_MAX_HEADER_BYTES} bytes for RabbitMQ")
    if body_bytes > settings.max_message_bytes:
        raise BrokerRefused(
            f"a message of {body_bytes} bytes exceeds the limit of {settings.max_message_bytes} "
            "(max_message_bytes; the broker's own limit is max_message_size)"
        )


def read_header(frame_data: bytes) -> ContentHeader:
    """Decode a content header frame. Never fails: properties that cannot be decoded become the header `UNREADABLE`.

    Other programs can send a timestamp beyond the calendar, or headers whose names are not UTF-8.
    """
    header = ContentHeader()
    try:
        header.unmarshal(frame_data)
    except (ValueError, ArithmeticError, LookupError, OSError, RecursionError, struct.error) as exc:
        header = ContentHeader(properties=spec.Basic.Properties(headers={UNREADABLE: f"{exc!r:.200}"}))
        fixed = frame_data[: _fixed_part.size].ljust(_fixed_part.size, b"\0")
        header.class_id, header.weight, header.body_size = _fixed_part.unpack(fixed)
    return header


def accept_any_header() -> None:
    """Make pamqp use `read_header`, in the whole process.

    Otherwise aiormq closes the connection, and RabbitMQ delivers the same message again, forever.
    """
    frame._unmarshal_header_frame = read_header


def raw_message(delivered: DeliveredMessage, settings: RabbitConfig) -> RawMessage:
    """Convert a delivery. Never fails, whatever the writer put into the message."""
    properties, delivery = delivered.header.properties, delivered.delivery
    assert isinstance(delivery, spec.Basic.Deliver)
    table = properties.headers or {}
    headers = {name.lower(): _plain(value) for name, value in table.items() if name != _DELIVERY_COUNT}
    if properties.content_type and "content-type" not in headers:
        headers["content-type"] = properties.content_type
    redelivered = bool(delivery.redelivered)
    counted = table.get(_DELIVERY_COUNT)
    return RawMessage(
        properties.message_id or _generate_id(delivered, delivery, settings),
        delivered.body,
        headers,
        _aware(properties.timestamp),
        {
            "exchange": delivery.exchange,
            "routing_key": delivery.routing_key,
            "delivery_tag": delivery.delivery_tag,
            "redelivered": redelivered,
        },
        headers.get(settings.key_header.lower(), ""),
        counted + 1 if isinstance(counted, int) else 1 + redelivered,
    )


def _generate_id(delivered: DeliveredMessage, delivery: spec.Basic.Deliver, settings: RabbitConfig) -> str:
    """Generate an id for a message without one: RabbitMQ assigns none.

    Only its content is the same in two deliveries, but two messages may have the same content.
    """
    if settings.without_id == "delivery":
        return secrets.token_hex(16)
    properties = delivered.header.properties
    table = {name: _plain(value) for name, value in (properties.headers or {}).items() if name != _DELIVERY_COUNT}
    written = [
        *(delivery.exchange, delivery.routing_key, sorted(table.items())),
        *(str(properties.timestamp), properties.correlation_id, properties.message_type, properties.app_id),
    ]
    return hashlib.sha256(json.dumps(written, default=str).encode() + b"\n" + delivered.body).hexdigest()[:32]


def _plain(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode(errors="replace")
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, bool | int | float | None | list | dict):
        return json.dumps(value, default=str, ensure_ascii=False)
    return str(value)


def _aware(timestamp: Any) -> datetime:
    if not isinstance(timestamp, datetime):
        return datetime.now(UTC)
    return timestamp if timestamp.tzinfo else timestamp.replace(tzinfo=UTC)


def _size(headers: Mapping[str, str]) -> int:
    return sum(len(name.encode()) + len(value.encode()) + 8 for name, value in headers.items())
