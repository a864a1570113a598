"""A Cluster node is unreachable: what operators see of it, and what projector, reconciler and replays do meanwhile."""

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
from holdfast.ledger.port.ledger import FeedPosition
from holdfast.ledger.port.operators import ReplayReservation
from holdfast.ledger.queries.operator_filters import DeadLetterFilter
from holdfast.ledger.reopen_intake import reopen_intake
from holdfast.ledger.verification import Verifier
from holdfast.operations.jobs import find_in_queues
from holdfast.upkeep.dispatch import ReplaySubmission
from holdfast.upkeep.projector import Projector
from holdfast.upkeep.reconciler import Reconciler
from tests.engine.redis.cluster_outage import REPLY_S, OutageRig
from tests.engine.redis.cluster_outage import cluster as cluster
from tests.engine.redis.cluster_outage import outage as outage
from tests.http.deployment import serving
from tests.ledger.projection_rig import open_ledger
from tests.worker.support import eventually

pytestmark = [pytest.mark.faults, pytest.mark.redis]


async def _holdfast(outage: OutageRig, code: int, *words: str) -> Result:
    """Run a command."""
    connection_options = ("--url", outage.cluster.url, "--namespace", outage.harness.names.namespace)
    result = await asyncio.to_thread(CliRunner().invoke, program(), [*words, *connection_options])
    assert result.exit_code == code, f"exit code {result.exit_code}\n{result.output}\n{result.exception!r}"
    return result


async def test_commands_show_reachable_queues_and_name_the_others(outage: OutageRig) -> None:
    jobs = {queue: await outage.rig(queue).submit(1) for queue in outage.queues}
    named = [word for queue in outage.queues for word in ("--queue", queue)]
    outage.kill()
    result = await _holdfast(outage, 3, "queues", "list", "--json", *named)
    assert [(item["queue"], item["states"]["queued"]) for item in json.loads(result.stdout)] == [
        (queue, 1) for queue in outage.up_queues
    ]
    assert f"no answer for {outage.down_queue}" in result.stderr
    result = await _holdfast(outage, 3, "jobs", "list", "--json", *named)
    assert {item["job_id"] for item in json.loads(result.stdout)} == {jobs[queue][0] for queue in outage.up_queues}
    assert f"no answer for {outage.down_queue}" in result.stderr
    result = await _holdfast(outage, 1, "doctor", "--json", *named)
    findings = {item["check"]: item for item in json.loads(result.stdout)["findings"]}
    assert "cannot reach Redis" in findings[f"queue {outage.down_queue}"]["message"]
    assert not findings[f"server of 127.0.0.1:{outage.cluster.node(outage.down_node).port}"]["ok"]
    for queue in outage.up_queues:
        assert "1 job waiting" in findings[f"queue {queue}"]["message"]
        assert findings[f"feed of {queue}"]["ok"]
    result = await _holdfast(outage, 3, "queues", "list")
    assert "the list of queues is on a node" in result.stderr
    assert "name the queues" in result.stderr


async def test_http_lists_reachable_queues_and_names_the_others(outage: OutageRig, tmp_path: Path) -> None:
    for queue in outage.queues:
        await outage.rig(queue).submit(1)
    namespace, ledger = outage.harness.names.namespace, f"sqlite:///{tmp_path}/ledger.db"
    app = Holdfast(outage.cluster.url, namespace=namespace, ledger=ledger, reply_timeout_s=REPLY_S)

    def request_over_http() -> None:
        with serving(app, upkeep=False) as server:
            client = server.client()
            all_queues = client.get("/api/v1/queues", params={"queue": outage.queues}).json()
            assert ([item["queue"] for item in all_queues["queues"]], all_queues["unreachable"]) == (
                outage.queues,
                None,
            )
            outage.kill()
            result = client.get("/api/v1/queues", params={"queue": outage.queues})
            assert result.status_code == 200, result.text
            assert [item["queue"] for item in result.json()["queues"]] == outage.up_queues
            assert f"no answer for {outage.down_queue}" in result.json()["unreachable"]

    await asyncio.to_thread(request_over_http)


async def test_live_views_and_event_streams_continue_while_a_node_is_down(outage: OutageRig) -> None:
    sampler = Sampler(outage.engine, outage.queues)
    await outage.rig(outage.up_queues[0]).submit(1)
    assert [sample.stats.queue for sample in (await sampler.sample()).samples] == outage.queues
    await outage.rig(outage.up_queues[0]).succeed(*await outage.rig(outage.up_queues[0]).claim())
    await outage.rig(outage.down_queue).submit(1)
    hub, listener = EventHub(outage.engine), StreamSubscriber(StreamFilter(None), lambda: None)
    await hub.subscribe(listener, None)
    outage.kill()
    request_over_http = await sampler.sample()
    assert {sample.stats.queue: sample.rates["succeeded"] > 0 for sample in request_over_http.samples} == {
        outage.up_queues[0]: True,
        outage.up_queues[1]: False,
    }
    assert (request_over_http.unreachable, request_over_http.is_empty) == ([outage.down_queue], False), (
        "the unreachable queue may have jobs"
    )
    (job_id,) = await outage.rig(outage.up_queues[0]).submit(1)
    chunks = b""
    async with asyncio.timeout(10):
        while job_id.encode() not in chunks:
            chunks += await listener.next_chunk(1)
    await hub.unsubscribe(listener)
    found = await find_in_queues(outage.engine, outage.queues, job_id, local_principal())
    assert found is not None
    assert found.queue == outage.up_queues[0]
    with pytest.raises(EngineUnavailable, match=f"no answer for {outage.down_queue}"):
        await find_in_queues(outage.engine, outage.queues, "unknown", local_principal())


