"""Webhooks (requirement H7): subscriptions, signed deliveries, and verification by receivers.

A receiver verifies a delivery with:

    from holdfast.webhooks import verify

    message = verify(request.headers, await request.body(), secret)   # raises SignatureInvalid
"""

from holdfast.errors import SignatureInvalid
from holdfast.webhooks.signature import DeliveryStore, InMemoryDeliveryStore, WebhookMessage, sign, verify

__all__ = ["DeliveryStore", "InMemoryDeliveryStore", "SignatureInvalid", "WebhookMessage", "sign", "verify"]
