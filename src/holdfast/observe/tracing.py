"""OpenTelemetry spans from submission to settle result (requirement M3), if tracing is enabled.

    submit (producer) ─┬─ run, attempt 1 (consumer) ── settle
                       └─ run, attempt 2 (consumer) ── settle

The submitter's W3C trace context travels in `Meta.traceparent`, so that all attempts, in any process, belong to its
trace. While the user's code runs, its span is current: spans and submissions of that code become its children.

Tracing is enabled by the setting `tracing`, or by a tracer provider that the program sets up before it opens the app.
Otherwise OpenTelemetry is not loaded and messages carry nothing extra.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.core.job import Claim, Envelope, Failure
from holdfast.core.verdict import TARGETS, SettleResult, Verdict
from holdfast.extras import require
from holdfast.observe.redact import redact_and_truncate

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, TracerProvider


_SCOPE: Final = "holdfast"
_HEADER: Final = "traceparent"
_MESSAGE_LIMIT: Final = 2_000


def tracer_for(enabled: bool | None) -> Tracer | None:
    """Return the tracer; None if tracing is off, or unset and the program has no tracer provider."""
    if enabled is False or (enabled is None and "opentelemetry.trace" not in sys.modules):
        return None
    require("tracing", "opentelemetry.trace")
    from opentelemetry import trace

    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
        if not enabled:
            return None
        provider = _own_provider()
        # Set it globally, so that spans of the user's code inside a run belong to the same trace.
        trace.set_tracer_provider(provider)
    return Tracer(provider)


class Tracer:
    """Starts spans for submissions and runs."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import context, trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.trace = trace
        self.context = context
        self._carry = TraceContextTextMapPropagator()
        self.tracer = provider.get_tracer(_SCOPE)

    @contextmanager
    def submit_span(self, envelopes: Sequence[Envelope]) -> Iterator[tuple[list[Envelope], Span]]:
        """Yield the envelopes with a trace context for their runs, and the span of the whole submission."""
        first = envelopes[0]
        name = f"submit {first.task}"
        span = self.tracer.start_span(name, self._parent_context(first), kind=self.trace.SpanKind.PRODUCER)
        carrier: dict[str, str] = {}
        self._carry.inject(carrier, self.trace.set_span_in_context(span))
        # Empty for a span that is not recorded and has no parent: then there is no trace to continue.
        traceparent = carrier.get(_HEADER, "")
        trace_id = self.trace.format_trace_id(span.get_span_context().trace_id) if traceparent else ""
        span.set_attributes(
            {
                "holdfast.task": first.task,
                "holdfast.queue": first.queue,
                "holdfast.tenant": first.tenant_id,
                "holdfast.jobs": len(envelopes),
            }
        )
        if len(envelopes) == 1:
            span.set_attribute("holdfast.job_id", first.job_id)
        try:
            yield [_with_trace(envelope, traceparent, trace_id) for envelope in envelopes], span
        except BaseException as exc:
            self.fail(
                span,
                Failure(getattr(exc, "code", ""), redact_and_truncate(str(exc), _MESSAGE_LIMIT), type(exc).__name__),
            )
            raise
        finally:
            span.end()

    def start_run(self, claim: Claim) -> RunTrace:
        """Start the span of a run when it gets its slot."""
        parent = self._carry.extract({_HEADER: claim.meta.traceparent}) if claim.meta.traceparent else None
        attributes: dict[str, str | int] = {
            "holdfast.job_id": claim.job_id,
            "holdfast.task": claim.task,
            "holdfast.queue": claim.queue,
            "holdfast.tenant": claim.tenant_id,
            "holdfast.attempt": claim.attempt,
            "holdfast.worker": claim.lease.worker,
            "holdfast.trace_id": claim.trace_id,
        }
        # Without a submitter's context the run is a root span: the worker's current span is unrelated.
        span = self.tracer.start_span(
            f"run {claim.task}",
            parent if parent is not None else self.context.Context(),
            kind=self.trace.SpanKind.CONSUMER,
            attributes=attributes,
        )
        return RunTrace(self, span)

    def headers(self) -> dict[str, str]:
        """W3C trace context of the current span, for a request to another service."""
        carrier: dict[str, str] = {}
        self._carry.inject(carrier)
        return carrier

    def fail(self, span: Span, failure: Failure) -> None:
        """Record a failure on a span. Failures are already redacted."""
        details = {"exception.type": failure.type or failure.code, "exception.message": failure.message}
        if failure.stack:
            details["exception.stacktrace"] = failure.stack
        span.add_event("exception", details)
        span.set_attribute("holdfast.error_code", failure.code)
        span.set_status(self.trace.StatusCode.ERROR, failure.message)

    def _parent_context(self, envelope: Envelope) -> Context | None:
        """Return the parent context of a submission; None means the current one.

        The caller's current span wins over the context in the envelope, for example from HTTP.
        """
        here = self.trace.get_current_span().get_span_context()
        if here.is_valid or not envelope.meta.traceparent:
            return None
        return self._carry.extract({_HEADER: envelope.meta.traceparent})


class RunTrace:
    """Spans of one attempt: the run, then the settle."""

    __slots__ = ("_settling", "_span", "_tracer")

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self._settling: Span | None = None

    def enter(self) -> None:
        """Make the run's span current. Call it in the task or thread that runs the user's code."""
        self._tracer.context.attach(self._tracer.trace.set_span_in_context(self._span))

    def end(self, verdict: Verdict) -> None:
        """End the run's span with the verdict and start the settle span."""
        self._span.set_attribute("holdfast.outcome", TARGETS[type(verdict)].value)
        failure: Any = getattr(verdict, "failure", None)
        if failure is not None:
            self._tracer.fail(self._span, failure)
        self._span.end()
        parent = self._tracer.trace.set_span_in_context(self._span)
        self._settling = self._tracer.tracer.start_span("settle", parent)

    def end_settle(self, answer: SettleResult) -> None:
        """End the settle span with the engine's answer."""
        if self._settling is not None:
            self._settling.set_attribute("holdfast.answer", answer.value)
            self._settling.end()
            self._settling = None

    def abandon(self) -> None:
        """End the run's span without a verdict, because the lease was lost."""
        self._span.set_attribute("holdfast.outcome", "lost")
        self._span.end()


def _with_trace(envelope: Envelope, traceparent: str, trace_id: str) -> Envelope:
    if not traceparent:
        return envelope
    meta = msgspec.structs.replace(envelope.meta, traceparent=traceparent)
    return msgspec.structs.replace(envelope, meta=meta, trace_id=envelope.trace_id or trace_id)


def _own_provider() -> TracerProvider:
    """Create a provider that sends spans by OTLP over HTTP, configured by `OTEL_EXPORTER_OTLP_…`."""
    require("tracing", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create()
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: _SCOPE}))
    # The provider flushes pending spans at exit.
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
