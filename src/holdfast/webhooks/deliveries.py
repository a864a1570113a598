"""Webhook deliveries: what to send to whom, their integrity as jobs, and checks at submission.

A body is `{"type", "timestamp", "data"}`. It holds what an outsider may know: no stack, no worker, no payload, and of
an error its code and the message meant for outsiders. A delivery's id is derived from its subject and its address, so
that the same notification to the same address is always the same delivery.

`sign_payload` and `verify_payload` ensure that only deliveries which holdfast wrote are signed and sent: a principal
that may submit jobs can submit one to the deliveries' queue, and one that may replay dead letters can edit one. The
signature covers the whole delivery and uses the secret that the delivery will be signed with. A subscriber's address
belongs to the operator and is often a secret: tenants, who see their jobs, see a reference to it.

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

from holdfast.core.job import Envelope
from holdfast.core.principal import ALL_TENANTS
from holdfast.core.states import State
from holdfast.core.webhook_url import ANY_SUBSCRIBER, check_target
from holdfast.errors import Fatal, InvalidOption, NoLedger
from holdfast.settings import Settings

if TYPE_CHECKING:
    from holdfast.ledger.port.ledger import Ledger
    from holdfast.ledger.port.operators import AlertNotification, ApprovalNotification, FinishedJob
    from holdfast.settings import WebhookSubscription


#: Deliveries are jobs of this queue.
QUEUE: Final = "holdfast.webhooks"
TASK: Final = "holdfast.webhook"

#: Results that are longer are left out: the receiver asks for them by the job's id.
RESULT_LIMIT: Final = 16 * 1024

_EVENTS: Final = {
    State.SUCCEEDED: "job.succeeded",
    State.FAILED: "job.failed",
    State.CANCELLED: "job.cancelled",
}


class WebhookDelivery(msgspec.Struct, frozen=True, kw_only=True):
    """One message to one address."""

    webhook_id: str
    tenant_id: str
    trace_id: str
    #: W3C trace context of the job that it is about.
    traceparent: str = ""
    url: str
    type: str
    #: JSON, as it is signed and sent.
    body: str


class Subscribers:
    """Who has subscribed to what."""

    def __init__(self, subscriptions: Sequence[WebhookSubscription]) -> None:
        self._subscriptions = tuple(subscriptions)

    def any_for(self, prefix: str) -> bool:
        """Whether anybody wants some event that begins like this."""
        return any(event.startswith(prefix) for each in self._subscriptions for event in each.events)

    def wants_jobs_of(self, tenant_id: str) -> bool:
        """Whether the end of a tenant's job may have to be told."""
        return any(_is_of(each, tenant_id) and _begins(each, "job.") for each in self._subscriptions)

    def addresses(self, event: str, tenant_id: str) -> list[str]:
        """Where to tell this event of this tenant."""
        return [
            each.url
            for each in self._subscriptions
            if _is_of(each, tenant_id) and any(fnmatchcase(event, pattern) for pattern in each.events)
        ]


def job_deliveries(job: FinishedJob, subscribers: Subscribers) -> Iterator[WebhookDelivery]:
    """Deliveries about the end of a job: to the address that it names, and to subscribers."""
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


def approval_deliveries(news: ApprovalNotification, subscribers: Subscribers) -> Iterator[WebhookDelivery]:
    """Deliveries about an approval: that it was asked for, if nobody has been told yet, and how it was decided."""
    data: dict[str, Any] = {
        "approval_id": news.approval_id,
        "job_id": news.job_id,
        "queue": news.queue,
        "tenant_id": news.tenant_id,
        "task": news.job_type,
        "name": news.name,
        "reason": news.reason,
        "policies": msgspec.Raw(news.policies.encode()),
        "details": None if news.details is None else msgspec.Raw(news.details.encode()),
        "quorum": news.quorum,
        "requested_by": news.requested_by,
        "requested_at": news.requested_at,
        "deadline": news.deadline,
    }
    decision = {
        "decided_by": news.decided_by,
        "decided_at": news.decided_at,
        "decision_reason": news.decision_reason,
    }
    steps: list[tuple[str, datetime, dict[str, Any]]] = []
    if news.told is None:
        steps.append(("requested", news.requested_at, data))
    if news.decided_at is not None:
        steps.append((news.status, news.decided_at, data | decision))
    for status, at, said in steps:
        event = f"approval.{status}"
        addresses = subscribers.addresses(event, news.tenant_id)
        trace = (news.trace_id, news.traceparent)
        yield from _deliveries(event, news.tenant_id, trace, (news.approval_id,), at, said, addresses)


