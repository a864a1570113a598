"""A master dies under load, and its replica takes over: on Sentinel and on Cluster, with real workers and a ledger.

Redis replicates asynchronously: what a dead master had accepted and not passed on is gone. What may be lost by that,
what comes back, and what must not be lost is what these tests are about.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
from sqlalchemy import select

from benchmarks.failover_load import Accepted, Load
from holdfast.core.text import queue_prefix
from holdfast.errors import EngineUnavailable
from holdfast.ledger.verify import LedgerReport, verify_ledger
from holdfast.schema import jobs
from holdfast.verification.chaos.redis_nodes import Node
from holdfast.verification.chaos.topologies import ClusterRedis, Topology, make_topology
from tests.conftest import MakeSentinel
from tests.faults.conftest import MakeSite
from tests.faults.support import QUEUE, Site, WorkerProcess, eventually
from tests.servers import find_server
from tools.servers import REDIS, REDIS_60

pytestmark = [pytest.mark.faults, pytest.mark.redis, pytest.mark.postgres]

#: Some of them lie with another master of a Cluster than the default queue.
OTHERS: Final = tuple(f"side-{number}" for number in range(8))
WORKERS: Final = 2
FULL_COVERAGE: Final = {"cluster-require-full-coverage": "no"}
#: A steady load, that leaves the machine room for everybody else.
PAUSE_S: Final = 0.01
SETTLED_WITHIN_S: Final = 60.0
#: With a replica at hand or not at all.
NEVER_ALONE: Final = {"min-replicas-to-write": "1", "min-replicas-max-lag": "2"}


@pytest.fixture(scope="module")
def topologies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Topology]]:
    """`topologies("sentinel")`: those that the tests of this file share, whole; to start one takes seconds."""
    running: dict[str, Topology] = {}

    def get(name: str) -> Topology:
        if name not in running:
            options = FULL_COVERAGE if name == "cluster" else {}
            folder = tmp_path_factory.mktemp(name)
            running[name] = make_topology(name, folder, binary=find_server(REDIS), options=options)
            running[name].start()
        running[name].heal()
        return running[name]

    yield get
    for topology in running.values():
        topology.stop()


class Scene:
    """A topology, workers, a ledger, and what became of jobs that were accepted."""

    def __init__(self, site: Site, topology: Topology, workers: list[WorkerProcess]) -> None:
        self.site = site
        self.topology = topology
        self.workers = workers

    async def submit(self, number: int, queue: str = QUEUE, durable: bool = False) -> str:
        options = self.site.tasks.work.options(idempotency_key=f"number-{number}", queue=queue, durable=durable)
        return (await options.submit(number)).id

    async def refuses(self, why: str) -> bool:
        """Whether nothing is accepted, and for this reason: during a fail-over there are others."""
        with pytest.raises(EngineUnavailable) as refused:
            await self.submit(20)
        return why in str(refused.value)

    async def insist(self, number: int, durable: bool = False) -> str:
        """The same, however often it takes: a client may still think that the dead master lives."""

        async def try_it() -> str | None:
            try:
                return await self.submit(number, durable=durable)
            except EngineUnavailable:
                return None

        return str(await eventually(try_it, "a job to be accepted"))

    async def fail_over(self, **how: Any) -> str:
        return await asyncio.to_thread(self.topology.fail_over, **how)

    async def heal(self) -> None:
        await asyncio.to_thread(self.topology.heal)

    def feed(self, queue: str = QUEUE) -> str:
        """The name of a queue's feed."""
        tagged = isinstance(self.topology, ClusterRedis)
        return queue_prefix(str(self.site.settings["namespace"]), queue, tagged=tagged) + "stream:feed"

    def owner(self, queue: str = QUEUE) -> str:
        """The master that has the queue."""
        if isinstance(self.topology, ClusterRedis):
            return self.topology.owner(self.feed(queue))
        return self.topology.masters()[0]

    def master(self, queue: str = QUEUE) -> Node:
        return self.topology.node(self.owner(queue))

    async def remembered(self) -> dict[str, str]:
        """The ledger's jobs and their states."""
        async with self.site.app.ledger.queries.snapshot() as snapshot:
            rows = snapshot.rows(select(jobs.c.job_id, jobs.c.state))
            return {str(row.job_id): str(row.state) async for row in rows}

    async def settled(self) -> LedgerReport:
        """What the ledger tells once every job that it knows has ended."""

        async def look() -> LedgerReport | None:
            try:
                await self.site.app.ledger.wait_caught_up(5)
            except EngineUnavailable:
                return None
            report = await verify_ledger(self.site.app.ledger.queries)
            return None if report.open_jobs else report

        report: LedgerReport = await eventually(look, "all jobs of the ledger to end", SETTLED_WITHIN_S)
        report.assert_valid(ended=True)
        return report

    async def account_for(self, *loads: Load) -> list[Accepted]:
        """Every job that was accepted has ended well, once, or is lost; and those that are lost were not durable."""
        report = await self.settled()
        remembered = await self.remembered()
        accepted = [job for load in loads for job in load.accepted]
        lost = [job for job in accepted if job.job_id not in remembered]
        assert not [job for job in lost if job.durable], "the ledger had confirmed it"
        assert set(remembered.values()) == {"succeeded"}
        for queue in {job.queue for job in accepted}:
            gone = [job.job_id for job in lost if job.queue == queue]
            assert await self.site.app.engine.get(queue, gone) == [None] * len(gone), "the ledger has missed a job"
        await self.nothing_is_left(*{job.queue for job in accepted})
        runs = Counter(run.job_id for run in self.site.runs())
        assert all(runs[job_id] for job_id in remembered), "it says that it has ended, and never ran"
        again = sum(number > 1 for number in runs.values())
        print(f"{len(accepted)} accepted, {len(lost)} lost, {report.restores} restored, {again} ran again")
        return lost

    async def nothing_is_left(self, *queues: str) -> None:
        """No job waits, runs or is pending in Redis."""
        for queue in queues or (QUEUE,):
            stats = await self.site.app.engine.stats(queue)
            assert not any(stats.states.values()), f"left behind in {queue}: {stats.states}"


