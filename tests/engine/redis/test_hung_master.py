"""A master hangs (SIGSTOP): work resumes with the promotion of its replica, and other masters are not affected."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any, Final

import hiredis
import pytest

from holdfast import Holdfast, Job, State
from holdfast.engine.redis.claims import Claims
from holdfast.engine.redis.engine import RedisEngine
from holdfast.engine.redis.intake import Intake
from holdfast.engine.redis.keys import KeyNames, QueueKeys
from holdfast.engine.redis.settlement import Settlements
from holdfast.errors import EngineUnavailable
from holdfast.testing.contract import Rig
from holdfast.verification.chaos.redis_nodes import Node
from holdfast.verification.chaos.topologies import ClusterRedis, SentinelRedis, Topology
from tests.engine.harness import RedisHarness, closing
from tests.servers import find_server
from tests.worker.support import eventually, working
from tools.servers import REDIS

pytestmark = [pytest.mark.faults, pytest.mark.redis]

#: Limits with slack for a busy machine; the measured times are in `docs/how-to/redis-topologies.md`.
RESUMED_WITHIN_S: Final = 5.0
LONGEST_GAP_S: Final = 2.0

#: Calls of one queue, and the methods that make them.
CALLS: Final[dict[str, tuple[type, str]]] = {
    "submit": (Intake, "_submit"),
    "claim": (Claims, "_claim_queue"),
    "settle": (Settlements, "_settle"),
    "renew": (Claims, "_renew"),
}


class Answers:
    """When the engine has answered which calls, by kind and queue."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._at: dict[tuple[str, str], list[float]] = defaultdict(list)
        for kind, (owner, name) in CALLS.items():
            monkeypatch.setattr(owner, name, self._recorded(kind, getattr(owner, name)))

    def _recorded(self, kind: str, method: Callable[..., Any]) -> Callable[..., Any]:
        async def call(owner: Any, *arguments: Any, **options: Any) -> Any:
            reply = await method(owner, *arguments, **options)
            queue = arguments[1] if method.__name__ == "_claim_queue" else arguments[0]
            self._at[kind, queue].append(time.monotonic())
            return reply

        return call

    def has_all(self, queues: Sequence[str], since: float) -> bool:
        """Whether every kind of call has been answered for each of these queues."""
        return all(max(self._at[kind, queue], default=0.0) > since for kind in CALLS for queue in queues)

    def gaps(self, queue: str, start: float, end: float) -> dict[str, float]:
        """The longest time without an answer, by kind of call."""
        found = {}
        for kind in CALLS:
            instants = [start, *(at for at in self._at[kind, queue] if start < at < end), end]
            found[kind] = max(later - earlier for earlier, later in pairwise(instants))
        return found


@asynccontextmanager
async def under_load(url: str, namespace: str, queues: Sequence[str]) -> AsyncIterator[list[Job[int]]]:
    """Short jobs and a long one in each queue, submitted and run in this process. Yields the jobs; all have to end."""
    app = Holdfast(url, namespace=namespace, heartbeat_interval_s=0.3)
    jobs: list[Job[int]] = []
    released = asyncio.Event()

    @app.task
    async def work(number: int) -> int:
        await asyncio.sleep(0.02)
        return number

    @app.task
    async def wait() -> int:
        await released.wait()
        return 0

    async def submit(queue: str) -> None:
        while not released.is_set():
            try:
                jobs.append(await work.options(queue=queue).submit(len(jobs)))
            except EngineUnavailable:
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.02)

    async with app, working(app, queues=queues, concurrency=10 * len(queues)):
        jobs += [await wait.options(queue=queue).submit() for queue in queues]
        async with asyncio.TaskGroup() as submitters:
            try:
                for queue in queues:
                    submitters.create_task(submit(queue))
                yield jobs
            finally:
                released.set()
        for job in jobs:
            await job.result(30)


async def wait_promoted(promoted: Callable[[], bool]) -> float:
    """Wait until another server has taken over; returns when."""

    def poll() -> float:
        deadline = time.monotonic() + 30
        while not promoted():
            assert time.monotonic() < deadline, "no replica was promoted"
            time.sleep(0.02)
        return time.monotonic()

    return await asyncio.to_thread(poll)


# Sentinel ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sentinel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SentinelRedis]:
    topology = SentinelRedis(tmp_path_factory.mktemp("hung"), binary=find_server(REDIS))
    yield from _started(topology)


def _started(topology: Topology) -> Iterator[Any]:
    try:
        topology.start()
        yield topology
    finally:
        topology.stop()


def has_successor(topology: SentinelRedis, old: Node) -> bool:
    return any(topology.node(name) is not old and topology.node(name).is_master for name in topology.masters())


