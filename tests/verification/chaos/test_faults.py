"""Each fault does to a real deployment what it says, and what it broke is whole again afterwards."""

from __future__ import annotations

import asyncio
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
    async with Deployment(tmp_path_factory.mktemp("chaos"), workers=2, seed=1) as deployment:
        yield deployment
    assert deployment.notes() == []


@pytest_asyncio.fixture(loop_scope="module")
async def deployment(shared: Deployment) -> AsyncIterator[Deployment]:
    """The one that the tests of this file share; each finds it whole."""
    before = shared.notes()
    yield shared
    await shared.heal()
    assert shared.notes() == before


@asynccontextmanager
async def struck(
    deployment: Deployment, kind: FaultKind, target: str, seconds: float = 0, number: int = 1
) -> AsyncIterator[None]:
    """The block runs while the fault is on; afterwards it is over. `inf`: however long the block takes."""
    fault = Fault(number=number, at=0, kind=kind, target=target, seconds=seconds)
    striking = asyncio.create_task(inject(deployment, fault))
    try:
        await asyncio.sleep(0)
        yield
        assert seconds == inf or await striking == ""
    finally:
        striking.cancel()
        await asyncio.gather(striking, return_exceptions=True)


async def hurt(deployment: Deployment, kind: FaultKind, target: str, seconds: float = 0, number: int = 1) -> str:
    return await inject(deployment, Fault(number=number, at=0, kind=kind, target=target, seconds=seconds))


def redis_of(deployment: Deployment, *, through_proxy: bool = True) -> Redis:
    variables = deployment.environment if through_proxy else deployment.direct
    return Redis.from_url(variables["HOLDFAST_URL"], retry=None, socket_timeout=10)


def state(process: ServerProcess) -> str:
    """The kernel's letter: T is stopped."""
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


async def test_all_parts_run_and_can_be_hurt(deployment: Deployment) -> None:
    assert list(deployment.parts) == ["postgres", "redis", "worker-1", "worker-2", "upkeep-1", "server-1"]
    every = set().union(*(part.kinds for part in deployment.parts.values()))
    assert every | ({FaultKind.FILL} if deployment.unsupported else set()) == set(FaultKind) - {
        FaultKind.FAIL_OVER,
        FaultKind.HAND_OVER,
    }


@pytest.mark.parametrize(
    ("kind", "targets"),
    [(FaultKind.KILL, ("worker-1", "redis", "postgres")), (FaultKind.RESTART, ("server-1", "redis", "postgres"))],
)
async def test_they_are_other_processes_afterwards(
    deployment: Deployment, kind: FaultKind, targets: tuple[str, ...]
) -> None:
    processes = [deployment.parts[target].process for target in targets]
    before = [ProcessId.of(process.pid) for process in processes]
    assert set(await asyncio.gather(*(hurt(deployment, kind, target) for target in targets))) == {""}
    for process, old in zip(processes, before, strict=True):
        assert ProcessId.of(process.pid) != old
        assert process.answers()
        assert not old.is_running()


@pytest.mark.parametrize("target", ["worker-2", "redis", "postgres"])
async def test_a_stopped_process_stands_still_and_goes_on(deployment: Deployment, target: str) -> None:
    process = deployment.parts[target].process
    before = process.pid
    async with struck(deployment, FaultKind.STOP, target, 0.3):
        await eventually(lambda: state(process) == "T", "it to stand still")
    assert process.pid == before
    assert state(process) != "T"
    assert process.answers()


async def test_a_cut_ends_connections_once(deployment: Deployment) -> None:
    async with redis_of(deployment) as redis:
        await redis.ping()
        await hurt(deployment, FaultKind.CUT, "redis")
        with pytest.raises(RedisConnectionError):
            await redis.ping()
        assert await redis.ping()


async def test_replies_are_slow_for_a_while(deployment: Deployment) -> None:
    async with redis_of(deployment) as redis:
        await redis.ping()
        async with struck(deployment, FaultKind.SLOW, "redis", 0.2):
            await eventually(lambda: all(door.delay_s >= 0.05 for door in deployment.ways["redis"]), "it to be slow")
            began = monotonic()
            await redis.ping()
            assert monotonic() - began >= 0.05
    assert not any(door.delay_s for door in deployment.ways["redis"])


