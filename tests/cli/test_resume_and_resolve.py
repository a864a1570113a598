"""Operators resume suspended jobs and resolve effects in doubt; wrong arguments are usage errors."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from holdfast import Context, Holdfast, Retry, State
from holdfast.cli.command import ExitCode
from holdfast.core.job import Event
from holdfast.engine.port.feed import FeedEntry
from holdfast.execution.backend import backend_of
from holdfast.ledger.port.effects import Reservation
from holdfast.testing import drain
from tests.cli.harness import Shell
from tests.cli.test_commands import InProcess


@pytest.fixture
def cli(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> InProcess:
    monkeypatch.chdir(shell.folder)
    monkeypatch.setenv("HOLDFAST_URL", shell.environment["HOLDFAST_URL"])
    return InProcess()


class Shop:
    """Jobs that meet the same effect in doubt; they are suspended."""

    def __init__(self, shell: Shell) -> None:
        self.app = Holdfast(shell.environment["HOLDFAST_URL"], retry=Retry(max_retries=1, base=0, jitter=None))
        self.calls = 0

        async def pay() -> str:
            self.calls += 1
            raise ConnectionError("the answer was lost")

        @self.app.task
        async def order(ctx: Context) -> str:
            return await ctx.effect("pay 1", pay)

        self.order = order

    async def submit(self, count: int) -> list[str]:
        async with self.app:
            jobs = []
            for _ in range(count):
                jobs.append(await self.order.submit())
                await drain(self.app)
            assert [await job.state() for job in jobs] == [State.SUSPENDED] * count
            return [job.id for job in jobs]

    async def finish(self, job_id: str) -> object:
        async with self.app:
            await drain(self.app)
            return await self.app.job(job_id).result(60)


# Suspended jobs ------------------------------------------------------------------------------------


def test_suspended_jobs_are_resumed(shell: Shell, cli: InProcess) -> None:
    first, second = asyncio.run(Shop(shell).submit(2))
    assert cli.run("jobs", "resume", first, "--reason", "seen").stdout == f"{first}\tsuspended → queued\n"
    (move,) = cli.json("jobs", "resume", second)
    assert move == {"job_id": second, "queue": "default", "from": "suspended", "to": "queued"}
    assert shell.info(first).state is shell.info(second).state is State.QUEUED
    assert "(seen)" in cli.run("explain", first).stdout


def test_a_job_that_is_not_suspended_is_not_resumed(cli: InProcess) -> None:
    job_id = cli.submit("add", "[1]")
    assert "not a legal move" in cli.run("jobs", "resume", job_id, code=ExitCode.ILLEGAL).stderr
    cli.run("jobs", "resume", "unknown", code=ExitCode.USAGE)
    cli.run("jobs", "resume", "", code=ExitCode.USAGE)


def test_resolving_an_effect_resumes_every_job_that_waits_for_it(shell: Shell, cli: InProcess) -> None:
    shop = Shop(shell)
    jobs = asyncio.run(shop.submit(3))
    result = cli.json("effects", "resolve", "pay 1", "--done", '"paid"')
    assert (result["resumed"], sorted(result["jobs"])) == (True, sorted(jobs))
    assert [asyncio.run(shop.finish(job_id)) for job_id in jobs] == ["paid"] * 3
    assert shop.calls == 1


def test_an_effect_that_is_done_meanwhile_still_resumes_its_jobs(shell: Shell, cli: InProcess) -> None:
    shop = Shop(shell)
    first, second = asyncio.run(shop.submit(2))
    assert cli.json("effects", "resolve", "pay 1", "--done", '"paid"', "--no-resume")["jobs"] == []
    for job_id in (first, second):
        assert f"until an operator resumes it: `holdfast jobs resume {job_id}`" in cli.run("explain", job_id).stdout
    answer = cli.run("effects", "resolve", "pay 1", "--done", "null")
    assert "was already done, its result is kept; 2 jobs resumed" in answer.stderr
    assert [asyncio.run(shop.finish(job_id)) for job_id in (first, second)] == ["paid"] * 2


def test_an_effect_left_in_doubt_by_another_job_is_explained(shell: Shell, cli: InProcess) -> None:
    for job_id in asyncio.run(Shop(shell).submit(2)):
        output = cli.run("explain", job_id).stdout
        assert "it is unknown whether this effect happened: pay 1." in output
        assert "`holdfast effects resolve 'pay 1'` with --done or --not-done" in output
        # The command is not repeated in the history.
        assert output.count("holdfast effects resolve") == 1
        assert "the answer was lost, and the job was suspended" in output


def test_a_reserved_effect_whose_holder_is_lost_is_in_doubt(shell: Shell, cli: InProcess) -> None:
    url = shell.environment["HOLDFAST_URL"]

    async def reserve() -> None:
        async with Holdfast(url) as app:
            backend = backend_of(app)
            assert backend.ledger is not None
            reservation = Reservation(
                tenant_id="default", key="k", function="f", fingerprint="x", token="t", queue="default", job_id="gone",
                attempt=1, worker="dead-worker", replaces_token="",
            )  # fmt: skip
            await backend.ledger.effects.reserve([reservation])

    asyncio.run(reserve())
    for words in ((), ("--state", "in_doubt")):
        (row,) = cli.json("effects", "list", *words)
        assert (row["key"], row["state"]) == ("k", "in_doubt")
        assert "dead-worker" in row["reason"]
    assert cli.json("effects", "list", "--state", "reserved") == []
    assert cli.json("effects", "show", "k")["state"] == "in_doubt"
    assert "is released; no job was resumed" in cli.run("effects", "resolve", "k", "--not-done").stderr
    assert cli.json("effects", "list") == []


# Wrong arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ("jobs", "list", "--since", "99999999d"),
        ("jobs", "list", "--since", "99999999999d"),
        ("jobs", "list", "--since", "9999-12-31T23:59:59-23:00"),
        ("jobs", "list", "--until", "0001-01-01T00:00:00+23:00"),
        ("verify", "--ledger", "--since", "99999999d"),
        ("submit", "--force", "add", "[1]", "--delay", "99999999999d"),
        ("submit", "--force", "add", "[1]", "--delay", "9999999d"),
        ("submit", "--force", "add", "[1]", "--run-at", "9999-12-31T23:59:59-23:00"),
        ("effects", "create-table", "--database", "mysql://x"),
    ],
    ids=" ".join,
)
def test_an_impossible_argument_is_a_usage_error(cli: InProcess, words: tuple[str, ...]) -> None:
    cli.submit("add", "[1]")
    answer = cli.run(*words, code=ExitCode.USAGE)
    assert answer.stderr.startswith("holdfast: ")
    assert "Traceback" not in answer.stderr


def test_the_error_for_another_database_names_the_supported_ones(cli: InProcess) -> None:
    answer = cli.run("effects", "create-table", "--database", "mysql://x", code=ExitCode.USAGE)
    assert "is not supported; use postgresql://… or sqlite:///…" in answer.stderr


def test_an_unknown_schema_version_is_reported(cli: InProcess, tmp_path: Path) -> None:
    ledger = ("--ledger", f"sqlite:///{tmp_path}/ledger.db")
    cli.run("migrate", "up", *ledger)
    engine = create_engine(f"sqlite:///{tmp_path}/ledger.db")
    with engine.begin() as connection:
        connection.execute(text("UPDATE holdfast_version SET version_num = '0000'"))
    engine.dispose()
    assert "no release of holdfast has had that version" in cli.run("migrate", "up", *ledger, code=2).stderr
    errors = cli.run("migrate", "status", *ledger, code=1).stderr
    assert "no release of holdfast has had that version" in errors
    assert "as this release needs" not in errors


# Interrupted ---------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads loaded libraries from Linux's /proc")
@pytest.mark.parametrize("library", ["msgspec", "pydantic_core"])
def test_ctrl_c_while_the_program_loads_shows_no_traceback(shell: Shell, library: str) -> None:
    process = subprocess.Popen(
        shell.command("jobs", "list"),
        cwd=shell.folder,
        env=shell.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )
    deadline = time.monotonic() + 30
    while f"/{library}/" not in Path(f"/proc/{process.pid}/maps").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert "holdfast/" not in errors, errors


@pytest.mark.redis
def test_a_durable_submission_prints_its_id_before_it_waits(
    cli: InProcess, redis_url: str, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No projector runs here, so the ledger never has the job."""
    monkeypatch.setenv("HOLDFAST_URL", redis_url)
    monkeypatch.setenv("HOLDFAST_NAMESPACE", namespace)
    monkeypatch.setenv("HOLDFAST_LEDGER", f"sqlite:///{tmp_path}/ledger.db")
    monkeypatch.setenv("HOLDFAST_DURABLE_TIMEOUT_S", "0.3")
    answer = cli.run("submit", "--force", "add", "[1]", "--durable", code=ExitCode.TIMEOUT)
    accepted, refused = answer.stderr.strip().splitlines()
    job_id = accepted.removeprefix("accepted ").partition(",")[0]
    assert len(job_id) == 32
    assert job_id in refused