async def working_scene(
    topology: Topology, make_site: MakeSite, ledger: str, *words: str, workers: int = WORKERS
) -> Scene:
    site = make_site(topology.url, ledger=ledger, reconcile_interval_s=2, durable_timeout_s=20)
    started = await site.started_all(workers, *words)
    await site.app.open()
    return Scene(site, topology, started)


# Under load ------------------------------------------------------------------------------------------


async def test_a_sentinel_fails_over_under_load(
    make_sentinel: MakeSentinel, make_site: MakeSite, postgres_url: str
) -> None:
    """Killed, healed (the old master is a replica now), and handed back: submitters and workers go on by themselves. On
    the oldest Redis; the tests below are on the current one."""
    topology = await asyncio.to_thread(make_sentinel, REDIS_60)
    scene = await working_scene(topology, make_site, postgres_url)
    async with Load(scene.submit, submitters=4, pause_s=PAUSE_S) as load:
        await load.more(100)
        old = scene.owner()
        new = await scene.fail_over()
        await load.more(100)
        await scene.heal()
        await load.more(100)
        assert scene.owner() == new, "the old master took over again, with what it had"
        assert await scene.fail_over(kill=False) == old
        await load.more(100)
    await scene.heal()
    await scene.account_for(load)


async def test_a_cluster_fails_over_under_load(
    topologies: Callable[[str], Topology], make_site: MakeSite, postgres_url: str
) -> None:
    """The same; and queues whose master is alive do not wait for those whose master is dead."""
    topology = await asyncio.to_thread(topologies, "cluster")
    words = [word for queue in (QUEUE, *OTHERS) for word in ("-q", queue)]
    scene = await working_scene(topology, make_site, postgres_url, *words)
    other = next(queue for queue in OTHERS if scene.owner(queue) != scene.owner())
    beside = Load(scene.submit, submitters=2, durable_every=0, queues=(other,), pause_s=PAUSE_S)
    async with Load(scene.submit, submitters=4, pause_s=PAUSE_S) as load, beside:
        await load.more(100)
        await beside.more(10)
        old, killed_at = scene.owner(), time.monotonic()
        new = await scene.fail_over(target=old)
        await load.more(100)
        gaps = [each.longest_gap(killed_at, time.monotonic()) for each in (load, beside)]
        assert gaps[1] < gaps[0] / 2, "it waited for the dead master"
        await scene.heal()
        assert scene.owner() == new
        healed_at = time.monotonic()
        assert await scene.fail_over(kill=False, target=new) == old
        await load.more(100)
    await scene.heal()
    lost = await scene.account_for(load, beside)
    assert not [job for job in lost if job.at > healed_at], "a hand-over on Cluster loses nothing"


# What is lost, exactly -------------------------------------------------------------------------------


@pytest.fixture
async def scene(
    request: pytest.FixtureRequest,
    topologies: Callable[[str], Topology],
    make_site: MakeSite,
    postgres_url: str,
) -> Scene:
    topology = await asyncio.to_thread(topologies, request.param)
    return await working_scene(topology, make_site, postgres_url, workers=1)