async def test_a_stall_of_one_worker_is_not_a_stall_of_all(deployment: Deployment) -> None:
    async with struck(deployment, FaultKind.STALL, "worker-1", 0.3):
        assert await set_works(deployment)
        assert all(not proxy.flows for proxy in deployment.parts["worker-1"].proxies)
        assert all(proxy.flows for proxy in deployment.parts["worker-2"].proxies)
    assert all(proxy.flows for proxy in deployment.parts["worker-1"].proxies)


async def test_nothing_passes_while_redis_is_stalled(deployment: Deployment) -> None:
    async with redis_of(deployment) as redis:
        await redis.ping()
        began = monotonic()
        async with struck(deployment, FaultKind.STALL, "redis", 0.4):
            await asyncio.sleep(0.05)
            await redis.ping()
            assert monotonic() - began >= 0.4


async def test_a_script_whose_reply_is_lost_has_been_applied(deployment: Deployment) -> None:
    async with redis_of(deployment, through_proxy=False) as direct, redis_of(deployment) as redis:
        await direct.delete("lost")
        sha = await direct.script_load("return redis.call('INCR', KEYS[1])")
        async with struck(deployment, FaultKind.LOSE_REPLY, "redis", inf):
            for count in (1, 2, 3):
                with pytest.raises(RedisConnectionError):
                    await redis.evalsha(sha, 1, "lost")
                assert await direct.get("lost") == str(count).encode()
        assert await redis.evalsha(sha, 1, "lost") == 4


async def test_a_transaction_whose_reply_is_lost_has_been_committed(deployment: Deployment) -> None:
    direct = await asyncpg.connect(deployment.direct["HOLDFAST_LEDGER"])
    await direct.execute("DROP TABLE IF EXISTS lost; CREATE TABLE lost (x int)")
    through = await asyncpg.connect(deployment.environment["HOLDFAST_LEDGER"])
    async with struck(deployment, FaultKind.LOSE_REPLY, "postgres", 0.3):
        await through.execute("BEGIN")
        await through.copy_records_to_table("lost", records=[(1,)])
        with pytest.raises((OSError, asyncpg.PostgresError)):
            await through.execute("COMMIT")
        assert await direct.fetchval("SELECT count(*) FROM lost") == 1
    through.terminate()
    await direct.close()


async def test_a_web_server_loses_replies_to_posts_only(deployment: Deployment) -> None:
    host, _, port = deployment.http_url.removeprefix("http://").partition(":")

    async def ask(method: str) -> bytes:
        reader, writer = await asyncio.open_connection(host, int(port))
        path = "/healthz" if method == "GET" else "/api/v1/jobs"
        writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".encode())
        try:
            return await reader.read()
        except OSError:
            return b""
        finally:
            writer.close()

    async with struck(deployment, FaultKind.LOSE_REPLY, "server-1", 0.2):
        assert b" 200 " in (await ask("GET")).splitlines()[0]
        assert await ask("POST") == b""
    assert b" 401 " in (await ask("POST")).splitlines()[0]


