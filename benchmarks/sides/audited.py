"""holdfast with a ledger, as a user runs it: a worker projects by itself, unless `holdfast upkeep` does it."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from benchmarks.board import Gauge
from benchmarks.sides.channel import ARGUMENT, Answer, Spec, in_parallel, main, serve, timed
from benchmarks.sides.ours import Producer, Tasks, Work
from benchmarks.usage import cpu_s, resident_bytes
from holdfast import Context
from holdfast.cli.lifecycle import freeze_gc
from holdfast.core.job import MAX_BATCH, Claim
from holdfast.core.verdict import Settlement, Succeed
from holdfast.execution.backend import backend_of
from holdfast.upkeep.upkeep import Upkeep

#: As in `benchmarks.audit`, which a child has no need to load.
_NO_UPKEEP: Final = "no-upkeep"
_QUEUE: Final = "default"
_STEP_S: Final = 0.005
_CLAIM_WAIT_MS: Final = 1_000


class Submitting(Producer):
    """Submits: also durably, at a steady rate, and whole feeds."""

    def __init__(self, tasks: AuditedTasks) -> None:
        super().__init__(tasks)
        self._durable = tasks.noop.options(durable=True)
        self._pay = tasks.pay

    async def durable(self, jobs: int, callers: int) -> Answer:
        """Many callers at once, each waits until the ledger has its job."""
        late_ms: list[float] = []

        async def submit() -> None:
            began = time.perf_counter()
            await self._durable.submit(ARGUMENT)
            late_ms.append((time.perf_counter() - began) * 1e3)

        with timed(jobs) as answer:
            await in_parallel(callers, jobs, submit)
        return {**answer, "late_ms": sorted(late_ms)}

    async def steady(self, per_s: int, seconds: float) -> Answer:
        """A steady rate of jobs, in small bulks."""
        began, sent = time.perf_counter(), 0
        while (passed := time.perf_counter() - began) < seconds:
            if (count := int(passed * per_s) - sent) > 0:
                await self._noop.submit_many((ARGUMENT,) for _ in range(count))
                sent += count
            await asyncio.sleep(_STEP_S)
        return {"jobs": sent, "rate": sent / passed}

    async def pays(self, jobs: int) -> Answer:
        """Jobs with one effect each."""
        await self._pay.submit_many((number,) for number in range(jobs))
        return {}

    async def lives(self, jobs: int, created: int, run: int) -> Answer:
        """Write whole histories to the feed: jobs are created in batches, then claimed and settled in batches."""
        for start in range(0, jobs, created):
            count = min(created, jobs - start)
            await self._noop.submit_many((ARGUMENT,) for _ in range(count))
            for begun in range(0, count, run):
                claims = await self._claim(min(run, count - begun))
                for first in range(0, len(claims), MAX_BATCH):
                    await self._settle(claims[first : first + MAX_BATCH])
        await self._engine.deregister_worker("bench", [_QUEUE])
        return {}

    async def _claim(self, count: int) -> list[Claim]:
        claims: list[Claim] = []
        while len(claims) < count:
            limit = min(MAX_BATCH, count - len(claims))
            claims += await self._engine.claim("bench", [_QUEUE], limit, _CLAIM_WAIT_MS)
        return claims

    async def _settle(self, claims: list[Claim]) -> None:
        now_ms = int(time.time() * 1000)
        await self._engine.settle([Settlement(claim, Succeed(b"1"), now_ms) for claim in claims])


class AuditedTasks(Tasks):
    """One task more, with an effect."""

    def __init__(self, spec: Spec, gauge: Gauge | None = None) -> None:
        super().__init__(spec, gauge)
        self._gauge = gauge
        self.pay = self.app.task(name="pay")(self._pay)

    async def _pay(self, context: Context, number: int) -> str:
        receipt: str = await context.effect(f"pay-{context.job_id}", _charge, number)
        if self._gauge is not None:
            self._gauge.tick()
        return receipt


async def _charge(number: int) -> str:
    return f"receipt-{number}"


async def produce(spec: Spec) -> None:
    """The role of a submitting process."""
    tasks = AuditedTasks(spec)
    async with tasks.app:
        role = Submitting(tasks)
        await serve(
            {
                "bulk": role.bulk,
                "durable": role.durable,
                "steady": role.steady,
                "pays": role.pays,
                "lives": role.lives,
            }
        )


async def work(spec: Spec) -> None:
    """The role of a worker process."""
    gauge = Gauge(spec.board_path, spec.row)
    tasks = AuditedTasks(spec, gauge)
    async with tasks.app:
        role = Work(tasks, gauge, upkeep=spec.flavour != _NO_UPKEEP)
        await serve({"start": role.start, "report": role.report})
        await role.stop()


async def keep(spec: Spec) -> None:
    """The role of `holdfast upkeep`."""
    tasks = AuditedTasks(spec)
    running: list[asyncio.Task[None]] = []
    async with tasks.app:
        keeper = Upkeep(tasks.app.engine, [_QUEUE], tasks.app.settings, backend_of(tasks.app).ledger)
        began_s = 0.0

        async def start(limit: int | None) -> Answer:
            nonlocal began_s
            # As `holdfast upkeep` does.
            freeze_gc()
            began_s = cpu_s()
            running.append(asyncio.create_task(keeper.run()))
            return {}

        async def report() -> Answer:
            return {"cpu_s": cpu_s() - began_s, "rss": resident_bytes()}

        await serve({"start": start, "report": report})
        keeper.stop()
        await asyncio.gather(*running)


if __name__ == "__main__":
    main({"produce": produce, "work": work, "keep": keep})
