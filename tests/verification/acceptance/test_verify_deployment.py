"""`holdfast verify --deployment` on real servers: passes, leaves nothing behind, and fails on defects."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from redis.asyncio import Redis

from holdfast import Holdfast, Settings
from holdfast.core.verdict import Settlement, SettleResult, Succeed
from holdfast.engine.redis.settlement import Settlements
from holdfast.errors import LedgerUnavailable
from holdfast.ledger.postgres.store import StoreOptions
from holdfast.verification.acceptance import fixture, run
from holdfast.verification.acceptance.fixture import AcceptanceReport, CriterionStatus
from holdfast.verification.acceptance.run import verify_deployment
from holdfast.verification.acceptance.sandbox import LEASE_S, OLD_MS, Sandbox, is_stale, new_name, schema_of
from holdfast.verification.acceptance.sandbox_postgres import PostgresSandbox, with_schema
from holdfast.verification.acceptance.sandbox_redis import RUNS
from holdfast.verification.chaos.servers import RedisServer, free_port
from tests.cli.harness import environment
from tests.processes import ProcessId, children
from tests.servers import find_server
from tests.worker.support import working
from tools.servers import REDIS

#: Criteria that need Redis, and those that need a ledger.
WITH_REDIS = {"Q3.1", "Q3.2", "Q15", "Q13"}
WITH_LEDGER = {"X1.4", "A2.1", "A2.2", "L4.1", "L4.2", "L2"}


@pytest.fixture(scope="module")
def durable_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A correctly configured Redis: with an append-only file."""
    server = RedisServer(find_server(REDIS), tmp_path_factory.mktemp("redis"), {"appendonly": "yes"})
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def durable_redis(durable_server: RedisServer) -> AsyncIterator[str]:
    """The same server for all tests, emptied after each: a failed test does not affect the next."""
    yield durable_server.url
    async with Redis.from_url(durable_server.url) as redis:
        await redis.flushall()


def criteria_with(report: AcceptanceReport, verdict: CriterionStatus) -> set[str]:
    return {result.id for result in report.results if result.verdict is verdict}


def observation(report: AcceptanceReport, criterion: str) -> str:
    return next(result.seen for result in report.results if result.id == criterion)


async def keys(url: str) -> set[bytes]:
    async with Redis.from_url(url) as redis:
        return {key async for key in redis.scan_iter()}


async def tables(url: str) -> set[tuple[str, str, int]]:
    """Every table of the database with the number of its rows."""
    connection = await asyncpg.connect(url)
    try:
        names = await connection.fetch(
            "SELECT schemaname, tablename FROM pg_tables WHERE schemaname NOT IN ('pg_catalog', 'information_schema')"
        )
        return {
            (schema, table, await connection.fetchval(f'SELECT count(*) FROM "{schema}"."{table}"'))
            for schema, table in names
        }
    finally:
        await connection.close()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def schemas(url: str) -> set[str]:
    connection = await asyncpg.connect(url)
    try:
        return {row[0] for row in await connection.fetch("SELECT nspname FROM pg_namespace")}
    finally:
        await connection.close()


# Passing ---------------------------------------------------------------------------------------------


async def test_redis_and_postgres_pass_next_to_a_busy_deployment(
    durable_redis: str, make_postgres: Any, namespace: str
) -> None:
    """A worker of another namespace on the same servers continues; its keys and rows are unchanged."""
    postgres_url = make_postgres().url
    app = Holdfast(durable_redis, ledger=postgres_url, namespace=namespace)
    runs: list[int] = []

    @app.task
    async def count(number: int) -> int:
        runs.append(number)
        return number

    async with app, working(app):
        waiting = await count.options(delay=3_600, idempotency_key="theirs").submit(-1)
        verification = asyncio.create_task(verify_deployment(app.settings))
        submitted = 0
        while not verification.done():
            job = await count.submit(submitted)
            assert await job.result(timeout=60) == submitted
            submitted += 1
            await asyncio.sleep(0.05)
        report = await verification
        assert report.ok, [(r.id, r.seen) for r in report.results if r.verdict is CriterionStatus.FAILED]
        assert criteria_with(report, CriterionStatus.NOT_APPLICABLE) == set()
        assert WITH_REDIS | WITH_LEDGER | {"X1.1", "X1.2", "X1.3", "Q5", "Q6", "ledger.tables"} <= criteria_with(
            report, CriterionStatus.PASSED
        )
        assert report.seconds < 60
        await app.ledger.wait_caught_up(20)
        assert runs == list(range(submitted))
        assert (await waiting.info()).state == "queued"
        counts = await app.ledger.queries.counts(exact=True)
        assert sum(counts.states.values()) == submitted + 1
    leftovers = {key for key in await keys(durable_redis) if namespace.encode() not in key}
    assert leftovers == set()
    assert not {name for name in await schemas(postgres_url) if "verify" in name}


