"""The pytest plugin in a user's project: pytest runs in a separate process, with real stores in its environment."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import asyncpg
import pytest
from redis.asyncio import Redis

from tests.docs.test_examples import ROOT, code_of

UNREACHABLE = "postgresql://127.0.0.1:1/none"

INI = """
[pytest]
filterwarnings = error
asyncio_default_fixture_loop_scope = function
"""

SHOP = """
from holdfast import Context, Holdfast

app = Holdfast()
charges = []


async def charge(order):
    charges.append(order)
    return f"charge {len(charges)}"


@app.task
async def pay(ctx: Context, order: str) -> str:
    receipt = await ctx.effect(f"charge {order}", charge, order)
    await notify.options(delay=3600).submit(order)
    return receipt


named = Holdfast("redis://127.0.0.1:1", ledger="postgresql://127.0.0.1:1/none")


@app.task(process=True)
def stores_in_child() -> list[tuple[str, str | None]]:
    return [(each.settings.url, each.settings.ledger) for each in (app, named)]


@app.task(queue="mail")
def notify(order: str) -> str:
    return order
"""

CONFTEST = """
import threading

import pytest

import shop
from holdfast.execution.backend import backend_of


@pytest.fixture
def holdfast_base_app():
    return shop.app


@pytest.fixture(autouse=True)
def isolated(holdfast_app):
    shop.charges.clear()


@pytest.fixture
def anyio_backend():
    return "asyncio"


def pytest_sessionfinish(session):
    # An in-memory app leaves no threads, and the program's own app is restored.
    for thread in threading.enumerate():
        if "temporary.db" in thread.name:
            thread.join(20)
            assert not thread.is_alive(), thread
    assert not shop.app.settings.in_memory
    assert not backend_of(shop.app).connections.in_use
"""

TESTS = '''
import pytest

import shop
from holdfast import State


async def pay_and_notify(holdfast_worker, holdfast_clock):
    job = await shop.pay.submit("7")
    assert await job.state() is State.QUEUED
    assert await holdfast_worker.drain() == 1
    assert await job.result(0) == "charge 1"
    assert await holdfast_worker.advance(3599) == 0
    holdfast_clock.advance(1)
    assert await holdfast_worker.drain() == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("again", [1, 2])
async def test_with_pytest_asyncio(holdfast_worker, holdfast_clock, again):
    await pay_and_notify(holdfast_worker, holdfast_clock)


@pytest.mark.anyio
async def test_with_anyio(holdfast_worker, holdfast_clock):
    await pay_and_notify(holdfast_worker, holdfast_clock)


def test_without_an_event_loop(holdfast_app, holdfast_worker):
    assert holdfast_app is shop.app
    job = shop.pay.submit_sync("7")
    assert holdfast_worker.drain_sync() == 1
    assert job.result_sync(0) == "charge 1"
    assert holdfast_worker.advance_sync(3600) == 1


def test_a_child_process_is_isolated_too(holdfast_worker):
    job = shop.stores_in_child.submit_sync()
    assert holdfast_worker.drain_sync() == 1
    assert job.result_sync(0) == [("sqlite://", None)] * 2


@pytest.mark.asyncio
async def test_without_a_worker():
    """The fixture of conftest.py alone isolates a submission from the real store."""
    await shop.pay.submit("7")


class TestAnotherApp:
    @pytest.fixture
    def holdfast_app(self):
        return shop.app

    def test_an_app_that_is_not_isolated_is_refused(self, request):
        with pytest.raises(Exception, match="holdfast_base_app"):
            request.getfixturevalue("holdfast_worker")
'''

DEFAULT = """
async def test_a_separate_app(holdfast_app, holdfast_worker):
    @holdfast_app.task
    async def double(number: int) -> int:
        return number * 2

    job = await double.submit(2)
    assert await holdfast_worker.drain() == 1
    assert await job.result(0) == 4
"""

UNUSED = """
import sys


def test_nothing_of_holdfast_is_loaded():
    assert "holdfast_pytest" in sys.modules
    assert [name for name in sys.modules if name.partition(".")[0] == "holdfast"] == []
"""


class Project:
    """A user's project in an environment with holdfast installed."""

    def __init__(self, parent: Path) -> None:
        self.folder = parent / "project"
        self._site = parent / "site"
        self.folder.mkdir()
        (self.folder / "pytest.ini").write_text(INI)
        # Entry points as an installed wheel has them: this checkout may have been installed before the plugin existed.
        about = self._site / "holdfast_checkout-0.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: holdfast-checkout\nVersion: 0\n")
        entry_points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
        entries = [f"{name} = {module}" for name, module in entry_points.items()]
        (about / "entry_points.txt").write_text("[pytest11]\n" + "\n".join(entries) + "\n")

    def pytest(self, *arguments: str, files: dict[str, str], **variables: str) -> str:
        for name, text in files.items():
            (self.folder / name).write_text(text)
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("HOLDFAST_", "PYTEST"))
        }
        environment |= {"PYTHONPATH": f"{self._site}{os.pathsep}{ROOT / 'src'}", **variables}
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:schemathesis", *arguments]
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False, timeout=55
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


async def test_a_users_app_is_tested_without_its_stores(
    project: Project, redis_url: str, postgres_url: str, namespace: str
) -> None:
    output = project.pytest(
        files={"shop.py": SHOP, "conftest.py": CONFTEST, "test_shop.py": TESTS},
        HOLDFAST_URL=redis_url,
        HOLDFAST_LEDGER=postgres_url,
        HOLDFAST_NAMESPACE=namespace,
    )
    assert "7 passed" in output
    async with Redis.from_url(redis_url) as redis:
        assert [key async for key in redis.scan_iter(f"{namespace}*")] == []
    connection = await asyncpg.connect(postgres_url)
    try:
        for table in ("jobs", "job_events", "idempotency_keys", "ledger_owner"):
            assert await connection.fetchval(f"SELECT count(*) FROM {table}") == 0, table
    finally:
        await connection.close()


def test_without_a_base_app_the_fixture_is_an_empty_app(project: Project) -> None:
    output = project.pytest(
        "-o", "asyncio_mode=auto", files={"test_it.py": DEFAULT}, HOLDFAST_URL="redis://127.0.0.1:1"
    )
    assert "1 passed" in output


def test_the_how_to_page_runs_with_pytest(project: Project) -> None:
    page = ROOT / "docs" / "how-to" / "test-your-tasks.md"
    # The deselected test moves the script's clock, not the plugin's.
    options = ("-o", "asyncio_mode=auto", "--deselect", "test_page.py::test_the_retry_waits_a_minute")
    output = project.pytest(*options, files={"test_page.py": code_of(page)}, HOLDFAST_LEDGER=UNREACHABLE)
    assert "6 passed" in output


def test_a_run_without_its_fixtures_does_not_load_holdfast(project: Project) -> None:
    assert "1 passed" in project.pytest(files={"test_it.py": UNUSED})


def test_the_plugin_lists_its_fixtures_and_can_be_disabled(project: Project) -> None:
    assert "holdfast_worker" in project.pytest("--fixtures", files={"test_it.py": "def test_it(): ..."})
    assert "holdfast_worker" not in project.pytest("--fixtures", "-p", "no:holdfast", files={})


def test_holdfast_testing_does_not_need_pytest() -> None:
    code = "import sys; sys.modules['pytest'] = None; import holdfast.testing as t; print(*t.__all__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50)
    assert "make_context" in done.stdout
