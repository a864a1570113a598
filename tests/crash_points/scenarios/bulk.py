"""Bulk operations on dead letters and suspended jobs, and a refused replay."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

from holdfast import Context, Fatal, Holdfast
from holdfast.core.states import State
from holdfast.errors import IntakeRefused, TransitionInvalid, Unavailable
from holdfast.ledger.port.operators import DeadLetterStatus
from holdfast.ledger.queries.job_list import JobFilter
from holdfast.ledger.queries.operator_filters import AuditFilter, DeadLetterFilter
from tests.crash_points.process import Process, retry_call
from tests.crash_points.scenarios.operators import ANN, BOB, wait_dead_letter
from tests.crash_points.scenarios.scenario import (
    QUEUE,
    RunRecord,
    Scenario,
    Step,
    check_alerts,
    check_backlog,
    expire_leases,
    get_state,
    run_upkeep,
    submit_until_accepted,
    work,
)

_FIXED = DeadLetterFilter(job_type="fixed")
_OBSOLETE = DeadLetterFilter(job_type="obsolete")


class Bulk(Scenario):
    """A replay is refused by a queue whose intake is paused. Then dead letters are replayed and discarded by a filter,
    suspended jobs are resumed and discarded, one job is expedited, and an alert is cleared."""

    name = "bulk"
    settings: ClassVar[dict[str, Any]] = {"backlog_alert": 2}
    failing = ("fixed-1", "fixed-2", "obsolete")
    to_suspend = ("resumed-1", "resumed-2", "discarded")

    def tasks(self, app: Holdfast, record: RunRecord) -> None:
        async def fail(ctx: Context) -> str:
            if ctx.job_id in record.accepted.values():
                raise Fatal("boom")
            return "replayed"

        app.task(name="fixed")(fail)
        app.task(name="obsolete")(fail)

        @app.task(name="plain")
        async def plain() -> str:
            return "done"

    async def submit(self, process: Process, record: RunRecord) -> None:
        for key in self.failing:
            await submit_until_accepted(process, record, key.partition("-")[0], key)
        for key in (*self.to_suspend, "early"):
            await submit_until_accepted(process, record, "plain", key, delay=90)

    async def pause_intake(self, process: Process, record: RunRecord) -> None:
        await self._control(process, intake_paused=True)

    async def replay_refused(self, process: Process, record: RunRecord) -> None:
        """A refused replay must not be submitted later."""
        # Repeated until it was refused: a call may find a store unreachable, or its reply is lost. With a key, a call
        # finds the replay that an interrupted one has reserved.
        while True:
            dead_letter = await wait_dead_letter(process, record, "fixed-1")
            if dead_letter.replay_count and dead_letter.status is DeadLetterStatus.OPEN:
                return
            with suppress(IntakeRefused, Unavailable):
                await process.operations.dead_letters.replay(
                    ANN, dead_letter.dlq_id, reason="fixed", idempotency_key="refused"
                )

    async def resume_intake(self, process: Process, record: RunRecord) -> None:
        await self._control(process, intake_paused=False)

    async def _control(self, process: Process, **changes: Any) -> None:
        change = partial(process.operations.queues.update_control, ANN, QUEUE, reason="flood", verb="intake")
        await retry_call(partial(change, **changes))

    async def replay(self, process: Process, record: RunRecord) -> None:
        await self._all(partial(process.operations.dead_letters.replay_many, ANN, _FIXED, reason="fixed"))

    async def discard(self, process: Process, record: RunRecord) -> None:
        await self._all(partial(process.operations.dead_letters.discard_many, ANN, _OBSOLETE, reason="of no use"))

    async def confirm(self, process: Process, record: RunRecord) -> None:
        await self._all(partial(process.operations.dead_letters.confirm_many, BOB, _OBSOLETE))

    async def _all(self, operation: Any) -> None:
        """Repeat until nothing matches, as an operator does when some could not be done."""
        while (await retry_call(operation)).matched:
            pass

    async def suspend(self, process: Process, record: RunRecord) -> None:
        for key in self.to_suspend:
            with suppress(TransitionInvalid):
                suspend = partial(process.operations.jobs.suspend, ANN, record.accepted[key], reason="wait")
                await retry_call(suspend)

    async def resume(self, process: Process, record: RunRecord) -> None:
        await self._move(process, record, process.operations.suspended.resume, "resumed")

    async def discard_suspended(self, process: Process, record: RunRecord) -> None:
        await self._move(process, record, process.operations.suspended.discard, "discarded")

    async def _move(self, process: Process, record: RunRecord, operation: Any, prefix: str) -> None:
        keys = [key for key in self.to_suspend if key.startswith(prefix)]
        while remaining := [key for key in keys if await get_state(process, record, key) is State.SUSPENDED]:
            with suppress(Unavailable):
                await operation(ANN, [record.accepted[key] for key in remaining], reason="decided")

    async def expedite(self, process: Process, record: RunRecord) -> None:
        with suppress(TransitionInvalid):
            await retry_call(lambda: process.operations.jobs.expedite(ANN, record.accepted["early"], reason="now"))

    def steps(self) -> Sequence[Step]:
        return (
            self.submit,
            check_backlog,
            work,
            work,
            work,
            work,
            run_upkeep,
            run_upkeep,
            self.pause_intake,
            self.replay_refused,
            self.resume_intake,
            self.replay,
            self.discard,
            self.confirm,
            self.suspend,
            self.resume,
            self.discard_suspended,
            self.expedite,
            work,
            work,
            run_upkeep,
            expire_leases,
            work,
            work,
            work,
            run_upkeep,
            check_backlog,
        )

    async def check(self, process: Process, record: RunRecord) -> None:
        for key in self.failing:
            assert await get_state(process, record, key) is State.FAILED
            dead_letter = await wait_dead_letter(process, record, key)
            if key.startswith("fixed"):
                assert dead_letter.replay_count >= 1, dead_letter
            else:
                assert dead_letter.status is DeadLetterStatus.DISCARDED, dead_letter
        states = {key: await get_state(process, record, key) for key in (*self.to_suspend, "early")}
        done, cancelled = State.SUCCEEDED, State.CANCELLED
        assert states == {"resumed-1": done, "resumed-2": done, "discarded": cancelled, "early": done}
        jobs = await process.ledger.queries.jobs(JobFilter(job_type="fixed"), 50, None)
        assert sorted(job.state for job in jobs.jobs) == [State.FAILED, State.FAILED, State.SUCCEEDED, State.SUCCEEDED]
        refused = AuditFilter(types=frozenset({"operator.dlq_replay_refused"}))
        assert len((await process.operations.audit.list(ANN, refused)).entries) == 1, "a refusal is logged once"
        await check_alerts(process, record)