@pytest.mark.parametrize(
    ("scene", "ahead_s"), [("sentinel", 0), ("cluster", 60)], ids=["same clock", "clock behind"], indirect=["scene"]
)
async def test_the_ledger_brings_back_what_it_had_seen(scene: Scene, ahead_s: int) -> None:
    """The replica knows nothing of the master's last jobs. Those that the ledger knows go on, in their own state; those
    that it does not know are lost: no more and no fewer. So too if the replica's clock is behind that of the master,
    and its feed begins before the place up to which the ledger had read."""
    both_know = [await scene.submit(number, durable=True) for number in range(5)]
    await scene.site.ended(both_know)
    scene.master().disconnect_replicas()
    if ahead_s:
        # What the master writes from now on bears the time of a clock that is so far ahead.
        scene.master().call("XSETID", scene.feed(), f"{int((time.time() + ahead_s) * 1000)}-0")
    gate = scene.site.gate()
    held = [(await scene.site.tasks.hold.options(durable=True).submit(str(gate))).id for _ in range(5)]
    await scene.site.has_runs(held, 1)
    ended = [await scene.submit(number, durable=True) for number in range(10, 15)]
    await scene.site.ended(ended)
    await scene.site.app.ledger.wait_caught_up()
    for worker in scene.workers:
        worker.pause()
    unseen = [await scene.submit(number) for number in range(20, 25)]

    await scene.fail_over(target=scene.owner())
    for worker in scene.workers:
        worker.resume()
    later = [await scene.insist(number, durable=True) for number in range(30, 35)]
    await scene.site.has_runs(held, 2)
    gate.touch()
    report = await scene.settled()

    remembered = await scene.remembered()
    assert remembered == dict.fromkeys([*both_know, *held, *ended, *later], "succeeded")
    assert not remembered.keys() & set(unseen)
    assert await scene.site.views(unseen) == [None] * len(unseen)
    assert report.restores == len(held)
    runs = Counter(run.job_id for run in scene.site.runs())
    assert all(runs[job_id] == 1 for job_id in (*both_know, *ended, *later)), "what had ended ran again"
    await scene.nothing_is_left()


@pytest.mark.parametrize("scene", ["sentinel", "cluster"], indirect=True)
async def test_a_key_that_the_replica_never_saw_still_names_one_job(scene: Scene) -> None:
    """In the ledger, ended, lost by the fail-over, and submitted again under its key: there is one job, once a worker
    has seen that this is not the feed that it knew. (It looks as soon as it has a connection to the new master.)"""
    before = await scene.submit(0, durable=True)
    scene.master().disconnect_replicas()
    first = await scene.submit(1, durable=True)
    await scene.site.ended([before, first])
    await scene.site.app.ledger.wait_caught_up()
    await scene.fail_over(target=scene.owner())
    await eventually(lambda: any(each.said("keys are known again") for each in scene.workers), "a worker to notice")
    again = await scene.insist(1, durable=True)
    await scene.settled()
    assert again == first
    assert Counter(run.job_id for run in scene.site.runs()) == {before: 1, first: 1}


@pytest.fixture
def never_alone(topologies: Callable[[str], Topology]) -> Iterator[Topology]:
    """A master that accepts nothing without its replica; also one that starts again."""
    topology = topologies("sentinel")
    nodes = topology.nodes().values()
    for node in nodes:
        node.options |= NEVER_ALONE
        for name, value in NEVER_ALONE.items():
            node.call("CONFIG", "SET", name, value)
    yield topology
    topology.heal()
    for node in nodes:
        node.options = {name: value for name, value in node.options.items() if name not in NEVER_ALONE}
        node.call("CONFIG", "SET", "min-replicas-to-write", 0)


def _offsets(master: Node) -> tuple[int, int]:
    """How much it has written, and how much of that its replica has said to have."""
    said = dict(line.split(":", 1) for line in str(master.call("INFO", "replication")).splitlines() if ":" in line)
    replica = dict(field.split("=") for field in said.get("slave0", "offset=-1").split(","))
    return int(said["master_repl_offset"]), int(replica["offset"])


async def test_a_master_that_has_no_replica_accepts_nothing(
    never_alone: Topology, make_site: MakeSite, postgres_url: str
) -> None:
    """With `min-replicas-to-write` there is nothing to lose, and nothing to be had while a replica is missing."""
    scene = await working_scene(never_alone, make_site, postgres_url, workers=1)
    accepted = [await scene.insist(number) for number in range(20)]
    # What it accepted while the replica was near is on its way there, not more.
    written, _ = _offsets(scene.master())
    await eventually(lambda: _offsets(scene.master())[1] >= written, "the replica to have all")
    scene.master().disconnect_replicas()
    await eventually(lambda: scene.refuses("too few replicas"), "the master to notice")
    await scene.fail_over()
    await eventually(lambda: scene.refuses("too few replicas"), "the new master to be alone")
    await scene.heal()
    accepted.append(await scene.insist(20))
    await scene.settled()
    assert await scene.remembered() == dict.fromkeys(accepted, "succeeded")
