"""Spans from submission to outcome, as a collector receives them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from holdfast import Fatal, Holdfast, Retry
from holdfast.core.job import Envelope, new_job_ids
from holdfast.core.states import State
from holdfast.errors import EngineUnavailable, MissingExtra
from holdfast.execution.backend import backend_of
from holdfast.observe.tracing import Tracer, tracer_for
from holdfast.testing import drain
from tests.observe.support import attributes, run_span_receiver

SOURCE = Path(__file__).resolve().parents[2] / "src"

PROGRAM = """
import asyncio, sys
from holdfast import Context, Holdfast, Retry
from holdfast.testing import drain

app = Holdfast()


@app.task(retry=Retry(max_retries=1, base=0.05, jitter=None))
async def publish(ctx: Context, article: int) -> str:
    if ctx.retry_count == 0:
        raise ConnectionError("cannot reach redis://app:hunter2@cache")
    return "done"


async def submit() -> None:
    async with app:
        job = await publish.options(tenant_id="acme").submit(7)
        print(job.id, "opentelemetry.sdk" in sys.modules, (await app.engine.get("default", [job.id]))[0].trace_id)


async def work(job_id: str) -> None:
    async with app:
        while (await app.engine.get("default", [job_id]))[0].state.value != "succeeded":
            await drain(app)


