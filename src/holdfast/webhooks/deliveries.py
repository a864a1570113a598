"""Webhook deliveries: content and addresses, signed payloads, and checks at submission.

A body is `{"type", "timestamp", "data"}`. It holds what an outsider may know: no stack, no worker, no payload; of an
error only its code and the message meant for outsiders. A delivery's id is derived from its subject and its address, so
that the same notification to the same address is always the same delivery.

`sign_payload` and `verify_payload` ensure that only deliveries which holdfast wrote are signed and sent. Otherwise a
principal that may submit jobs could submit a delivery, and one that may replay dead letters could edit one. The
signature covers the whole delivery and uses the secret that the delivery will be signed with. A subscriber's address
belongs to the operator and is often a secret, so a job holds only a reference to it: tenants see their jobs.

`WebhookPolicy` checks a webhook's address at submission, as far as possible without a DNS look-up, and marks jobs that
a subscription covers, so that the ledger can find them among millions of others.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator, Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.core.job import WEBHOOK_QUEUE, Envelope
from holdfast.core.principal import ALL_TENANTS
from holdfast.core.states import State
from holdfast.core.webhook_url import ANY_SUBSCRIBER, check_target
from holdfast.errors import Fatal, InvalidOption, NoLedger
from holdfast.settings import Settings

if TYPE_CHECKING:
    from holdfast.ledger.port.ledger import Ledger
    from holdfast.ledger.port.operators import AlertNotification, ApprovalNotification, FinishedJob
    from holdfast.settings import WebhookSubscription


QUEUE: Final = WEBHOOK_QUEUE
TASK: Final = "holdfast.webhook"

#: Longer results are omitted; the receiver can get them by job id.
RESULT_LIMIT: Final = 16 * 1024

_EVENTS: Final = {
    State.SUCCEEDED: "job.succeeded",
    State.FAILED: "job.failed",
    State.CANCELLED: "job.cancelled",
}


class WebhookDelivery(msgspec.Struct, frozen=True, kw_only=True):
    """One notification to one address."""

    webhook_id: str
    tenant_id: str
    trace_id: str
    #: W3C trace context of the job concerned.
    traceparent: str = ""
    url: str
    type: str
    #: JSON, exactly as signed and sent.
    body: str


class Subscribers:
    """Configured subscriptions."""

    def __init__(self, subscriptions: Sequence[WebhookSubscription]) -> None:
        self._subscriptions = tuple(subscriptions)

    def any_for(self, prefix: str) -> bool:
        """Whether a subscription covers events with this prefix."""
        return any(event.startswith(prefix) for each in self._subscriptions for event in each.events)

    def wants_jobs_of(self, tenant_id: str) -> bool:
        """Whether a subscription covers the end of this tenant's jobs."""
        return any(_is_of(each, tenant_id) and _begins(each, "job.") for each in self._subscriptions)

    def addresses(self, event: str, tenant_id: str) -> list[str]:
        """Addresses subscribed to an event of a tenant."""
        return [
            each.url
            for each in self._subscriptions
            if _is_of(each, tenant_id) and any(fnmatchcase(event, pattern) for pattern in each.events)
        ]


def job_deliveries(job: FinishedJob, subscribers: Subscribers) -> Iterator[WebhookDelivery]:
    """Deliveries for the end of a job: to the job's own address and to subscribers."""
    event = _EVENTS[job.state]
    addresses = subscribers.addresses(event, job.key.tenant_id)
    if job.webhook != ANY_SUBSCRIBER:
        addresses.insert(0, job.webhook)
    data: dict[str, Any] = {
        "job_id": job.key.job_id,
        "queue": job.key.queue,
        "tenant_id": job.key.tenant_id,
        "task": job.job_type,
        "state": job.state,
        "attempt": job.attempt,
        "retry_count": job.retry_count,
        "idempotency_key": job.idempotency_key or job.key.job_id,
        "trace_id": job.trace_id,
        "created_at": job.created_at,
        "finished_at": job.finished_at,
    }
    if job.state is State.SUCCEEDED:
        data |= _result(job.result)
    if job.state is State.FAILED:
        data |= {"error": {"code": job.error_code, "message": job.error_message}, "dlq_id": job.dlq_id}
    about = (job.key.queue, job.key.job_id)
    trace = (job.trace_id, job.traceparent)
    yield from _deliveries(event, job.key.tenant_id, trace, about, job.finished_at, data, addresses)


