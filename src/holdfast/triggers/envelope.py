"""A message of any broker in one shape (requirement T2).

Headers that are missing are None. A key that is too long or cannot be stored is known by its hash; a tenant id or event
name that cannot be is a `ParseError`, since anything else than what was meant would act for somebody else.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

import msgspec

from holdfast.brokers.port import RawMessage
from holdfast.core.job import DEFAULT_TENANT
from holdfast.errors import InvalidOption, PayloadTooLarge
from holdfast.ledger.text import clean
from holdfast.options import KEY_LIMIT, NAME_LIMIT, check_name
from holdfast.triggers.parsers import ParseError, Parser

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


def guessed(raw: RawMessage, names: HeaderNames) -> tuple[str, str]:
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


def storable(text: str, limit: int = KEY_LIMIT) -> str:
    """The text itself, or its SHA-256 if a ledger could not hold it or look it up."""
    if text.isascii():
        # The usual case, without a copy.
        fits = len(text) <= limit and "\0" not in text
    else:
        fits = clean(text) == text and len(text.encode()) <= limit
    return text if fits else hashed(text)


def hashed(text: str) -> str:
    """A short name for a text, the same every time."""
    return "sha256-" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _readable(headers: Mapping[str, str]) -> dict[str, str]:
    """What is no text that JSON could hold is replaced, so that one odd header costs no message."""
    return {
        name if name.isascii() else clean(name): value if value.isascii() else clean(value)
        for name, value in headers.items()
    }


def _key(text: str) -> str | None:
    return storable(text) if text else None


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
    if given and storable(given) == given:
        return given
    return w3c or storable(f"queue-{message_id}")
