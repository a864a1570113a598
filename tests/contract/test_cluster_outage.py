"""A node of a Cluster is away: its own queues wait, those of the others go on as if nothing had happened."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import pytest
from typer.testing import CliRunner, Result

from holdfast import Holdfast, State
from holdfast.chaos.topologies import ClusterRedis
from holdfast.cli.program import program
from holdfast.cli.watch import Sampler
from holdfast.cli.who import local_person
from holdfast.core.job import Envelope, Failure, Lease, new_job_ids
from holdfast.core.verdict import Answer, DeadLetter, Settlement, Succeed
from holdfast.engine.port import EngineOptions, PartlyDone
from holdfast.engine.redis.client import ConnectionLost
from holdfast.engine.redis.engine import RedisEngine
from holdfast.errors import EngineUnavailable
from holdfast.http.hub import Hub
from holdfast.http.listening import Listener, Wish
from holdfast.ledger.keys import JobKey
from holdfast.ledger.letters import LetterFilter
from holdfast.ledger.people import ReplayRow
from holdfast.ledger.port import Position
from holdfast.people.reaching import find_among
from holdfast.testing.contract import Rig
from holdfast.upkeep.admission import admit
from holdfast.upkeep.alarm import Alarm
from holdfast.upkeep.loop import Queues
from holdfast.upkeep.projector import Projector
from holdfast.upkeep.pruner import Pruner
from holdfast.upkeep.reclaimer import Reclaimer
from holdfast.upkeep.reconciler import Reconciler
from holdfast.upkeep.replays import Replays
from tests.conftest import MakeCluster
from tests.harness import RedisHarness, closing
from tests.http.world import serving
from tests.ledger.projection_rig import open_ledger
from tests.servers import find_server
from tests.worker.support import eventually, working
from tools.servers import REDIS

pytestmark = [pytest.mark.faults, pytest.mark.redis]

#: How long a hung node is waited for, here.
_REPLY_S: Final = 1.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterRedis]:
    """Three masters that nobody replaces: what is killed stays away until it is healed, and has its data then."""
    topology = ClusterRedis(
        tmp_path_factory.mktemp("outage"),
        binary=find_server(REDIS),
        replicas=0,
        node_timeout_ms=60_000,
        aof=True,
        # With `everysec` a write may wait for an fsync that is under way, and die with the server.
        options={"cluster-require-full-coverage": "no", "appendfsync": "always"},
    )
    try:
        topology.start()
        yield topology
    finally:
        topology.stop()


class Scene:
    """One queue on each node. `hit` is the one whose node goes away; the list of queues is with it."""

    def __init__(self, cluster: ClusterRedis, harness: RedisHarness, engine: RedisEngine) -> None:
        self.cluster, self.harness, self.engine = cluster, harness, engine
        by_node: dict[str, str] = {}
        for number in range(100):
            queue = f"q{number}"
            by_node.setdefault(cluster.owner(harness.keys(queue).control.decode()), queue)
        self.down = cluster.owner(harness.names.queues)
        self.hit = by_node.pop(self.down)
        self.well = list(by_node.values())
        self.queues = [self.well[0], self.hit, self.well[1]]
        self.held: set[Lease] = set()

    def rig(self, queue: str) -> Rig:
        return Rig(self.harness, self.engine, queue)

    def kill(self) -> None:
        self.cluster.node(self.down).kill()

    async def raw(self, queue: str, *words: Any) -> Any:
        """A command to the node of a queue, past everybody."""
        node = self.cluster.node(self.cluster.owner(self.harness.keys(queue).control.decode()))
        return await asyncio.to_thread(node.ask, *words)

    async def heal(self) -> None:
        await asyncio.to_thread(self.cluster.heal)

    async def claim(self, limit: int = 10, wait_ms: int = 0) -> list[Any]:
        """As a worker does."""
        claims = await self.engine.claim("w1", self.queues, limit, wait_ms, self.held.copy)
        leases = {claim.lease for claim in claims}
        assert not self.held & leases, "claimed twice"
        self.held |= leases
        return claims

    async def claim_all(self, number: int) -> list[Any]:
        claims: list[Any] = []
        async with asyncio.timeout(10):
            while len(claims) < number:
                claims += await self.claim(wait_ms=100)
        return claims


@pytest.fixture
async def scene(cluster: ClusterRedis, namespace: str) -> AsyncIterator[Scene]:
    async with closing(RedisHarness(cluster.url, namespace)) as harness:
        engine = RedisEngine(cluster.url, harness.names, reply_timeout_s=_REPLY_S, connect_timeout_s=_REPLY_S)
        await engine.open()
        scene = Scene(cluster, harness, engine)
        try:
            yield scene
        finally:
            await scene.heal()
            await engine.close()


def _done(claim: Any) -> Settlement:
    return Settlement(claim, Succeed(b"1"), claim.claimed_at_ms)


async def test_claims_go_on_around_a_dead_node(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    submitted = {queue: await scene.rig(queue).submit(20) for queue in scene.queues}
    scene.kill()
    claims = [claim for _ in range(4) for claim in await scene.claim()]
    assert {claim.job_id for claim in claims} == {*submitted[scene.well[0]], *submitted[scene.well[1]]}
    began = time.monotonic()
    assert await scene.claim(wait_ms=5_000) == []
    assert 0.3 < time.monotonic() - began < 2, "it looks for the dead node now and then, and does not spin"
    job_id = (await scene.rig(scene.well[0]).submit(1))[0]
    assert [claim.job_id for claim in await scene.claim(wait_ms=5_000)] == [job_id]
    assert len([line for line in caplog.messages if "is away" in line]) == 1
    await scene.heal()
    back = await scene.claim_all(20)
    assert {claim.job_id for claim in back} == set(submitted[scene.hit])
    assert len([line for line in caplog.messages if "answers again" in line]) == 1
    assert await scene.engine.settle([_done(claim) for claim in (*claims, *back)]) == [Answer.APPLIED] * 60


async def test_what_a_lost_reply_had_granted_comes_first_and_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node granted jobs and died with the reply."""
    before = await scene.rig(scene.hit).submit(2)
    known = await scene.claim(limit=2)
    lost = await scene.rig(scene.hit).submit(3)
    there = await scene.rig(scene.well[0]).submit(3)
    run = scene.engine._store.client.run

    async def lose(purpose: Any, script: Any, keys: Any, arguments: Any) -> Any:
        reply = await run(purpose, script, keys, arguments)
        if script.name == "claim" and keys[0] == scene.harness.keys(scene.hit).streams[0]:
            scene.kill()
            raise ConnectionLost("the connection was lost")
        return reply

    with monkeypatch.context() as patch:
        patch.setattr(scene.engine._store.client, "run", lose)
        assert {claim.job_id for claim in await scene.claim()} == set(there)
    await scene.heal()
    late = await scene.rig(scene.hit).submit(1)
    found = await scene.claim_all(4)
    assert [claim.job_id for claim in found] == [*lost, *late]
    assert {claim.attempt for claim in found} == {1}
    assert {claim.lease.deliveries for claim in found} == {1}
    assert {claim.job_id for claim in known} == set(before)
    assert await scene.engine.settle([_done(claim) for claim in (*known, *found)]) == [Answer.APPLIED] * 6


