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

from holdfast.brokers.port import RawMessage
from holdfast.core.job import DEFAULT_TENANT
from holdfast.core.text import KEY_LIMIT, NAME_LIMIT, check_name, clean
from holdfast.errors import InvalidOption, InvalidPayload, PayloadTooLarge


class ParseError(InvalidPayload):
    """A body that its parser cannot read, or a header that cannot be. No later try will do better."""


class Parsed(msgspec.Struct, frozen=True):
    """What a body says."""

    payload: Any
    #: The payload as JSON, byte by byte as it came; None if it is no JSON.
    json: bytes | None = None
    #: What stands in for headers that are missing.
    event_name: str = ""
    dedup_key: str = ""
    headers: Mapping[str, str] = MappingProxyType({})


Parser = Callable[[bytes | None], Parsed]

_any: Final[msgspec.json.Decoder[Any]] = msgspec.json.Decoder()
_members: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NOTHING: Final = msgspec.Raw(b"null")
_TOMBSTONE: Final = Parsed(None, b"null")
_NEEDED: Final = ("specversion", "id", "source", "type")


def parser_of(kind: str) -> Parser:
    """The parser of this name."""
    parser = _PARSERS.get(kind)
    if parser is None:
        raise InvalidOption(f"there is no parser {kind!r}; it is one of {', '.join(_PARSERS)}")
    return parser


def parse_json(body: bytes | None) -> Parsed:
    return _TOMBSTONE if body is None else Parsed(_json(_any, body), body)


def parse_text(body: bytes | None) -> Parsed:
    if body is None:
        return _TOMBSTONE
    try:
        return Parsed(body.decode())
    except UnicodeDecodeError as exc:
        # Its own words would show bytes of the message.
        raise ParseError(f"the message is not UTF-8: byte {exc.start} of {len(body)}: {exc.reason}") from None


def parse_binary(body: bytes | None) -> Parsed:
    return _TOMBSTONE if body is None else Parsed(body)


def parse_cloud_event(body: bytes | None) -> Parsed:
    if body is None:
        raise ParseError("the message is not a CloudEvent: it is a tombstone, without a value")
    members = _json(_members, body)
    attributes: dict[str, str] = {}
    for name, raw in members.items():
        if name not in ("data", "data_base64"):
            value = _json(_any, bytes(raw))
            attributes[name.lower()] = value if isinstance(value, str) else bytes(raw).decode()
    for name in _NEEDED:
        if not attributes.get(name):
            raise ParseError(f"the message is no CloudEvent: its {name!r} is missing")
    if not attributes["specversion"].startswith("1."):
        raise ParseError("the message is a CloudEvent of another version than 1.x")
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
        data = bytes(members.get("data", _NOTHING))
        return _json(_any, data), data
    if "data" in members:
        raise ParseError("the message is no CloudEvent: it has both data and data_base64")
    text = _json(_any, bytes(encoded))
    try:
        return base64.b64decode(text, validate=True), None
    except (TypeError, ValueError, binascii.Error):
        raise ParseError("the message is no CloudEvent: its data_base64 is no base64") from None


