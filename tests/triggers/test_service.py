"""All triggers of a file in one process: start, heartbeats, pauses by operators, stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast import Holdfast
from holdfast.brokers.memory import MemoryBroker
from holdfast.core.principal import AuditEntry, Principal, Role
from holdfast.errors import BrokerUnavailable, EngineUnavailable, InvalidOption, LedgerUnavailable
from holdfast.execution.backend import backend_of
from holdfast.operations.messages import TriggerOperations
from holdfast.testing import drain
from holdfast.triggers.config import TriggerEntry
from holdfast.triggers.service import TriggerService
from tests.observe.support import eventually

TIMEOUT_S = 60.0
ADA = Principal(name="ada", role=Role.OPERATOR, tenants=frozenset({"*"}))


@pytest.fixture
def broker(namespace: str) -> MemoryBroker:
    return MemoryBroker.named(namespace)


@pytest.fixture
def entry(namespace: str) -> Callable[..., TriggerEntry]:
    def make(name: str = "orders", **options: Any) -> TriggerEntry:
        fields = {
            "name": name,
            "queue_name": name,
            "consumer_group": "g",
            "adapter": {"type": "memory", "connection": {"name": namespace}},
            "runtime": {"task": "ship"},
        }
        return TriggerEntry.model_validate(fields | options)

    return make


@pytest.fixture
async def app(tmp_path: Path) -> AsyncIterator[Holdfast]:
    app = Holdfast(f"sqlite:///{tmp_path / 'jobs.db'}")

    @app.task
    async def ship(order: int) -> int:
        return order

    async with app:
        yield app


@asynccontextmanager
async def run_service(triggers: TriggerService) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(triggers.run())
    try:
        yield task
    finally:
        triggers.stop()
        await asyncio.wait_for(task, TIMEOUT_S)


def operations(app: Holdfast) -> TriggerOperations:
    backend = backend_of(app)
    assert backend.ledger is not None
    return TriggerOperations(backend.ledger)


async def count_jobs(app: Holdfast) -> int:
    return sum((await app.engine.stats("default")).states.values())


Entry = Callable[..., TriggerEntry]


async def test_messages_become_jobs_and_the_ledger_lists_the_process(
    app: Holdfast, broker: MemoryBroker, entry: Entry
) -> None:
    triggers = TriggerService(app, [entry("orders"), entry("returns")], report_s=0.02)
    assert not triggers.ready
    for number in range(3):
        broker.write("orders", str(number).encode())
    broker.write("returns", b"7")
    async with run_service(triggers):

        async def all_submitted() -> bool:
            return await count_jobs(app) == 4 and len(await operations(app).list(ADA)) == 2

        await eventually(all_submitted, "the jobs")
        assert triggers.ready
        infos = await operations(app).list(ADA)
        assert [(info.name, info.queue_name, info.adapter, info.status) for info in infos] == [
            ("orders", "orders", "memory", "healthy"),
            ("returns", "returns", "memory", "healthy"),
        ]
        (heartbeat,) = infos[0].processes
        assert heartbeat.process == triggers.process
        assert heartbeat.health == {
            "status": "healthy",
            "running": True,
            "adapter_healthy": True,
            "active_workers": 1,
            "paused": False,
        }
    assert not triggers.ready
    assert await operations(app).list(ADA) == []
    await drain(app)
    rows = await operations(app).executions(ADA, queue_name="orders")
    assert sorted(row.status for row in rows) == ["success"] * 3


async def test_pause_and_resume_reach_the_process(app: Holdfast, broker: MemoryBroker, entry: Entry) -> None:
    async with run_service(TriggerService(app, [entry("orders"), entry("returns")], report_s=0.01)):

        async def has_heartbeats() -> bool:
            return len(await operations(app).list(ADA)) == 2

        await eventually(has_heartbeats, "heartbeats")
        info = await operations(app).pause(ADA, "orders", reason="the warehouse moves")
        assert (info.status, info.pause and info.pause.paused_by) == ("paused", "ada")

        async def paused() -> bool:
            return bool((await operations(app).list(ADA))[0].processes[0].health["paused"])

        await eventually(paused, "the pause")
        broker.write("orders", b"1")
        broker.write("returns", b"2")

        async def other_trigger_works() -> bool:
            return await count_jobs(app) == 1

        await eventually(other_trigger_works, "the other trigger")
        await operations(app).resume(ADA, "orders", reason="moved")

        async def both_submitted() -> bool:
            return await count_jobs(app) == 2

        await eventually(both_submitted, "both triggers")


async def test_a_paused_trigger_does_not_start(app: Holdfast, broker: MemoryBroker, entry: Entry) -> None:
    backend = backend_of(app)
    assert backend.ledger is not None
    action = AuditEntry(type="operator.trigger_pause", actor="ada", tenant_id="*", target="trigger", target_id="orders")
    await backend.ledger.triggers.set_paused("orders", True, action)
    for number in range(20):
        broker.write("orders", str(number).encode())
    broker.write("returns", b"1")
    triggers = TriggerService(app, [entry("orders", concurrency=20), entry("returns")], report_s=0.01)
    async with run_service(triggers):

        async def other_trigger_works() -> bool:
            return await count_jobs(app) >= 1 and (await operations(app).list(ADA))[0].status == "paused"

        await eventually(other_trigger_works, "the other trigger")
        assert triggers.ready
        assert await count_jobs(app) == 1


async def test_all_connection_failures_are_named(
    app: Holdfast, broker: MemoryBroker, entry: Entry, redis_down: str
) -> None:
    broker.write("orders", b"1")
    unreachable = {"type": "redis", "connection": {"url": redis_down}}
    triggers = TriggerService(app, [entry("orders"), entry("a", adapter=unreachable), entry("b", adapter=unreachable)])
    with pytest.raises(BrokerUnavailable, match=r"trigger a: .*; trigger b: "):
        await triggers.run()
    assert await operations(app).list(ADA) == []
    # The message was released or became a job; it is never lost.
    async with run_service(TriggerService(app, [entry("orders")])):

        async def job_exists() -> bool:
            return await count_jobs(app) == 1

        await eventually(job_exists, "the job")


@pytest.fixture
def redis_down() -> str:
    return "redis://127.0.0.1:1/0"


def test_all_invalid_triggers_are_named(entry: Entry) -> None:
    async def build() -> None:
        app = Holdfast("sqlite://")

        @app.task
        async def other() -> None: ...

        async with app:
            TriggerService(
                app, [entry("a"), entry("b", runtime={"callable": "nowhere:f"}), entry("c", runtime={"task": "other"})]
            )

    with pytest.raises(InvalidOption, match=r"trigger a: no task named 'ship'.*; trigger b: cannot load 'nowhere:f'"):
        asyncio.run(build())


async def test_without_a_ledger(redis_url: str, namespace: str, broker: MemoryBroker, entry: Entry) -> None:
    async with Holdfast(redis_url, namespace=namespace) as app:
        broker.write("orders", b'{"a": 1}')
        triggers = TriggerService(app, [entry("orders")])
        async with run_service(triggers):

            async def job_exists() -> bool:
                return await count_jobs(app) == 1 and triggers.ready

            await eventually(job_exists, "the job")
        with pytest.raises(InvalidOption, match=r"enable_dedup .* needs a ledger"):
            TriggerService(app, [entry("x", runtime={"callable": "json:dumps"})])


async def test_an_unreachable_ledger_does_not_stop_triggers(
    app: Holdfast, broker: MemoryBroker, entry: Entry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = backend_of(app)
    assert backend.ledger is not None
    calls = []

    async def fail(*_: object, **__: object) -> None:
        calls.append(1)
        raise LedgerUnavailable("ledger is down")

    triggers = TriggerService(app, [entry("orders")], report_s=0.01)
    for name in ("heartbeat", "pauses", "remove_process"):
        monkeypatch.setattr(triggers._book, name, fail)
    with caplog.at_level(logging.WARNING, "holdfast.triggers"):
        async with run_service(triggers):

            async def several() -> bool:
                return len(calls) > 3

            await eventually(several, "several reports")
            broker.write("orders", b"1")

            async def job_exists() -> bool:
                return await count_jobs(app) == 1

            await eventually(job_exists, "the job")
    assert "ledger is down" in caplog.text


async def test_not_ready_while_the_engine_is_down(
    app: Holdfast, broker: MemoryBroker, entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    triggers = TriggerService(app, [entry("orders")], report_s=0.01)
    submitter = await backend_of(app).connections.submitter()

    async def refuse(_: object) -> None:
        raise EngineUnavailable("gone")

    async def is_ready() -> bool:
        return triggers.ready

    async def is_not_ready() -> bool:
        return not triggers.ready and (await operations(app).list(ADA))[0].status == "unhealthy"

    async with run_service(triggers):
        await eventually(is_ready, "the start")
        with monkeypatch.context() as patched:
            patched.setattr(submitter, "submit", refuse)
            broker.write("orders", b"1")
            await eventually(is_not_ready, "the reported outage")
            assert (await operations(app).list(ADA))[0].processes[0].health["status"] == "holding"
        await eventually(is_ready, "the end of the outage")
        assert await count_jobs(app) == 1


BLOCKING = """
import asyncio, threading
started, proceed = threading.Event(), asyncio.Event()
async def handle(event_name, context, focus, tenant_id):
    started.set()
    await proceed.wait()
    return "run-1"
