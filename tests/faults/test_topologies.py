"""Fail-over under load, on Sentinel and on Cluster, with real workers and a ledger.

Redis replicates asynchronously: writes that a dead master had accepted and not replicated are lost. These tests check
which jobs may be lost, which are restored, and which must not be lost.
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
from holdfast.core.key_names import queue_prefix
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

#: Some of these are on another master of a Cluster than the default queue.
OTHERS: Final = tuple(f"side-{number}" for number in range(8))
WORKERS: Final = 2
FULL_COVERAGE: Final = {"cluster-require-full-coverage": "no"}
#: A steady load that does not saturate the machine.
PAUSE_S: Final = 0.01
SETTLED_WITHIN_S: Final = 60.0
#: A master refuses writes without a replica.
REPLICA_REQUIRED: Final = {"min-replicas-to-write": "1", "min-replicas-max-lag": "2"}


@pytest.fixture(scope="module")
def topologies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Topology]]:
    """`topologies("sentinel")`: healthy topologies shared by this file, since a start takes seconds."""
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


class Deployment:
    """A topology, workers and a ledger, with checks of the accepted jobs."""

    def __init__(self, site: Site, topology: Topology, workers: list[WorkerProcess]) -> None:
        self.site = site
        self.topology = topology
        self.workers = workers

    async def submit(self, number: int, queue: str = QUEUE, durable: bool = False) -> str:
        options = self.site.tasks.work.options(idempotency_key=f"number-{number}", queue=queue, durable=durable)
        return (await options.submit(number)).id

    async def is_refused(self, reason: str) -> bool:
        """Return whether submissions are refused for this reason; a fail-over causes other errors."""
        with pytest.raises(EngineUnavailable) as refused:
            await self.submit(20)
        return reason in str(refused.value)

    async def submit_until_accepted(self, number: int, durable: bool = False) -> str:
        """Submit until accepted: a client may still use the dead master."""

        async def try_submit() -> str | None:
            try:
                return await self.submit(number, durable=durable)
            except EngineUnavailable:
                return None

        return str(await eventually(try_submit, "a job to be accepted"))

    async def fail_over(self, **options: Any) -> str:
        return await asyncio.to_thread(self.topology.fail_over, **options)

    async def heal(self) -> None:
        await asyncio.to_thread(self.topology.heal)

    def feed(self, queue: str = QUEUE) -> str:
        """Return the name of a queue's feed."""
        tagged = isinstance(self.topology, ClusterRedis)
        return queue_prefix(str(self.site.settings["namespace"]), queue, tagged=tagged) + "stream:feed"

    def owner(self, queue: str = QUEUE) -> str:
        """Return the master of a queue."""
        if isinstance(self.topology, ClusterRedis):
            return self.topology.owner(self.feed(queue))
        return self.topology.masters()[0]

    def master(self, queue: str = QUEUE) -> Node:
        return self.topology.node(self.owner(queue))

    async def get_ledger_jobs(self) -> dict[str, str]:
        """Return the states of the jobs in the ledger."""
        async with self.site.app.ledger.queries.snapshot() as snapshot:
            rows = snapshot.rows(select(jobs.c.job_id, jobs.c.state))
            return {str(row.job_id): str(row.state) async for row in rows}

    async def wait_settled(self) -> LedgerReport:
        """Wait until every job in the ledger has ended. Return the report on its events."""

        async def check() -> LedgerReport | None:
            try:
                await self.site.app.ledger.wait_caught_up(5)
            except EngineUnavailable:
                return None
            report = await verify_ledger(self.site.app.ledger.queries)
            return None if report.open_jobs else report

        report: LedgerReport = await eventually(check, "all jobs of the ledger to end", SETTLED_WITHIN_S)
        report.assert_valid(ended=True)
        return report

    async def account_for(self, *loads: Load) -> list[Accepted]:
        """Check that every accepted job succeeded once or is lost, and that no durable one is lost. Return the lost."""
        report = await self.wait_settled()
        ledger_jobs = await self.get_ledger_jobs()
        accepted = [job for load in loads for job in load.accepted]
        lost = [job for job in accepted if job.job_id not in ledger_jobs]
        assert not [job for job in lost if job.durable], "a durable job was lost"
        assert set(ledger_jobs.values()) == {"succeeded"}
        for queue in {job.queue for job in accepted}:
            lost_ids = [job.job_id for job in lost if job.queue == queue]
            assert await self.site.app.engine.get(queue, lost_ids) == [None] * len(lost_ids), (
                "the ledger lacks a job that the engine has"
            )
        await self.assert_nothing_open(*{job.queue for job in accepted})
        runs = Counter(run.job_id for run in self.site.runs())
        assert all(runs[job_id] for job_id in ledger_jobs), "a job has ended without a run"
        repeated = sum(number > 1 for number in runs.values())
        print(f"{len(accepted)} accepted, {len(lost)} lost, {report.restores} restored, {repeated} ran again")
        return lost

    async def assert_nothing_open(self, *queues: str) -> None:
        """Check that no job is open in Redis."""
        for queue in queues or (QUEUE,):
            stats = await self.site.app.engine.stats(queue)
            assert not any(stats.states.values()), f"open jobs in {queue}: {stats.states}"