async def test_redis_without_a_ledger_passes_with_custom_names(durable_redis: str) -> None:
    """With custom names, and without a stream of dead letters."""
    settings = Settings(url=durable_redis, stream_task="tasks", stream_result="results", stream_dlq="", group="theirs")
    report = await verify_deployment(settings)
    assert report.ok, [(r.id, r.seen) for r in report.results if r.verdict is CriterionStatus.FAILED]
    assert criteria_with(report, CriterionStatus.NOT_APPLICABLE) == WITH_LEDGER | {"ledger.tables"}
    assert "HOLDFAST_LEDGER" in observation(report, "L2")
    assert await keys(durable_redis) == set()


async def test_redis_with_a_sqlite_ledger_passes(durable_redis: str, tmp_path: Path) -> None:
    report = await verify_deployment(Settings(url=durable_redis, ledger=f"sqlite:///{tmp_path}/ledger.db"))
    assert report.ok, [(r.id, r.seen) for r in report.results if r.verdict is CriterionStatus.FAILED]
    assert criteria_with(report, CriterionStatus.NOT_APPLICABLE) == {"ledger.tables"}
    assert await keys(durable_redis) == set()
    assert files(tmp_path) == []


async def test_one_sqlite_file_passes_and_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "jobs.db").write_bytes(b"theirs")
    report = await verify_deployment(Settings(url=f"sqlite:///{tmp_path}/jobs.db", ledger=None))
    assert report.ok, [(r.id, r.seen) for r in report.results if r.verdict is CriterionStatus.FAILED]
    assert criteria_with(report, CriterionStatus.NOT_APPLICABLE) == WITH_REDIS | {"L4.2", "Q6", "ledger.tables"}
    assert files(tmp_path) == ["jobs.db"]
    assert (tmp_path / "jobs.db").read_bytes() == b"theirs"


# Failing ---------------------------------------------------------------------------------------------


@pytest.fixture
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the timeouts to just above a lease. Criteria that are left then are not run."""
    monkeypatch.setattr(run, "_ONE_S", LEASE_S + 2)
    monkeypatch.setattr(run, "_ALL_S", LEASE_S + 4)
    monkeypatch.setattr(fixture, "TIMEOUT_S", LEASE_S + 1)


async def test_an_engine_that_does_not_settle_is_found(
    durable_redis: str, monkeypatch: pytest.MonkeyPatch, short_timeouts: None
) -> None:
    """It answers that a success was applied, and does not change the job."""
    real = Settlements.settle

    async def broken(self: Settlements, settlements: list[Settlement]) -> list[SettleResult]:
        kept = [settlement for settlement in settlements if not isinstance(settlement.verdict, Succeed)]
        answers = iter(await real(self, kept) if kept else [])
        return [
            SettleResult.APPLIED if isinstance(settlement.verdict, Succeed) else next(answers)
            for settlement in settlements
        ]

    monkeypatch.setattr(Settlements, "settle", broken)
    report = await verify_deployment(Settings(url=durable_redis, ledger=None))
    assert {"X1.1", "X1.3", "Q5", "RP-001"} <= criteria_with(report, CriterionStatus.FAILED)
    assert "did not end" in observation(report, "X1.1")
    assert "not run" in observation(report, "RP-001")
    assert await keys(durable_redis) == set()


async def test_an_engine_without_a_fence_is_found(durable_redis: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any worker can settle a job, even with a stale lease."""
    real = Settlements.settle

    async def broken(self: Settlements, settlements: list[Settlement]) -> list[SettleResult]:
        return [
            SettleResult.APPLIED if answer is SettleResult.STALE else answer for answer in await real(self, settlements)
        ]

    monkeypatch.setattr(Settlements, "settle", broken)
    report = await verify_deployment(Settings(url=durable_redis, ledger=None))
    assert criteria_with(report, CriterionStatus.FAILED) == {"Q5", "Q2"}
    assert "stale" in observation(report, "Q5")


async def test_a_redis_that_may_evict_or_lose_jobs_is_found(make_redis: Any) -> None:
    url = make_redis(maxmemory_policy="allkeys-lru").url
    report = await verify_deployment(Settings(url=url, ledger=None))
    assert criteria_with(report, CriterionStatus.FAILED) == {"engine.eviction", "engine.persistence"}
    assert "noeviction" in observation(report, "engine.eviction")