def _json(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise ParseError(f"the message cannot be read as JSON: {exc}") from None
    except UnicodeDecodeError as exc:
        raise ParseError(f"the message cannot be read as JSON: it is not UTF-8 ({exc.reason})") from None


_PARSERS: Final[Mapping[str, Parser]] = {
    "json": parse_json,
    "text": parse_text,
    "binary": parse_binary,
    "cloudevents": parse_cloud_event,
}


#: T5's word for a message that has no event name.
DEFAULT_EVENT: Final = "queue_message"

#: The id of the first message, in a replay of its dead letter.
REPLAY_OF: Final = "x-replay-of"

_TRACE_HEADER: Final = "x-trace-id"
_TRACEPARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
#: Of a name that is shown in an error.
_SHOWN: Final = 40


class HeaderNames(msgspec.Struct, frozen=True):
    """Where an envelope's fields come from; lower case."""

    event_name: str = "x-event-name"
    dedup_key: str = "x-dedup-key"
    tenant_id: str = "x-tenant-id"


_DEFAULT_NAMES: Final = HeaderNames()


class MessageEnvelope(msgspec.Struct, frozen=True, kw_only=True):
    """A message, ready to be handed over."""

    message_id: str
    payload: Any
    headers: Mapping[str, str]
    received_at: datetime
    #: The queue.
    source: str
    dedup_key: str | None = None
    event_name: str | None = None
    tenant_id: str | None = None
    #: The payload's JSON as it came, if it is JSON.
    json: bytes | None = None
    trace_id: str = ""
    traceparent: str = ""

    @classmethod
    def from_raw(
        cls,
        raw: RawMessage,
        source: str,
        parser: Parser,
        names: HeaderNames = _DEFAULT_NAMES,
        payload_limit: int | None = None,
    ) -> MessageEnvelope:
        """Raises `ParseError`, or `PayloadTooLarge`: then it is one for the dead letters."""
        size = len(raw.body or b"")
        if payload_limit is not None and size > payload_limit:
            raise PayloadTooLarge("the message", size, payload_limit)
        headers = _readable(raw.headers)
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
            # A replay of a message without a key has the key that the message had: its id.
            dedup_key=_key(headers.get(names.dedup_key) or parsed.dedup_key or headers.get(REPLAY_OF, "")),
            event_name=_event(headers.get(names.event_name, "").strip() or parsed.event_name),
            tenant_id=_tenant(headers.get(names.tenant_id, "").strip(), names.tenant_id),
            json=parsed.json,
            trace_id=_trace_id(headers.get(_TRACE_HEADER, ""), found[1] if found else "", raw.message_id),
            traceparent=traceparent if found else "",
        )

    @property
    def tenant(self) -> str:
        """Whose it is; nobody's are the default tenant's."""
        return self.tenant_id or DEFAULT_TENANT

    @property
    def event(self) -> str:
        return self.event_name or DEFAULT_EVENT

    def context(self) -> dict[str, Any]:
        """What a runtime is told of it (requirement T5)."""
        return {
            "message": self.payload,
            "headers": self.headers,
            "source": self.source,
            "message_id": self.message_id,
            "received_at": self.received_at.isoformat(),
        }


def trace_id_of(raw: RawMessage) -> str:
    """Of a message that may not be parsed."""
    headers = _readable(raw.headers)
    found = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
    return _trace_id(headers.get(_TRACE_HEADER, ""), found[1] if found else "", raw.message_id)


def tenant_and_event_hint(raw: RawMessage, names: HeaderNames) -> tuple[str, str]:
    """Tenant and event name of a message that cannot be parsed, as far as its headers can be used."""
    headers = _readable(raw.headers)
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
    """The text itself, or its SHA-256 if a ledger could not hold it or look it up."""
    if text.isascii():
        # The usual case, without a copy.
        fits = len(text) <= limit and "\0" not in text
    else:
        fits = clean(text) == text and len(text.encode()) <= limit
    return text if fits else short_hash(text)


def short_hash(text: str) -> str:
    """A short name for a text, the same every time."""
    return "sha256-" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _readable(headers: Mapping[str, str]) -> dict[str, str]:
    """What is no text that JSON could hold is replaced, so that one odd header costs no message."""
    return {
        name if name.isascii() else clean(name): value if value.isascii() else clean(value)
        for name, value in headers.items()
    }


def _key(text: str) -> str | None:
    return key_or_hash(text) if text else None


def _event(name: str) -> str | None:
    if not name:
        return None
    if not name.isprintable() or len(name.encode()) > NAME_LIMIT:
        raise ParseError(
            f"the event name {name[:_SHOWN]!r} cannot be: at most {NAME_LIMIT} bytes, no control characters"
        )
    return name


def _tenant(name: str, header: str) -> str | None:
    if not name:
        return None
    try:
        return check_name(name, header)
    except InvalidOption:
        raise ParseError(
            f"the header {header} names a tenant that cannot be, {name[:_SHOWN]!r}: at most {NAME_LIMIT} bytes, no "
            "blanks, braces or control characters"
        ) from None


def _trace_id(given: str, w3c: str, message_id: str) -> str:
    if given and key_or_hash(given) == given:
        return given
    return w3c or key_or_hash(f"queue-{message_id}")