async def test_a_fault_that_met_nobody_says_so(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.verification.chaos.faults._TRAFFIC_S", 0.1)
    assert "no request" in await hurt(deployment, FaultKind.LOSE_REPLY, "server-1", 0.1)


async def test_what_cannot_be_done_is_skipped_with_a_reason(deployment: Deployment) -> None:
    assert "cannot be done" in await hurt(deployment, FaultKind.FAIL_OVER, "redis")
    assert "cannot be done" in await hurt(deployment, FaultKind.FILL, "worker-1")


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
            async with struck(deployment, FaultKind.FILL, "redis", 0.8, number=2):

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

    async def test_redis_that_must_have_written_before_it_answers_goes_down_and_comes_back(
        self, deployment: Deployment
    ) -> None:
        process = deployment.parts["redis"].process
        async with redis_of(deployment, through_proxy=False) as redis:
            await redis.set("kept", "1")
            before = process.pid
            async with struck(deployment, FaultKind.FILL, "redis", 0.8, number=1):

                async def down() -> bool:
                    with suppress(RedisError):
                        await redis.set("big", os.urandom(65_536))
                    return process.ended is not None

                await eventually(down, "it to go down")
            assert process.pid != before
            assert await redis.get("kept") == b"1"
            assert await set_works(deployment)

    async def test_postgres_cannot_write(self, deployment: Deployment) -> None:
        async with struck(deployment, FaultKind.FILL, "postgres", 1.0):
            connection = await asyncpg.connect(deployment.direct["HOLDFAST_LEDGER"])
            # More than what is left of the segments that it has already.
            with pytest.raises((OSError, asyncpg.DiskFullError, asyncpg.PostgresConnectionError)):
                await connection.execute(
                    "CREATE TABLE big AS SELECT repeat(md5(n::text), 8) FROM generate_series(1, 500000) AS n"
                )
            connection.terminate()
        await eventually(lambda: insert_works(deployment), "it to write again")
        assert not deployment.parts["postgres"].disk.full  # type: ignore[union-attr]


async def test_faults_on_two_parts_overlap_and_on_one_wait_for_each_other(deployment: Deployment) -> None:
    ways = [way for part in ("redis", "postgres") for way in deployment.ways[part]]
    both = asyncio.gather(
        hurt(deployment, FaultKind.STALL, "redis", 1.5), hurt(deployment, FaultKind.STALL, "postgres", 1.5)
    )
    await eventually(lambda: not any(way.flows for way in ways), "both to stand still at the same time")
    await both
    began = monotonic()
    await asyncio.gather(
        hurt(deployment, FaultKind.STALL, "redis", 0.3), hurt(deployment, FaultKind.SLOW, "redis", 0.3)
    )
    assert monotonic() - began >= 0.6


async def test_healing_heals_what_a_cancelled_fault_left(deployment: Deployment) -> None:
    for kind, target in ((FaultKind.STOP, "worker-1"), (FaultKind.STALL, "redis"), (FaultKind.FILL, "postgres")):
        if kind not in deployment.parts[target].kinds:
            continue
        striking = asyncio.create_task(hurt(deployment, kind, target, 60))
        await asyncio.sleep(0.2)
        striking.cancel()
        await asyncio.gather(striking, return_exceptions=True)
    await deployment.heal()
    assert state(deployment.parts["worker-1"].process) != "T"
    assert await set_works(deployment)
    await eventually(lambda: insert_works(deployment), "PostgreSQL to write")


async def test_a_death_that_is_nobodys_doing_is_noted_and_the_part_started_again(shared: Deployment) -> None:
    process = shared.parts["worker-2"].process
    before = process.pid
    os.kill(before, 9)

    def another() -> bool:
        try:
            return process.pid != before and process.answers()
        except RuntimeError:  # between its death and its new start there is none
            return False

    await eventually(another, "a new worker")
    assert shared.notes() == ["worker-2 ended unexpectedly with signal 9"]
    shared._notes.clear()


class Sleeper(ServerProcess):
    """Does nothing."""

    def _launch(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", "60"])

    def _answers(self) -> bool:
        return True


@pytest.mark.parametrize("kind", [FaultKind.KILL, FaultKind.STOP, FaultKind.RESTART, None], ids=str)
async def test_what_comes_right_after_such_a_death_does_not_bury_it(tmp_path: Path, kind: FaultKind | None) -> None:
    deployment, process = Deployment(tmp_path), Sleeper(Path("sleep"), tmp_path)
    deployment.parts = {"worker-1": Part("worker-1", process, frozenset(FaultKind))}
    process.start()
    os.kill(process.pid, 9)
    await eventually(lambda: process.ended is not None, "its end")
    await (hurt(deployment, kind, "worker-1") if kind else deployment.heal())
    assert process.answers()
    process.stop()
    assert deployment.notes() == ["worker-1 ended unexpectedly with signal 9"]


class Fragile(Program):
    """Its first start fails."""

    failed = False

    def start(self) -> None:
        if not self.failed:
            self.failed = True
            raise RuntimeError("no store")


@pytest.mark.parametrize("hurt_until", [0.0, inf])
async def test_a_program_that_does_not_start_is_noted_unless_a_store_was_hurt(
    tmp_path: Path, hurt_until: float
) -> None:
    deployment, program = Deployment(tmp_path), Part("worker-1", Fragile("w", [], tmp_path, {}), frozenset(FaultKind))
    store = Part("redis", Sleeper(Path("sleep"), tmp_path), frozenset(FaultKind))
    store.hurt_until = hurt_until
    deployment.parts = {"worker-1": program, "redis": store}
    await deployment.restart_part(program)
    assert deployment.notes() == ([] if hurt_until else ["worker-1 did not start: no store"])