async def test_a_missing_permission_is_named(durable_redis: str, postgres_url: str, namespace: str) -> None:
    """The engine's criteria are run nevertheless."""
    role = namespace.replace("-", "_")
    connection = await asyncpg.connect(postgres_url)
    database = await connection.fetchval("SELECT current_database()")
    try:
        await connection.execute(f"CREATE ROLE {role} LOGIN; GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}")
        restricted_url = postgres_url.replace("postgres@", f"{role}@", 1)
        report = await verify_deployment(Settings(url=durable_redis, ledger=restricted_url))
        assert criteria_with(report, CriterionStatus.FAILED) == {"place", "ledger.tables"}
        assert f'GRANT CREATE ON DATABASE "{database}" TO "{role}"' in observation(report, "place")
        assert f'TO "{role}"' in observation(report, "ledger.tables")
        assert "may not" in observation(report, "L2")
        assert "X1.1" in criteria_with(report, CriterionStatus.PASSED)
    finally:
        await connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
        await connection.close()
    assert await keys(durable_redis) == set()


async def test_a_database_without_tables_is_found(durable_redis: str, empty_postgres_url: str) -> None:
    postgres_sandbox = PostgresSandbox(empty_postgres_url)
    try:
        assert "migrate up" in await postgres_sandbox.table_problem()
    finally:
        await postgres_sandbox.close()


# Names, and leftovers of killed runs -----------------------------------------------------------------


def test_only_old_runs_are_stale() -> None:
    now_ms = time.time_ns() // 1_000_000
    name = new_name(now_ms - OLD_MS - 1)
    assert is_stale(name, now_ms)
    assert is_stale(schema_of(name), now_ms)
    for other in (new_name(now_ms), f"{name}x", f"x{name}", "holdfast-verify-", "holdfast_verify_mine", "public"):
        assert not is_stale(other, now_ms)


def test_the_search_path_overrides_that_of_the_url() -> None:
    url = with_schema("postgresql://u:p%2F@h:1/db?sslmode=disable&options=-c%20search_path%3Dpublic", "mine")
    assert url.startswith("postgresql://u:p%2F@h:1/db?sslmode=disable&options=")
    assert url.endswith("-c+search_path%3Dpublic+-c+search_path%3Dmine")


