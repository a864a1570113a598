"""Further operations and upkeep duties with a ledger."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

from holdfast import Context, Fatal, Holdfast, RequireApproval
from holdfast.core.principal import ALL_TENANTS, Role
from holdfast.core.states import State
from holdfast.errors import Conflict, TransitionInvalid
from holdfast.ledger.port.messages import TriggerHeartbeat
from holdfast.ledger.port.operators import DeadLetterStatus
from holdfast.verification.chaos.operators import resolve_effect
from tests.crash_points.process import Process, retry_call
from tests.crash_points.scenarios.operators import ANN, BOB, wait_dead_letter
from tests.crash_points.scenarios.scenario import (
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

_TENANT = "default"


class OperationsAndUpkeep(Scenario):
    """An operator resolves an effect in doubt, a dead letter is kept, an approval comes too late, a job sleeps, a token
    is revoked, a trigger is paused; a backlog alert is raised, and the ledger prunes what has ended."""

    name = "operations"
    prunes = True
    settings: ClassVar[dict[str, Any]] = {"backlog_alert": 1}

    def tasks(self, app: Holdfast, record: RunRecord) -> None:
        app.guard.rule(
            "unapproved", task="unapproved", then=RequireApproval("it expires", deadline=timedelta(milliseconds=1))
        )

        async def do() -> str:
            record.perform("once")
            raise ConnectionError("no answer")

        @app.task(name="in_doubt")
        async def in_doubt(ctx: Context) -> str:
            return await ctx.effect("once", do)

        @app.task(name="failing")
        async def failing() -> None:
            raise Fatal("boom")

        @app.task(name="sleeping")
        async def sleeping(ctx: Context) -> None:
            await ctx.sleep(1)

        @app.task(name="unapproved")
        async def unapproved() -> None:
            raise AssertionError("ran without an approval")

    async def submit(self, process: Process, record: RunRecord) -> None:
        for task in ("in_doubt", "failing", "sleeping", "unapproved"):
            await submit_until_accepted(process, record, task, task)

    async def resolve_doubt(self, process: Process, record: RunRecord) -> None:
        """An operator resolves the effect once it is in doubt."""
        if await get_state(process, record, "in_doubt") is State.SUSPENDED:
            happened = bool(record.effects["once"])
            await retry_call(lambda: resolve_effect(process.app, _TENANT, "once", done=happened))
            with suppress(TransitionInvalid):
                resume = process.operations.jobs.resume
                await retry_call(partial(resume, ANN, record.accepted["in_doubt"], reason="resolved"))

    async def discard(self, process: Process, record: RunRecord) -> None:
        dead_letter = await wait_dead_letter(process, record, "failing")
        with suppress(Conflict):
            await retry_call(lambda: process.operations.dead_letters.discard(ANN, dead_letter.dlq_id, "of no use"))

    async def keep_dead_letter(self, process: Process, record: RunRecord) -> None:
        dead_letter = await wait_dead_letter(process, record, "failing")
        with suppress(Conflict):
            await retry_call(lambda: process.operations.dead_letters.keep(BOB, dead_letter.dlq_id, "of some use"))

    async def token(self, process: Process, record: RunRecord) -> None:
        create = process.operations.tokens.create
        row, _ = await retry_call(partial(create, ANN, name="robot", role=Role.VIEWER, tenants=[ALL_TENANTS]))
        with suppress(Conflict):
            await retry_call(lambda: process.operations.tokens.revoke(ANN, row.token_id))
        record.notes["token"] = row.token_id

    async def trigger(self, process: Process, record: RunRecord) -> None:
        book, name = process.ledger.triggers, "orders"
        heartbeat = TriggerHeartbeat(name=name, process="p", queue_name=name, adapter="memory", health={}, seen_at_ms=0)
        await retry_call(lambda: book.heartbeat([heartbeat], expire_after_ms=60_000))
        for operation in (process.operations.triggers.pause, process.operations.triggers.resume):
            await retry_call(partial(operation, ANN, name, reason="too many"))
        await retry_call(lambda: book.remove_process("p"))

    async def prune(self, process: Process, record: RunRecord) -> None:
        await retry_call(lambda: process.ledger.prune(0, 100))

    def steps(self) -> Sequence[Step]:
        return (
            self.submit,
            check_backlog,
            work,
            run_upkeep,
            run_upkeep,
            self.resolve_doubt,
            self.discard,
            self.keep_dead_letter,
            self.token,
            self.trigger,
            expire_leases,
            run_upkeep,
            work,
            run_upkeep,
            check_backlog,
            self.prune,
        )

    async def act_as_operator(self, process: Process, record: RunRecord) -> None:
        await self.resolve_doubt(process, record)

    async def check(self, process: Process, record: RunRecord) -> None:
        assert record.effects["once"] == 1
        states = {key: await get_state(process, record, key) for key in record.accepted}
        assert states == {
            "in_doubt": State.SUCCEEDED,
            "failing": State.FAILED,
            "sleeping": State.SUCCEEDED,
            "unapproved": State.CANCELLED,
        }
        assert (await wait_dead_letter(process, record, "failing")).status is DeadLetterStatus.OPEN
        token = await process.ledger.operators.token(record.notes["token"])
        assert token is not None
        assert token.revoked_at is not None
        assert not await process.ledger.triggers.pauses()
        await check_alerts(process, record)
