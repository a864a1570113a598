"""All triggers of a file in one process: start, presence, people's pauses, stop."""

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

PATIENCE_S = 60.0
ADA = Principal(name="ada", role=Role.OPERATOR, tenants=frozenset({"*"}))


@pytest.fixture
def broker(namespace: str) -> MemoryBroker:
    return MemoryBroker.named(namespace)


@pytest.fixture
def entry(namespace: str) -> Callable[..., TriggerEntry]:
    def make(name: str = "orders", **more: Any) -> TriggerEntry:
        told = {
            "name": name,
            "queue_name": name,
            "consumer_group": "g",
            "adapter": {"type": "memory", "connection": {"name": namespace}},
            "runtime": {"task": "ship"},
        }
        return TriggerEntry.model_validate(told | more)

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
async def running(triggers: TriggerService) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(triggers.run())
    try:
        yield task
    finally:
        triggers.stop()
        await asyncio.wait_for(task, PATIENCE_S)


def office(app: Holdfast) -> TriggerOperations:
    backend = backend_of(app)
    assert backend.ledger is not None
    return TriggerOperations(backend.ledger)


async def queued(app: Holdfast) -> int:
    return sum((await app.engine.stats("default")).states.values())


Entry = Callable[..., TriggerEntry]


async def test_messages_become_jobs_and_the_ledger_knows_who_is_here(
    app: Holdfast, broker: MemoryBroker, entry: Entry
) -> None:
    triggers = TriggerService(app, [entry("orders"), entry("returns")], report_s=0.02)
    assert not triggers.ready
    for number in range(3):
        broker.write("orders", str(number).encode())
    broker.write("returns", b"7")
    async with running(triggers):

        async def handed_over() -> bool:
            return await queued(app) == 4 and len(await office(app).list(ADA)) == 2

        await eventually(handed_over, "messages to be handed over")
        assert triggers.ready
        views = await office(app).list(ADA)
        assert [(view.name, view.queue_name, view.adapter, view.status) for view in views] == [
            ("orders", "orders", "memory", "healthy"),
            ("returns", "returns", "memory", "healthy"),
        ]
        (presence,) = views[0].processes
        assert presence.process == triggers.process
        assert presence.health == {
            "status": "healthy",
            "running": True,
            "adapter_healthy": True,
            "active_workers": 1,
            "paused": False,
        }
    assert not triggers.ready
    assert await office(app).list(ADA) == []
    await drain(app)
    rows = await office(app).executions(ADA, queue_name="orders")
    assert sorted(row.status for row in rows) == ["success"] * 3


async def test_a_pause_reaches_the_process_and_so_does_its_end(
    app: Holdfast, broker: MemoryBroker, entry: Entry
) -> None:
    async with running(TriggerService(app, [entry("orders"), entry("returns")], report_s=0.01)):

        async def present() -> bool:
            return len(await office(app).list(ADA)) == 2

        await eventually(present, "presence")
        view = await office(app).pause(ADA, "orders", reason="the warehouse moves")
        assert (view.status, view.pause and view.pause.paused_by) == ("paused", "ada")

        async def paused() -> bool:
            return bool((await office(app).list(ADA))[0].processes[0].health["paused"])

        await eventually(paused, "the pause to be heard of")
        broker.write("orders", b"1")
        broker.write("returns", b"2")

        async def other_one_works() -> bool:
            return await queued(app) == 1

        await eventually(other_one_works, "the other trigger")
        await office(app).resume(ADA, "orders", reason="moved")

        async def both() -> bool:
            return await queued(app) == 2

        await eventually(both, "both triggers")


async def test_what_is_paused_does_not_begin(app: Holdfast, broker: MemoryBroker, entry: Entry) -> None:
    backend = backend_of(app)
    assert backend.ledger is not None
    action = AuditEntry(type="operator.trigger_pause", actor="ada", tenant_id="*", target="trigger", target_id="orders")
    await backend.ledger.triggers.set_paused("orders", True, action)
    for number in range(20):
        broker.write("orders", str(number).encode())
    broker.write("returns", b"1")
    triggers = TriggerService(app, [entry("orders", concurrency=20), entry("returns")], report_s=0.01)
    async with running(triggers):

        async def other_one_works() -> bool:
            return await queued(app) >= 1 and (await office(app).list(ADA))[0].status == "paused"

        await eventually(other_one_works, "the other trigger")
        assert triggers.ready
        assert await queued(app) == 1