def approval_deliveries(notification: ApprovalNotification, subscribers: Subscribers) -> Iterator[WebhookDelivery]:
    """Deliveries for an approval request: that it was made, unless already notified, and its decision."""
    data: dict[str, Any] = {
        "approval_id": notification.approval_id,
        "job_id": notification.job_id,
        "queue": notification.queue,
        "tenant_id": notification.tenant_id,
        "task": notification.job_type,
        "name": notification.name,
        "reason": notification.reason,
        "policies": msgspec.Raw(notification.policies.encode()),
        "details": None if notification.details is None else msgspec.Raw(notification.details.encode()),
        "quorum": notification.quorum,
        "requested_by": notification.requested_by,
        "requested_at": notification.requested_at,
        "deadline": notification.deadline,
    }
    decision = {
        "decided_by": notification.decided_by,
        "decided_at": notification.decided_at,
        "decision_reason": notification.decision_reason,
    }
    steps: list[tuple[str, datetime, dict[str, Any]]] = []
    if notification.notified_status is None:
        steps.append(("requested", notification.requested_at, data))
    if notification.decided_at is not None:
        steps.append((notification.status, notification.decided_at, data | decision))
    for status, at, content in steps:
        event = f"approval.{status}"
        addresses = subscribers.addresses(event, notification.tenant_id)
        trace = (notification.trace_id, notification.traceparent)
        yield from _deliveries(
            event, notification.tenant_id, trace, (notification.approval_id,), at, content, addresses
        )


def alert_deliveries(notification: AlertNotification, subscribers: Subscribers) -> Iterator[WebhookDelivery]:
    """Deliveries for an alert."""
    data = {
        "alert_id": notification.id,
        "queue": notification.queue,
        "tenant_id": notification.tenant_id,
        "target": notification.target,
        "target_id": notification.target_id,
        "message": notification.reason,
        "details": None if notification.after is None else msgspec.Raw(notification.after.encode()),
        "at": notification.at,
    }
    addresses = subscribers.addresses(notification.type, notification.tenant_id)
    yield from _deliveries(
        notification.type, notification.tenant_id, ("", ""), (notification.id,), notification.at, data, addresses
    )


def _deliveries(
    event: str,
    tenant_id: str,
    trace: tuple[str, str],
    about: Sequence[str],
    at: datetime,
    data: dict[str, Any],
    addresses: Sequence[str],
) -> Iterator[WebhookDelivery]:
    if not addresses:
        return
    body = msgspec.json.encode({"type": event, "timestamp": at, "data": data}).decode()
    for url in dict.fromkeys(addresses):
        yield WebhookDelivery(
            webhook_id=_webhook_id(event, tenant_id, *about, url),
            tenant_id=tenant_id,
            trace_id=trace[0],
            traceparent=trace[1],
            url=url,
            type=event,
            body=body,
        )


def _webhook_id(*parts: str) -> str:
    """Derive an id that is safe in a header.

    The parts may contain any text, because other programs choose job ids.
    """
    encoded = msgspec.json.encode(parts)
    return f"msg_{hashlib.sha256(encoded).hexdigest()[:32]}"


def _result(result: str | None) -> dict[str, Any]:
    if result is None:
        return {"result": None}
    encoded = result.encode()
    if len(encoded) > RESULT_LIMIT:
        return {"result": None, "result_omitted": True}
    return {"result": msgspec.Raw(encoded)}


def _is_of(subscription: WebhookSubscription, tenant_id: str) -> bool:
    return ALL_TENANTS in subscription.tenants or tenant_id in subscription.tenants


