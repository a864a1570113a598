"""What is told, and to whom: from the ledger's rows to deliveries.

A body is `{"type", "timestamp", "data"}`. It holds what an outsider may know: no stack, no worker, no payload, and of
an error its code and the sentence meant for outsiders. A delivery's id is made from what it is about and where it goes,
so that the same news for the same address is always the same delivery.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.core.person import ALL_TENANTS
from holdfast.core.states import State
from holdfast.core.webhook import SUBSCRIBERS

if TYPE_CHECKING:
    # SQLAlchemy, which whoever only submits does not need.
    from holdfast.ledger.telling import AlertNews, ApprovalNews, EndedJob
    from holdfast.settings import Subscription

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


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
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

    def __init__(self, subscriptions: Sequence[Subscription]) -> None:
        self._subscriptions = tuple(subscriptions)

    def any_for(self, prefix: str) -> bool:
        """Whether anybody wants some event that begins like this."""
        return any(event.startswith(prefix) for each in self._subscriptions for event in each.events)

    def want_jobs_of(self, tenant_id: str) -> bool:
        """Whether the end of a tenant's job may have to be told."""
        return any(_is_of(each, tenant_id) and _begins(each, "job.") for each in self._subscriptions)

    def addresses(self, event: str, tenant_id: str) -> list[str]:
        """Where to tell this event of this tenant."""
        return [
            each.url
            for each in self._subscriptions
            if _is_of(each, tenant_id) and any(fnmatchcase(event, pattern) for pattern in each.events)
        ]


def of_job(job: EndedJob, subscribers: Subscribers) -> Iterator[Delivery]:
    """Deliveries about the end of a job: to the address that it names, and to subscribers."""
    event = _EVENTS[job.state]
    addresses = subscribers.addresses(event, job.key.tenant_id)
    if job.webhook != SUBSCRIBERS:
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


def of_approval(news: ApprovalNews, subscribers: Subscribers) -> Iterator[Delivery]:
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


def of_alert(news: AlertNews, subscribers: Subscribers) -> Iterator[Delivery]:
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
) -> Iterator[Delivery]:
    if not addresses:
        return
    body = msgspec.json.encode({"type": event, "timestamp": at, "data": data}).decode()
    for url in dict.fromkeys(addresses):
        yield Delivery(
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


def _is_of(subscription: Subscription, tenant_id: str) -> bool:
    return ALL_TENANTS in subscription.tenants or tenant_id in subscription.tenants


def _begins(subscription: Subscription, prefix: str) -> bool:
    return any(event.startswith(prefix) for event in subscription.events)
