"""`holdfast effects`: effects in doubt, and how operators resolve them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from sqlalchemy import create_engine, inspect

from holdfast import Context, Holdfast, Retry, State
from holdfast.cli.command import ExitCode
from holdfast.testing import drain
from tests.cli.harness import Shell, environment


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path, environment(tmp_path))


class Doubtful:
    """An app with a job that is suspended because its effect may have happened."""

    def __init__(self, shell: Shell) -> None:
        self.app = Holdfast(shell.environment["HOLDFAST_URL"], retry=Retry(max_retries=1, base=0, jitter=None))
        self.calls = 0

        async def publish(text: str) -> dict[str, str]:
            self.calls += 1
            if self.calls == 1:
                raise ConnectionError("the answer was lost")
            return {"url": text}

        @self.app.task
        async def article(ctx: Context) -> dict[str, str]:
            return await ctx.effect("publish:1", publish, "a")

        self.article = article

    async def submit(self) -> str:
        async with self.app:
            job = await self.article.submit()
            await drain(self.app)
            assert await job.state() is State.SUSPENDED
            return job.id

    async def finish(self, job_id: str) -> object:
        async with self.app:
            await drain(self.app)
            return await self.app.job(job_id).result(60)


def test_effects_in_doubt_are_listed_and_shown(shell: Shell) -> None:
    job_id = asyncio.run(Doubtful(shell).submit())
    (row,) = shell.json("effects", "list")
    assert (row["key"], row["state"], row["job_id"], row["attempt"]) == ("publish:1", "in_doubt", job_id, 1)
    assert "the answer was lost" in row["reason"]
    assert shell.json("effects", "list", "--state", "reserved") == []
    assert shell.json("effects", "list", "--tenant", "other") == []
    assert "publish:1" in shell.run("effects", "list").stdout
    assert shell.json("effects", "show", "publish:1") == row
    assert "in_doubt" in shell.run("effects", "show", "publish:1").stdout
    shell.run("effects", "show", "publish:1", "--tenant", "other", code=ExitCode.USAGE)
    shell.run("effects", "list", "--state", "done", code=ExitCode.USAGE)


def test_done_gives_the_job_its_result(shell: Shell) -> None:
    doubtful = Doubtful(shell)
    job_id = asyncio.run(doubtful.submit())
    result = shell.json("effects", "resolve", "publish:1", "--done", '{"url": "seen"}')
    assert (result["state"], result["resumed"]) == ("done", True)
    assert asyncio.run(doubtful.finish(job_id)) == {"url": "seen"}
    assert doubtful.calls == 1
    assert shell.json("effects", "show", "publish:1")["value"] == {"url": "seen"}
    shell.run("effects", "resolve", "publish:1", "--not-done", code=ExitCode.USAGE)


def test_not_done_lets_the_effect_run_again(shell: Shell) -> None:
    doubtful = Doubtful(shell)
    job_id = asyncio.run(doubtful.submit())
    assert "is released" in shell.run("effects", "resolve", "publish:1", "--not-done").stderr
    assert asyncio.run(doubtful.finish(job_id)) == {"url": "a"}
    assert doubtful.calls == 2


def test_a_job_can_stay_suspended(shell: Shell) -> None:
    job_id = asyncio.run(Doubtful(shell).submit())
    assert shell.json("effects", "resolve", "publish:1", "--done", "null", "--no-resume")["resumed"] is False
    assert shell.info(job_id).state is State.SUSPENDED


def test_a_wrong_resolution_changes_nothing(shell: Shell) -> None:
    asyncio.run(Doubtful(shell).submit())
    for words in ((), ("--done", "1", "--not-done"), ("--done", "{no json")):
        shell.run("effects", "resolve", "publish:1", *words, code=ExitCode.USAGE)
    assert [row["state"] for row in json.loads(shell.run("effects", "list", "--json").stdout)] == ["in_doubt"]


def test_the_table_for_transactions_is_created(shell: Shell) -> None:
    for _ in range(2):
        shell.run("effects", "create-table", "--database", f"sqlite:///{shell.folder}/own.db")
    engine = create_engine(f"sqlite:///{shell.folder}/own.db")
    assert inspect(engine).get_table_names() == ["idempotency_keys"]
    engine.dispose()
    shell.run("effects", "create-table", "--database", "nonsense", code=ExitCode.USAGE)
