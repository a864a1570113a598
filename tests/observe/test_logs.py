"""Log lines name their job. Secrets do not appear in logs, events, dead letters or job infos."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast import Fatal, Holdfast
from holdfast.core.job import Claim, Lease, Meta
from holdfast.core.states import State
from holdfast.execution.backend import backend_of
from holdfast.observe.log_formats import JsonFormatter
from holdfast.observe.logs import current_claim, log_fields
from holdfast.testing import drain

SECRET = "hunter2-Zx9q"
LEAKS = (
    f"cannot connect to redis://app:{SECRET}@cache:6379/0",
    f"password={SECRET}",
    f"GET /x?token={SECRET}&y=1 gave 401",
    f"headers were {{'Authorization': 'Bearer {SECRET}'}}",
)


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """All log records as JSON lines."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        yield stream
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


def documents(lines: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines.getvalue().splitlines()]


def make_claim() -> Claim:
    return Claim(Lease("mail", "j1", "1", 1, "blue-1"), "send", b"{}", "acme", "k", "t-1", 3, 0, 0, Meta())


def test_a_line_has_time_level_logger_message_and_extra_fields(lines: io.StringIO) -> None:
    logging.getLogger("shop").warning("order %d", 7, extra={"order": {"id": 7}, "tags": {"a"}})
    (line,) = documents(lines)
    assert line.pop("time").endswith("Z")
    assert line == {"level": "warning", "logger": "shop", "message": "order 7", "order": {"id": 7}, "tags": ["a"]}


def test_a_line_inside_a_run_names_the_job(lines: io.StringIO) -> None:
    token = current_claim.set(make_claim())
    logging.getLogger("shop").info("now")
    current_claim.reset(token)
    logging.getLogger("shop").info("later")
    inside, after = documents(lines)
    assert {name: inside[name] for name in log_fields(make_claim())} == {
        "trace_id": "t-1",
        "job_id": "j1",
        "task": "send",
        "queue": "mail",
        "tenant_id": "acme",
        "attempt": 3,
        "worker": "blue-1",
    }
    assert "job_id" not in after


async def test_lines_of_user_code_name_their_job_on_the_loop_and_in_threads(
    engine_url: str, namespace: str, lines: io.StringIO
) -> None:
    async with Holdfast(engine_url, namespace=namespace) as app:

        @app.task
        async def on_the_loop() -> None:
            logging.getLogger("shop").info("mine")

        @app.task
        def in_a_thread() -> None:
            logging.getLogger("shop").info("mine")

        jobs = [await task.options(trace_id=f"t-{n}").submit() for n, task in enumerate([on_the_loop, in_a_thread] * 2)]
        await drain(app)
    mine = [line for line in documents(lines) if line["message"] == "mine"]
    assert {(line["job_id"], line["trace_id"]) for line in mine} == {(job.id, f"t-{n}") for n, job in enumerate(jobs)}
    assert {line["task"] for line in mine} == {"on_the_loop", "in_a_thread"}
    assert all(line["attempt"] == 1 and line["worker"] for line in mine)


async def test_worker_lines_about_a_job_name_it(engine_app: Any, lines: io.StringIO) -> None:
    app = engine_app

    @app.task
    async def fail() -> None:
        raise Fatal("no")

    job = await fail.options(trace_id="t-9").submit()
    await drain(app)
    (line,) = [line for line in documents(lines) if "failed for good" in line["message"]]
    assert (line["job_id"], line["trace_id"], line["task"], line["attempt"]) == (job.id, "t-9", "fail", 1)


@pytest.fixture
async def engine_app(engine_url: str, namespace: str) -> Any:
    async with Holdfast(engine_url, namespace=namespace) as app:
        yield app


@pytest.mark.parametrize("leak", LEAKS)
async def test_a_secret_in_an_error_is_redacted_everywhere(engine_app: Any, lines: io.StringIO, leak: str) -> None:
    app = engine_app

    @app.task
    async def on_the_loop() -> None:
        logging.getLogger("shop").error("trying %s", leak, extra={"url": leak, "password": SECRET})
        try:
            raise ValueError(leak)
        except ValueError as exc:
            raise Fatal(f"again: {leak}") from exc

    @app.task
    def in_a_thread() -> None:
        raise Fatal(leak)

    @app.task(on_exhausted="suspend")
    async def suspended() -> None:
        raise Fatal(leak)

    for task in (on_the_loop, in_a_thread, suspended):
        await task.submit()
    await drain(app)
    infos = await app.engine.find("default", [State.SUSPENDED], 10)
    feed = await app.engine.read_feed("default", "", 100)
    assert len(infos) == 1
    outputs = [*map(msgspec.json.encode, infos), *map(msgspec.json.encode, feed)]
    if backend_of(app).ledger is not None:
        page = await app.ledger.queries.jobs()
        for row in page.jobs:
            from holdfast.core.job import JobKey

            key = JobKey(row.tenant_id, row.queue, row.job_id)
            outputs += [
                repr(await app.ledger.queries.events(key)).encode(),
                repr(await app.ledger.queries.dead_letter_of(key)).encode(),
            ]
        assert len(page.jobs) == 3
    assert any(b"***" in text for text in outputs)
    assert not any(SECRET.encode() in text for text in outputs)
    assert "trying" in lines.getvalue()
    assert SECRET not in lines.getvalue()


_secret = st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=14, max_size=30).map(lambda s: f"Zq{s}")
_forms = st.sampled_from(["redis://u:{}@h/0", "password={}", "api_key: '{}'", "Authorization: Basic {}", "hf_ab12_{}"])


@given(secret=_secret, form=_forms, level=st.sampled_from([10, 20, 30, 40, 50]), variant=st.integers(0, 4))
@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_no_secret_in_any_line_at_any_level(
    lines: io.StringIO, secret: str, form: str, level: int, variant: int
) -> None:
    lines.truncate(0)
    text, log = form.format(secret), logging.getLogger("shop")
    match variant:
        case 0:
            log.log(level, text)
        case 1:
            log.log(level, "at %s and %r", text, {"inner": [text]})
        case 2:
            log.log(level, "see", extra={"where": {"deep": (text,)}, "auth_token": secret})
        case 3:
            try:
                raise RuntimeError(text)
            except RuntimeError:
                log.log(level, "failed", exc_info=True)
        case _:
            log.log(level, ValueError(text))
    assert lines.getvalue()
    assert secret not in lines.getvalue()