async def test_a_hung_node_is_waited_for_once(scene: Scene) -> None:
    for queue in scene.queues:
        await scene.rig(queue).submit(1)
    await scene.claim_all(3)
    node = scene.cluster.node(scene.down)
    node.pause()
    try:
        took = []
        for _ in range(20):
            for queue in scene.well:
                await scene.rig(queue).submit(1)
            began = time.monotonic()
            assert len(await scene.claim()) == 2
            took.append(time.monotonic() - began)
        assert took[0] < _REPLY_S + 1
        assert max(took[1:]) < _REPLY_S / 2
    finally:
        node.resume()


async def test_other_queues_take_jobs_and_keep_their_leases(scene: Scene) -> None:
    alive = scene.well[0]
    healthy, hit = scene.rig(alive), scene.rig(scene.hit)
    claims = [await hit.start_one(), await healthy.start_one()]
    # The test's own client has to find the way while all are there.
    await scene.harness.age_queue(alive, 0)
    scene.kill()
    with pytest.raises(EngineUnavailable):
        await hit.submit_one()
    # The list of queues is gone, too; it was looked at long ago.
    scene.engine._store._known[alive] = 0.0
    assert await healthy.submit_one()
    await scene.harness.age_queue(alive, 20_000)
    with pytest.raises(PartlyDone):
        await scene.engine.renew([claim.lease for claim in claims])
    stream = scene.harness.keys(alive).streams[1].decode()
    (row,) = await scene.raw(alive, "XPENDING", stream, scene.harness.names.group, "-", "+", 10)
    assert row[2] < 20_000
    assert await healthy.succeed(claims[1]) == [Answer.APPLIED]