asyncio.run(submit() if sys.argv[1] == "submit" else work(sys.argv[2]))
"""


def run(folder: Path, *words: str, **settings: str) -> list[str]:
    (folder / "program.py").write_text(PROGRAM)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HOLDFAST_", "OTEL_"))}
    done = subprocess.run(
        [sys.executable, "program.py", *words],
        cwd=folder,
        env=inherited | {"PYTHONPATH": str(SOURCE)} | settings,
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_one_trace_from_submission_to_success_across_processes(engine_url: str, namespace: str, tmp_path: Path) -> None:
    with run_span_receiver() as (receiver, address):
        env = {
            "HOLDFAST_URL": engine_url,
            "HOLDFAST_NAMESPACE": namespace,
            "HOLDFAST_TRACING": "true",
            "OTEL_EXPORTER_OTLP_ENDPOINT": address,
        }
        job_id, _, trace_id = run(tmp_path, "submit", **env)
        run(tmp_path, "work", job_id, **env)
        submit, first, first_settle, second, second_settle = receiver.wait(5)

    names = ["submit publish", "run publish", "settle", "run publish", "settle"]
    spans = [submit, first, first_settle, second, second_settle]
    assert [span.name for span in spans] == names
    assert {span.trace_id.hex() for span in spans} == {trace_id}
    assert submit.parent_span_id == b""
    assert [span.parent_span_id for span in (first, second)] == [submit.span_id] * 2
    assert (first_settle.parent_span_id, second_settle.parent_span_id) == (first.span_id, second.span_id)
    kinds = {"PRODUCER": 4, "CONSUMER": 5, "INTERNAL": 1}
    assert [span.kind for span in spans] == [
        kinds[kind] for kind in ("PRODUCER", "CONSUMER", "INTERNAL", "CONSUMER", "INTERNAL")
    ]
    assert receiver.services == {"holdfast"}

    common = {
        "holdfast.job_id": job_id,
        "holdfast.task": "publish",
        "holdfast.queue": "default",
        "holdfast.tenant": "acme",
    }
    assert attributes(submit).items() >= common.items()
    for span, attempt, outcome in ((first, 1, "retrying"), (second, 2, "succeeded")):
        assert attributes(span).items() >= (common | {"holdfast.attempt": attempt, "holdfast.outcome": outcome}).items()
    assert [attributes(span)["holdfast.answer"] for span in (first_settle, second_settle)] == ["applied"] * 2

    (error,) = first.events
    details = attributes(error)
    assert (error.name, details["exception.type"]) == ("exception", "ConnectionError")
    assert details["exception.message"] == "cannot reach redis://app:***@cache"
    assert "Traceback" in details["exception.stacktrace"]
    assert first.status.code == 2
    assert second.status.code == 0
    assert not any(b"hunter2" in span.SerializeToString() for span in spans)


def test_without_tracing_nothing_is_loaded_or_added(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'jobs.db'}"
    output = run(tmp_path, "submit", HOLDFAST_URL=url)
    assert output[1:] == ["False"], "no SDK loaded, no trace id"


class TracedApp:
    """An app and its finished spans."""

    def __init__(self, app: Holdfast, exporter: InMemorySpanExporter, tracer: Tracer) -> None:
        self.app = app
        self.tracer = tracer
        self._exporter = exporter

    async def trace_id(self, job_id: str) -> str:
        (info,) = await self.app.engine.get("default", [job_id])
        assert info is not None
        return info.trace_id

    def spans(self) -> list[Any]:
        return sorted(self._exporter.get_finished_spans(), key=lambda span: span.start_time or 0)

    def find_span(self, name: str) -> Any:
        (span,) = [span for span in self.spans() if span.name == name]
        return span


@pytest.fixture
async def traced(engine_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TracedApp]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = Tracer(provider)
    for module in ("holdfast.client.backend", "holdfast.worker.worker"):
        monkeypatch.setattr(f"{module}.tracer_for", lambda _: tracer)
    async with Holdfast(engine_url, namespace=namespace) as app:
        yield TracedApp(app, exporter, tracer)
    provider.shutdown()


async def test_a_job_submitted_by_a_job_is_its_child(traced: TracedApp) -> None:
    app = traced.app

    @app.task
    async def child() -> None:
        return None

    @app.task
    def threaded() -> None:
        with traced.tracer.tracer.start_as_current_span("inside the thread"):
            pass

    @app.task
    async def parent() -> None:
        with traced.tracer.tracer.start_as_current_span("inside"):
            await child.submit()
            await threaded.submit()

    job = await parent.submit()
    await drain(app)
    inside, run_thread = traced.find_span("inside"), traced.find_span("run threaded")
    assert inside.parent.span_id == traced.find_span("run parent").context.span_id
    assert traced.find_span("submit child").parent.span_id == inside.context.span_id
    assert traced.find_span("run child").parent.span_id == traced.find_span("submit child").context.span_id
    assert traced.find_span("inside the thread").parent.span_id == run_thread.context.span_id
    assert len({span.context.trace_id for span in traced.spans()}) == 1
    assert await traced.trace_id(job.id) == f"{inside.context.trace_id:032x}"


async def test_a_given_trace_id_is_kept(traced: TracedApp) -> None:
    app = traced.app

    @app.task
    async def ok() -> None:
        return None

    job = await ok.options(trace_id="mine").submit()
    assert await traced.trace_id(job.id) == "mine"


async def test_a_bulk_submission_has_one_span(traced: TracedApp) -> None:
    app = traced.app

    @app.task
    async def ok(n: int) -> None:
        return None

    await ok.submit_many([(n,) for n in range(3)])
    assert await ok.submit_many([]) == []
    await drain(app)
    submit = traced.find_span("submit ok")
    assert submit.attributes["holdfast.jobs"] == 3
    runs = [span for span in traced.spans() if span.name == "run ok"]
    assert [span.parent.span_id for span in runs] == [submit.context.span_id] * 3


async def test_a_duplicate_names_the_first_job(traced: TracedApp) -> None:
    app = traced.app

    @app.task
    async def ok() -> None:
        return None

    first = await ok.options(idempotency_key="k").submit()
    await ok.options(idempotency_key="k").submit()
    _, second = [span for span in traced.spans() if span.name == "submit ok"]
    assert (second.attributes["holdfast.duplicate"], second.attributes["holdfast.job_id"]) == (True, first.id)


async def test_a_submission_that_fails_is_an_error(traced: TracedApp, monkeypatch: pytest.MonkeyPatch) -> None:
    app = traced.app

    @app.task
    async def ok() -> None:
        return None

    async def refuse(*_: object) -> None:
        raise EngineUnavailable("redis://app:hunter2@cache is gone")

    await app.open()
    monkeypatch.setattr(app.engine, "submit_each", refuse)
    with pytest.raises(EngineUnavailable):
        await ok.submit()
    span = traced.find_span("submit ok")
    assert span.status.is_ok is False
    assert span.events[0].attributes["exception.message"].endswith("redis://app:***@cache is gone")


async def test_a_job_without_a_trace_context_starts_its_own_trace(traced: TracedApp) -> None:
    app = traced.app

    @app.task(retry=Retry(max_retries=0))
    async def fail() -> None:
        raise Fatal("no")

    submitter = (await backend_of(app).connections.submitter())._submitter  # type: ignore[attr-defined]
    with traced.tracer.tracer.start_as_current_span("unrelated"):
        await submitter.submit(Envelope(job_id=new_job_ids(1)[0], task="fail", payload=b"{}"))
        await drain(app)
    assert traced.find_span("run fail").parent is None
    assert traced.find_span("run fail").attributes["holdfast.outcome"] == State.DLQ_PENDING.value


def test_when_tracing_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tracer_for(False) is None
    assert tracer_for(None) is None, "the program has no tracer provider"
    monkeypatch.setattr("opentelemetry.trace.get_tracer_provider", TracerProvider)
    assert isinstance(tracer_for(None), Tracer)
    assert tracer_for(False) is None


def test_without_opentelemetry_the_setting_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(MissingExtra, match="pip install 'holdfast\\[tracing\\]'"):
        tracer_for(True)