async def test_work_resumes_with_the_promotion(
    sentinel: SentinelRedis, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await asyncio.to_thread(sentinel.heal)
    answers = Answers(monkeypatch)
    async with under_load(sentinel.url, namespace, ["default"]):
        await eventually(lambda: answers.has_all(["default"], 0.0), "the load")
        old = sentinel.node(sentinel.masters()[0])
        old.pause()
        try:
            promoted_at = await wait_promoted(lambda: has_successor(sentinel, old))
            await eventually(lambda: answers.has_all(["default"], promoted_at), "work to resume")
            assert time.monotonic() - promoted_at < RESUMED_WITHIN_S
        finally:
            old.resume()


async def test_a_woken_master_that_refuses_writes_is_left(sentinel: SentinelRedis, namespace: str) -> None:
    """It considers itself the master until the sentinels demote it, about ten seconds later."""
    await asyncio.to_thread(sentinel.heal)
    old = sentinel.node(sentinel.masters()[0])
    for name, value in {"min-replicas-to-write": 1, "min-replicas-max-lag": 2}.items():
        old.call("CONFIG", "SET", name, value)
    app = Holdfast(sentinel.url, namespace=namespace)

    @app.task
    async def work() -> None: ...

    async def is_accepted() -> bool:
        try:
            return bool(await work.submit())
        except EngineUnavailable:
            return False

    async with app:
        await eventually(is_accepted, "the replica to count")
        old.pause()
        try:
            await wait_promoted(lambda: has_successor(sentinel, old))
        finally:
            old.resume()
        await eventually(lambda: _refuses_writes(old), "the old master to notice")
        with pytest.raises(EngineUnavailable, match="too few replicas"):
            await work.submit()
        woken_at = time.monotonic()
        await eventually(is_accepted, "the new master to be used")
        assert time.monotonic() - woken_at < RESUMED_WITHIN_S
        old.call("CONFIG", "SET", "min-replicas-to-write", 0)


def _refuses_writes(node: Node) -> bool:
    try:
        node.call("SET", "probe", "1")
    except hiredis.ReplyError as exc:
        return "NOREPLICAS" in str(exc)
    return False


# Cluster -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterRedis]:
    options = {"cluster-require-full-coverage": "no"}
    yield from _started(ClusterRedis(tmp_path_factory.mktemp("hung"), binary=find_server(REDIS), options=options))


def queues_by_node(cluster: ClusterRedis, namespace: str) -> dict[str, list[str]]:
    names = KeyNames(namespace=namespace, cluster=True)
    by_node: dict[str, list[str]] = defaultdict(list)
    for number in range(40):
        queue = f"q{number}"
        by_node[cluster.owner(QueueKeys(queue, names).control.decode())].append(queue)
    return by_node


async def test_queues_of_other_masters_are_not_affected(
    cluster: ClusterRedis, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hung master also has the list of queues."""
    answers = Answers(monkeypatch)
    old = cluster.owner(KeyNames(namespace=namespace, cluster=True).queues)
    by_node = queues_by_node(cluster, namespace)
    hung = by_node.pop(old)[:4]
    others = [queues[0] for queues in by_node.values()]
    node = cluster.node(old)
    witness = next(each for each in cluster.nodes().values() if each is not node)

    def promoted() -> bool:
        return all(row[2][1] != node.port for row in witness.call("CLUSTER", "SLOTS"))

    async with under_load(cluster.url, namespace, [*hung, *others]):
        await eventually(lambda: answers.has_all([*hung, *others], 0.0), "the load")
        hung_at = time.monotonic()
        node.pause()
        try:
            promoted_at = await wait_promoted(promoted)
            await eventually(lambda: answers.has_all(hung, promoted_at), "work to resume")
            resumed_at = time.monotonic()
        finally:
            node.resume()
        assert resumed_at - promoted_at < RESUMED_WITHIN_S
        for queue in others:
            gaps = answers.gaps(queue, hung_at, resumed_at)
            assert max(gaps.values()) < LONGEST_GAP_S, f"{queue} waited for another master: {gaps}"


async def test_waiters_do_not_need_the_silent_node(cluster: ClusterRedis, namespace: str) -> None:
    """A process has one subscription, on any node."""
    await asyncio.to_thread(cluster.heal)
    by_node = queues_by_node(cluster, namespace)
    async with closing(RedisHarness(cluster.url, namespace)) as harness:
        engine = RedisEngine(cluster.url, harness.names)
        await engine.open()
        await engine._completion.wait_final(next(iter(by_node.values()))[0], "unknown", 1_000)
        subscription = engine._completion._subscription
        assert subscription is not None
        name, node = next(each for each in cluster.nodes().items() if each[1].port == subscription.address.port)
        rig = Rig(harness, engine, next(queues[0] for owner, queues in by_node.items() if owner != name))
        claim = await rig.start_one()
        node.pause()
        try:
            started = time.monotonic()
            waiting = asyncio.create_task(engine.wait_final(rig.queue, claim.job_id, 20_000))
            await asyncio.sleep(0)
            await rig.succeed(claim)
            info = await waiting
            assert info is not None
            assert info.state is State.SUCCEEDED
            assert time.monotonic() - started < LONGEST_GAP_S
        finally:
            node.resume()
        await engine.close()


async def test_a_silent_node_is_not_waited_for(cluster: ClusterRedis, namespace: str) -> None:
    """Without a promotion: a call for several queues leaves it out, and a call for its queue alone waits."""
    await asyncio.to_thread(cluster.heal)
    by_node = queues_by_node(cluster, namespace)
    (hung_node, (hung, *_)), (_, (other, *_)), *_ = by_node.items()
    async with closing(RedisHarness(cluster.url, namespace)) as harness:
        engine = RedisEngine(cluster.url, harness.names)
        await engine.open()
        for queue in (hung, other):
            await Rig(harness, engine, queue).submit(2)
            assert len(await engine.claim("w1", [queue], 1, 0, tuple)) == 1
        node = cluster.node(hung_node)
        node.pause()
        try:
            alone = asyncio.create_task(engine.get(hung, ["unknown"]))
            started = time.monotonic()
            (claim,) = await engine.claim("w1", [hung, other], 10, 0, tuple)
            assert claim.queue == other
            assert time.monotonic() - started < LONGEST_GAP_S
            assert not alone.done()
        finally:
            node.resume()
        assert await alone == [None]
        await engine.close()
