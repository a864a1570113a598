"""Transactional enqueue: a job exists exactly if the transaction committed, and once however often it is submitted."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import aiosqlite
import asyncpg
import msgspec
import pytest

from holdfast import Holdfast
from holdfast.core.job import Envelope, KeyReuse, Meta, Priority
from holdfast.core.publishing import lane_of
from holdfast.engine.port.operators import QueueControl, TenantControl
from holdfast.errors import (
    Denied,
    EngineUnavailable,
    InvalidOption,
    InvalidPayload,
    JobFailed,
    UnknownJob,
    UsageError,
    WaitTimeout,
)
from holdfast.execution.backend import backend_of
from holdfast.ledger.port.messages import ENGINE_DESTINATION, OutboxEvent, OutboxStatus
from holdfast.outbox.writer import envelope_from_event, job_event_row
from holdfast.testing import drain, inline
from holdfast.upkeep.relay_service import RelayService, run_relay
from tests.outbox import support
from tests.outbox.support import run_jobs, until


@pytest.fixture(params=["embedded", "redis-postgres"])
async def app(request: pytest.FixtureRequest, tmp_path: Path, namespace: str) -> AsyncIterator[Holdfast]:
    if request.param == "embedded":
        app = Holdfast(f"sqlite:///{tmp_path / 'app.db'}", outbox_backoff_base_s=0.02)
    else:
        app = Holdfast(
            request.getfixturevalue("redis_url"),
            ledger=request.getfixturevalue("postgres_url"),
            namespace=namespace,
            outbox_backoff_base_s=0.02,
        )

    @app.task(queue="mail")
    async def double(number: int) -> int:
        return number * 2

    async with app:
        # Creates the database file on SQLite.
        backend = backend_of(app)
        assert backend.outbox is not None
        await backend.outbox.open()
        yield app


def double(app: Holdfast) -> Any:
    return app.tasks["double"]


@asynccontextmanager
async def transaction(app: Holdfast, *, commit: bool = True) -> AsyncIterator[Any]:
    """Open a transaction in the database with the outbox."""
    if app.settings.ledger is None:
        async with aiosqlite.connect(app.settings.url.removeprefix("sqlite:///")) as file:
            yield file
            await (file.commit() if commit else file.rollback())
        return
    connection = await asyncpg.connect(app.settings.ledger)
    try:
        started = connection.transaction()
        await started.start()
        yield connection
        await (started.commit() if commit else started.rollback())
    finally:
        await connection.close()


async def only_event(app: Holdfast) -> OutboxEvent:
    backend = backend_of(app)
    assert backend.outbox is not None
    (event,) = await (await backend.outbox.open()).find(None)
    return event


async def test_after_the_commit_the_job_runs(app: Holdfast) -> None:
    async with transaction(app) as connection:
        job = await double(app).options(connection=connection).submit(21)
        assert await app.engine.get("mail", [job.id]) == [None], "nothing before the commit"
    async with run_jobs(app, ["mail", "other"]):
        assert await job.result(timeout=60) == 42
    event = await only_event(app)
    assert (event.id, event.destination, event.topic, event.status) == (
        job.id,
        ENGINE_DESTINATION,
        "mail",
        OutboxStatus.SENT,
    )
    assert (await job.info()).task == "double"
    assert not job.duplicate


async def test_after_a_rollback_there_is_no_job(app: Holdfast) -> None:
    async with transaction(app, commit=False) as connection:
        job = await double(app).options(connection=connection).submit(21)
    async with run_jobs(app, ["mail", "other"]):
        with pytest.raises(UnknownJob):
            await job.result(timeout=5)
        with pytest.raises(UnknownJob):
            await job.info()


async def test_many_jobs_in_one_transaction(app: Holdfast) -> None:
    async with transaction(app) as connection:
        jobs = await double(app).options(connection=connection).submit_many([(n,) for n in range(30)])
        assert await double(app).options(connection=connection).submit_many([]) == []
        keyed = (
            await double(app)
            .options(connection=connection)
            .submit_many(double(app).options(idempotency_key=f"key {n % 2}").bind(n) for n in range(3))
        )
        one = await app.submit_raw("double", b'{"number": 50}', connection=connection)
    async with run_jobs(app, ["mail", "other"]):
        assert [await job.result(timeout=60) for job in jobs] == [2 * n for n in range(30)]
        assert [await job.result(timeout=60) for job in keyed] == [0, 2, 0]
        assert (keyed[2].id, keyed[2].duplicate) == (keyed[0].id, True)
        assert await one.result(timeout=60) == 100


async def test_options_are_kept(app: Holdfast) -> None:
    async with transaction(app) as connection:
        chosen = double(app).options(
            connection=connection,
            tenant_id="acme",
            queue="other",
            priority="high",
            trace_id="trace",
            context={"a": 1},
            delay=timedelta(hours=1),
        )
        job = await chosen.submit(1)
    async with run_relay(app):
        await until(lambda: job_exists(app, "other", job.id))
    info = await job.info()
    assert (info.tenant_id, info.queue, info.trace_id, info.meta.context) == ("acme", "other", "trace", {"a": 1})
    assert info.meta.priority == Priority.HIGH
    assert info.next_attempt_at_ms or info.meta.run_at_ms


async def job_exists(app: Holdfast, queue: str, job_id: str) -> bool:
    return (await app.engine.get(queue, [job_id]))[0] is not None


async def test_an_event_submitted_twice_is_one_job(app: Holdfast) -> None:
    async with transaction(app) as connection:
        job = await double(app).options(connection=connection).submit(21)
    # As a relay that is killed before it records the result.
    await (await backend_of(app).connections.submitter()).submit(envelope_from_event(await only_event(app)))
    assert await drain(app, ["mail"]) == 1
    async with run_jobs(app, ["mail", "other"]):
        await until(lambda: is_sent(app))
        assert await job.result(timeout=60) == 42
        assert await drain(app, ["mail"]) == 0
    assert (await job.info()).attempt == 1


async def is_sent(app: Holdfast) -> bool:
    return (await only_event(app)).status is OutboxStatus.SENT


async def test_a_known_idempotency_key_returns_the_first_job(app: Holdfast) -> None:
    first = await double(app).options(idempotency_key="k").submit(1)
    async with transaction(app) as connection:
        second = await double(app).options(idempotency_key="k", connection=connection).submit(1)
    assert second.id != first.id
    async with run_jobs(app, ["mail", "other"]):
        assert await second.result(timeout=60) == 2
    assert (second.id, second.duplicate) == (first.id, True)
    assert (await only_event(app)).last_error == f"duplicate of job {first.id}"
    async with transaction(app) as connection:
        third = await double(app).options(idempotency_key="k", connection=connection).submit(1)
    async with run_relay(app):
        backend = backend_of(app)
        assert backend.outbox is not None
        store = await backend.outbox.open()

        async def sent() -> bool:
            event = await store.get("default", third.id)
            return event is not None and event.status is OutboxStatus.SENT

        await until(sent)
    assert (await third.info()).job_id == first.id


async def test_waiting_for_a_job_in_the_outbox_times_out(app: Holdfast) -> None:
    async with transaction(app) as connection:
        job = await double(app).options(connection=connection).submit(21)
    with pytest.raises(WaitTimeout, match="in the outbox"):
        await job.result(timeout=0.2)


async def test_guards_run_at_submission(app: Holdfast) -> None:
    @app.guard
    async def odd(request: Any) -> Any:
        from holdfast import Deny

        return Deny("odd") if request.arguments["number"] % 2 else None

    async with transaction(app) as connection:
        task = double(app).options(connection=connection)
        with pytest.raises(Denied):
            await task.submit(1)
        with pytest.raises(Denied):
            await task.submit_many([(2,), (3,)])
        job = await task.submit(4)
    async with run_jobs(app, ["mail", "other"]):
        assert await job.result(timeout=60) == 8


async def test_arguments_are_checked_at_submission(app: Holdfast) -> None:
    async with transaction(app) as connection:
        with pytest.raises(InvalidPayload):
            await double(app).options(connection=connection).submit("x")
        with pytest.raises(InvalidOption, match="durable"):
            double(app).options(connection=connection, durable=True)
        with pytest.raises(UsageError, match="not a supported connection"):
            await double(app).options(connection=object()).submit(1)


async def test_an_unreachable_engine_delays_the_job(app: Holdfast, monkeypatch: pytest.MonkeyPatch) -> None:
    async with transaction(app) as connection:
        job = await double(app).options(connection=connection).submit(21)
    real, unreachable = app.engine.submit_each, [True]

    async def submit(envelopes: Any) -> Any:
        if unreachable[0]:
            raise EngineUnavailable("unreachable")
        return await real(envelopes)

    monkeypatch.setattr(app.engine, "submit_each", submit)

    async def has_three_attempts() -> bool:
        event = await only_event(app)
        assert event.status in (OutboxStatus.NEW, OutboxStatus.RETRYING)
        return event.attempt_count >= 3

    async with run_jobs(app, ["mail", "other"]):
        await until(has_three_attempts)
        unreachable[0] = False
        assert await job.result(timeout=60) == 42


async def test_a_job_that_the_engine_refuses_does_not_delay_others(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with transaction(app) as connection:
        jobs = [await double(app).options(connection=connection).submit(number) for number in range(4)]
        await connection.execute("UPDATE outbox_events SET lane = 7")
    real, poison = app.engine.submit_each, jobs[1].id

    async def submit(envelopes: Any) -> Any:
        if any(envelope.job_id == poison for envelope in envelopes):
            raise OverflowError("number out of range")
        return await real(envelopes)

    monkeypatch.setattr(app.engine, "submit_each", submit)
    async with run_jobs(app, ["mail", "other"]):
        for number in (0, 2, 3):
            assert await jobs[number].result(timeout=60) == 2 * number
    backend = backend_of(app)
    assert backend.outbox is not None
    event = await (await backend.outbox.open()).get("default", poison)
    assert event is not None
    assert event.status in (OutboxStatus.RETRYING, OutboxStatus.DEAD)
    assert "OverflowError" in event.last_error


async def test_what_fits_is_submitted_and_the_rest_waits(app: Holdfast) -> None:
    tenants = ["acme"] * 4 + ["zeta"] * 2
    async with transaction(app) as connection:
        jobs = [
            await double(app).options(connection=connection, tenant_id=tenant).submit(number)
            for number, tenant in enumerate(tenants)
        ]
        await connection.execute("UPDATE outbox_events SET lane = 7")
    await app.engine.set_control("mail", QueueControl(tenants={"acme": TenantControl(intake_limit=1)}))

    async def statuses() -> dict[str, OutboxEvent]:
        backend = backend_of(app)
        assert backend.outbox is not None
        return {event.id: event for event in await (await backend.outbox.open()).find(None)}

    async def others_are_sent() -> bool:
        events = await statuses()
        return [events[job.id].status for job in (jobs[0], *jobs[4:])] == [OutboxStatus.SENT] * 3

    async with run_relay(app):
        await until(others_are_sent)
        waiting = [event for event in (await statuses()).values() if event.status is not OutboxStatus.SENT]
        assert len(waiting) == 3
        assert all("acme" in event.last_error and event.attempt_count == 0 for event in waiting if event.last_error)
        async with run_jobs(app, ["mail", "other"]):
            for number, job in enumerate(jobs):
                assert await job.result(timeout=60) == 2 * number


async def test_a_tenant_with_all_its_queues_does_not_stop_the_relay(app: Holdfast) -> None:
    """Its job for a new queue waits until another tenant has made the queue; it uses up no attempt."""
    stores = {name: getattr(app.settings, name) for name in ("url", "ledger", "namespace")}
    async with Holdfast(**stores, outbox_backoff_base_s=0.02, tenant_queue_limit=1) as limited:

        @limited.task(queue="mail")
        async def double(number: int) -> int:
            return number * 2

        await double.options(tenant_id="acme", queue="own").submit(0)
        async with transaction(limited) as connection:
            refused = await double.options(connection=connection, tenant_id="acme").submit(1)
        async with run_relay(limited), run_jobs(limited, ["mail"]):
            await until(lambda: limited.engine.counters.intake_refused > 0)
            async with transaction(limited) as connection:
                accepted = await double.options(connection=connection, tenant_id="zeta").submit(2)
            assert (await accepted.result(timeout=60), await refused.result(timeout=60)) == (4, 2)
        backend = backend_of(limited)
        assert backend.outbox is not None
        events = await (await backend.outbox.open()).find(None)
        assert [(event.status, event.attempt_count) for event in events] == [(OutboxStatus.SENT, 0)] * 2


async def test_a_reused_key_in_the_outbox_is_recorded(app: Holdfast) -> None:
    keyed = double(app).options(idempotency_key="k")
    first = await keyed.submit(1)
    async with transaction(app) as connection:
        await double(app).options(connection=connection, idempotency_key="k").submit(2)
    async with run_relay(app):
        await until(lambda: is_sent(app))
    assert first.id in (await only_event(app)).last_error
    entries = await app.engine.read_feed("mail", "", 100)
    duplicates = [event for entry in entries for event in entry.events if event.type == "task.duplicate"]
    assert [(event.job_id, event.data) for event in duplicates] == [(first.id, {"arguments_differ": True})]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"topic": "a b"}, "topic"),
        ({"topic": "ö" * 101}, "200"),
        ({"tenant_id": "{x}"}, "tenant"),
        ({"payload": '{"task": "f", "payload": {}, "idempotency_key": "%s"}' % ("k" * 1_001)}, "1000"),
        ({"payload": '{"task": "f", "payload": {}, "idempotency_key": "a\\u0000b"}'}, "zero bytes"),
        ({"payload": '{"task": "f", "payload": {}, "trace_id": "%s"}' % ("k" * 1_001)}, "trace_id"),
    ],
)
def test_an_event_with_invalid_fields_is_not_decoded(changed: dict[str, Any], message: str) -> None:
    row: dict[str, Any] = {"topic": "mail", "tenant_id": "acme", "payload": '{"task": "f", "payload": {}}', **changed}
    event = OutboxEvent(
        id="e",
        destination=ENGINE_DESTINATION,
        key="",
        headers={},
        status=OutboxStatus.NEW,
        attempt_count=0,
        next_retry_at_ms=None,
        last_error="",
        created_at_ms=1,
        sent_at_ms=None,
        position=1,
        **row,
    )
    with pytest.raises(InvalidPayload, match=message):
        envelope_from_event(event)


async def test_an_event_that_is_not_a_job_becomes_dead(app: Holdfast) -> None:
    async with transaction(app) as connection:
        job = await double(app).options(connection=connection).submit(21)
        statement = 'UPDATE outbox_events SET payload = \'{"task": ""}\''
        await connection.execute(statement)
    async with run_jobs(app, ["mail", "other"]):
        with pytest.raises(JobFailed, match="OUTBOX_DEAD"):
            await job.result(timeout=60)
    assert (await only_event(app)).status is OutboxStatus.DEAD


async def test_a_row_inserted_with_sql_becomes_a_job(app: Holdfast) -> None:
    async with transaction(app) as connection:
        lite = app.settings.ledger is None
        now = "unixepoch() * 1000" if lite else "now()"
        payload = '{"task": "double", "payload": {"number": 5}}'
        await connection.execute(
            "INSERT INTO outbox_events (id, destination, topic, lane, payload, created_at) VALUES "
            f"('from-elsewhere', 'holdfast', 'mail', 7, '{payload}', {now})"
        )
    async with run_jobs(app, ["mail", "other"]):
        await until(lambda: job_exists(app, "mail", "from-elsewhere"))
        assert await app.job("from-elsewhere", "mail").result(timeout=60) == 10


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_the_outbox_in_a_separate_database(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The relay reads the user's database; the ledger's outbox stays empty."""
    outbox_url = request.getfixturevalue("postgres_url") if kind == "postgres" else f"sqlite:///{tmp_path / 'own.db'}"
    app = Holdfast(f"sqlite:///{tmp_path / 'app.db'}", outbox_url=outbox_url, outbox_backoff_base_s=0.02)

    @app.task(queue="mail")
    async def double(number: int) -> int:
        return number * 2

    async with app:
        backend = backend_of(app)
        assert backend.outbox is not None
        await backend.outbox.open()
        async with support.transaction(outbox_url) as connection:
            job = await double.options(connection=connection).submit(4)
        async with run_jobs(app, ["mail", "other"]):
            assert await job.result(timeout=60) == 8
            await until(lambda: is_sent(app))
        assert backend.ledger is not None
        assert await backend.ledger.outbox.find(None) == []