async def make_deployment(
    topology: Topology, make_site: MakeSite, ledger: str, *args: str, workers: int = WORKERS
) -> Deployment:
    site = make_site(topology.url, ledger=ledger, reconcile_interval_s=2, durable_timeout_s=20)
    started = await site.start_workers(workers, *args)
    await site.app.open()
    return Deployment(site, topology, started)


# Under load ------------------------------------------------------------------------------------------


async def test_a_sentinel_fail_over_under_load(
    make_sentinel: MakeSentinel, make_site: MakeSite, postgres_url: str
) -> None:
    """Killed, healed (the old master becomes a replica), and failed back: submitters and workers recover by
    themselves. On the oldest Redis; the tests below use the current one."""
    topology = await asyncio.to_thread(make_sentinel, REDIS_60)
    deployment = await make_deployment(topology, make_site, postgres_url)
    async with Load(deployment.submit, submitters=4, pause_s=PAUSE_S) as load:
        await load.more(100)
        old = deployment.owner()
        new = await deployment.fail_over()
        await load.more(100)
        await deployment.heal()
        await load.more(100)
        assert deployment.owner() == new, "the old master became master again with its old data"
        assert await deployment.fail_over(kill=False) == old
        await load.more(100)
    await deployment.heal()
    await deployment.account_for(load)


async def test_a_cluster_fail_over_under_load(
    topologies: Callable[[str], Topology], make_site: MakeSite, postgres_url: str
) -> None:
    """Also, queues with a live master do not wait for those with a dead master."""
    topology = await asyncio.to_thread(topologies, "cluster")
    args = [arg for queue in (QUEUE, *OTHERS) for arg in ("-q", queue)]
    deployment = await make_deployment(topology, make_site, postgres_url, *args)
    other = next(queue for queue in OTHERS if deployment.owner(queue) != deployment.owner())
    other_load = Load(deployment.submit, submitters=2, durable_every=0, queues=(other,), pause_s=PAUSE_S)
    async with Load(deployment.submit, submitters=4, pause_s=PAUSE_S) as load, other_load:
        await load.more(100)
        await other_load.more(10)
        old, killed_at = deployment.owner(), time.monotonic()
        new = await deployment.fail_over(target=old)
        await load.more(100)
        gaps = [each.longest_gap(killed_at, time.monotonic()) for each in (load, other_load)]
        assert gaps[1] < gaps[0] / 2, "a queue waited for the dead master of another one"
        await deployment.heal()
        assert deployment.owner() == new
        healed_at = time.monotonic()
        assert await deployment.fail_over(kill=False, target=new) == old
        await load.more(100)
    await deployment.heal()
    lost = await deployment.account_for(load, other_load)
    assert not [job for job in lost if job.at > healed_at], "a manual fail-over on Cluster lost a job"


@pytest.mark.parametrize("name", ["sentinel", "cluster"])
def test_a_hung_master_is_replaced_and_follows_when_it_is_woken(
    name: str, topologies: Callable[[str], Topology]
) -> None:
    topology = topologies(name)
    old = topology.masters()[0]
    new = topology.hang(old)
    assert new in topology.masters()
    assert (topology.node(old).runs, topology.node(old).serves) == (True, False)
    topology.node(old).resume()
    topology.heal()
    assert topology.node(old).is_replica_of(topology.node(new))


# What is lost, exactly -------------------------------------------------------------------------------


@pytest.fixture
async def deployment(
    request: pytest.FixtureRequest,
    topologies: Callable[[str], Topology],
    make_site: MakeSite,
    postgres_url: str,
) -> Deployment:
    topology = await asyncio.to_thread(topologies, request.param)
    return await make_deployment(topology, make_site, postgres_url, workers=1)


