"""Parse a message of any broker into a `MessageEnvelope` (T2).

Fields of missing headers are None. A dedup key that is too long or cannot be stored is replaced by its hash. A tenant
id or event name that cannot be stored raises `ParseError`, because a substitute could act for another tenant.

Parsers, which turn the body into the payload without loss:

json          any JSON value; the last value of a repeated key wins, integers may be of any size
text          UTF-8
binary        the bytes unchanged
cloudevents   a CloudEvent in structured JSON: its data; type and id stand in for missing headers, and the other
              attributes become headers `ce-…`

The payload of a tombstone (a Kafka message without a value) is None; a tombstone is not a CloudEvent. An empty body is
valid text and binary of length 0, but not JSON.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final

import msgspec

from holdfast.brokers.port import UNREADABLE, RawMessage
from holdfast.core.job import DEFAULT_TENANT
from holdfast.core.text import KEY_LIMIT, NAME_LIMIT, check_name, clean
from holdfast.errors import InvalidOption, InvalidPayload, PayloadTooLarge


class ParseError(InvalidPayload):
    """A body that the parser cannot read, or an invalid header. A retry cannot succeed."""


class Parsed(msgspec.Struct, frozen=True):
    """The parsed body."""

    payload: Any
    #: The payload as the original JSON bytes; None if it is not JSON.
    json: bytes | None = None
    #: Substitutes for missing headers.
    event_name: str = ""
    dedup_key: str = ""
    headers: Mapping[str, str] = MappingProxyType({})


MessageParser = Callable[[bytes | None], Parsed]

_any: Final[msgspec.json.Decoder[Any]] = msgspec.json.Decoder()
_members: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NULL: Final = msgspec.Raw(b"null")
_TOMBSTONE: Final = Parsed(None, b"null")
_REQUIRED: Final = ("specversion", "id", "source", "type")


def parser_of(kind: str) -> MessageParser:
    """Get a parser by name."""
    parser = _PARSERS.get(kind)
    if parser is None:
        raise InvalidOption(f"unknown parser {kind!r}; use one of {', '.join(_PARSERS)}")
    return parser


def parse_json(body: bytes | None) -> Parsed:
    return _TOMBSTONE if body is None else Parsed(_json(_any, body), body)


def parse_text(body: bytes | None) -> Parsed:
    if body is None:
        return _TOMBSTONE
    try:
        return Parsed(body.decode())
    except UnicodeDecodeError as exc:
        # The original error would quote bytes of the message.
        raise ParseError(f"the message is not UTF-8: byte {exc.start} of {len(body)}: {exc.reason}") from None


def parse_binary(body: bytes | None) -> Parsed:
    return _TOMBSTONE if body is None else Parsed(body)


def parse_cloud_event(body: bytes | None) -> Parsed:
    if body is None:
        raise ParseError("the message is not a CloudEvent: it is a tombstone without a value")
    members = _json(_members, body)
    attributes: dict[str, str] = {}
    for name, raw in members.items():
        if name not in ("data", "data_base64"):
            value = _json(_any, bytes(raw))
            attributes[name.lower()] = value if isinstance(value, str) else bytes(raw).decode()
    for name in _REQUIRED:
        if not attributes.get(name):
            raise ParseError(f"the message is not a CloudEvent: {name!r} is missing")
    if not attributes["specversion"].startswith("1."):
        raise ParseError("the message is a CloudEvent of an unsupported version; only 1.x is supported")
    payload, data = _cloud_data(members)
    return Parsed(
        payload,
        data,
        event_name=attributes["type"],
        dedup_key=attributes["id"],
        headers={f"ce-{name}": value for name, value in attributes.items()},
    )


def _cloud_data(members: dict[str, msgspec.Raw]) -> tuple[Any, bytes | None]:
    encoded = members.get("data_base64")
    if encoded is None:
        data = bytes(members.get("data", _NULL))
        return _json(_any, data), data
    if "data" in members:
        raise ParseError("the message is not a CloudEvent: it has both data and data_base64")
    text = _json(_any, bytes(encoded))
    try:
        return base64.b64decode(text, validate=True), None
    except (TypeError, ValueError, binascii.Error):
        raise ParseError("the message is not a CloudEvent: data_base64 is not base64") from None


def _json(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise ParseError(f"the message is not valid JSON: {exc}") from None
    except UnicodeDecodeError as exc:
        raise ParseError(f"the message is not valid JSON: it is not UTF-8 ({exc.reason})") from None


_PARSERS: Final[Mapping[str, MessageParser]] = {
    "json": parse_json,
    "text": parse_text,
    "binary": parse_binary,
    "cloudevents": parse_cloud_event,
}


#: Event name of a message without one (T5).
DEFAULT_EVENT: Final = "queue_message"

#: Header of a replayed dead letter: id of the original message.
REPLAY_OF: Final = "x-replay-of"

_TRACE_HEADER: Final = "x-trace-id"
_TRACEPARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
#: Number of characters of a name that an error shows.
_SHOWN: Final = 40


class HeaderNames(msgspec.Struct, frozen=True):
    """Names of the headers that fill an envelope, in lower case."""

    event_name: str = "x-event-name"
    dedup_key: str = "x-dedup-key"
    tenant_id: str = "x-tenant-id"


_DEFAULT_NAMES: Final = HeaderNames()


class MessageEnvelope(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed message."""

    message_id: str
    payload: Any
    headers: Mapping[str, str]
    received_at: datetime
    #: Name of the queue.
    source: str
    dedup_key: str | None = None
    event_name: str | None = None
    tenant_id: str | None = None
    #: The original JSON of the payload, if it is JSON.
    json: bytes | None = None
    trace_id: str = ""
    traceparent: str = ""

    @classmethod
    def from_raw(
        cls,
        raw: RawMessage,
        source: str,
        parser: MessageParser,
        names: HeaderNames = _DEFAULT_NAMES,
        payload_limit: int | None = None,
    ) -> MessageEnvelope:
        """Parse a message. Raises `ParseError` or `PayloadTooLarge`, after which it should be dead-lettered."""
        size = len(raw.body or b"")
        if payload_limit is not None and size > payload_limit:
            raise PayloadTooLarge("the message", size, payload_limit)
        headers = _clean_headers(raw.headers)
        if reason := headers.get(UNREADABLE):
            raise ParseError(f"the message's headers cannot be decoded: {reason}")
        parsed = parser(raw.body)
        if parsed.headers:
            headers = {**parsed.headers, **headers}
        traceparent = headers.get("traceparent", "")
        found = _TRACEPARENT.fullmatch(traceparent)
        return cls(
            message_id=raw.message_id,
            payload=parsed.payload,
            headers=headers,
            received_at=raw.timestamp,
            source=source,
            # The replay of a message without a key uses the key of the original: its id.
            dedup_key=_key(headers.get(names.dedup_key) or parsed.dedup_key or headers.get(REPLAY_OF, "")),
            event_name=_event(headers.get(names.event_name, "").strip() or parsed.event_name),
            tenant_id=_tenant(headers.get(names.tenant_id, "").strip(), names.tenant_id),
            json=parsed.json,
            trace_id=_trace_id(headers.get(_TRACE_HEADER, ""), found[1] if found else "", raw.message_id),
            traceparent=traceparent if found else "",
        )

    @property
    def tenant(self) -> str:
        """The tenant, or the default tenant."""
        return self.tenant_id or DEFAULT_TENANT

    @property
    def event(self) -> str:
        return self.event_name or DEFAULT_EVENT

    def context(self) -> dict[str, Any]:
        """The `context` passed to a runtime (T5)."""
        return {
            "message": self.payload,
            "headers": self.headers,
            "source": self.source,
            "message_id": self.message_id,
            "received_at": self.received_at.isoformat(),
        }


