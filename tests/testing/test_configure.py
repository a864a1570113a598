"""`app.configure`: changes the settings of a module's app for a test and restores them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast import Holdfast, Settings, State
from holdfast.client.connections import LoopConnections
from holdfast.errors import InvalidOption, PayloadTooLarge, UnknownJob
from holdfast.execution.backend import backend_of
from holdfast.testing import ManualClock, drain

UNREACHABLE = "redis://127.0.0.1:1"
LEDGER = "postgresql://127.0.0.1:1/none"


@pytest.fixture(autouse=True)
def _configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Set the variables of a machine that is configured for production."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_URL", UNREACHABLE)
    monkeypatch.setenv("HOLDFAST_LEDGER", LEDGER)


def make_app(**settings: str) -> Holdfast:
    app = Holdfast(**settings)  # type: ignore[arg-type]

    @app.task
    async def double(number: int) -> int:
        return number * 2

    return app


def wait_threads_ended() -> bool:
    """Return whether all threads of temporary databases end. The last ones end shortly after the close."""
    deadline = time.monotonic() + 20
    while left := [thread for thread in threading.enumerate() if "temporary.db" in thread.name]:
        if time.monotonic() > deadline:
            return False
        left[0].join(0.1)
    return True


@pytest.mark.parametrize("settings", [{}, {"url": UNREACHABLE, "ledger": LEDGER}], ids=["from variables", "in code"])
async def test_an_app_configured_in_memory_has_no_other_store(settings: dict[str, str]) -> None:
    app = make_app(**settings)
    app.configure(url="sqlite://")
    assert (app.settings.ledger, app.settings.embedded) == (None, True)
    async with app:
        job = await app.tasks["double"].submit(2)
        assert await drain(app) == 1
        assert await job.result(0) == 4


def test_an_app_with_a_settings_object_can_be_configured() -> None:
    app = Holdfast(settings=Settings.load(url=UNREACHABLE, ledger=LEDGER))
    app.configure(url="sqlite://")
    assert app.settings.embedded


def test_a_ledger_in_the_same_call_is_used() -> None:
    app = make_app()
    app.configure(url="sqlite://", ledger="sqlite:///mine.db")
    assert app.settings.ledger == "sqlite:///mine.db"
    # A later change of another setting does not reset it.
    app.configure(concurrency=3)
    assert app.settings.ledger == "sqlite:///mine.db"


def test_none_unsets_and_the_environment_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app()
    assert app.settings.ledger == LEDGER
    app.configure(ledger=None)
    assert app.settings.ledger is None
    monkeypatch.setenv("HOLDFAST_CONCURRENCY", "9")
    app.configure(namespace="n")
    assert (app.settings.concurrency, app.settings.ledger, app.settings.url) == (9, None, UNREACHABLE)
    with pytest.raises(InvalidOption, match="url"):
        app.configure(url=None)


async def test_a_block_restores_the_settings() -> None:
    app = make_app()
    before = app.settings
    async with app.configure(url="sqlite://", clock=ManualClock(), concurrency=3) as same:
        assert same is app
        job = await app.tasks["double"].submit(2)
        assert await drain(app) == 1
        assert await job.state() is State.SUCCEEDED
        assert app.engine.options.ledger is False
    assert app.settings is before
    assert wait_threads_ended()
    # The in-memory data is gone; a second block starts empty.
    async with app.configure(url="sqlite://"):
        with pytest.raises(UnknownJob):
            await job.info()


async def test_the_clock_of_a_block_is_used() -> None:
    app, clock = make_app(), ManualClock()
    async with app.configure(url="sqlite://", clock=clock):
        job = await app.tasks["double"].options(delay=3600).submit(2)
        assert await drain(app) == 0
        clock.advance(3600)
        assert await drain(app) == 1
        assert await job.result(0) == 4


async def test_a_plain_block_closes_in_memory_stores() -> None:
    """A synchronous fixture cannot await the close."""
    app = make_app()
    with app.configure(url="sqlite://"):
        await app.tasks["double"].submit(2)
        await app.ledger.queries.jobs()
    assert app.settings.url == UNREACHABLE
    assert wait_threads_ended()


def test_a_plain_block_closes_after_its_event_loops_have_ended() -> None:
    app = make_app()
    with app.configure(url="sqlite://"):
        for _ in range(2):
            assert asyncio.run(_submit_and_drain(app)) == 1
    assert wait_threads_ended()


def test_an_app_whose_event_loops_have_ended_can_be_configured() -> None:
    app = make_app()
    app.configure(url="sqlite://")
    asyncio.run(_submit_and_drain(app))
    app.configure(url="sqlite://")
    assert wait_threads_ended()
    assert asyncio.run(_submit_and_drain(app)) == 1
    app.configure(concurrency=2)


async def _submit_and_drain(app: Holdfast) -> int:
    await app.tasks["double"].submit(2)
    return await drain(app)


def test_a_plain_block_works_with_submit_sync() -> None:
    app = make_app()
    with app.configure(url="sqlite://"):
        job = app.tasks["double"].submit_sync(2)
        asyncio.run(drain(app))
        assert job.result_sync(0) == 4
    assert wait_threads_ended()
    assert not backend_of(app).portal.is_open


async def test_a_plain_block_that_leaves_a_real_store_open_is_an_error(tmp_path: Path) -> None:
    app = make_app()
    url = f"sqlite:///{tmp_path / 'jobs.db'}"
    left: list[LoopConnections] = []

    async def leave_open(then: Callable[[], object]) -> None:
        with app.configure(url=url, ledger=None):
            await app.open()
            left.append(backend_of(app).connections)
            then()

    with pytest.raises(InvalidOption, match=r"async with app\.configure"):
        await leave_open(lambda: None)
    assert app.settings.url == UNREACHABLE
    # It does not hide an error of the test itself.
    with pytest.raises(ZeroDivisionError):
        await leave_open(lambda: 1 / 0)
    for connections in left:
        await connections.close()


async def test_an_in_memory_app_with_an_explicit_ledger_must_be_closed_by_its_own_loop(postgres_url: str) -> None:
    app = make_app()
    async with app.configure(url="sqlite://", ledger=postgres_url):
        await app.tasks["double"].options(durable=False).submit(2)
        await app.ledger.queries.jobs()
    left: list[LoopConnections] = []

    async def leave_open() -> None:
        with app.configure(url="sqlite://", ledger=postgres_url):
            await app.open()
            left.append(backend_of(app).connections)

    with pytest.raises(InvalidOption, match="still open"):
        await leave_open()
    await left[0].close()


async def test_tasks_registered_earlier_use_the_new_settings() -> None:
    app = make_app()

    @app.task
    async def keep(text: str) -> str:
        return text

    async with app.configure(url="sqlite://", payload_limit=100):
        with pytest.raises(PayloadTooLarge):
            await keep.submit("x" * 100)
    async with app.configure(url="sqlite://"):
        await keep.submit("x" * 100)


async def test_an_invalid_option_changes_nothing() -> None:
    app = make_app()
    with pytest.raises(InvalidOption, match="concurency"):
        app.configure(url="sqlite://", concurency=3)
    assert app.settings.url == UNREACHABLE


def test_a_plain_block_closes_an_app_that_is_open_in_another_threads_event_loop() -> None:
    app, opened, finished = make_app(), threading.Event(), threading.Event()

    async def serve() -> None:
        await app.tasks["double"].submit(2)
        opened.set()
        await asyncio.to_thread(finished.wait, 20)

    server = threading.Thread(target=lambda: asyncio.run(serve()))
    with app.configure(url="sqlite://"):
        server.start()
        assert opened.wait(20)
    assert wait_threads_ended()
    finished.set()
    server.join(20)
