"""Deliveries as jobs carry them: sealed, so that nothing is signed and sent that the courier did not write.

Whoever may submit jobs can hand one in for the deliveries' queue, and whoever may replay dead letters can edit one. The
seal is made with the secret that the delivery will be signed with, over all of it. The address of a subscriber is the
operator's own, and often a secret: tenants, who see their jobs, see a reference to it.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any, Final

import msgspec

from holdfast.errors import Fatal
from holdfast.settings import Settings
from holdfast.webhooks.messages import Delivery

#: What is signed for receivers begins otherwise: neither can be taken for the other.
_PURPOSE: Final = b"holdfast.delivery\x00"
_SUBSCRIBER: Final = "subscriber:"


def sealed(settings: Settings, delivery: Delivery) -> bytes:
    """The payload of a delivery's job."""
    url = delivery.url
    to = _reference(url) if any(each.url == url for each in settings.webhooks) else url
    parts = {"url": to, "webhook_id": delivery.webhook_id, "event": delivery.type, "body": delivery.body}
    # Without a secret there is nothing to sign it with either: the sender says so.
    key = next(iter(settings.webhook_secrets(url)), b"")
    return msgspec.json.encode(parts | {"seal": _seal(key, parts)})


def opened(settings: Settings, url: str, webhook_id: str, event: str, body: str, seal: str) -> str:
    """The address that a delivery goes to; `Fatal` if it is not as the courier wrote it, or for nobody any more."""
    address = url
    if url.startswith(_SUBSCRIBER):
        known = {_reference(each.url): each.url for each in settings.webhooks}
        if url not in known:
            raise Fatal("webhook: nobody subscribes at that address any more")
        address = known[url]
    parts = {"url": url, "webhook_id": webhook_id, "event": event, "body": body}
    keys = settings.webhook_secrets(address) or (b"",)
    if not any(hmac.compare_digest(_seal(key, parts).encode(), seal.encode()) for key in keys):
        raise Fatal(
            "webhook: this delivery is not as holdfast wrote it, so it is not signed; "
            "if the secret was replaced meanwhile, set the old one beside the new one and replay the delivery"
        )
    return address


def _reference(url: str) -> str:
    return f"{_SUBSCRIBER}{hashlib.sha256(url.encode()).hexdigest()[:32]}"


def _seal(key: bytes, parts: dict[str, Any]) -> str:
    return hmac.new(key, _PURPOSE + msgspec.json.encode(parts), "sha256").hexdigest()