async def test_inline_mode_runs_the_job_at_once(app: Holdfast) -> None:
    with inline(app):
        job = await double(app).options(connection=object()).submit(4)
        assert await job.result() == 8


def test_submit_sync(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    app = Holdfast(f"sqlite:///{path}")

    @app.task
    def triple(number: int) -> int:
        return number * 3

    async def prepare() -> None:
        async with app:
            backend = backend_of(app)
            assert backend.outbox is not None
            await backend.outbox.open()

    asyncio.run(prepare())
    with closing(sqlite3.connect(path)) as connection:
        lost = triple.options(connection=connection).submit_sync(1)
        connection.rollback()
        job = triple.options(connection=connection).submit_sync(2)
        connection.commit()
    with pytest.raises(UnknownJob):
        lost.result_sync(timeout=1)

    async def relay_and_run() -> None:
        async with app:
            backend = backend_of(app)
            assert backend.outbox is not None
            relay = RelayService(app, backend.outbox)
            running = asyncio.create_task(relay.run())
            await until(lambda: job_exists(app, "default", job.id))
            relay.stop()
            await running
            await drain(app, ["default"])

    asyncio.run(relay_and_run())
    assert job.result_sync(timeout=60) == 6
    asyncio.run(app.close())


def test_an_envelope_is_decoded_unchanged() -> None:
    envelope = Envelope(
        job_id="j",
        task="t",
        payload='{"a":  "ü", "b":1.10}'.encode(),
        queue="q",
        tenant_id="acme",
        idempotency_key="k",
        trace_id="x",
        meta=Meta(priority=Priority.HIGH, approved_hash="hash"),
        run_at_ms=5,
        hold=True,
        schema="39c4bce5",
    )
    row = job_event_row(envelope)
    assert row.lane == lane_of(ENGINE_DESTINATION, "q", None, "k")
    event = OutboxEvent(
        tenant_id=row.tenant_id,
        id=row.id,
        destination=row.destination,
        topic=row.topic,
        key="",
        payload=row.payload,
        headers=msgspec.json.decode(row.headers or "{}"),
        status=OutboxStatus.NEW,
        attempt_count=0,
        next_retry_at_ms=None,
        last_error="",
        created_at_ms=0,
        sent_at_ms=None,
        position=1,
    )
    # The relay cannot refuse the writer: the first job under a key stands.
    assert envelope_from_event(event) == msgspec.structs.replace(envelope, on_key_reuse=KeyReuse.RETURN)
    for broken in ("", "[]", '{"task":"t"}', '{"task":"t","payload":1}', '{"task":"a b","payload":{}}'):
        with pytest.raises(InvalidPayload):
            envelope_from_event(msgspec.structs.replace(event, payload=broken))
    with pytest.raises(InvalidPayload):
        envelope_from_event(msgspec.structs.replace(event, id="a{b}"))
