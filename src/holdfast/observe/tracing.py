"""OpenTelemetry spans from submission to outcome (requirement M3), where they are wanted.

    submit (producer) ─┬─ run, attempt 1 (consumer) ── settle
                       └─ run, attempt 2 (consumer) ── settle

The submitter's W3C trace context travels in `Meta.traceparent`, so that all attempts, in whatever process, are in its
trace. While the user's code runs its span is the current one: what it traces, and what it submits, lies below.

Off, nothing here is loaded and nothing is added to a message. On: the setting `tracing`, or a tracer provider that the
program has set up itself before it opened its app.
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


def tracer_for(wanted: bool | None) -> Tracer | None:
    """The tracer to use: None if tracing is off, or left open while the program has no tracer provider."""
    if wanted is False or (wanted is None and "opentelemetry.trace" not in sys.modules):
        return None
    require("tracing", "opentelemetry.trace")
    from opentelemetry import trace

    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
        if not wanted:
            return None
        provider = _own_provider()
        # For the user's code, too: what it traces inside of a run belongs to the same trace.
        trace.set_tracer_provider(provider)
    return Tracer(provider)


class Tracer:
    """Begins spans."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import context, trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.trace = trace
        self.context = context
        self._carry = TraceContextTextMapPropagator()
        self.tracer = provider.get_tracer(_SCOPE)

    @contextmanager
    def submit_span(self, envelopes: Sequence[Envelope]) -> Iterator[tuple[list[Envelope], Span]]:
        """The submissions with the trace context that their runs go on with; one span for all that go together."""
        first = envelopes[0]
        name = f"submit {first.task}"
        span = self.tracer.start_span(name, self._above(first), kind=self.trace.SpanKind.PRODUCER)
        carrier: dict[str, str] = {}
        self._carry.inject(carrier, self.trace.set_span_in_context(span))
        # Empty for a span that is not recorded and has no parent: then there is no trace to go on with.
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
        """A run has got its slot."""
        above = self._carry.extract({_HEADER: claim.meta.traceparent}) if claim.meta.traceparent else None
        attributes: dict[str, str | int] = {
            "holdfast.job_id": claim.job_id,
            "holdfast.task": claim.task,
            "holdfast.queue": claim.queue,
            "holdfast.tenant": claim.tenant_id,
            "holdfast.attempt": claim.attempt,
            "holdfast.worker": claim.lease.worker,
            "holdfast.trace_id": claim.trace_id,
        }
        # Without a submitter's context a root of its own: whatever span the worker is in has nothing to do with it.
        span = self.tracer.start_span(
            f"run {claim.task}",
            above if above is not None else self.context.Context(),
            kind=self.trace.SpanKind.CONSUMER,
            attributes=attributes,
        )
        return RunTrace(self, span)

    def headers(self) -> dict[str, str]:
        """The W3C trace context of the current span, for a request to another service."""
        carrier: dict[str, str] = {}
        self._carry.inject(carrier)
        return carrier

    def fail(self, span: Span, failure: Failure) -> None:
        """What went wrong, without secrets: failures have been looked through already."""
        details = {"exception.type": failure.type or failure.code, "exception.message": failure.message}
        if failure.stack:
            details["exception.stacktrace"] = failure.stack
        span.add_event("exception", details)
        span.set_attribute("holdfast.error_code", failure.code)
        span.set_status(self.trace.StatusCode.ERROR, failure.message)

    def _above(self, envelope: Envelope) -> Context | None:
        """The span that the caller is in; else what came with the submission, over HTTP say."""
        here = self.trace.get_current_span().get_span_context()
        if here.is_valid or not envelope.meta.traceparent:
            return None
        return self._carry.extract({_HEADER: envelope.meta.traceparent})


class RunTrace:
    """The spans of one attempt: its run, then its settling."""

    __slots__ = ("_settling", "_span", "_tracer")

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self._settling: Span | None = None

    def enter(self) -> None:
        """In the task or thread that runs the user's code: from here on its spans lie below this one."""
        self._tracer.context.attach(self._tracer.trace.set_span_in_context(self._span))

    def end(self, verdict: Verdict) -> None:
        """The verdict is given; it is on its way to the engine."""
        self._span.set_attribute("holdfast.outcome", TARGETS[type(verdict)].value)
        failure: Any = getattr(verdict, "failure", None)
        if failure is not None:
            self._tracer.fail(self._span, failure)
        self._span.end()
        above = self._tracer.trace.set_span_in_context(self._span)
        self._settling = self._tracer.tracer.start_span("settle", above)

    def settled(self, answer: SettleResult) -> None:
        """The engine has answered."""
        if self._settling is not None:
            self._settling.set_attribute("holdfast.answer", answer.value)
            self._settling.end()
            self._settling = None

    def abandon(self) -> None:
        """The lease is someone else's: there is no verdict."""
        self._span.set_attribute("holdfast.outcome", "lost")
        self._span.end()


def _with_trace(envelope: Envelope, traceparent: str, trace_id: str) -> Envelope:
    if not traceparent:
        return envelope
    meta = msgspec.structs.replace(envelope.meta, traceparent=traceparent)
    return msgspec.structs.replace(envelope, meta=meta, trace_id=envelope.trace_id or trace_id)


def _own_provider() -> TracerProvider:
    """Sends spans by OTLP over HTTP; where to is said by OpenTelemetry's own variables (`OTEL_EXPORTER_OTLP_…`)."""
    require("tracing", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create()
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: _SCOPE}))
    # Ends what is on its way when the program ends.
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
