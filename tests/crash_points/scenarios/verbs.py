"""Every verb of the engine's port by hand."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

from holdfast import Holdfast
from holdfast.core.job import Claim, Envelope, Failure, new_job_ids
from holdfast.core.states import State
from holdfast.core.verdict import Release, RetryLater, Settlement, SettleResult, Succeed
from holdfast.engine.port.operators import QueueControl
from holdfast.errors import ControlChanged, TransitionInvalid, Unavailable
from holdfast.execution.backend import backend_of
from tests.crash_points.process import Process, again
from tests.crash_points.scenarios.scenario import QUEUE, Step, Story, World, keep, later, work
from tests.crash_points.stores import Place


class Verbs(Story):
    """Every verb of the engine's port by hand, asked again with the same arguments when it does not answer."""

    name = "verbs"
    loses_leases = True
    keys = ("now", "delayed", "taken", "urgent", "lost")

    def suits(self, place: Place) -> bool:
        return True

    def tasks(self, app: Holdfast, world: World) -> None:
        @app.task(name="plain")
        async def plain() -> str:
            return "done"

    async def submit(self, process: Process, world: World) -> None:
        ids = world.notes.setdefault("ids", new_job_ids(len(self.keys)))
        now_ms = await again(process.engine.now_ms)
        due = world.notes.setdefault("due", now_ms + 20_000)
        envelopes = [
            Envelope(
                job_id=job_id,
                task="plain",
                payload=b"{}",
                idempotency_key=key,
                run_at_ms=due if key in ("delayed", "taken", "urgent") else 0,
            )
            for key, job_id in zip(self.keys, ids, strict=True)
        ]
        desk = await again(backend_of(process.app).submitter)
        for key, receipt in zip(self.keys, await again(lambda: desk.submit_many(envelopes)), strict=True):
            world.accept(key, receipt.job_id)

    async def take(self, process: Process, world: World) -> None:
        job_id = world.accepted["taken"]
        try:
            claims = [await process.engine.claim_job(process.name, QUEUE, job_id)]
        except TransitionInvalid:
            claims = []
        except Unavailable:
            claims = await again(lambda: process.engine.recover_claims(process.name, [QUEUE], ()))
        await self._renew_and_settle(process, claims)

    async def hold(self, process: Process, world: World) -> None:
        """Claim one job, and die of old age with it, as far as the engine knows."""
        with suppress(Unavailable):
            world.notes["late"] = await process.engine.claim("lost-worker", [QUEUE], 1, 0)

    async def reclaim(self, process: Process, world: World) -> None:
        claims = await self._claims(process, lambda: process.engine.reclaim(process.name, [QUEUE], 10))
        release = [Settlement(claim, Release("given back"), claim.claimed_at_ms) for claim in claims]
        if release:
            await again(lambda: process.engine.settle(release))

    async def late(self, process: Process, world: World) -> None:
        """The lost worker wakes up, and has an end for a job that is not its own any more."""
        late = [Settlement(claim, Succeed(b"late"), claim.claimed_at_ms) for claim in world.notes.get("late", ())]
        if late:
            answers = await again(lambda: process.engine.settle(late))
            assert set(answers) == {SettleResult.STALE}, f"a lost lease has settled: {answers}"

    async def relapse(self, process: Process, world: World) -> None:
        """A worker that slept for longer than its lease gets its own job again: only the second lease counts."""
        engine, slow = process.engine, "slow-worker"
        old = await self._claims(process, lambda: engine.claim(slow, [QUEUE], 1, 0), slow)
        if old:
            await process.place.advance(31_000)
            new = await self._claims(process, lambda: engine.reclaim(slow, [QUEUE], 10), slow, old)
            late = [Settlement(claim, Succeed(b"late"), claim.claimed_at_ms) for claim in old]
            assert await again(lambda: engine.settle(late)) == [SettleResult.STALE], "a lost lease has settled"
            release = [Settlement(claim, Release("given back"), claim.claimed_at_ms) for claim in new]
            assert SettleResult.STALE not in await again(lambda: engine.settle(release))

    async def expedite(self, process: Process, world: World) -> None:
        with suppress(TransitionInvalid):
            await again(lambda: process.engine.expedite(QUEUE, world.accepted["urgent"], actor="ann", reason="now"))

    async def claim(self, process: Process, world: World) -> None:
        claims = await self._claims(process, lambda: process.engine.claim(process.name, [QUEUE], 1, 0))
        failure = Failure("TASK_ERROR", "boom", "ValueError", "")
        settlements = [Settlement(claim, RetryLater(1_000, failure), claim.claimed_at_ms) for claim in claims]
        if settlements:
            answers = await again(lambda: process.engine.settle(settlements))
            assert SettleResult.STALE not in answers, answers

    async def control(self, process: Process, world: World) -> None:
        paused = QueueControl(paused=True)
        for before, after in ((None, paused), (paused, QueueControl())):
            with suppress(ControlChanged):
                await again(partial(process.engine.set_control, QUEUE, after, expected=before))
        assert (await again(lambda: process.engine.get_control(QUEUE))) == QueueControl()

    async def look(self, process: Process, world: World) -> None:
        engine = process.engine
        await again(lambda: engine.stats(QUEUE))
        await again(lambda: engine.workers([QUEUE]))
        await again(lambda: engine.find(QUEUE, [State.QUEUED, State.RETRYING], 10))
        await again(lambda: engine.wait_final(QUEUE, world.accepted["now"], 0))
        await again(lambda: engine.snapshot(QUEUE, list(world.accepted.values())))
        await again(lambda: engine.read_feed(QUEUE, "", 10))

    async def leave(self, process: Process, world: World) -> None:
        await again(lambda: process.engine.deregister_worker("lost-worker", [QUEUE]))

    async def _claims(
        self,
        process: Process,
        call: Callable[[], Awaitable[list[Claim]]],
        worker: str = "",
        known: Sequence[Claim] = (),
    ) -> list[Claim]:
        """As a worker gets them: after a lost reply, first by asking for what it holds."""
        had = {claim.lease for claim in known}
        resume = partial(process.engine.recover_claims, worker or process.name, [QUEUE], had)
        while True:
            try:
                return await call()
            except Unavailable:
                held: list[Claim] = await again(resume)
                if held:
                    return held

    async def _renew_and_settle(self, process: Process, claims: list[Claim]) -> None:
        if not claims:
            return
        leases = [claim.lease for claim in claims]
        lost = await again(lambda: process.engine.renew(leases, leases))
        assert not lost
        settlements = [Settlement(claim, Succeed(b"1"), claim.claimed_at_ms) for claim in claims]
        answers = await again(lambda: process.engine.settle(settlements))
        assert SettleResult.STALE not in answers, answers

    def steps(self) -> Sequence[Step]:
        return (
            self.submit,
            self.take,
            self.expedite,
            keep,
            self.hold,
            self.look,
            self.claim,
            later,
            self.reclaim,
            self.late,
            self.relapse,
            self.control,
            keep,
            self.leave,
            work,
        )