"""


@pytest.fixture
def blocking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, namespace: str) -> Any:
    """A module with a callable that blocks until `proceed` is set."""
    import importlib

    name = f"blocking_{namespace.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(BLOCKING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return importlib.import_module(name)


@pytest.mark.parametrize("stop_twice", [False, True])
async def test_stop_waits_for_messages_in_flight_and_a_second_stop_does_not(
    app: Holdfast, broker: MemoryBroker, entry: Entry, blocking: Any, stop_twice: bool
) -> None:
    triggers = TriggerService(
        app, [entry("orders", runtime={"callable": f"{blocking.__name__}:handle"})], report_s=0.01
    )
    broker.write("orders", b"1")
    task = asyncio.create_task(triggers.run())

    async def has_started() -> bool:
        return bool(blocking.started.is_set())

    await eventually(has_started, "the call")
    triggers.stop()
    await asyncio.sleep(0.05)
    assert not task.done()
    if stop_twice:
        triggers.stop()
    else:
        blocking.proceed.set()
    await asyncio.wait_for(task, 5)
    rows = await operations(app).executions(ADA)
    assert [row.status for row in rows] == ([] if stop_twice else ["success"])
    blocking.proceed.set()


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("nowhere_at_all:f", "module 'nowhere_at_all' not found"),
        ("missing.py:f", "file missing.py not found"),
        ("json:nothing", "has no 'nothing'"),
        ("string:ascii_letters", "not callable"),
        ("broken.py:f", "raised ValueError: boom"),
    ],
)
async def test_invalid_callables_are_refused(
    app: Holdfast, entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("raise ValueError('boom')")
    with pytest.raises(InvalidOption, match=message):
        TriggerService(app, [entry(runtime={"callable": reference})])
