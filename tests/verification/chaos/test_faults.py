"""Each fault has its effect on a real deployment, and the deployment recovers afterwards."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from math import inf
from pathlib import Path
from time import monotonic
from typing import IO

import asyncpg
import pytest
import pytest_asyncio
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

from holdfast.verification.chaos.deaths import Death, deaths
from holdfast.verification.chaos.deployment import Deployment
from holdfast.verification.chaos.faults import inject
from holdfast.verification.chaos.parts import Fault, FaultKind, Part, Program
from holdfast.verification.chaos.servers import ServerProcess
from tests.faults.support import eventually
from tests.processes import ProcessId

pytestmark = [
    pytest.mark.faults,
    pytest.mark.redis,
    pytest.mark.postgres,
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Deployment]:
    async with Deployment(tmp_path_factory.mktemp("chaos"), workers=2, seed=1, rewinds=True) as deployment:
        yield deployment
    assert deployment.notes() == []


@pytest_asyncio.fixture(loop_scope="module")
async def deployment(shared: Deployment) -> AsyncIterator[Deployment]:
    """The deployment that the tests of this file share, healed after each test."""
    before = shared.notes()
    yield shared
    await shared.heal()
    assert shared.notes() == before


@asynccontextmanager
async def run_fault(
    deployment: Deployment, kind: FaultKind, target: str, seconds: float = 0, number: int = 1
) -> AsyncIterator[None]:
    """Run the block during the fault, then wait for its end. `inf`: the fault lasts as long as the block."""
    fault = Fault(number=number, at=0, kind=kind, target=target, seconds=seconds)
    fault_task = asyncio.create_task(inject(deployment, fault))
    try:
        await asyncio.sleep(0)
        yield
        assert seconds == inf or await fault_task == ""
    finally:
        fault_task.cancel()
        await asyncio.gather(fault_task, return_exceptions=True)


async def inject_fault(
    deployment: Deployment, kind: FaultKind, target: str, seconds: float = 0, number: int = 1
) -> str:
    return await inject(deployment, Fault(number=number, at=0, kind=kind, target=target, seconds=seconds))


def redis_of(deployment: Deployment, *, through_proxy: bool = True) -> Redis:
    variables = deployment.environment if through_proxy else deployment.direct
    return Redis.from_url(variables["HOLDFAST_URL"], retry=None, socket_timeout=10)


def state(process: ServerProcess) -> str:
    """The kernel's process state; T is stopped."""
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


async def set_works(deployment: Deployment) -> bool:
    async with redis_of(deployment) as redis:
        try:
            return bool(await redis.set("test", "1"))
        except (RedisError, OSError):
            return False


async def insert_works(deployment: Deployment) -> bool:
    try:
        connection = await asyncpg.connect(deployment.environment["HOLDFAST_LEDGER"], timeout=5)
    except (OSError, asyncpg.PostgresError):
        return False
    try:
        await connection.execute("CREATE TABLE IF NOT EXISTS test (x text); INSERT INTO test VALUES ('a')")
        return True
    except (OSError, asyncpg.PostgresError):
        return False
    finally:
        connection.terminate()


async def test_all_parts_run_and_support_every_fault(deployment: Deployment) -> None:
    assert list(deployment.parts) == ["postgres", "redis", "worker-1", "worker-2", "upkeep-1", "server-1"]
    kinds = set().union(*(part.kinds for part in deployment.parts.values()))
    assert kinds | ({FaultKind.FILL} if deployment.unsupported else set()) == set(FaultKind) - {
        FaultKind.FAIL_OVER,
        FaultKind.HAND_OVER,
        FaultKind.HANG,
    }


@pytest.mark.parametrize(
    ("kind", "targets"),
    [(FaultKind.KILL, ("worker-1", "redis", "postgres")), (FaultKind.RESTART, ("server-1", "redis", "postgres"))],
)
async def test_killed_and_restarted_parts_are_new_processes(
    deployment: Deployment, kind: FaultKind, targets: tuple[str, ...]
) -> None:
    processes = [deployment.parts[target].process for target in targets]
    before = [ProcessId.of(process.pid) for process in processes]
    assert set(await asyncio.gather(*(inject_fault(deployment, kind, target) for target in targets))) == {""}
    for process, old in zip(processes, before, strict=True):
        assert ProcessId.of(process.pid) != old
        assert process.answers()
        assert not old.is_running()


@pytest.mark.parametrize("target", ["worker-2", "redis", "postgres"])
async def test_a_stopped_process_is_paused_and_continues(deployment: Deployment, target: str) -> None:
    process = deployment.parts[target].process
    before = process.pid
    async with run_fault(deployment, FaultKind.STOP, target, 0.3):
        await eventually(lambda: state(process) == "T", "it to be stopped")
    assert process.pid == before
    assert state(process) != "T"
    assert process.answers()