class LedgerRig:
    """An engine with a ledger, and a projector of all queues."""

    def __init__(self, outage: OutageRig, folder: Path) -> None:
        self.scene = outage
        options = EngineOptions(ledger=True)
        names = outage.harness.names
        self.engine = RedisEngine(outage.cluster.url, names, options, reply_timeout_s=REPLY_S)
        self._url = f"sqlite:///{folder}/ledger.db"
        self.ledger = open_ledger(self._url)

    async def __aenter__(self) -> Self:
        await self.engine.open()
        await self.ledger.open()
        projector_engine, self._ledger = self.engine.clone(), open_ledger(self._url)
        await projector_engine.open()
        self._projector = projector_engine
        run = Projector(projector_engine, self._ledger, self.scene.queues, linger_s=0.001, round_s=0.1).run()
        self._task = asyncio.create_task(run)
        for queue in self.scene.queues:
            await reopen_intake(self.engine, self.ledger, queue)
            await Verifier(self.engine, self.ledger).ensure(queue)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for part in (self._projector, self._ledger, self.engine, self.ledger):
            await part.close()

    async def submit(self, queue: str) -> str:
        envelope = Envelope(job_id=new_job_ids(1)[0], task="add", payload=b"{}", queue=queue)
        await self.engine.submit([envelope])
        return envelope.job_id

    async def reserve_replays(self) -> dict[str, ReplayReservation]:
        """Reserve a replay of one dead letter of each queue, without submitting it."""
        for queue in self.scene.queues:
            await self.submit(queue)
            (claim,) = await self.engine.claim("w1", [queue], 1, 0)
            dead_letter = DeadLetter(Failure("TASK_ERROR", "boom"))
            await self.engine.settle([Settlement(claim, dead_letter, claim.claimed_at_ms)])
        await self.wait_all_caught_up()
        page = await self.ledger.queries.dead_letters(DeadLetterFilter(), 10)
        reserve = partial(self.ledger.operators.reserve_replay, actor="ann", reason="fixed", payload=None)
        return {row.queue: await reserve(None, row.dlq_id) for row in page.dead_letters}

    async def has_caught_up(self, queue: str) -> bool:
        assert self.ledger.projection is not None
        end = await self.engine.snapshot(queue, [])
        return await self.ledger.projection.position(queue) == FeedPosition(end.position, end.nonce)

    async def wait_all_caught_up(self) -> None:
        for queue in self.scene.queues:
            await eventually(partial(self.has_caught_up, queue), f"the ledger has all of {queue}")


async def test_projection_and_reconciliation_continue_while_a_node_is_down(outage: OutageRig, tmp_path: Path) -> None:
    """The projector continues, the reconciler restores jobs, replays of dead letters are submitted."""
    async with LedgerRig(outage, tmp_path) as ledger_rig:
        reservations = await ledger_rig.reserve_replays()
        lost = {queue: await ledger_rig.submit(queue) for queue in outage.queues}
        await ledger_rig.wait_all_caught_up()
        outage.kill()
        lost_queue = outage.up_queues[1]
        keys = outage.harness.keys(lost_queue)
        await outage.send_command(lost_queue, "DEL", keys.job(lost[lost_queue]))
        reconciler = Reconciler(ledger_rig.engine, ledger_rig.ledger, outage.queues)
        report = await reconciler.reconcile()
        assert [job.key.job_id for job in report.jobs] == [lost[lost_queue]]
        assert (report.checked, report.restored, list(report.unreachable)) == (2, 1, [outage.down_queue])
        # Without named queues and without a cached list, which is on the dead node.
        fresh = ledger_rig.engine.clone()
        await fresh.open()
        report = await Reconciler(fresh, ledger_rig.ledger).reconcile()
        assert (report.checked, list(report.unreachable)) == (2, [outage.down_queue])
        await fresh.close()
        # The projector continues with the other queues too.
        job_id = await ledger_rig.submit(outage.up_queues[0])
        assert ledger_rig.ledger.projection is not None
        key = JobKey("default", outage.up_queues[0], job_id)
        assert await ledger_rig.ledger.projection.wait_recorded([key], 10_000) == {key}
        replays = ReplaySubmission(ledger_rig.engine, ledger_rig.ledger)
        with pytest.raises(EngineUnavailable):
            await replays.run_once()
        for queue in outage.up_queues:
            assert await ledger_rig.engine.get(queue, [reservations[queue].new_job_id]) != [None]
        unsubmitted = ledger_rig.ledger.operators.unsubmitted_replays
        assert [row.queue for row in await unsubmitted(10)] == [outage.down_queue]
        await outage.heal()
        await eventually(partial(_submit_replays, replays), "the node has recovered")
        assert await unsubmitted(10) == []
        assert await ledger_rig.engine.get(outage.down_queue, [reservations[outage.down_queue].new_job_id]) != [None]


async def _submit_replays(replays: ReplaySubmission) -> bool:
    try:
        return await replays.run_once() > 0
    except EngineUnavailable:
        return False
