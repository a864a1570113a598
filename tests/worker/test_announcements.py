"""Workers announce their tasks in the engine, upkeep copies them to a separate ledger; work depends on neither."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from holdfast import Holdfast
from holdfast.core.announcement import ANNOUNCE_INTERVAL_S, KEEP_MS, AnnouncedTask
from holdfast.execution.backend import backend_of
from holdfast.upkeep.announcements import AnnouncementCopier
from tests.worker.support import Faults, eventually, working


def add_tasks(app: Holdfast) -> None:
    @app.task(queue="mail", priority="low")
    async def send(to: str, copies: int = 1) -> None: ...

    @app.task
    async def add(a: int) -> int:
        return a


def names(tasks: list[AnnouncedTask]) -> list[tuple[str, str, int]]:
    return [(each.task, each.queue, each.priority) for each in tasks]


async def test_a_worker_announces_all_tasks_of_its_app(both: Holdfast) -> None:
    add_tasks(both)
    async with working(both):
        await eventually(both.engine.announced_tasks, "the announcement")
    found = await both.engine.announced_tasks()
    assert names(found) == [("add", "default", 1), ("send", "mail", 2)]
    specs = backend_of(both).specs
    assert {each.task: each.fingerprint for each in found} == {name: spec.fingerprint for name, spec in specs.items()}
    assert {each.task: each.document for each in found} == {name: spec.schema for name, spec in specs.items()}


@pytest.fixture(params=["postgresql", "sqlite"])
def ledger_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A ledger that is separate from the engine."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'ledger.db'}"
    url: str = request.getfixturevalue("postgres_url")
    return url


async def test_a_worker_with_upkeep_copies_its_tasks_to_a_separate_ledger(
    redis_url: str, namespace: str, ledger_url: str
) -> None:
    app = Holdfast(redis_url, namespace=namespace, ledger=ledger_url)
    add_tasks(app)
    async with app, working(app):
        ledger = backend_of(app).ledger
        assert ledger is not None
        found = await eventually(ledger.operators.announced_tasks, "the announcement")
        assert names(found) == [("add", "default", 1), ("send", "mail", 2)]
        assert found == await app.engine.announced_tasks()


async def test_upkeep_copies_announcements_of_workers_without_upkeep(
    redis_url: str, namespace: str, ledger_url: str
) -> None:
    """Such a worker does not write to the ledger: stopped in the middle, it would lock a SQLite file for all."""
    app = Holdfast(redis_url, namespace=namespace, ledger=ledger_url)
    add_tasks(app)
    async with app, working(app, upkeep=False):
        ledger = backend_of(app).ledger
        assert ledger is not None
        announced = await eventually(app.engine.announced_tasks, "the announcement")
        copier = AnnouncementCopier(app.engine, ledger)
        assert await ledger.operators.announced_tasks() == []
        assert await copier.run_once() == ANNOUNCE_INTERVAL_S
        assert await ledger.operators.announced_tasks() == announced


async def test_a_copy_keeps_the_time_of_the_announcement(redis_url: str, namespace: str, ledger_url: str) -> None:
    """What no worker announces any more does not look current because upkeep still runs."""
    app = Holdfast(redis_url, namespace=namespace, ledger=ledger_url)
    task = AnnouncedTask(task="t", queue="q", fingerprint="01")
    async with app:
        ledger = backend_of(app).ledger
        assert ledger is not None
        await app.engine.announce_tasks([task])
        first = await app.engine.announced_tasks()
        for copier in (AnnouncementCopier(app.engine, ledger), AnnouncementCopier(app.engine, ledger)):
            await copier.run_once()
            await copier.run_once()
            assert await ledger.operators.announced_tasks() == first
        await app.engine.announce_tasks([task])
        await copier.run_once()
        assert await ledger.operators.announced_tasks() == await app.engine.announced_tasks()


async def test_garbage_in_the_engine_does_not_stop_the_copy(redis_url: str, namespace: str, ledger_url: str) -> None:
    """Other programs can write to the hash: names with zero bytes, times beyond every calendar."""
    app = Holdfast(redis_url, namespace=namespace, ledger=ledger_url)
    async with app, Redis.from_url(redis_url) as redis:
        ledger = backend_of(app).ledger
        assert ledger is not None
        await app.engine.announce_tasks([AnnouncedTask(task="t", queue="q", fingerprint="01")])
        (key,) = [key async for key in redis.scan_iter(f"*{namespace}*") if await redis.type(key) == b"hash"]
        odd = AnnouncedTask(task="nul\0", queue="q\0", fingerprint="0\0", schema="\0", seen_at_ms=10**15)
        await redis.hset(key, "odd", msgspec.json.encode(odd))
        assert len(await app.engine.announced_tasks()) == 2
        assert await AnnouncementCopier(app.engine, ledger).run_once() == ANNOUNCE_INTERVAL_S
        assert [each.task for each in await ledger.operators.announced_tasks()] == ["nul\ufffd", "t"]


async def test_old_schemas_of_a_task_are_deleted(app: Holdfast, clock: Any) -> None:
    def announced(task: str, fingerprint: str) -> AnnouncedTask:
        return AnnouncedTask(task=task, queue="default", fingerprint=fingerprint)

    async with app:
        await app.engine.announce_tasks([announced("a", "01"), announced("b", "01")])
        clock.advance(KEEP_MS / 1000 + 1)
        await app.engine.announce_tasks([announced("a", "02")])
        # "b" is still known, although no worker has it any more.
        assert [(each.task, each.fingerprint) for each in await app.engine.announced_tasks()] == [
            ("a", "02"),
            ("b", "01"),
        ]


async def test_a_worker_works_while_it_cannot_announce(
    url: str, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    app = Holdfast(url)
    add_tasks(app)
    faults.down.add("announce_tasks")
    with caplog.at_level(logging.WARNING, "holdfast.worker"):
        async with app, working(app):
            job = await app.submit_raw("add", b'{"a": 7}')
            assert await job.result(60) == 7
            await eventually(lambda: faults.count("announce_tasks"), "the announcement")
    assert "cannot announce the tasks of this worker" in caplog.text


async def test_a_copy_is_repeated_while_the_ledger_is_down(
    redis_url: str, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = Holdfast(redis_url, namespace=namespace, ledger="postgresql://127.0.0.1:1/none")
    add_tasks(app)
    ledger = backend_of(app).ledger
    assert ledger is not None
    async with app, working(app, upkeep=False):
        await eventually(app.engine.announced_tasks, "the announcement in the engine")
        assert await AnnouncementCopier(app.engine, ledger).run_once() < ANNOUNCE_INTERVAL_S
    assert "cannot copy announced tasks to the ledger, retrying" in caplog.text