async def test_only_if_no_node_answers_a_call_fails(scene: Scene) -> None:
    await scene.rig(scene.hit).submit(1)
    scene.kill()
    only = [scene.hit]
    for call in (
        lambda: scene.engine.claim("w1", only, 10, 0, tuple),
        lambda: scene.engine.claim("w1", scene.queues, 10, 0),
        lambda: scene.engine.resume("w1", only, ()),
        lambda: scene.engine.reclaim("w1", only, 10),
        lambda: scene.engine.promote(only, 10),
        lambda: scene.engine.prune(only),
        lambda: scene.engine.listen(only, 1),
    ):
        with pytest.raises(EngineUnavailable):
            await call()


async def test_verdicts_are_settled_where_they_can_be(scene: Scene) -> None:
    for queue in scene.queues:
        await scene.rig(queue).submit(2)
    claims = await scene.claim_all(6)
    settlements = [_done(claim) for claim in claims]
    scene.kill()
    for applied in (Answer.APPLIED, Answer.ALREADY):
        with pytest.raises(PartlyDone, match=r"cannot be reached|connection was lost") as raised:
            await scene.engine.settle(settlements)
        assert raised.value.done == [None if each.queue == scene.hit else applied for each in claims]
    assert scene.engine.counts.succeeded == 4
    with pytest.raises(PartlyDone) as raised:
        await scene.engine.settle([each for each in settlements if each.claim.queue == scene.hit])
    assert raised.value.done == [None, None]
    await scene.heal()
    answers: list[Answer] = []
    async with asyncio.timeout(10):
        while not answers:
            try:
                answers = await scene.engine.settle(settlements)
            except PartlyDone:
                await asyncio.sleep(0.02)
    assert Counter(answers) == {Answer.APPLIED: 2, Answer.ALREADY: 4}


async def test_upkeep_goes_on_around_a_dead_node(scene: Scene) -> None:
    engine, harness = scene.engine, scene.harness
    for queue in scene.queues:
        await scene.rig(queue).submit(1)
    lost = await scene.claim_all(3)
    for queue in scene.queues:
        await scene.rig(queue).submit(1, delay_ms=60_000)
        await harness.age_queue(queue, 120_000)
    assert await engine.queues() == sorted(scene.queues)
    assert await engine.listen(scene.queues, 1) is not None
    scene.kill()
    asked = _counted(engine._store.client, "call")
    for _ in range(3):
        assert await engine.queues() == sorted(scene.queues), "the list was on the dead node, and is remembered"
    assert len(asked) == 1, "a node that hangs would be waited for each time"
    assert (await engine.promote(scene.queues, 10)).count == 2
    with pytest.raises(PartlyDone) as raised:
        await engine.renew([claim.lease for claim in lost])
    assert raised.value.done == []
    assert [view.queue for view in await engine.workers(scene.queues)] == sorted(scene.well)
    for queue in scene.well:
        await harness.age_queue(queue, 120_000)
    reclaimer = Reclaimer(engine, Queues(engine, scene.queues), _settings(), "upkeep-1")
    await reclaimer._turn()
    for queue in scene.well:
        assert (await engine.stats(queue)).states[State.QUEUED] == 2, "given back, and promoted"
    await Pruner(engine, Queues(engine, scene.queues))._turn()
    await engine.leave("w1", scene.queues)
    await Alarm(engine, Queues(engine, scene.queues), _settings(backlog_alert=1), None).look()
    assert engine.counts.alerts == {f"backlog:{queue}" for queue in scene.well}
    fresh = engine.sibling()
    await fresh.open()
    assert await fresh.listen(scene.queues, 1) == []
    await fresh.close()


def _settings(**more: Any) -> Any:
    return Holdfast("sqlite:///unused.db", **more).settings


# People and the ledger -----------------------------------------------------------------------------


