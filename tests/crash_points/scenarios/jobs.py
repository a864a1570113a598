"""The lifecycle of one job."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from holdfast import Context, Holdfast, Retry
from holdfast.core.states import State
from holdfast.core.verdict import POISON_PILL
from holdfast.effects import Done, NotDone
from holdfast.errors import TransitionInvalid, Unavailable
from tests.crash_points.process import Process, retry_call
from tests.crash_points.scenarios.operators import ANN
from tests.crash_points.scenarios.scenario import (
    QUEUE,
    RunRecord,
    Scenario,
    Step,
    expire_leases,
    get_info,
    get_state,
    run_upkeep,
    submit_until_accepted,
    work,
)
from tests.crash_points.stores import Stores


class Life(Scenario):
    """A job with an idempotency key fails once, is retried, and ends. The same key is the same job throughout."""

    name = "life"

    def supports(self, stores: Stores) -> bool:
        return True

    def tasks(self, app: Holdfast, record: RunRecord) -> None:
        @app.task(retry=Retry(max_retries=20, base=1.0))
        async def order(ctx: Context) -> str:
            if ctx.attempt == 1:
                raise ValueError("the first attempt fails")
            return "done"

    async def submit(self, process: Process, record: RunRecord) -> None:
        await submit_until_accepted(process, record, "order", "one")

    async def repeat(self, process: Process, record: RunRecord) -> None:
        await submit_until_accepted(process, record, "order", "one")

    def steps(self) -> Sequence[Step]:
        return (self.submit, work, run_upkeep, self.repeat, expire_leases, run_upkeep, work, run_upkeep, self.repeat)

    async def check(self, process: Process, record: RunRecord) -> None:
        assert await get_state(process, record, "one") is State.SUCCEEDED


class Effects(Scenario):
    """A step and two effects: one is resolved by its check, one waits for an operator."""

    name = "effects"

    def tasks(self, app: Holdfast, record: RunRecord) -> None:
        def check_done(key: str) -> Any:
            return Done("did checked") if record.effects["checked"] else NotDone()

        async def do(key: str) -> str:
            return record.perform(key)

        async def draft() -> str:
            return "draft"

        @app.task(retry=Retry(max_retries=20, base=1.0))
        async def publish(ctx: Context) -> str:
            await ctx.step("draft", draft)
            await ctx.effect.options(in_doubt=check_done)("checked", do, "checked")
            if ctx.attempt == 1:
                raise ValueError("after the first effect")
            return await ctx.effect("once", do, "once")

    async def submit(self, process: Process, record: RunRecord) -> None:
        await submit_until_accepted(process, record, "publish", "one")

    def steps(self) -> Sequence[Step]:
        return (self.submit, work, run_upkeep, expire_leases, run_upkeep, work, run_upkeep)

    async def act_as_operator(self, process: Process, record: RunRecord) -> None:
        if await get_state(process, record, "one") is State.SUSPENDED:
            # The effect is in doubt. An operator discards the job.
            with suppress(TransitionInvalid):
                await retry_call(
                    lambda: process.operations.jobs.discard(ANN, record.accepted["one"], reason="in doubt")
                )

    async def check(self, process: Process, record: RunRecord) -> None:
        assert record.effects["checked"] == 1
        if await get_state(process, record, "one") is State.SUCCEEDED:
            assert record.effects["once"] == 1


class Pending(Life):
    """As `Life`, with retries that wait in the pending list."""

    name = "pending"
    settings: ClassVar[dict[str, Any]] = {"retry_via": {QUEUE: "pending"}, "reclaim_idle_s": 20}


class Poison(Scenario):
    """A job has crashed two workers: it becomes a dead letter and is never run again."""

    name = "poison"
    loses_leases = True
    settings: ClassVar[dict[str, Any]] = {"max_deliveries": 1}

    def supports(self, stores: Stores) -> bool:
        return True

    def tasks(self, app: Holdfast, record: RunRecord) -> None:
        @app.task(name="plain")
        async def plain() -> None:
            raise AssertionError("the poison pill was run again")

    async def submit(self, process: Process, record: RunRecord) -> None:
        await submit_until_accepted(process, record, "plain", "pill")

    async def first(self, process: Process, record: RunRecord) -> None:
        await self._lose_lease(process, record, "first", lambda: process.engine.claim("first", [QUEUE], 1, 0))

    async def second(self, process: Process, record: RunRecord) -> None:
        await self._lose_lease(process, record, "second", lambda: process.engine.reclaim("second", [QUEUE], 1))

    async def _lose_lease(
        self, process: Process, record: RunRecord, worker: str, claim: Callable[[], Awaitable[Any]]
    ) -> None:
        while (await get_info(process, record, "pill")).worker != worker:
            with suppress(Unavailable):
                await claim()

    def steps(self) -> Sequence[Step]:
        return (self.submit, self.first, expire_leases, self.second, expire_leases, work, run_upkeep)

    async def check(self, process: Process, record: RunRecord) -> None:
        info = await get_info(process, record, "pill")
        assert info.state is State.FAILED
        assert info.failure is not None
        assert info.failure.code == POISON_PILL
