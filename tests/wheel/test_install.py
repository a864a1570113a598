"""The wheel alone, and with each extra, in clean environments: help, README, tutorial, a worker that finishes a job."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Final

import httpx
import pytest
import typer.main

from holdfast.cli.program import program
from holdfast.extras import EXTRAS
from tests.docs.test_examples import README_PRINTS, code_of, get_shown_output
from tests.wheel.environments import ALL, NAMES, TIMEOUT_S, Environment, Environments, settings
from tests.wheel.inside import Plan, commands
from tests.wheel.programs import TRIGGERS, write_app, write_trigger
from tests.wheel.wheelhouse import ROOT

# The first test of each process may have to wait for environments that other processes create.
pytestmark = pytest.mark.timeout(3 * TIMEOUT_S)

TUTORIAL: Final = ROOT / "docs" / "tutorial" / "first-steps.md"
#: Pages and what their code prints.
PAGES: Final = {ROOT / "README.md": README_PRINTS, TUTORIAL: get_shown_output(TUTORIAL)}
#: The words of every command and group.
COMMANDS: Final = list(commands(typer.main.get_command(program())))


def finish_a_job(environment: Environment, folder: Path, **variables: str) -> str:
    """Run a worker process on a job that another process submits. Return the worker's log."""
    write_app(folder)
    with environment.start("-m", "holdfast", "worker", "shop.py:app", cwd=folder, **variables) as worker:
        try:
            arguments = ("submit", "--force", "add", '{"a": 40, "b": 2}', "--wait", str(TIMEOUT_S))
            done = environment.run("-m", "holdfast", *arguments, cwd=folder, **variables)
            worker.send_signal(signal.SIGTERM)
            _, log = worker.communicate(timeout=TIMEOUT_S)
        finally:
            worker.kill()
    assert (done.returncode, done.stdout.split()[-1:]) == (0, ["42"]), f"{done.stdout}{done.stderr}{log}"
    assert worker.returncode == 0, log
    return log


@pytest.mark.parametrize("name", NAMES)
def test_help_readme_tutorial_and_a_worker_run(name: str, environments: Environments, tmp_path: Path) -> None:
    write_app(tmp_path)
    copies = [tmp_path / page.stem / "example.py" for page in PAGES]
    for page, copy in zip(PAGES, copies, strict=True):
        copy.parent.mkdir()
        copy.write_text(code_of(page))
    modules = EXTRAS.get(name, ())
    plan = Plan(modules=list(modules), worker=str(tmp_path), pages=[str(copy) for copy in copies])
    report = environments.get(name).run_plan(plan, tmp_path)
    assert [tuple(path) for path in report.commands] == COMMANDS
    assert [(copy.parent / "printed.txt").read_text() for copy in copies] == list(PAGES.values())
    assert report.submit is not None
    assert report.worker is not None
    assert (report.submit.code, report.submit.out.split()[-1:]) == (0, ["42"]), report.submit.errors
    assert report.worker.code == 0, report.worker.errors


