"""SQS's messages and the port's.

SQS carries text of XML's characters, at least one of them, and ten attributes with names of few characters. What fits
is written as it is, so that other programs can read it. What does not: bodies become base64 (`x-body-encoding`),
headers become one attribute of JSON (`x-headers`); the adapter undoes both.
"""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64decode, b64encode
from binascii import Error as NotBase64
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final
from uuid import uuid4

from holdfast.brokers.letters import dead_headers, tombstone_refused
from holdfast.brokers.port import Outgoing, RawMessage
from holdfast.brokers.times import moment
from holdfast.errors import BrokerRefused

KEY: Final = "x-key"
_ENCODING: Final = "x-body-encoding"
_PACKED: Final = "x-headers"
_RESERVED: Final = (KEY, _ENCODING, _PACKED)
_MAX_ATTRIBUTES: Final = 10
#: Reason and history of a dead letter are cut to this.
_DEAD_TEXT_CHARS: Final = 4_000

_FORBIDDEN: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_NAME: Final = re.compile(r"(?!(?i:aws\.|amazon\.))[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")
_GROUP: Final = re.compile(r"[!-~]{1,128}")
#: Groups of messages without a key, and of keys that a group cannot be named by.
_UNKEYED: Final = "holdfast-unkeyed-"
_DIGEST: Final = "holdfast-digest-"


def encoded(message: Outgoing, *, fifo: bool) -> dict[str, Any]:
    """An entry for `SendMessageBatch`, without its `Id`; `BrokerRefused` for what SQS cannot carry."""
    if message.body is None:
        raise tombstone_refused("SQS")
    body, encoding = _encoded_body(message.body)
    own = {_ENCODING: encoding} if encoding else {}
    entry: dict[str, Any] = {"MessageBody": body}
    if fifo:
        group = _group(message.key)
        entry["MessageGroupId"] = group
        entry["MessageDeduplicationId"] = _deduplication_id(message.message_id)
        if group.startswith(_DIGEST):
            own[KEY] = message.key
    elif message.key:
        own[KEY] = message.key
    attributes = {**message.headers, **own}
    if not _fits(attributes):
        attributes = {**own, _PACKED: json.dumps(dict(message.headers))}
    if own.get(KEY) and (not _fits(own) or own[KEY].startswith('"')):
        attributes[KEY] = json.dumps(own[KEY])
    if attributes:
        entry["MessageAttributes"] = {
            name: {"DataType": "String", "StringValue": value} for name, value in attributes.items()
        }
    return entry


def size_of(entry: Mapping[str, Any]) -> int:
    """As SQS counts it: body and attributes with their names and types."""
    attributes = entry.get("MessageAttributes", {}).items()
    return len(entry["MessageBody"].encode()) + sum(
        len(name.encode()) + len("String") + len(value["StringValue"].encode()) for name, value in attributes
    )


def check_size(entry: Mapping[str, Any], limit: int) -> None:
    """`BrokerRefused` for what SQS will never take."""
    if size_of(entry) > limit:
        raise BrokerRefused(
            f"a message of {size_of(entry)} bytes, as SQS counts them, is over its limit of {limit}: "
            "store the payload elsewhere and send its address"
        )


def decoded(received: Mapping[str, Any], queue: str) -> RawMessage:
    """Total: whatever odd things a writer puts into a message, it can be handed over."""
    attributes: Mapping[str, Any] = received.get("MessageAttributes") or {}
    texts = {name.lower(): _text(value) for name, value in attributes.items()}
    system: Mapping[str, str] = received.get("Attributes") or {}
    group = system.get("MessageGroupId", "")
    headers = {name: value for name, value in texts.items() if name not in _RESERVED} | _unpacked(texts.get(_PACKED))
    sent = system.get("SentTimestamp", "")
    return RawMessage(
        received["MessageId"],
        _decoded_body(received.get("Body", ""), texts.get(_ENCODING, "")),
        headers,
        moment(int(sent)) if sent.isdigit() else datetime.now(UTC),
        {"queue": queue, "receipt_handle": received["ReceiptHandle"], **system},
        _unpacked_key(texts.get(KEY)) or ("" if group.startswith(_UNKEYED) else group),
        int(system.get("ApproximateReceiveCount", "1")),
    )


def dead_letter(message: RawMessage, name: str, source: str, reason: str, history: Sequence[str]) -> Outgoing:
    """The message as it was, with what there is to say about it."""
    headers = dead_headers(message, source, reason, history, limit=_DEAD_TEXT_CHARS)
    return Outgoing(name, message.body, headers, message.key, f"dead-{message.message_id}")


def _encoded_body(body: bytes) -> tuple[str, str]:
    if not body:
        return "empty", "empty"
    try:
        text = body.decode()
    except UnicodeDecodeError:
        text = ""
    if text and not _FORBIDDEN.search(text):
        return text, ""
    return b64encode(body).decode(), "base64"


def _decoded_body(text: str, encoding: str) -> bytes:
    if encoding == "empty":
        return b""
    if encoding == "base64":
        try:
            return b64decode(text, validate=True)
        except NotBase64:
            # Somebody else's header of the same name.
            return text.encode()
    return text.encode(errors="replace")


def _fits(attributes: Mapping[str, str]) -> bool:
    return len(attributes) <= _MAX_ATTRIBUTES and all(
        _NAME.fullmatch(name) and len(name) <= 256 and value and not _FORBIDDEN.search(value)
        for name, value in attributes.items()
    )


def _unpacked(packed: str | None) -> dict[str, str]:
    """Headers that were written as JSON; none, if it is somebody else's header of the same name."""
    try:
        found = json.loads(packed) if packed else {}
    except ValueError:
        return {_PACKED: packed or ""}
    if not isinstance(found, dict):
        return {_PACKED: packed or ""}
    return {str(name).lower(): value if isinstance(value, str) else json.dumps(value) for name, value in found.items()}


def _unpacked_key(key: str | None) -> str:
    if key and key.startswith('"'):
        try:
            found = json.loads(key)
        except ValueError:
            return key
        return found if isinstance(found, str) else key
    return key or ""


def _text(value: Mapping[str, Any]) -> str:
    if "StringValue" in value:
        return str(value["StringValue"])
    return bytes(value.get("BinaryValue", b"")).decode(errors="replace")


def _group(key: str) -> str:
    if not key:
        return f"{_UNKEYED}{uuid4().hex}"
    return key if _GROUP.fullmatch(key) else _DIGEST + hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()


def _deduplication_id(message_id: str) -> str:
    if not message_id:
        return uuid4().hex
    return (
        message_id
        if _GROUP.fullmatch(message_id)
        else hashlib.sha256(message_id.encode(errors="surrogatepass")).hexdigest()
    )