async def test_redis_has_several_outages_in_a_row(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.verification.chaos.faults._BETWEEN_OUTAGES_S", 0.0)
    process, outages = deployment.parts["redis"].process, list[str]()

    def record(name: str) -> None:
        real = getattr(process, name)

        def call() -> None:
            outages.append(name)
            real()

        monkeypatch.setattr(process, name, call)

    record("kill")
    record("pause")
    assert await inject_fault(deployment, FaultKind.OUTAGES, "redis", 0.2) == ""
    assert outages == ["pause", "kill", "pause"]
    assert await set_works(deployment)


async def test_redis_comes_back_with_older_data(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    assert deployment.topology is not None
    node = deployment.topology.node("redis")
    node.call("SET", "before", "1")
    kill = node.kill

    def write_and_kill() -> None:
        node.call("SET", "after", "1")
        kill()

    monkeypatch.setattr(node, "kill", write_and_kill)
    assert await inject_fault(deployment, FaultKind.REWIND, "redis") == ""
    assert node.call("MGET", "before", "after") == ["1", None]
    assert not list(deployment.folder.glob("data-before-*"))
    assert await set_works(deployment)


async def test_a_cut_ends_connections_once(deployment: Deployment) -> None:
    async with redis_of(deployment) as redis:
        await redis.ping()
        await inject_fault(deployment, FaultKind.CUT, "redis")
        with pytest.raises(RedisConnectionError):
            await redis.ping()
        assert await redis.ping()


async def test_replies_are_slow_for_a_while(deployment: Deployment) -> None:
    async with redis_of(deployment) as redis:
        await redis.ping()
        async with run_fault(deployment, FaultKind.SLOW, "redis", 0.2):
            await eventually(lambda: all(proxy.delay_s >= 0.05 for proxy in deployment.ways["redis"]), "it to be slow")
            started = monotonic()
            await redis.ping()
            assert monotonic() - started >= 0.05
    assert not any(proxy.delay_s for proxy in deployment.ways["redis"])


async def test_a_stall_of_one_worker_is_not_a_stall_of_all(deployment: Deployment) -> None:
    async with run_fault(deployment, FaultKind.STALL, "worker-1", 0.3):
        assert await set_works(deployment)
        assert all(not proxy.flows for proxy in deployment.parts["worker-1"].proxies)
        assert all(proxy.flows for proxy in deployment.parts["worker-2"].proxies)
    assert all(proxy.flows for proxy in deployment.parts["worker-1"].proxies)


async def test_nothing_passes_while_redis_is_stalled(deployment: Deployment) -> None:
    async with redis_of(deployment) as redis:
        await redis.ping()
        started = monotonic()
        async with run_fault(deployment, FaultKind.STALL, "redis", 0.4):
            await asyncio.sleep(0.05)
            await redis.ping()
            assert monotonic() - started >= 0.4


async def test_a_script_whose_reply_is_lost_has_been_applied(deployment: Deployment) -> None:
    async with redis_of(deployment, through_proxy=False) as direct, redis_of(deployment) as redis:
        await direct.delete("lost")
        sha = await direct.script_load("return redis.call('INCR', KEYS[1])")
        async with run_fault(deployment, FaultKind.LOSE_REPLY, "redis", inf):
            for count in (1, 2, 3):
                with pytest.raises(RedisConnectionError):
                    await redis.evalsha(sha, 1, "lost")
                assert await direct.get("lost") == str(count).encode()
        assert await redis.evalsha(sha, 1, "lost") == 4


async def test_a_transaction_whose_reply_is_lost_has_been_committed(deployment: Deployment) -> None:
    direct = await asyncpg.connect(deployment.direct["HOLDFAST_LEDGER"])
    await direct.execute("DROP TABLE IF EXISTS lost; CREATE TABLE lost (x int)")
    through = await asyncpg.connect(deployment.environment["HOLDFAST_LEDGER"])
    async with run_fault(deployment, FaultKind.LOSE_REPLY, "postgres", 0.3):
        await through.execute("BEGIN")
        await through.copy_records_to_table("lost", records=[(1,)])
        with pytest.raises((OSError, asyncpg.PostgresError)):
            await through.execute("COMMIT")
        assert await direct.fetchval("SELECT count(*) FROM lost") == 1
    through.terminate()
    await direct.close()


async def test_a_web_server_loses_replies_to_posts_only(deployment: Deployment) -> None:
    host, _, port = deployment.http_url.removeprefix("http://").partition(":")

    async def request(method: str) -> bytes:
        reader, writer = await asyncio.open_connection(host, int(port))
        path = "/healthz" if method == "GET" else "/api/v1/jobs"
        writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".encode())
        try:
            return await reader.read()
        except OSError:
            return b""
        finally:
            writer.close()

    async with run_fault(deployment, FaultKind.LOSE_REPLY, "server-1", 0.2):
        assert b" 200 " in (await request("GET")).splitlines()[0]
        assert await request("POST") == b""
    assert b" 401 " in (await request("POST")).splitlines()[0]


async def test_a_fault_without_traffic_is_reported(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.verification.chaos.faults._TRAFFIC_S", 0.1)
    assert "no request" in await inject_fault(deployment, FaultKind.LOSE_REPLY, "server-1", 0.1)


async def test_an_impossible_fault_is_skipped_with_a_reason(deployment: Deployment) -> None:
    assert "cannot be done" in await inject_fault(deployment, FaultKind.FAIL_OVER, "redis")
    assert "cannot be done" in await inject_fault(deployment, FaultKind.FILL, "worker-1")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a disk to fill")
class TestFullDisks:
    async def test_redis_refuses_writes_and_can_start_from_its_file_later(self, deployment: Deployment) -> None:
        process = deployment.parts["redis"].process
        async with redis_of(deployment) as redis:
            # Redis 7.0 leaves a hole in a file that is not its first one.
            await redis.set("first", "1")
            await redis.bgrewriteaof()

            async def rewritten() -> bool:
                return not (await redis.info("persistence"))["aof_rewrite_in_progress"]

            await eventually(rewritten, "a new file")
            await redis.set("kept", os.urandom(100_000))
            async with run_fault(deployment, FaultKind.FILL, "redis", 0.8, number=2):

                async def refused() -> bool:
                    try:
                        await redis.set("big", os.urandom(65_536))
                    except ResponseError as exc:
                        return str(exc).startswith("MISCONF")
                    return False

                await eventually(refused, "MISCONF")
                pid = deployment.parts["redis"].process.pid
            assert deployment.parts["redis"].process.pid == pid
            assert await redis.set("test", "1")
            assert (await redis.config_get("appendfsync"))["appendfsync"] == "always"
        process.kill()
        process.start()
        async with redis_of(deployment, through_proxy=False) as redis:
            assert await redis.strlen("kept") == 100_000

    async def test_redis_with_fsync_always_exits_on_a_full_disk_and_is_restarted(self, deployment: Deployment) -> None:
        process = deployment.parts["redis"].process
        async with redis_of(deployment, through_proxy=False) as redis:
            await redis.set("kept", "1")
            before = process.pid
            async with run_fault(deployment, FaultKind.FILL, "redis", 0.8, number=1):

                async def down() -> bool:
                    with suppress(RedisError):
                        await redis.set("big", os.urandom(65_536))
                    return process.ended is not None

                await eventually(down, "it to exit")
            assert process.pid != before
            assert await redis.get("kept") == b"1"
            assert await set_works(deployment)

    async def test_postgres_cannot_write(self, deployment: Deployment) -> None:
        async with run_fault(deployment, FaultKind.FILL, "postgres", 1.0):
            connection = await asyncpg.connect(deployment.direct["HOLDFAST_LEDGER"])
            # More than the free part of its existing segments.
            with pytest.raises((OSError, asyncpg.DiskFullError, asyncpg.PostgresConnectionError)):
                await connection.execute(
                    "CREATE TABLE big AS SELECT repeat(md5(n::text), 8) FROM generate_series(1, 500000) AS n"
                )
            connection.terminate()
        await eventually(lambda: insert_works(deployment), "it to write again")
        assert not deployment.parts["postgres"].disk.full  # type: ignore[union-attr]


async def test_faults_overlap_on_two_parts_and_are_serialized_on_one(deployment: Deployment) -> None:
    proxies = [proxy for part in ("redis", "postgres") for proxy in deployment.ways[part]]
    both = asyncio.gather(
        inject_fault(deployment, FaultKind.STALL, "redis", 1.5),
        inject_fault(deployment, FaultKind.STALL, "postgres", 1.5),
    )
    await eventually(lambda: not any(proxy.flows for proxy in proxies), "both to be stalled at the same time")
    await both
    started = monotonic()
    await asyncio.gather(
        inject_fault(deployment, FaultKind.STALL, "redis", 0.3), inject_fault(deployment, FaultKind.SLOW, "redis", 0.3)
    )
    assert monotonic() - started >= 0.6


async def test_heal_ends_the_effects_of_cancelled_faults(deployment: Deployment) -> None:
    for kind, target in ((FaultKind.STOP, "worker-1"), (FaultKind.STALL, "redis"), (FaultKind.FILL, "postgres")):
        if kind not in deployment.parts[target].kinds:
            continue
        fault_task = asyncio.create_task(inject_fault(deployment, kind, target, 60))
        await asyncio.sleep(0.2)
        fault_task.cancel()
        await asyncio.gather(fault_task, return_exceptions=True)
    await deployment.heal()
    assert state(deployment.parts["worker-1"].process) != "T"
    assert await set_works(deployment)
    await eventually(lambda: insert_works(deployment), "PostgreSQL to write")


async def test_an_unexpected_exit_is_noted_and_the_part_restarted(shared: Deployment) -> None:
    process = shared.parts["worker-2"].process
    before = process.pid
    os.kill(before, 9)

    def is_restarted() -> bool:
        try:
            return process.pid != before and process.answers()
        except RuntimeError:  # there is no process between its end and its restart
            return False

    await eventually(is_restarted, "a new worker")
    assert shared.notes() == ["worker-2 ended unexpectedly with signal 9"]
    shared._notes.clear()


class Sleeper(ServerProcess):
    """A process that only sleeps."""

    def _launch(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", "60"])

    def _answers(self) -> bool:
        return True


@pytest.mark.parametrize("kind", [FaultKind.KILL, FaultKind.STOP, FaultKind.RESTART, None], ids=str)
async def test_a_fault_right_after_an_unexpected_exit_does_not_hide_it(tmp_path: Path, kind: FaultKind | None) -> None:
    deployment, process = Deployment(tmp_path), Sleeper(Path("sleep"), tmp_path)
    deployment.parts = {"worker-1": Part("worker-1", process, frozenset(FaultKind))}
    process.start()
    os.kill(process.pid, 9)
    await eventually(lambda: process.ended is not None, "its end")
    await (inject_fault(deployment, kind, "worker-1") if kind else deployment.heal())
    assert process.answers()
    process.stop()
    assert deployment.notes() == ["worker-1 ended unexpectedly with signal 9"]


async def test_an_exit_by_a_job_is_not_a_defect(tmp_path: Path) -> None:
    deployment, process = Deployment(tmp_path), Sleeper(Path("sleep"), tmp_path)
    deployment.parts = {"worker-1": Part("worker-1", process, frozenset(FaultKind))}
    process.start()
    before = process.pid

    async def submit_crash(number: int) -> str:
        os.kill(before, 9)
        (tmp_path / "crashes.jsonl").write_text(f'{{"job_id":"job-{number}","pid":{before},"at":1.0}}\n')
        await eventually(lambda: process.ended is not None, "its end")
        return f"job-{number}"

    deployment.submit_crash = submit_crash
    assert await inject_fault(deployment, FaultKind.CRASH, "worker-1", number=7) == ""
    assert process.pid != before
    process.stop()
    assert deployment.notes() == []


async def test_a_crash_without_a_job_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.verification.chaos.faults._TRAFFIC_S", 0.0)
    deployment = Deployment(tmp_path)
    deployment.parts = {"worker-1": Part("worker-1", Sleeper(Path("sleep"), tmp_path), frozenset(FaultKind))}
    assert "not accepted" in await inject_fault(deployment, FaultKind.CRASH, "worker-1")

    async def submit_crash(number: int) -> str:
        return "job"

    deployment.submit_crash = submit_crash
    assert "has not run" in await inject_fault(deployment, FaultKind.CRASH, "worker-1")


@pytest.mark.parametrize(("ends_at", "notes"), [(100.0, 0), (103.0, 1), (inf, 1)])
async def test_a_process_that_is_found_dead_must_have_ended(tmp_path: Path, ends_at: float, notes: int) -> None:
    log = {
        "time": "1970-01-01T00:01:42.000Z",
        "message": "worker shop@vm-77-6aff2798a8103123 has ended without a drain; its 18 leases expire now",
    }
    (tmp_path / "upkeep-1.log").write_text(f"{json.dumps({**log, 'message': 'ready'})}\n{json.dumps(log)}\n")
    assert deaths(tmp_path) == [Death(77, 18, 102.0)]
    deployment, program = Deployment(tmp_path), Program("worker-1", [], tmp_path, {})
    program.ends_at = {77: ends_at}
    deployment.parts = {"worker-1": Part("worker-1", program, frozenset())}
    assert len([note for note in deployment.notes() if "77 was found dead while it ran" in note]) == notes


class FailsOnce(Program):
    """A program whose first start fails."""

    failed = False

    def start(self) -> None:
        if not self.failed:
            self.failed = True
            raise RuntimeError("no store")


@pytest.mark.parametrize("hurt_until", [0.0, inf])
async def test_a_failed_start_is_noted_unless_a_store_had_a_fault(tmp_path: Path, hurt_until: float) -> None:
    deployment, program = Deployment(tmp_path), Part("worker-1", FailsOnce("w", [], tmp_path, {}), frozenset(FaultKind))
    store = Part("redis", Sleeper(Path("sleep"), tmp_path), frozenset(FaultKind))
    store.hurt_until = hurt_until
    deployment.parts = {"worker-1": program, "redis": store}
    await deployment.restart_part(program)
    assert deployment.notes() == ([] if hurt_until else ["worker-1 did not start: no store"])