# An incomplete history --------------------------------------------------------------------------------


@pytest.mark.redis
def test_a_job_without_its_creation_in_the_ledger_is_shown(
    cli: InProcess, redis_url: str, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger_url = f"sqlite:///{tmp_path}/ledger.db"
    monkeypatch.setenv("HOLDFAST_URL", redis_url)
    monkeypatch.setenv("HOLDFAST_NAMESPACE", namespace)
    monkeypatch.setenv("HOLDFAST_LEDGER", ledger_url)

    async def project() -> None:
        async with Holdfast(redis_url, ledger=ledger_url, namespace=namespace) as app:
            backend = backend_of(app)
            assert backend.ledger is not None
            projection = backend.ledger.projection
            assert projection is not None
            event = Event(
                type="task.claimed", job_id="orphan", at_ms=1_800_000_000_000, from_state=State.QUEUED,
                to_state=State.RUNNING, attempt=1, worker="w-1",
            )  # fmt: skip
            position = await projection.acquire("q", "p", 60_000)
            assert position is not None
            await projection.project("q", "p", 60_000, position, [FeedEntry("1-0", "n", [event])])

    asyncio.run(project())
    job = cli.json("jobs", "show", "orphan")
    assert (job["state"], job["queue"], job["worker"]) == ("running", "q", "w-1")
    assert "its history in the ledger is incomplete" in cli.run("jobs", "show", "orphan").stderr