async def _holdfast(scene: Scene, code: int, *words: str) -> Result:
    """A command, which knows of no queue but those that it is told of."""
    at = ("--url", scene.cluster.url, "--namespace", scene.harness.names.namespace)
    answer = await asyncio.to_thread(CliRunner().invoke, program(), [*words, *at])
    assert answer.exit_code == code, f"exit code {answer.exit_code}\n{answer.output}\n{answer.exception!r}"
    return answer


async def test_people_see_the_queues_that_answer_and_are_told_of_the_others(scene: Scene) -> None:
    jobs = {queue: await scene.rig(queue).submit(1) for queue in scene.queues}
    named = [word for queue in scene.queues for word in ("--queue", queue)]
    scene.kill()
    told = await _holdfast(scene, 3, "queues", "list", "--json", *named)
    assert [(each["queue"], each["states"]["queued"]) for each in json.loads(told.stdout)] == [
        (queue, 1) for queue in scene.well
    ]
    assert f"no answer for {scene.hit}" in told.stderr
    told = await _holdfast(scene, 3, "jobs", "list", "--json", *named)
    assert {each["job_id"] for each in json.loads(told.stdout)} == {jobs[queue][0] for queue in scene.well}
    assert f"no answer for {scene.hit}" in told.stderr
    told = await _holdfast(scene, 1, "doctor", "--json", *named)
    findings = {each["check"]: each for each in json.loads(told.stdout)["findings"]}
    assert "cannot be reached" in findings[f"queue {scene.hit}"]["message"]
    assert not findings[f"server of 127.0.0.1:{scene.cluster.node(scene.down).port}"]["ok"]
    for queue in scene.well:
        assert "1 job waits" in findings[f"queue {queue}"]["message"]
        assert findings[f"feed of {queue}"]["ok"]
    told = await _holdfast(scene, 3, "queues", "list")
    assert "the list of queues is on a node" in told.stderr
    assert "name those that you mean" in told.stderr


async def test_over_http_too(scene: Scene, tmp_path: Path) -> None:
    for queue in scene.queues:
        await scene.rig(queue).submit(1)
    namespace, ledger = scene.harness.names.namespace, f"sqlite:///{tmp_path}/ledger.db"
    app = Holdfast(scene.cluster.url, namespace=namespace, ledger=ledger, reply_timeout_s=_REPLY_S)

    def look() -> None:
        with serving(app, upkeep=False) as world:
            client = world.client()
            whole = client.get("/api/v1/queues", params={"queue": scene.queues}).json()
            assert ([each["queue"] for each in whole["queues"]], whole["missing"]) == (scene.queues, None)
            scene.kill()
            answer = client.get("/api/v1/queues", params={"queue": scene.queues})
            assert answer.status_code == 200, answer.text
            assert [each["queue"] for each in answer.json()["queues"]] == scene.well
            assert f"no answer for {scene.hit}" in answer.json()["missing"]

    await asyncio.to_thread(look)


async def test_who_looks_for_long_goes_on_around_a_dead_node(scene: Scene) -> None:
    sampler = Sampler(scene.engine, scene.queues)
    await scene.rig(scene.well[0]).submit(1)
    assert [sample.stats.queue for sample in (await sampler.look()).samples] == scene.queues
    await scene.rig(scene.well[0]).succeed(*await scene.rig(scene.well[0]).claim())
    await scene.rig(scene.hit).submit(1)
    hub, listener = Hub(scene.engine), Listener(Wish(None), lambda: None)
    await hub.join(listener, None)
    scene.kill()
    look = await sampler.look()
    assert {sample.stats.queue: sample.rates["succeeded"] > 0 for sample in look.samples} == {
        scene.well[0]: True,
        scene.well[1]: False,
    }
    assert (look.away, look.is_empty) == ([scene.hit], False), "who knows what is in it?"
    (job_id,) = await scene.rig(scene.well[0]).submit(1)
    heard = b""
    async with asyncio.timeout(10):
        while job_id.encode() not in heard:
            heard += await listener.take(1)
    await hub.leave(listener)
    found = await find_among(scene.engine, scene.queues, job_id, local_person())
    assert found is not None
    assert found.queue == scene.well[0]
    with pytest.raises(EngineUnavailable, match=f"no answer for {scene.hit}"):
        await find_among(scene.engine, scene.queues, "unknown, or there", local_person())


