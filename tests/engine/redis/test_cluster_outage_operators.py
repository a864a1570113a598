"""A node of a Cluster is away: what people see of it, and what the ledger's side does meanwhile."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Self

import pytest
from typer.testing import CliRunner, Result

from holdfast import Holdfast
from holdfast.cli.live_view import Sampler
from holdfast.cli.program import program
from holdfast.cli.session import local_principal
from holdfast.core.job import Envelope, Failure, JobKey, new_job_ids
from holdfast.core.verdict import DeadLetter, Settlement
from holdfast.engine.port.jobs import EngineOptions
from holdfast.engine.redis.engine import RedisEngine
from holdfast.errors import EngineUnavailable
from holdfast.http.event_hub import EventHub
from holdfast.http.subscribers import StreamFilter, StreamSubscriber
from holdfast.ledger.intake_recovery import reopen_intake
from holdfast.ledger.port.ledger import FeedPosition
from holdfast.ledger.port.operators import ReplayReservation
from holdfast.ledger.queries.operator_filters import DeadLetterFilter
from holdfast.operations.jobs import find_in_queues
from holdfast.upkeep.dispatch import ReplaySubmission
from holdfast.upkeep.projector import Projector
from holdfast.upkeep.reconciler import Reconciler
from tests.engine.redis.cluster_outage import REPLY_S, Scene
from tests.engine.redis.cluster_outage import cluster as cluster
from tests.engine.redis.cluster_outage import scene as scene
from tests.http.deployment import serving
from tests.ledger.projection_rig import open_ledger
from tests.worker.support import eventually

pytestmark = [pytest.mark.faults, pytest.mark.redis]


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
    assert "cannot reach Redis" in findings[f"queue {scene.hit}"]["message"]
    assert not findings[f"server of 127.0.0.1:{scene.cluster.node(scene.down).port}"]["ok"]
    for queue in scene.well:
        assert "1 job waiting" in findings[f"queue {queue}"]["message"]
        assert findings[f"feed of {queue}"]["ok"]
    told = await _holdfast(scene, 3, "queues", "list")
    assert "the list of queues is on a node" in told.stderr
    assert "name the queues" in told.stderr


async def test_over_http_too(scene: Scene, tmp_path: Path) -> None:
    for queue in scene.queues:
        await scene.rig(queue).submit(1)
    namespace, ledger = scene.harness.names.namespace, f"sqlite:///{tmp_path}/ledger.db"
    app = Holdfast(scene.cluster.url, namespace=namespace, ledger=ledger, reply_timeout_s=REPLY_S)

    def look() -> None:
        with serving(app, upkeep=False) as world:
            client = world.client()
            whole = client.get("/api/v1/queues", params={"queue": scene.queues}).json()
            assert ([each["queue"] for each in whole["queues"]], whole["unreachable"]) == (scene.queues, None)
            scene.kill()
            answer = client.get("/api/v1/queues", params={"queue": scene.queues})
            assert answer.status_code == 200, answer.text
            assert [each["queue"] for each in answer.json()["queues"]] == scene.well
            assert f"no answer for {scene.hit}" in answer.json()["unreachable"]

    await asyncio.to_thread(look)


async def test_who_looks_for_long_goes_on_around_a_dead_node(scene: Scene) -> None:
    sampler = Sampler(scene.engine, scene.queues)
    await scene.rig(scene.well[0]).submit(1)
    assert [sample.stats.queue for sample in (await sampler.sample()).samples] == scene.queues
    await scene.rig(scene.well[0]).succeed(*await scene.rig(scene.well[0]).claim())
    await scene.rig(scene.hit).submit(1)
    hub, listener = EventHub(scene.engine), StreamSubscriber(StreamFilter(None), lambda: None)
    await hub.subscribe(listener, None)
    scene.kill()
    look = await sampler.sample()
    assert {sample.stats.queue: sample.rates["succeeded"] > 0 for sample in look.samples} == {
        scene.well[0]: True,
        scene.well[1]: False,
    }
    assert (look.unreachable, look.is_empty) == ([scene.hit], False), "who knows what is in it?"
    (job_id,) = await scene.rig(scene.well[0]).submit(1)
    heard = b""
    async with asyncio.timeout(10):
        while job_id.encode() not in heard:
            heard += await listener.next_chunk(1)
    await hub.unsubscribe(listener)
    found = await find_in_queues(scene.engine, scene.queues, job_id, local_principal())
    assert found is not None
    assert found.queue == scene.well[0]
    with pytest.raises(EngineUnavailable, match=f"no answer for {scene.hit}"):
        await find_in_queues(scene.engine, scene.queues, "unknown, or there", local_principal())


class Books:
    """An engine with a ledger, and a projector of all queues."""

    def __init__(self, scene: Scene, folder: Path) -> None:
        self.scene = scene
        options = EngineOptions(ledger=True)
        names = scene.harness.names
        self.engine = RedisEngine(scene.cluster.url, names, options, reply_timeout_s=REPLY_S)
        self._url = f"sqlite:///{folder}/ledger.db"
        self.ledger = open_ledger(self._url)

    async def __aenter__(self) -> Self:
        await self.engine.open()
        await self.ledger.open()
        own, self._ledger = self.engine.clone(), open_ledger(self._url)
        await own.open()
        self._projector = own
        run = Projector(own, self._ledger, self.scene.queues, linger_s=0.001, round_s=0.1).run()
        self._task = asyncio.create_task(run)
        for queue in self.scene.queues:
            await reopen_intake(self.engine, self.ledger, queue)
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

    async def replays_to_hand_in(self) -> dict[str, ReplayReservation]:
        """One of each queue, of a dead letter, left half-way."""
        for queue in self.scene.queues:
            await self.submit(queue)
            (claim,) = await self.engine.claim("w1", [queue], 1, 0)
            died = DeadLetter(Failure("TASK_ERROR", "boom"))
            await self.engine.settle([Settlement(claim, died, claim.claimed_at_ms)])
        await self.all_caught_up()
        page = await self.ledger.queries.dead_letters(DeadLetterFilter(), 10)
        begin = partial(self.ledger.operators.reserve_replay, actor="ann", reason="again", payload=None)
        return {letter.queue: await begin(None, letter.dlq_id) for letter in page.dead_letters}

    async def caught_up(self, queue: str) -> bool:
        assert self.ledger.projection is not None
        end = await self.engine.snapshot(queue, [])
        return await self.ledger.projection.position(queue) == FeedPosition(end.position, end.nonce)

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
        assert (report.checked, report.restored, list(report.unreachable)) == (2, 1, [scene.hit])
        # Who has named no queues, and has never seen the list, which is on the dead node.
        fresh = books.engine.clone()
        await fresh.open()
        report = await Reconciler(fresh, books.ledger).reconcile()
        assert (report.checked, list(report.unreachable)) == (2, [scene.hit])
        await fresh.close()
        # The projector is in no trouble with the others, either.
        later = await books.submit(scene.well[0])
        assert books.ledger.projection is not None
        key = JobKey("default", scene.well[0], later)
        assert await books.ledger.projection.wait_recorded([key], 10_000) == {key}
        replays = ReplaySubmission(books.engine, books.ledger)
        with pytest.raises(EngineUnavailable):
            await replays.run_once()
        for queue in scene.well:
            assert await books.engine.get(queue, [wanted[queue].new_job_id]) != [None]
        unsubmitted = books.ledger.operators.unsubmitted_replays
        assert [row.queue for row in await unsubmitted(10)] == [scene.hit]
        await scene.heal()
        await eventually(partial(_finished, replays), "the node is back")
        assert await unsubmitted(10) == []
        assert await books.engine.get(scene.hit, [wanted[scene.hit].new_job_id]) != [None]


async def _finished(replays: ReplaySubmission) -> bool:
    try:
        return await replays.run_once() > 0
    except EngineUnavailable:
        return False
