"""The desk in front of the desk, where submissions are traced: a span for each call, and its context on every job."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.core.job import Envelope, JobView, Receipt
from holdfast.observe.tracing import Tracer
from holdfast.submitter import Desk


class TracedDesk(Desk):
    """Submits through another desk, in a span."""

    def __init__(self, desk: Desk, tracer: Tracer) -> None:
        self._desk = desk
        self._tracer = tracer

    async def submit(self, envelope: Envelope) -> Receipt:
        with self._tracer.submitting([envelope]) as ((traced,), span):
            receipt = await self._desk.submit(traced)
            if receipt.duplicate:
                span.set_attributes({"holdfast.job_id": receipt.job_id, "holdfast.duplicate": True})
        return receipt

    async def submit_many(self, envelopes: Iterable[Envelope]) -> list[Receipt]:
        batch = list(envelopes)
        if not batch:
            return []
        with self._tracer.submitting(batch) as (traced, _):
            return await self._desk.submit_many(traced)

    async def get(self, queue: str, job_id: str) -> JobView | None:
        return await self._desk.get(queue, job_id)

    async def wait_final(self, queue: str, job_id: str, wait_ms: int) -> JobView | None:
        return await self._desk.wait_final(queue, job_id, wait_ms)

    async def cancel(self, queue: str, job_id: str, actor: str, reason: str) -> None:
        await self._desk.cancel(queue, job_id, actor, reason)
