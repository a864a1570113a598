"""Every method of the engine's port, called directly."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

from holdfast import Holdfast
from holdfast.core.job import Claim, Envelope, Failure, new_job_ids
from holdfast.core.states import State
from holdfast.core.verdict import Release, RetryLater, Settlement, SettleResult, Succeed
from holdfast.engine.port.operators import QueueControl
from holdfast.engine.port.worker_ids import WorkerIdStatus, WorkerStart
from holdfast.errors import ControlChanged, TransitionInvalid, Unavailable
from holdfast.execution.backend import backend_of
from holdfast.upkeep.lost_leases import LostLeases
from tests.crash_points.process import Process, retry_call
from tests.crash_points.scenarios.scenario import QUEUE, RunRecord, Scenario, Step, expire_leases, run_upkeep, work
from tests.crash_points.stores import Stores


class Verbs(Scenario):
    """Every method of the engine's port, called directly, and repeated with the same arguments until it answers."""

    name = "verbs"
    loses_leases = True
    keys = ("now", "delayed", "claimed", "urgent", "lost")

    def supports(self, stores: Stores) -> bool:
        return True

    def tasks(self, app: Holdfast, record: RunRecord) -> None:
        @app.task(name="plain")
        async def plain() -> str:
            return "done"

    async def submit(self, process: Process, record: RunRecord) -> None:
        ids = record.notes.setdefault("ids", new_job_ids(len(self.keys)))
        now_ms = await retry_call(process.engine.now_ms)
        due = record.notes.setdefault("due", now_ms + 20_000)
        envelopes = [
            Envelope(
                job_id=job_id,
                task="plain",
                payload=b"{}",
                idempotency_key=key,
                run_at_ms=due if key in ("delayed", "claimed", "urgent") else 0,
            )
            for key, job_id in zip(self.keys, ids, strict=True)
        ]
        submitter = await retry_call(backend_of(process.app).connections.submitter)
        for key, receipt in zip(self.keys, await retry_call(lambda: submitter.submit_many(envelopes)), strict=True):
            record.accept(key, receipt.job_id)

    async def claim_job(self, process: Process, record: RunRecord) -> None:
        job_id = record.accepted["claimed"]
        try:
            claims = [await process.engine.claim_job(process.name, QUEUE, job_id)]
        except TransitionInvalid:
            claims = []
        except Unavailable:
            claims = await retry_call(lambda: process.engine.recover_claims(process.name, [QUEUE], ()))
        await self._renew_and_settle(process, claims)

    async def lose_lease(self, process: Process, record: RunRecord) -> None:
        """Claim one job with a worker that never settles it."""
        with suppress(Unavailable):
            record.notes["late"] = await process.engine.claim("lost-worker", [QUEUE], 1, 0)

    async def reclaim(self, process: Process, record: RunRecord) -> None:
        claims = await self._claims(process, lambda: process.engine.reclaim(process.name, [QUEUE], 10))
        release = [Settlement(claim, Release("released"), claim.claimed_at_ms) for claim in claims]
        if release:
            await retry_call(lambda: process.engine.settle(release))

    async def settle_late(self, process: Process, record: RunRecord) -> None:
        """The lost worker settles a job whose lease it has lost."""
        late = [Settlement(claim, Succeed(b"late"), claim.claimed_at_ms) for claim in record.notes.get("late", ())]
        if late:
            answers = await retry_call(lambda: process.engine.settle(late))
            assert set(answers) == {SettleResult.STALE}, f"a lost lease has settled: {answers}"

    async def reclaim_own_job(self, process: Process, record: RunRecord) -> None:
        """A worker that missed its deadline reclaims its own job: only the second lease counts."""
        engine, slow = process.engine, "slow-worker"
        old = await self._claims(process, lambda: engine.claim(slow, [QUEUE], 1, 0), slow)
        if old:
            await process.stores.advance(31_000)
            new = await self._claims(process, lambda: engine.reclaim(slow, [QUEUE], 10), slow, old)
            late = [Settlement(claim, Succeed(b"late"), claim.claimed_at_ms) for claim in old]
            assert await retry_call(lambda: engine.settle(late)) == [SettleResult.STALE], "a lost lease has settled"
            release = [Settlement(claim, Release("released"), claim.claimed_at_ms) for claim in new]
            assert SettleResult.STALE not in await retry_call(lambda: engine.settle(release))

    async def end_worker(self, process: Process, record: RunRecord) -> None:
        """A worker ends before its job has started: the lease expires now, and the job is released."""
        engine, dead = process.engine, "dead-worker"
        await self._claims(process, lambda: engine.claim(dead, [QUEUE], 1, 0), dead)
        while await retry_call(lambda: engine.expire_leases(dead, [QUEUE])):
            pass
        lost = LostLeases(engine, process.name, lambda worker, job_id: False)
        try:
            claims = await lost.reclaim([QUEUE], 10)
        except Unavailable:
            found = await retry_call(lambda: engine.recover_claims(process.name, [QUEUE], ()))
            claims = await retry_call(lambda: lost.release_lost(found))
        assert not claims, "a job that had not started is not released"

    async def keep_id(self, process: Process, record: RunRecord) -> None:
        """An id has two starts: the second one has it, although the first one asks again."""
        engine = process.engine

        async def start(worker: str) -> WorkerStart:
            return WorkerStart("id", worker, await retry_call(lambda: engine.next_generation("id", [QUEUE])))

        async def keep(start: WorkerStart) -> WorkerIdStatus:
            status: WorkerIdStatus = await retry_call(lambda: engine.keep_worker_id(start, [QUEUE]))
            return status

        first = record.notes.setdefault("first start", await start("first-start"))
        await keep(first)
        second = await start("second-start")
        assert (await keep(second)).successor == ""
        assert (await keep(first)).successor == second.worker

    async def expedite(self, process: Process, record: RunRecord) -> None:
        with suppress(TransitionInvalid):
            await retry_call(
                lambda: process.engine.expedite(QUEUE, record.accepted["urgent"], actor="ann", reason="now")
            )

    async def claim(self, process: Process, record: RunRecord) -> None:
        claims = await self._claims(process, lambda: process.engine.claim(process.name, [QUEUE], 1, 0))
        failure = Failure("TASK_ERROR", "boom", "ValueError", "")
        settlements = [Settlement(claim, RetryLater(1_000, failure), claim.claimed_at_ms) for claim in claims]
        if settlements:
            answers = await retry_call(lambda: process.engine.settle(settlements))
            assert SettleResult.STALE not in answers, answers

    async def control(self, process: Process, record: RunRecord) -> None:
        paused = QueueControl(paused=True)
        for before, after in ((None, paused), (paused, QueueControl())):
            with suppress(ControlChanged):
                await retry_call(partial(process.engine.set_control, QUEUE, after, expected=before))
        assert (await retry_call(lambda: process.engine.get_control(QUEUE))) == QueueControl()

    async def read(self, process: Process, record: RunRecord) -> None:
        engine = process.engine
        await retry_call(lambda: engine.stats(QUEUE))
        await retry_call(lambda: engine.workers([QUEUE]))
        await retry_call(lambda: engine.find(QUEUE, [State.QUEUED, State.RETRYING], 10))
        await retry_call(lambda: engine.wait_final(QUEUE, record.accepted["now"], 0))
        await retry_call(lambda: engine.snapshot(QUEUE, list(record.accepted.values())))
        await retry_call(lambda: engine.read_feed(QUEUE, "", 10))

    async def deregister(self, process: Process, record: RunRecord) -> None:
        await retry_call(lambda: process.engine.deregister_worker("lost-worker", [QUEUE]))

    async def _claims(
        self,
        process: Process,
        call: Callable[[], Awaitable[list[Claim]]],
        worker: str = "",
        known: Sequence[Claim] = (),
    ) -> list[Claim]:
        """Claim as a worker does: after a lost reply, recover the claims in flight first."""
        known_leases = {claim.lease for claim in known}
        recover = partial(process.engine.recover_claims, worker or process.name, [QUEUE], known_leases)
        while True:
            try:
                return await call()
            except Unavailable:
                recovered: list[Claim] = await retry_call(recover)
                if recovered:
                    return recovered

    async def _renew_and_settle(self, process: Process, claims: list[Claim]) -> None:
        if not claims:
            return
        leases = [claim.lease for claim in claims]
        lost = await retry_call(lambda: process.engine.renew(leases, leases))
        assert not lost
        settlements = [Settlement(claim, Succeed(b"1"), claim.claimed_at_ms) for claim in claims]
        answers = await retry_call(lambda: process.engine.settle(settlements))
        assert SettleResult.STALE not in answers, answers

    def steps(self) -> Sequence[Step]:
        return (
            self.submit,
            self.claim_job,
            self.expedite,
            run_upkeep,
            self.lose_lease,
            self.read,
            self.claim,
            expire_leases,
            self.reclaim,
            self.settle_late,
            self.reclaim_own_job,
            self.end_worker,
            self.keep_id,
            self.control,
            run_upkeep,
            self.deregister,
            work,
        )