@pytest.mark.parametrize("command", ["dev", "worker", "upkeep", "serve", "trigger", "outbox"])
def test_the_help_of_a_command_works_alone(command: str, base: Environment, tmp_path: Path) -> None:
    """A separate process, which does not profit from modules that another command has loaded."""
    done = base.run("-m", "holdfast", command, "--help", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"holdfast {command} " in done.stdout


def test_a_worker_process_finishes_a_job(base: Environment, tmp_path: Path) -> None:
    finish_a_job(base, tmp_path, **settings(url="sqlite:///shop.db"))


def test_the_program_is_on_the_path(base: Environment, tmp_path: Path) -> None:
    done = base.run(str(base.folder / "bin" / "holdfast"), "--help", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "holdfast [OPTIONS] COMMAND" in done.stdout


# The base without an extra --------------------------------------------------------------------------

TRANSACTION: Final = """
import asyncio
from pathlib import Path

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from holdfast import Context, Holdfast, Worker
from holdfast.effects import create_keys_table

app = Holdfast("sqlite:///shop.db")
engine = create_async_engine("sqlite+aiosqlite:///bank.db")


async def pay(connection: AsyncConnection, cents: int) -> int:
    await connection.execute(text("INSERT INTO payments VALUES (:cents)"), {"cents": cents})
    return cents


@app.task
async def charge(ctx: Context, cents: int) -> int:
    return await ctx.transaction(engine, "payment", pay, cents)


async def main() -> None:
    await create_keys_table(engine)
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE payments (cents INTEGER)"))
    async with app:
        worker = Worker(app)
        running = asyncio.create_task(worker.run())
        jobs = [await charge.submit(1999) for _ in range(2)]
        print([await job.result(timeout=60) for job in jobs])
        worker.drain()
        await running
    async with engine.connect() as connection:
        print((await connection.execute(text("SELECT count(*) FROM payments"))).scalar_one())
    await engine.dispose()


asyncio.run(main())
"""


def test_a_transaction_on_sqlite_works_with_the_wheel_alone(base: Environment, tmp_path: Path) -> None:
    (tmp_path / "pay.py").write_text(TRANSACTION)
    done = base.run("pay.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "[1999, 1999]\n1\n"), done.stderr


def test_an_embedded_file_is_migrated_with_the_wheel_alone(base: Environment, tmp_path: Path) -> None:
    variables = settings(url="sqlite:///shop.db")
    for arguments, message in ((("up",), "shop.db upgraded from nothing to"), (("status",), "as this release needs")):
        done = base.run("-m", "holdfast", "migrate", *arguments, cwd=tmp_path, **variables)
        assert (done.returncode, message in done.stderr) == (0, True), done.stderr


def test_a_deployment_on_one_file_is_verified_with_the_wheel_alone(base: Environment, tmp_path: Path) -> None:
    arguments = ("-m", "holdfast", "verify", "--deployment", "--json")
    done = base.run(*arguments, cwd=tmp_path, **settings(url="sqlite:///shop.db"))
    # 1: on a slow machine some criteria may exceed their timeout.
    assert done.returncode in (0, 1), done.stderr
    observed = {result["id"]: result["seen"] for result in json.loads(done.stdout)["results"]}
    assert "X1.1" in observed
    assert [text for text in observed.values() if "ModuleNotFoundError" in text or "MissingExtra" in text] == []


# Extras ----------------------------------------------------------------------------------------------


def test_all_is_the_sum_of_the_other_extras(environments: Environments) -> None:
    environment_all = environments.get(ALL)
    assert "Successfully installed" not in environments.install(environment_all, ALL)
    assert environments.pip(environment_all, "check").strip() == "No broken requirements found."


@pytest.mark.redis
def test_redis_with_a_ledger_in_a_file_needs_redis_only(
    environments: Environments, tmp_path: Path, redis_url: str, namespace: str
) -> None:
    variables = settings(url=redis_url, namespace=namespace, ledger="sqlite:///ledger.db")
    log = finish_a_job(environments.get("redis"), tmp_path, **variables)
    assert "Traceback" not in log


@pytest.mark.postgres
def test_a_ledger_on_postgres_needs_postgres_only(
    environments: Environments, tmp_path: Path, empty_postgres_url: str
) -> None:
    environment, variables = environments.get("postgres"), settings(url="sqlite:///shop.db", ledger=empty_postgres_url)
    done = environment.run("-m", "holdfast", "migrate", "up", cwd=tmp_path, **variables)
    assert done.returncode == 0, done.stderr
    finish_a_job(environment, tmp_path, **variables)


def test_the_service_needs_http_only(environments: Environments, tmp_path: Path) -> None:
    write_app(tmp_path)
    arguments = ("-m", "holdfast", "serve", "shop.py:app", "--dev", "--port", "0")
    with environments.get("http").start(*arguments, cwd=tmp_path, **settings(url="sqlite:///shop.db")) as server:
        try:
            assert server.stderr is not None
            address = next(found[0] for line in server.stderr if (found := re.search(r"http://[\d.:]+", line)))
            job = {"task": "add", "payload": {"a": 40, "b": 2}}
            reply = httpx.post(f"{address}/api/v1/jobs?wait=60", json=job, timeout=TIMEOUT_S)
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=TIMEOUT_S)
        finally:
            server.kill()
    assert (reply.status_code, reply.json()["state"], server.returncode) == (200, "succeeded", 0)


@pytest.mark.parametrize("extra", TRIGGERS)
def test_a_broker_needs_its_own_extra_only(extra: str, environments: Environments, tmp_path: Path) -> None:
    write_trigger(tmp_path, extra)
    arguments = ("-m", "holdfast", "trigger", "check", "triggers.yaml", "shop.py:app")
    done = environments.get(extra).run(*arguments, cwd=tmp_path, **settings(url="sqlite:///shop.db"))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("extra", "script"),
    [
        ("mongo", "import holdfast.mongo"),
        ("tracing", "from holdfast.observe.tracing import tracer_for; assert tracer_for(True)"),
    ],
)
def test_a_library_needs_its_own_extra_only(
    extra: str, script: str, environments: Environments, tmp_path: Path
) -> None:
    done = environments.get(extra).run("-c", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