def _begins(subscription: WebhookSubscription, prefix: str) -> bool:
    return any(event.startswith(prefix) for event in subscription.events)


#: Domain separation from signatures for receivers, so that neither can be used as the other.
_PURPOSE: Final = b"holdfast.delivery\x00"
_SUBSCRIBER: Final = "subscriber:"


def sign_payload(settings: Settings, delivery: WebhookDelivery) -> bytes:
    """Build the signed payload of a delivery's job."""
    url = delivery.url
    to = _reference(url) if any(each.url == url for each in settings.webhooks) else url
    parts = {"url": to, "webhook_id": delivery.webhook_id, "event": delivery.type, "body": delivery.body}
    # Without a secret the sender cannot sign the request and reports that.
    key = next(iter(settings.webhook_secrets(url)), b"")
    return msgspec.json.encode(parts | {"signature": _signature(key, parts)})


def verify_payload(settings: Settings, url: str, webhook_id: str, event: str, body: str, signature: str) -> str:
    """Return the address of a delivery.

    Raises `Fatal` if the payload was changed or its subscription was removed.
    """
    address = url
    if url.startswith(_SUBSCRIBER):
        known = {_reference(each.url): each.url for each in settings.webhooks}
        if url not in known:
            raise Fatal("webhook: the address is no longer subscribed")
        address = known[url]
    parts = {"url": url, "webhook_id": webhook_id, "event": event, "body": body}
    keys = settings.webhook_secrets(address) or (b"",)
    if not any(hmac.compare_digest(_signature(key, parts).encode(), signature.encode()) for key in keys):
        raise Fatal(
            "webhook: the delivery was not written by holdfast and is not sent; if the secret was replaced, configure "
            "the old one in addition to the new one and replay the delivery"
        )
    return address


def _reference(url: str) -> str:
    return f"{_SUBSCRIBER}{hashlib.sha256(url.encode()).hexdigest()[:32]}"


def _signature(key: bytes, parts: dict[str, Any]) -> str:
    return hmac.new(key, _PURPOSE + msgspec.json.encode(parts), "sha256").hexdigest()


class WebhookPolicy:
    """Checks webhook addresses of submissions, and marks jobs that a subscription covers."""

    def __init__(self, settings: Settings, ledger: Ledger | None) -> None:
        self._settings = settings
        self._exceptions = settings.webhook_allow_list
        self._has_ledger = ledger is not None
        self._subscribers = Subscribers(settings.webhooks)
        #: Whether jobs without their own webhook may need the mark; if not, they need not be passed to `apply`.
        self.has_subscribers = self._has_ledger and self._subscribers.any_for("job")

    def apply(self, envelope: Envelope) -> Envelope:
        """Return the envelope to submit. Raises `InvalidOption` for an invalid address, and `NoLedger`."""
        webhook = envelope.meta.webhook
        if webhook and webhook != ANY_SUBSCRIBER:
            self._check(webhook)
            return envelope
        subscribed = (
            self.has_subscribers and envelope.queue != QUEUE and self._subscribers.wants_jobs_of(envelope.tenant_id)
        )
        mark = ANY_SUBSCRIBER if subscribed else ""
        if mark == webhook:
            return envelope
        return msgspec.structs.replace(envelope, meta=msgspec.structs.replace(envelope.meta, webhook=mark))

    def _check(self, webhook: str) -> None:
        if not self._has_ledger:
            raise NoLedger("a webhook")
        if not self._settings.webhooks_enabled and self._settings.in_memory:
            raise InvalidOption(
                "an in-memory app ignores HOLDFAST_WEBHOOK_SECRET, so that tests send nothing; pass webhook_secret=… "
                "in code, or omit webhook"
            )
        if not self._settings.webhooks_enabled:
            raise InvalidOption(
                "webhooks need a signing secret; set webhook_secret (HOLDFAST_WEBHOOK_SECRET) to whsec_…"
            )
        check_target(webhook, self._exceptions)