async def test_leftovers_of_a_killed_run_are_removed_by_the_next_one(
    durable_redis: str, postgres_url: str, tmp_path: Path
) -> None:
    old = new_name(time.time_ns() // 1_000_000 - OLD_MS - 60_000)
    fresh = new_name(time.time_ns() // 1_000_000)
    connection = await asyncpg.connect(postgres_url)
    async with Redis.from_url(durable_redis) as redis:
        for name in (old, fresh):
            await redis.hset(RUNS, name, 1)
            await redis.set(f"{{{name}:acceptance}}:job:1", "x")
            await connection.execute(f"CREATE SCHEMA {schema_of(name)}")
        await redis.set("theirs", "x")
        try:
            sandbox = Sandbox(Settings(url=durable_redis, ledger=postgres_url))
            await sandbox.create()
            await sandbox.remove()
            assert len(sandbox.notes) == 2
            assert all(old in note or schema_of(old) in note for note in sandbox.notes)
            kept = {f"{{{fresh}:acceptance}}:job:1".encode(), RUNS.encode(), b"theirs"}
            assert await keys(durable_redis) == kept
            assert await redis.hkeys(RUNS) == [fresh.encode()]
            assert {name for name in await schemas(postgres_url) if "verify" in name} == {schema_of(fresh)}
        finally:
            await redis.delete(*await keys(durable_redis))
            await connection.execute(f"DROP SCHEMA IF EXISTS {schema_of(fresh)}")
            await connection.close()
    file = tmp_path / f"{old}.engine.db"
    file.write_bytes(b"")
    sandbox = Sandbox(Settings(url=f"sqlite:///{tmp_path}/jobs.db", ledger=None))
    await sandbox.create()
    await sandbox.remove()
    assert files(tmp_path) == []


async def test_leftovers_that_cannot_be_removed_are_reported_within_a_timeout(
    durable_redis: str, make_postgres: Any
) -> None:
    server = make_postgres()
    sandbox = Sandbox(Settings(url=durable_redis, ledger=server.url))
    await sandbox.create()
    postgres_sandbox = PostgresSandbox(server.url, StoreOptions(1, 0.3, 0.3))
    assert not await postgres_sandbox.missing_permission()
    server.pause()
    try:
        async with asyncio.timeout(20):
            with pytest.raises(LedgerUnavailable):
                await postgres_sandbox.remove(schema_of(sandbox.name))
    finally:
        server.resume()
    await postgres_sandbox.close()
    server.kill()
    await sandbox.remove()
    (problem,) = sandbox.left
    assert sandbox.name in problem
    assert "PostgreSQL" in problem
    assert await keys(durable_redis) == set()


# The command -----------------------------------------------------------------------------------------


def command(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    shell = environment(Path("/nonexistent"), **variables)
    arguments = [sys.executable, "-m", "holdfast", "verify", *words]
    return subprocess.run(arguments, env=shell, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_prints_json_and_a_table(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    result = command("--deployment", "--json", HOLDFAST_URL=url)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["ok"] is True
    assert {"id", "title", "done", "verdict", "seen", "seconds"} == set(document["results"][0])
    assert result.stderr == ""


def test_a_failed_criterion_is_exit_code_1_and_in_the_table(redis_url: str) -> None:
    """The shared Redis has no append-only file."""
    result = command("--deployment", HOLDFAST_URL=redis_url)
    assert result.returncode == 1, result.stderr
    header, *rows = result.stdout.splitlines()
    assert header.split("\t") == ["criterion", "title", "verdict", "seconds", "seen"]
    failed = [row.split("\t")[0] for row in rows if row.split("\t")[2] == "failed"]
    assert failed == ["engine.persistence"]
    assert "1 failed" in result.stderr


def test_unreachable_servers_are_exit_code_3_and_one_line(durable_redis: str) -> None:
    closed_port = free_port()
    for variables in (
        {"HOLDFAST_URL": f"redis://127.0.0.1:{closed_port}/0"},
        {"HOLDFAST_URL": durable_redis, "HOLDFAST_LEDGER": f"postgresql://u:secret@127.0.0.1:{closed_port}/db"},
    ):
        result = command("--deployment", **variables)
        assert result.returncode == 3, result.stderr
        assert result.stdout == ""
        assert result.stderr.startswith("holdfast: ")
        assert len(result.stderr.splitlines()) == 1
        assert "secret" not in result.stderr


def test_usage_errors_name_the_options() -> None:
    for words in ([], ["--ledger", "--deployment"]):
        result = command(*words)
        assert result.returncode == 2
        assert "--ledger" in result.stderr
        assert "--deployment" in result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_an_interrupted_run_removes_everything(
    durable_redis: str, postgres_url: str, number: signal.Signals
) -> None:
    before = await tables(postgres_url)
    shell = environment(Path("/nonexistent"), HOLDFAST_URL=durable_redis, HOLDFAST_LEDGER=postgres_url)
    words = [sys.executable, "-m", "holdfast", "verify", "--deployment"]
    process = await asyncio.create_subprocess_exec(
        *words, env=shell, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    try:
        deadline = time.monotonic() + 30
        # In mid-run: there are jobs and a worker process.
        while not any(b":job:" in key for key in await keys(durable_redis)) or not children(process.pid):
            assert time.monotonic() < deadline
            assert process.returncode is None, await process.communicate()
            await asyncio.sleep(0.05)
        worker_processes = children(process.pid)
        process.send_signal(number)
        async with asyncio.timeout(30):
            _, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode not in (0, -signal.SIGKILL)
    assert b"interrupted" in errors
    assert await keys(durable_redis) == set()
    assert await tables(postgres_url) == before
    assert not any(child.is_running() for child in worker_processes)


def test_a_paused_worker_process_does_not_outlive_a_killed_check(tmp_path: Path) -> None:
    """A stopped process does not notice that its parent has ended."""
    settings = Settings(url=f"sqlite:///{tmp_path}/jobs.db").model_dump_json()
    check = (
        "import os, signal, subprocess, sys\n"
        "words = [sys.executable, '-m', 'holdfast.verification.acceptance.worker_process', 'any']\n"
        "child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "child.stdin.write(sys.argv[1].encode() + b'\\n')\n"
        "child.stdin.flush()\n"
        "assert child.stdout.readline() == b'ready\\n'\n"
        "os.kill(child.pid, signal.SIGSTOP)\n"
        "started_at = open(f'/proc/{child.pid}/stat').read().rpartition(')')[2].split()[19]\n"
        "print(child.pid, started_at, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    shell = environment(Path("/nonexistent"))
    result = subprocess.run(
        [sys.executable, "-c", check, settings], env=shell, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == -signal.SIGKILL, result.stderr
    deadline = time.monotonic() + 10
    child = ProcessId.parse(result.stdout)
    while child.is_running():
        if time.monotonic() > deadline:
            os.kill(child.pid, signal.SIGKILL)
            raise AssertionError("the process is still running")
        time.sleep(0.02)
