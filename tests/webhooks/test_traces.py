"""Each attempt to deliver a webhook is a span in the trace of the job that it is about."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from holdfast.core.states import State
from holdfast.observe.tracing import Tracer
from holdfast.webhooks.deliveries import TASK
from tests.webhooks.receiver import Receiver, status
from tests.webhooks.support import list_deliveries, make_app
from tests.worker.support import eventually, working


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Spans of all parts of an app. OpenTelemetry's global provider is not changed."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = Tracer(provider)
    for module in ("holdfast.client.backend", "holdfast.worker.worker", "holdfast.worker.webhook_worker"):
        monkeypatch.setattr(f"{module}.tracer_for", lambda _: tracer)
    yield exporter
    provider.shutdown()


def find_spans(exporter: InMemorySpanExporter, name: str) -> list[Any]:
    found = [span for span in exporter.get_finished_spans() if span.name == name]
    return sorted(found, key=lambda span: span.start_time or 0)


async def test_every_attempt_is_in_the_trace_of_its_job(
    stores: dict[str, Any], receiver: Receiver, exporter: InMemorySpanExporter
) -> None:
    receiver.answers = [status(500)]
    app = make_app(stores)
    async with app, working(app):
        # A trace id that the caller sets does not matter: spans follow the W3C context.
        job = await app.tasks["add"].options(webhook=receiver.url, trace_id="mine").submit(1, 2)
        await job.result(timeout=60)
        await eventually(lambda: list_deliveries(app, State.SUCCEEDED), "the delivery's end")
        [delivery] = await list_deliveries(app)
    [submit] = find_spans(exporter, "submit add")
    attempts = find_spans(exporter, f"run {TASK}")
    assert [span.attributes["holdfast.attempt"] for span in attempts] == [1, 2]
    assert {span.context.trace_id for span in attempts} == {submit.context.trace_id}
    assert {span.parent.span_id for span in attempts} == {submit.context.span_id}
    assert attempts[0].status.is_ok is False
    assert delivery.trace_id == "mine"
    # The receiver gets the span of the attempt as its parent.
    assert [request.headers["traceparent"].rpartition("-")[0] for request in receiver.requests] == [
        f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}" for span in attempts
    ]


async def test_approvals_are_in_the_trace_of_their_job(
    stores: dict[str, Any], receiver: Receiver, exporter: InMemorySpanExporter
) -> None:
    app = make_app(stores, webhooks=[{"url": receiver.url, "events": ["approval.*"]}])
    async with app, working(app):
        job = await app.tasks["add"].options(hold=True).submit(1, 2)
        await eventually(lambda: list_deliveries(app, State.SUCCEEDED), "the delivery's end")
        [delivery] = await list_deliveries(app)
        trace_id = (await job.info()).trace_id
    [submit] = find_spans(exporter, "submit add")
    [attempt] = find_spans(exporter, f"run {TASK}")
    assert attempt.parent.span_id == submit.context.span_id
    assert delivery.trace_id == trace_id == f"{submit.context.trace_id:032x}"


async def test_without_tracing_no_header_is_added(stores: dict[str, Any], receiver: Receiver) -> None:
    app = make_app(stores)
    async with app, working(app):
        await app.tasks["add"].options(webhook=receiver.url).submit(1, 2)
        await eventually(lambda: list_deliveries(app, State.SUCCEEDED), "the delivery's end")
    [request] = receiver.requests
    assert "traceparent" not in request.headers