class Books:
    """An engine with a ledger, and a projector of all queues."""

    def __init__(self, scene: Scene, folder: Path) -> None:
        self.scene = scene
        options = EngineOptions(ledger=True)
        names = scene.harness.names
        self.engine = RedisEngine(scene.cluster.url, names, options, reply_timeout_s=_REPLY_S)
        self._url = f"sqlite:///{folder}/ledger.db"
        self.ledger = open_ledger(self._url)

    async def __aenter__(self) -> Self:
        await self.engine.open()
        await self.ledger.open()
        own, self._ledger = self.engine.sibling(), open_ledger(self._url)
        await own.open()
        self._projector = own
        run = Projector(own, self._ledger, self.scene.queues, linger_s=0.001, round_s=0.1).run()
        self._task = asyncio.create_task(run)
        for queue in self.scene.queues:
            await admit(self.engine, self.ledger, queue)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for opened in (self._projector, self._ledger, self.engine, self.ledger):
            await opened.close()

    async def submit(self, queue: str) -> str:
        envelope = Envelope(job_id=new_job_ids(1)[0], task="add", payload=b"{}", queue=queue)
        await self.engine.submit([envelope])
        return envelope.job_id

    async def replays_to_hand_in(self) -> dict[str, ReplayRow]:
        """One of each queue, of a dead letter, left half-way."""
        for queue in self.scene.queues:
            await self.submit(queue)
            (claim,) = await self.engine.claim("w1", [queue], 1, 0)
            died = DeadLetter(Failure("TASK_ERROR", "boom"))
            await self.engine.settle([Settlement(claim, died, claim.claimed_at_ms)])
        await self.all_caught_up()
        page = await self.ledger.queries.letters(LetterFilter(), 10)
        begin = partial(self.ledger.people.begin_replay, person="ann", reason="again", payload=None)
        return {letter.queue: await begin(None, letter.dlq_id) for letter in page.letters}

    async def caught_up(self, queue: str) -> bool:
        assert self.ledger.projection is not None
        end = await self.engine.survey(queue, [])
        return await self.ledger.projection.position(queue) == Position(end.position, end.nonce)

    async def all_caught_up(self) -> None:
        for queue in self.scene.queues:
            await eventually(partial(self.caught_up, queue), f"the ledger has all of {queue}")


async def test_the_ledgers_side_goes_on_around_a_dead_node(scene: Scene, tmp_path: Path) -> None:
    """The projector reads on, the reconciler puts jobs back, replays of dead letters are handed in."""
    async with Books(scene, tmp_path) as books:
        wanted = await books.replays_to_hand_in()
        lost = {queue: await books.submit(queue) for queue in scene.queues}
        await books.all_caught_up()
        scene.kill()
        forgotten = scene.well[1]
        keys = scene.harness.keys(forgotten)
        await scene.raw(forgotten, "DEL", keys.job(lost[forgotten]))
        reconciler = Reconciler(books.engine, books.ledger, scene.queues)
        report = await reconciler.reconcile()
        assert [job.key.job_id for job in report.jobs] == [lost[forgotten]]
        assert (report.checked, report.restored, list(report.away)) == (2, 1, [scene.hit])
        # Who has named no queues, and has never seen the list, which is on the dead node.
        fresh = books.engine.sibling()
        await fresh.open()
        report = await Reconciler(fresh, books.ledger).reconcile()
        assert (report.checked, list(report.away)) == (2, [scene.hit])
        await fresh.close()
        # The projector is in no trouble with the others, either.
        later = await books.submit(scene.well[0])
        assert books.ledger.projection is not None
        key = JobKey("default", scene.well[0], later)
        assert await books.ledger.projection.wait_present([key], 10_000) == {key}
        replays = Replays(books.engine, books.ledger)
        with pytest.raises(EngineUnavailable):
            await replays.turn()
        for queue in scene.well:
            assert await books.engine.get(queue, [wanted[queue].new_job_id]) != [None]
        unsubmitted = books.ledger.people.unsubmitted_replays
        assert [row.queue for row in await unsubmitted(10)] == [scene.hit]
        await scene.heal()
        await eventually(partial(_finished, replays), "the node is back")
        assert await unsubmitted(10) == []
        assert await books.engine.get(scene.hit, [wanted[scene.hit].new_job_id]) != [None]


async def _finished(replays: Replays) -> bool:
    try:
        return await replays.turn() > 0
    except EngineUnavailable:
        return False