async def test_all_that_cannot_connect_are_named(
    app: Holdfast, broker: MemoryBroker, entry: Entry, redis_down: str
) -> None:
    broker.write("orders", b"1")
    away = {"type": "redis", "connection": {"url": redis_down}}
    triggers = TriggerService(app, [entry("orders"), entry("a", adapter=away), entry("b", adapter=away)])
    with pytest.raises(BrokerUnavailable, match=r"trigger a: .*; trigger b: "):
        await triggers.run()
    assert await office(app).list(ADA) == []
    # Whoever comes next gets what it may have had in hand, or it is a job: never neither.
    async with running(TriggerService(app, [entry("orders")])):

        async def there() -> bool:
            return await queued(app) == 1

        await eventually(there, "the job")


@pytest.fixture
def redis_down() -> str:
    return "redis://127.0.0.1:1/0"


def test_all_that_cannot_be_built_are_named(entry: Entry) -> None:
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
        async with running(triggers):

            async def there() -> bool:
                return await queued(app) == 1 and triggers.ready

            await eventually(there, "the job")
        with pytest.raises(InvalidOption, match=r"enable_dedup .* needs a ledger"):
            TriggerService(app, [entry("x", runtime={"callable": "json:dumps"})])


async def test_a_ledger_that_is_away_changes_nothing(
    app: Holdfast, broker: MemoryBroker, entry: Entry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = backend_of(app)
    assert backend.ledger is not None
    asked = []

    async def away(*_: object, **__: object) -> None:
        asked.append(1)
        raise LedgerUnavailable("gone for lunch")

    triggers = TriggerService(app, [entry("orders")], report_s=0.01)
    for name in ("heartbeat", "pauses", "remove_process"):
        monkeypatch.setattr(triggers._book, name, away)
    with caplog.at_level(logging.WARNING, "holdfast.trigger"):
        async with running(triggers):

            async def several() -> bool:
                return len(asked) > 3

            await eventually(several, "several reports")
            broker.write("orders", b"1")

            async def there() -> bool:
                return await queued(app) == 1

            await eventually(there, "the job")
    assert "gone for lunch" in caplog.text


async def test_not_ready_while_the_engine_is_down(
    app: Holdfast, broker: MemoryBroker, entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    triggers = TriggerService(app, [entry("orders")], report_s=0.01)
    desk = await backend_of(app).submitter()

    async def refuse(_: object) -> None:
        raise EngineUnavailable("gone")

    async def is_ready() -> bool:
        return triggers.ready

    async def is_not_ready() -> bool:
        return not triggers.ready and (await office(app).list(ADA))[0].status == "unhealthy"

    async with running(triggers):
        await eventually(is_ready, "the start")
        with monkeypatch.context() as patched:
            patched.setattr(desk, "submit", refuse)
            broker.write("orders", b"1")
            await eventually(is_not_ready, "the outage to be told")
            assert (await office(app).list(ADA))[0].processes[0].health["status"] == "holding"
        await eventually(is_ready, "the end of the outage")
        assert await queued(app) == 1


BLOCKING = """
import asyncio, threading
begun, go_on = threading.Event(), asyncio.Event()
async def handle(event_name, context, focus, tenant_id):
    begun.set()
    await go_on.wait()
    return "run-1"
"""


@pytest.fixture
def blocking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, namespace: str) -> Any:
    """A callable that runs until it is told."""
    import importlib

    name = f"blocking_{namespace.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(BLOCKING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return importlib.import_module(name)


@pytest.mark.parametrize("hurry", [False, True])
async def test_stop_waits_for_what_is_in_hand_and_a_second_one_does_not(
    app: Holdfast, broker: MemoryBroker, entry: Entry, blocking: Any, hurry: bool
) -> None:
    triggers = TriggerService(
        app, [entry("orders", runtime={"callable": f"{blocking.__name__}:handle"})], report_s=0.01
    )
    broker.write("orders", b"1")
    task = asyncio.create_task(triggers.run())

    async def begun() -> bool:
        return bool(blocking.begun.is_set())

    await eventually(begun, "the call")
    triggers.stop()
    await asyncio.sleep(0.05)
    assert not task.done()
    if hurry:
        triggers.stop()
    else:
        blocking.go_on.set()
    await asyncio.wait_for(task, 5)
    rows = await office(app).executions(ADA)
    assert [row.status for row in rows] == ([] if hurry else ["success"])
    blocking.go_on.set()


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("nowhere_at_all:f", "module 'nowhere_at_all' not found"),
        ("missing.py:f", "file missing.py not found"),
        ("json:nothing", "has no 'nothing'"),
        ("string:ascii_letters", "not callable"),
        ("broken.py:f", "raised ValueError: boom"),
    ],
)
async def test_functions_that_are_not_there(
    app: Holdfast, entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("raise ValueError('boom')")
    with pytest.raises(InvalidOption, match=words):
        TriggerService(app, [entry(runtime={"callable": reference})])
