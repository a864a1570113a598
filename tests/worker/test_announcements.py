"""Workers announce their tasks, in the engine and in a separate ledger, and do not depend on either."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from holdfast import Holdfast
from holdfast.core.announcement import KEEP_MS, AnnouncedTask
from holdfast.execution.backend import backend_of
from holdfast.ledger.port.ledger import Ledger
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


@pytest.mark.parametrize("kind", ["postgresql", "sqlite"])
async def test_a_separate_ledger_has_the_announcements_too(
    redis_url: str, namespace: str, kind: str, tmp_path: Any, request: pytest.FixtureRequest
) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.db'}" if kind == "sqlite" else request.getfixturevalue("postgres_url")
    app = Holdfast(redis_url, namespace=namespace, ledger=url)
    add_tasks(app)
    async with app, working(app, upkeep=False):
        ledger = backend_of(app).ledger
        assert ledger is not None
        found = await eventually(ledger.operators.announced_tasks, "the announcement")
        assert names(found) == [("add", "default", 1), ("send", "mail", 2)]
        await ledger.operators.announce_tasks(found)
        again = await ledger.operators.announced_tasks()
        assert [each.schema for each in again] == [each.schema for each in found]
        assert all(one.seen_at_ms >= other.seen_at_ms for one, other in zip(again, found, strict=True))


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
    assert "cannot announce the tasks of this worker in the engine" in caplog.text


async def test_a_worker_works_while_the_ledger_is_down(redis_url: str, namespace: str) -> None:
    app = Holdfast(redis_url, namespace=namespace, ledger="postgresql://127.0.0.1:1/none")
    add_tasks(app)
    ledger: Ledger | None = backend_of(app).ledger
    assert ledger is not None
    async with app, working(app, upkeep=False):
        await eventually(app.engine.announced_tasks, "the announcement in the engine")
