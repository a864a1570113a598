"""`holdfast reconcile` and `submit --durable`, as a shell would run them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import redis
from typer.testing import CliRunner, Result

from holdfast import Holdfast
from holdfast.cli.program import program
from tests.conftest import MakeServer
from tests.worker.support import eventually, working


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(program(arguments[0]), list(arguments), env=environment)


def test_embedded_there_is_nothing_to_compare(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'holdfast.db'}"
    assert run("submit", "--force", "work", "[]", "--durable", "--url", url).exit_code == 0
    done = run("reconcile", "--json", "--url", url)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["restored"] == 0
    assert "one file" in done.stderr


@pytest.mark.redis
def test_without_a_ledger_the_error_names_the_setting(redis_url: str, namespace: str) -> None:
    for arguments in (("reconcile",), ("submit", "--force", "work", "[]", "--durable")):
        done = run(*arguments, "--url", redis_url, "--namespace", namespace)
        assert done.exit_code == 2
        assert "HOLDFAST_LEDGER" in done.stderr


@pytest.mark.redis
def test_a_dry_run_lists_and_a_real_run_restores(make_redis: MakeServer, tmp_path: Path) -> None:
    server = make_redis()
    ledger = f"sqlite:///{tmp_path / 'ledger.db'}"

    async def scenario() -> None:
        app = Holdfast(server.url, ledger=ledger, reconcile_interval_s=0)

        @app.task
        async def work() -> None: ...

        async with app, working(app):
            held = await work.options(durable=True, hold=True).submit()
            with redis.Redis.from_url(server.url) as client:
                client.flushall()
            variables = {"HOLDFAST_LEDGER": ledger, "HOLDFAST_URL": server.url}

            async def reconcile(*flags: str) -> Any:
                done = await asyncio.to_thread(run, "reconcile", "--json", *flags, **variables)
                assert done.exit_code == 0, done.output
                return json.loads(done.stdout)

            async def find_lost() -> Any:
                report = await reconcile("--dry-run")
                return report if report["jobs"] else None

            report = await eventually(find_lost, "the loss to be found")
            assert (report["lost"], report["restored"]) == (1, 0)
            assert [(job["job_id"], job["state"]) for job in report["jobs"]] == [(held.id, "waiting_approval")]
            assert (await reconcile())["restored"] == 1
            assert await held.state() == "waiting_approval"
            assert (await reconcile())["lost"] == 0

    asyncio.run(scenario())