# A worker ------------------------------------------------------------------------------------------


async def test_a_worker_goes_on_around_a_dead_node(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """Jobs of the other nodes run and are settled; a run of the dead node's keeps its verdict until it is back."""
    caplog.set_level(logging.WARNING)
    app = Holdfast(scene.cluster.url, namespace=scene.harness.names.namespace, reclaim_interval_s=0.2)
    gate, runs = asyncio.Event(), Counter[str]()

    @app.task
    async def work(name: str) -> str:
        runs[name] += 1
        if name.startswith("long"):
            await gate.wait()
        return name

    async with app, working(app, queues=scene.queues, concurrency=20) as worker:
        long = {queue: await work.options(queue=queue).submit(f"long-{queue}") for queue in scene.queues}
        await eventually(lambda: len(runs) == 3)
        scene.kill()
        gate.set()
        for queue in scene.well:
            assert await long[queue].result(5) == f"long-{queue}"
        for number in range(20):
            queue = scene.well[number % 2]
            began = time.monotonic()
            job = await work.options(queue=queue).submit(f"short-{number}")
            assert await job.result(5) == f"short-{number}"
            assert time.monotonic() - began < 2
        assert worker.in_hand == 1
        assert worker.ready
        claims = _counted(app.engine, "claim")
        await asyncio.sleep(1)
        assert len(claims) < 20, "a busy loop"
        await scene.heal()
        assert await long[scene.hit].result(10) == f"long-{scene.hit}"
        job = await eventually_submitted(work.options(queue=scene.hit), "after")
        assert await job.result(10) == "after"
        await eventually(lambda: worker.in_hand == 0)
    assert set(runs.values()) == {1}
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert sum("is away" in line for line in said) == 1, said
    assert sum("verdicts wait" in line for line in said) == 1, said
    assert len(said) < 8, said


def _counted(engine: Any, name: str) -> list[float]:
    called: list[float] = []
    method = getattr(engine, name)

    async def counting(*arguments: Any, **options: Any) -> Any:
        called.append(time.monotonic())
        return await method(*arguments, **options)

    setattr(engine, name, counting)
    return called


async def eventually_submitted(task: Any, name: str) -> Any:
    async with asyncio.timeout(10):
        while True:
            try:
                return await task.submit(name)
            except EngineUnavailable:
                await asyncio.sleep(0.05)


async def test_a_worker_starts_while_a_node_is_away(scene: Scene) -> None:
    scene.kill()
    engine = RedisEngine(scene.cluster.url, scene.harness.names)
    await engine.open()
    assert await engine.claim("w1", scene.queues, 10, 10, tuple) == []
    await engine.close()


async def test_a_replica_that_takes_over_is_found_without_a_word_from_the_dead_master(
    make_cluster: MakeCluster, namespace: str
) -> None:
    """A dead master never says `MOVED`: whoever had its address learns the new one from the others."""
    cluster = await asyncio.to_thread(make_cluster, options={"cluster-require-full-coverage": "no"})
    async with closing(RedisHarness(cluster.url, namespace)) as harness:
        rig = Rig(harness, await harness.make(), "taken-over")
        idle = Rig(harness, await harness.make(), "taken-over")
        first = await rig.submit_one()
        assert await idle.engine.get("taken-over", [first]) != [None]
        owner = cluster.owner(harness.keys("taken-over").control.decode())
        await _replicated(cluster, owner)
        try:
            assert await asyncio.to_thread(cluster.fail_over, target=owner) != owner
            for each in (rig, idle):
                view = await _answered(each, first)
                assert view.state is State.QUEUED
            assert await rig.succeed(*await rig.claim()) == [Answer.APPLIED]
        finally:
            # The harness's own client asks the first node only.
            await asyncio.to_thread(cluster.heal)


async def _answered(rig: Rig, job_id: str) -> Any:
    """The nodes tell each other of the new master within moments, and not all at the same one."""
    async with asyncio.timeout(10):
        while True:
            try:
                return (await rig.engine.get(rig.queue, [job_id]))[0]
            except EngineUnavailable:
                await asyncio.sleep(0.02)


async def _replicated(cluster: ClusterRedis, master: str) -> None:
    """Everything so far has reached its replica."""
    assert await asyncio.to_thread(cluster.node(master).ask, "WAIT", 1, 5_000) == 1