def alert_deliveries(news: AlertNotification, subscribers: Subscribers) -> Iterator[WebhookDelivery]:
    """Deliveries about an alert."""
    data = {
        "alert_id": news.id,
        "queue": news.queue,
        "tenant_id": news.tenant_id,
        "target": news.target,
        "target_id": news.target_id,
        "message": news.reason,
        "details": None if news.after is None else msgspec.Raw(news.after.encode()),
        "at": news.at,
    }
    addresses = subscribers.addresses(news.type, news.tenant_id)
    yield from _deliveries(news.type, news.tenant_id, ("", ""), (news.id,), news.at, data, addresses)


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
    """Plain whatever the parts hold: other programs may choose a job's id, and this goes into a header."""
    told = msgspec.json.encode(parts)
    return f"msg_{hashlib.sha256(told).hexdigest()[:32]}"


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


#: What is signed for receivers begins otherwise: neither can be taken for the other.
_PURPOSE: Final = b"holdfast.delivery\x00"
_SUBSCRIBER: Final = "subscriber:"


def sign_payload(settings: Settings, delivery: WebhookDelivery) -> bytes:
    """The payload of a delivery's job."""
    url = delivery.url
    to = _reference(url) if any(each.url == url for each in settings.webhooks) else url
    parts = {"url": to, "webhook_id": delivery.webhook_id, "event": delivery.type, "body": delivery.body}
    # Without a secret there is nothing to sign it with either: the sender says so.
    key = next(iter(settings.webhook_secrets(url)), b"")
    return msgspec.json.encode(parts | {"seal": _seal(key, parts)})


def verify_payload(settings: Settings, url: str, webhook_id: str, event: str, body: str, seal: str) -> str:
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


class WebhookPolicy:
    """Stamps submissions."""

    def __init__(self, settings: Settings, ledger: Ledger | None) -> None:
        self._settings = settings
        self._exceptions = settings.webhook_allow_list
        self._has_ledger = ledger is not None
        self._subscribers = Subscribers(settings.webhooks)
        #: Whether jobs that name no webhook have to be looked at.
        self._subscribed = self._has_ledger and self._subscribers.any_for("job")

    def apply(self, envelope: Envelope) -> Envelope:
        """The envelope as it is to be submitted. Raises `InvalidOption` for an address that cannot be, `NoLedger`."""
        webhook = envelope.meta.webhook
        if webhook and webhook != ANY_SUBSCRIBER:
            self._check(webhook)
            return envelope
        wanted = self._subscribed and envelope.queue != QUEUE and self._subscribers.wants_jobs_of(envelope.tenant_id)
        stamped = ANY_SUBSCRIBER if wanted else ""
        if stamped == webhook:
            return envelope
        return msgspec.structs.replace(envelope, meta=msgspec.structs.replace(envelope.meta, webhook=stamped))

    def _check(self, webhook: str) -> None:
        if not self._has_ledger:
            raise NoLedger("telling a webhook")
        if not self._settings.webhooks_enabled and self._settings.in_memory:
            raise InvalidOption(
                "an app in memory ignores HOLDFAST_WEBHOOK_SECRET, so that tests send nothing; pass webhook_secret=… "
                "in code, or leave webhook out"
            )
        if not self._settings.webhooks_enabled:
            raise InvalidOption("webhooks are signed: set webhook_secret (HOLDFAST_WEBHOOK_SECRET) to whsec_…")
        check_target(webhook, self._exceptions)