@pytest.mark.parametrize(
    ("deployment", "ahead_s"),
    [("sentinel", 0), ("cluster", 60)],
    ids=["same clock", "clock behind"],
    indirect=["deployment"],
)
async def test_the_ledger_restores_the_jobs_that_it_has_recorded(deployment: Deployment, ahead_s: int) -> None:
    """The replica lacks the last jobs of the master. Exactly those in the ledger are restored in their states; the
    others are lost. The same holds if the clock of the replica is behind, so that its feed begins before the position
    that the ledger had read."""
    replicated = [await deployment.submit(number, durable=True) for number in range(5)]
    await deployment.site.wait_ended(replicated)
    deployment.master().disconnect_replicas()
    if ahead_s:
        # From now on entries of the master have timestamps of a clock that is ahead.
        deployment.master().call("XSETID", deployment.feed(), f"{int((time.time() + ahead_s) * 1000)}-0")
    gate = deployment.site.gate()
    blocked = [(await deployment.site.tasks.hold.options(durable=True).submit(str(gate))).id for _ in range(5)]
    await deployment.site.wait_runs(blocked, 1)
    ended = [await deployment.submit(number, durable=True) for number in range(10, 15)]
    await deployment.site.wait_ended(ended)
    await deployment.site.app.ledger.wait_caught_up()
    for worker in deployment.workers:
        worker.pause()
    not_in_ledger = [await deployment.submit(number) for number in range(20, 25)]

    await deployment.fail_over(target=deployment.owner())
    for worker in deployment.workers:
        worker.resume()
    later = [await deployment.submit_until_accepted(number, durable=True) for number in range(30, 35)]
    await deployment.site.wait_runs(blocked, 2)
    gate.touch()
    report = await deployment.wait_settled()

    ledger_jobs = await deployment.get_ledger_jobs()
    assert ledger_jobs == dict.fromkeys([*replicated, *blocked, *ended, *later], "succeeded")
    assert not ledger_jobs.keys() & set(not_in_ledger)
    assert await deployment.site.get_infos(not_in_ledger) == [None] * len(not_in_ledger)
    assert report.restores == len(blocked)
    runs = Counter(run.job_id for run in deployment.site.runs())
    assert all(runs[job_id] == 1 for job_id in (*replicated, *ended, *later)), "an ended job ran again"
    await deployment.assert_nothing_open()


@pytest.mark.parametrize("deployment", ["sentinel", "cluster"], indirect=True)
async def test_a_key_missing_on_the_replica_still_identifies_one_job(deployment: Deployment) -> None:
    """An ended job in the ledger, lost by the fail-over and submitted again with its key: there is one job once a
    worker has detected the new epoch, which it checks as soon as it is connected to the new master."""
    before = await deployment.submit(0, durable=True)
    deployment.master().disconnect_replicas()
    first = await deployment.submit(1, durable=True)
    await deployment.site.wait_ended([before, first])
    await deployment.site.app.ledger.wait_caught_up()
    await deployment.fail_over(target=deployment.owner())
    await eventually(
        lambda: any(each.has_logged("engine lost data of queue") for each in deployment.workers), "a worker to notice"
    )
    repeated = await deployment.submit_until_accepted(1, durable=True)
    await deployment.wait_settled()
    assert repeated == first
    assert Counter(run.job_id for run in deployment.site.runs()) == {before: 1, first: 1}


@pytest.fixture
def replica_required(topologies: Callable[[str], Topology]) -> Iterator[Topology]:
    """A topology whose masters accept nothing without a replica, also after a restart."""
    topology = topologies("sentinel")
    nodes = topology.nodes().values()
    for node in nodes:
        node.options |= REPLICA_REQUIRED
        for name, value in REPLICA_REQUIRED.items():
            node.call("CONFIG", "SET", name, value)
    yield topology
    topology.heal()
    for node in nodes:
        node.options = {name: value for name, value in node.options.items() if name not in REPLICA_REQUIRED}
        node.call("CONFIG", "SET", "min-replicas-to-write", 0)


def _offsets(master: Node) -> tuple[int, int]:
    """Return the replication offset of the master and that of its replica."""
    fields = dict(line.split(":", 1) for line in str(master.call("INFO", "replication")).splitlines() if ":" in line)
    replica = dict(field.split("=") for field in fields.get("slave0", "offset=-1").split(","))
    return int(fields["master_repl_offset"]), int(replica["offset"])


async def test_a_master_without_a_replica_accepts_nothing(
    replica_required: Topology, make_site: MakeSite, postgres_url: str
) -> None:
    """With `min-replicas-to-write` no job is lost, and none is accepted while a replica is missing."""
    deployment = await make_deployment(replica_required, make_site, postgres_url, workers=1)
    accepted = [await deployment.submit_until_accepted(number) for number in range(20)]
    # Wait until the jobs accepted so far are replicated.
    written, _ = _offsets(deployment.master())
    await eventually(lambda: _offsets(deployment.master())[1] >= written, "the replica to catch up")
    deployment.master().disconnect_replicas()
    await eventually(lambda: deployment.is_refused("too few replicas"), "the master to notice")
    await deployment.fail_over()
    await eventually(lambda: deployment.is_refused("too few replicas"), "the new master to refuse")
    await deployment.heal()
    accepted.append(await deployment.submit_until_accepted(20))
    await deployment.wait_settled()
    assert await deployment.get_ledger_jobs() == dict.fromkeys(accepted, "succeeded")
