"""From a message's body to its payload, without loss (requirement T2).

json          any JSON value; of a key that comes twice the last value counts, whole numbers may be of any size
text          UTF-8
binary        the bytes as they are
cloudevents   a CloudEvent in structured JSON: its data; type and id stand in for missing headers, and the other
              attributes become headers `ce-…`

The payload of a tombstone, Kafka's message without a value, is None; it is not a CloudEvent. An empty body is text or
bytes without length, and is not JSON.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

from holdfast.errors import InvalidOption, InvalidPayload


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