def trace_id_of(raw: RawMessage) -> str:
    """Trace id of a message that may not be parsable."""
    headers = _clean_headers(raw.headers)
    found = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
    return _trace_id(headers.get(_TRACE_HEADER, ""), found[1] if found else "", raw.message_id)


def tenant_and_event_hint(raw: RawMessage, names: HeaderNames) -> tuple[str, str]:
    """Tenant and event name of a message that cannot be parsed, as far as its headers can be used."""
    headers = _clean_headers(raw.headers)
    try:
        tenant = _tenant(headers.get(names.tenant_id, "").strip(), names.tenant_id)
    except ParseError:
        tenant = None
    try:
        event = _event(headers.get(names.event_name, "").strip())
    except ParseError:
        event = None
    return tenant or DEFAULT_TENANT, event or DEFAULT_EVENT


def key_or_hash(text: str, limit: int = KEY_LIMIT) -> str:
    """The text itself, or its SHA-256 if a ledger could not store or index it."""
    if text.isascii():
        # The common case, without a copy.
        fits = len(text) <= limit and "\0" not in text
    else:
        fits = clean(text) == text and len(text.encode()) <= limit
    return text if fits else short_hash(text)


def short_hash(text: str) -> str:
    """Deterministic SHA-256 name of a text."""
    return "sha256-" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _clean_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Replace lone surrogates, which JSON cannot hold. All other text, zero bytes included, is unchanged."""
    return {
        name if name.isascii() else _without_surrogates(name): value if value.isascii() else _without_surrogates(value)
        for name, value in headers.items()
    }


def _without_surrogates(text: str) -> str:
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _key(text: str) -> str | None:
    return key_or_hash(text) if text else None


def _event(name: str) -> str | None:
    if not name:
        return None
    if not name.isprintable() or len(name.encode()) > NAME_LIMIT:
        raise ParseError(
            f"event name {name[:_SHOWN]!r} is not valid: at most {NAME_LIMIT} bytes, no control characters"
        )
    return name


def _tenant(name: str, header: str) -> str | None:
    if not name:
        return None
    try:
        return check_name(name, header)
    except InvalidOption:
        raise ParseError(
            f"tenant {name[:_SHOWN]!r} in header {header} is not valid: at most {NAME_LIMIT} bytes, no "
            "spaces, braces or control characters"
        ) from None


def _trace_id(given: str, w3c: str, message_id: str) -> str:
    if given and key_or_hash(given) == given:
        return given
    return w3c or key_or_hash(f"queue-{message_id}")
