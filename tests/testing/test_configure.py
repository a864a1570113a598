"""`app.configure`: a module's app, moved for a test and put back."""

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

NOWHERE = "redis://127.0.0.1:1"
LEDGER = "postgresql://127.0.0.1:1/none"


@pytest.fixture(autouse=True)
def _configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a machine that is configured for production."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_URL", NOWHERE)
    monkeypatch.setenv("HOLDFAST_LEDGER", LEDGER)


def make_app(**given: str) -> Holdfast:
    app = Holdfast(**given)  # type: ignore[arg-type]

    @app.task
    async def double(number: int) -> int:
        return number * 2

    return app


def threads_end() -> bool:
    """Whether no thread of a temporary database is left; the last ones end a moment after their close."""
    deadline = time.monotonic() + 20
    while left := [thread for thread in threading.enumerate() if "temporary.db" in thread.name]:
        if time.monotonic() > deadline:
            return False
        left[0].join(0.1)
    return True


@pytest.mark.parametrize("given", [{}, {"url": NOWHERE, "ledger": LEDGER}], ids=["from variables", "in code"])
async def test_moved_into_memory_it_has_no_other_store(given: dict[str, str]) -> None:
    app = make_app(**given)
    app.configure(url="sqlite://")
    assert (app.settings.ledger, app.settings.embedded) == (None, True)
    async with app:
        job = await app.tasks["double"].submit(2)
        assert await drain(app) == 1
        assert await job.result(0) == 4


def test_a_ready_made_settings_object_is_moved_too() -> None:
    app = Holdfast(settings=Settings.load(url=NOWHERE, ledger=LEDGER))
    app.configure(url="sqlite://")
    assert app.settings.embedded


def test_what_is_named_in_the_same_call_is_used() -> None:
    app = make_app()
    app.configure(url="sqlite://", ledger="sqlite:///mine.db")
    assert app.settings.ledger == "sqlite:///mine.db"
    # A later change of something else leaves it alone.
    app.configure(concurrency=3)
    assert app.settings.ledger == "sqlite:///mine.db"


def test_none_unsets_and_the_environment_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app()
    assert app.settings.ledger == LEDGER
    app.configure(ledger=None)
    assert app.settings.ledger is None
    monkeypatch.setenv("HOLDFAST_CONCURRENCY", "9")
    app.configure(namespace="n")
    assert (app.settings.concurrency, app.settings.ledger, app.settings.url) == (9, None, NOWHERE)
    with pytest.raises(InvalidOption, match="url"):
        app.configure(url=None)


async def test_a_block_puts_everything_back() -> None:
    app = make_app()
    before = app.settings
    async with app.configure(url="sqlite://", clock=ManualClock(), concurrency=3) as same:
        assert same is app
        job = await app.tasks["double"].submit(2)
        assert await drain(app) == 1
        assert await job.state() is State.SUCCEEDED
        assert app.engine.options.ledger is False
    assert app.settings is before
    assert threads_end()
    # What was in memory is gone; a second block begins with nothing.
    async with app.configure(url="sqlite://"):
        with pytest.raises(UnknownJob):
            await job.info()


async def test_the_clock_is_the_block_s() -> None:
    app, clock = make_app(), ManualClock()
    async with app.configure(url="sqlite://", clock=clock):
        job = await app.tasks["double"].options(delay=3600).submit(2)
        assert await drain(app) == 0
        clock.advance(3600)
        assert await drain(app) == 1
        assert await job.result(0) == 4


async def test_a_plain_block_closes_what_is_in_memory() -> None:
    """A fixture that is not async cannot await the close."""
    app = make_app()
    with app.configure(url="sqlite://"):
        await app.tasks["double"].submit(2)
        await app.ledger.queries.jobs()
    assert app.settings.url == NOWHERE
    assert threads_end()


def test_a_plain_block_after_its_event_loops_have_ended() -> None:
    app = make_app()
    with app.configure(url="sqlite://"):
        for _ in range(2):
            assert asyncio.run(_submit_and_drain(app)) == 1
    assert threads_end()


def test_an_app_whose_event_loops_have_ended_can_be_configured() -> None:
    app = make_app()
    app.configure(url="sqlite://")
    asyncio.run(_submit_and_drain(app))
    app.configure(url="sqlite://")
    assert threads_end()
    assert asyncio.run(_submit_and_drain(app)) == 1
    app.configure(concurrency=2)


async def _submit_and_drain(app: Holdfast) -> int:
    await app.tasks["double"].submit(2)
    return await drain(app)


def test_a_plain_block_with_submit_sync() -> None:
    app = make_app()
    with app.configure(url="sqlite://"):
        job = app.tasks["double"].submit_sync(2)
        asyncio.run(drain(app))
        assert job.result_sync(0) == 4
    assert threads_end()
    assert not backend_of(app).portal.is_open


async def test_a_plain_block_that_leaves_a_real_store_open_says_so(tmp_path: Path) -> None:
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
    assert app.settings.url == NOWHERE
    # An error of the test itself is not hidden by it.
    with pytest.raises(ZeroDivisionError):
        await leave_open(lambda: 1 / 0)
    for links in left:
        await links.close()


async def test_an_app_in_memory_with_a_ledger_that_code_names_is_closed_by_its_own_loop(postgres_url: str) -> None:
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


async def test_tasks_that_were_registered_before_follow_the_settings() -> None:
    app = make_app()

    @app.task
    async def keep(text: str) -> str:
        return text

    async with app.configure(url="sqlite://", payload_limit=100):
        with pytest.raises(PayloadTooLarge):
            await keep.submit("x" * 100)
    async with app.configure(url="sqlite://"):
        await keep.submit("x" * 100)


async def test_a_mistake_changes_nothing() -> None:
    app = make_app()
    with pytest.raises(InvalidOption, match="concurency"):
        app.configure(url="sqlite://", concurency=3)
    assert app.settings.url == NOWHERE


def test_a_plain_block_closes_an_app_that_another_thread_s_event_loop_has_open() -> None:
    app, opened, over = make_app(), threading.Event(), threading.Event()

    async def serve() -> None:
        await app.tasks["double"].submit(2)
        opened.set()
        await asyncio.to_thread(over.wait, 20)

    server = threading.Thread(target=lambda: asyncio.run(serve()))
    with app.configure(url="sqlite://"):
        server.start()
        assert opened.wait(20)
    assert threads_end()
    over.set()
    server.join(20)
