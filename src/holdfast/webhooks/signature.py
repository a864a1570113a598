"""Signatures by the Standard Webhooks convention: holdfast signs, receivers verify.

HMAC-SHA256 signs `<webhook-id>.<webhook-timestamp>.<body>`. The header `webhook-signature` holds `v1,<base64>`, one per
secret during a rotation. The timestamp is that of the attempt: a retried delivery has the same id and a new signature.
"""

from __future__ import annotations

import base64
import hmac
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Protocol

import msgspec

from holdfast.core.webhook_url import parse_secrets
from holdfast.errors import SignatureInvalid

TOLERANCE: Final = timedelta(minutes=5)

_ID, _TIMESTAMP, _SIGNATURE = "webhook-id", "webhook-timestamp", "webhook-signature"
#: More signatures than any rotation needs; bounds the work of a verification.
_MAX_SIGNATURES: Final = 16


class WebhookMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a verified delivery."""

    #: The same for every attempt of a delivery; use it to detect duplicates.
    id: str
    #: `job.succeeded`, `approval.requested`, `alert.…`
    type: str
    #: When it happened.
    timestamp: datetime
    data: dict[str, Any]


class DeliveryStore(Protocol):
    """Stores seen deliveries, to refuse replayed ones: for example a table, or Redis keys with an expiry."""

    def add(self, delivery: str, until: datetime) -> bool:
        """Add a delivery; whether it is new. Must be atomic under concurrency. May be deleted after `until`."""
        ...


class InMemoryDeliveryStore(DeliveryStore):
    """Delivery store for a receiver with a single process."""

    def __init__(self) -> None:
        self._until: dict[str, datetime] = {}

    def __len__(self) -> int:
        return len(self._until)

    def add(self, delivery: str, until: datetime) -> bool:
        now = datetime.now(UTC)
        # Insertion order is close to the order of expiry.
        while self._until and next(iter(self._until.values())) < now:
            del self._until[next(iter(self._until))]
        if delivery in self._until:
            return False
        self._until[delivery] = until
        return True


def sign(secrets: Sequence[bytes], webhook_id: str, timestamp_s: int, body: bytes) -> dict[str, str]:
    """Return the three signature headers of a delivery."""
    signed = _signed_content(webhook_id, str(timestamp_s), body)
    return {
        _ID: webhook_id,
        _TIMESTAMP: str(timestamp_s),
        _SIGNATURE: " ".join(f"v1,{base64.b64encode(_digest(secret, signed)).decode()}" for secret in secrets),
    }


def verify(
    headers: Mapping[str, str],
    body: bytes | str,
    secret: str,
    *,
    tolerance: timedelta = TOLERANCE,
    seen: DeliveryStore | None = None,
    now: datetime | None = None,
) -> WebhookMessage:
    """Verify a delivery and return its message, for receivers. Raises `SignatureInvalid`.

    `body` is the request's body, byte for byte as received. `secret` is `whsec_…`; several are separated by blanks.
    Deliveries whose timestamp differs by more than `tolerance` are refused; with `seen` also repeated ones.
    """
    found = {name.lower(): value for name, value in headers.items() if name.lower().startswith("webhook-")}
    missing = [name for name in (_ID, _TIMESTAMP, _SIGNATURE) if not found.get(name)]
    if missing:
        raise SignatureInvalid(f"header {missing[0]} is missing")
    sent_at = _sent_at(found[_TIMESTAMP])
    now = now or datetime.fromtimestamp(time.time(), UTC)
    try:
        content = body.encode() if isinstance(body, str) else body
        matches = _matches(secret, found, content)
    except UnicodeEncodeError as exc:
        raise SignatureInvalid("the request has lone surrogates, which no signed request has") from exc
    if not matches:
        raise SignatureInvalid("the signature does not match the request")
    if abs(now - sent_at) > tolerance:
        raise SignatureInvalid("the timestamp is outside the tolerance; the request is too old or a clock is wrong")
    if seen is not None and not seen.add(f"{found[_ID]}.{found[_TIMESTAMP]}", sent_at + 2 * tolerance):
        raise SignatureInvalid("the request was already received")
    try:
        read = msgspec.json.decode(content, type=_Body)
    except (ValueError, RecursionError) as exc:
        raise SignatureInvalid("the signature is valid, but the body is not a holdfast webhook") from exc
    return WebhookMessage(id=found[_ID], type=read.type, timestamp=read.timestamp, data=read.data)


class _Body(msgspec.Struct, frozen=True):
    type: str
    timestamp: datetime
    data: dict[str, Any]


def _matches(secret: str, found: Mapping[str, str], body: bytes) -> bool:
    signed = _signed_content(found[_ID], found[_TIMESTAMP], body)
    expected = [base64.b64encode(_digest(key, signed)) for key in parse_secrets(secret)]
    given = [
        text.removeprefix("v1,").encode("utf-8", "replace")
        for text in found[_SIGNATURE].split(" ")[:_MAX_SIGNATURES]
        if text.startswith("v1,")
    ]
    # Compare all, so that timing reveals nothing.
    results = [hmac.compare_digest(one, other) for one in expected for other in given]
    return any(results)


def _sent_at(text: str) -> datetime:
    if not (text.isascii() and text.isdigit() and len(text) <= 11):
        raise SignatureInvalid("header webhook-timestamp is not a number of seconds")
    return datetime.fromtimestamp(int(text), UTC)


def _signed_content(webhook_id: str, timestamp: str, body: bytes) -> bytes:
    return f"{webhook_id}.{timestamp}.".encode("utf-8", "surrogateescape") + body


def _digest(secret: bytes, signed: bytes) -> bytes:
    return hmac.digest(secret, signed, "sha256")
