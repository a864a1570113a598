"""People's answers: who may give them, what they are bound to, and what becomes of the job."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from holdfast import Approval, Context, Holdfast, Job, RequireApproval, State
from holdfast.core.principal import Role
from holdfast.core.verdict import CANCELLED
from holdfast.errors import ApprovalVoid, Conflict, Forbidden, JobCancelled, JobFailed, NoLedger, NotFound
from holdfast.execution.backend import backend_of
from holdfast.ledger.port.operators import ApprovalStatus
from holdfast.operations.approvals import ApprovalOperations
from holdfast.operations.operations import Operations
from tests.guard import process_tasks
from tests.guard.conftest import MakeApp
from tests.guard.support import ANN, BOB, CYD, change_in_store, events, person, question, vote
from tests.worker.support import eventually, working

APPROVED, REJECTED = ApprovalStatus.APPROVED, ApprovalStatus.REJECTED
EXPIRED, WITHDRAWN = ApprovalStatus.EXPIRED, ApprovalStatus.WITHDRAWN


class Bank:
    """Payments of more than 100 take a person's yes."""

    def __init__(self, app: Holdfast, **ask: Any) -> None:
        self.app = app
        self.paid: list[int] = []
        app.guard.rule("large", when=lambda args: args["amount"] > 100, then=RequireApproval("much money", **ask))

        @app.task
        async def pay(amount: int) -> str:
            self.paid.append(amount)
            return f"paid {amount}"

        self.pay = pay

    async def ask(self, amount: int = 101, **options: Any) -> Job[str]:
        return await self.pay.options(**options).submit(amount)


# A guard's question -----------------------------------------------------------------------------------


async def test_a_yes_lets_the_job_run(app: Holdfast) -> None:
    bank = Bank(app)
    async with working(app):
        job = await bank.ask()
        row = await question(app, job)
        assert (row.job_type, row.policies, row.reason, row.quorum) == ("pay", ("large",), "much money", 1)
        assert (row.name, row.details, row.deadline, row.votes) == ("", None, None, ())
        assert bank.paid == []
        decided = await vote(app, ANN, row.approval_id, reason="fine with me")
        assert (decided.status, decided.decided_by, decided.decision_reason) == (APPROVED, "ann", "fine with me")
        assert await job.result(60) == "paid 101"
        told = await events(app, job)
    assert told == ["approval.requested", "approval.approved", "task.claimed", "task.succeeded"]
    log = (await app.ledger.queries.audit_log()).entries
    assert [(line.type, line.actor, line.target_id) for line in log] == [("operator.approve", "ann", row.approval_id)]


async def test_a_no_cancels_the_job(app: Holdfast) -> None:
    bank = Bank(app)
    async with working(app):
        job = await bank.ask()
        row = await question(app, job)
        assert (await vote(app, ANN, row.approval_id, approve=False, reason="no way")).status is REJECTED
        with pytest.raises(JobCancelled, match="no way"):
            await job.result(60)
        assert await events(app, job) == ["approval.requested", "approval.rejected"]
    assert bank.paid == []


async def test_nobody_answers_in_time(app: Holdfast) -> None:
    bank = Bank(app, deadline=timedelta(milliseconds=300))
    async with working(app):
        job = await bank.ask()
        with pytest.raises(JobCancelled):
            await job.result(60)
        row = await question(app, job, EXPIRED)
        with pytest.raises(Conflict, match="expired"):
            await vote(app, ANN, row.approval_id)
        assert await events(app, job) == ["approval.requested", "approval.expired"]
    assert bank.paid == []


async def test_a_vote_after_the_deadline_is_too_late_even_before_upkeep_has_looked(app: Holdfast) -> None:
    bank = Bank(app, deadline=timedelta(milliseconds=300))
    async with working(app, upkeep=app.settings.ledger is not None) as _:
        job = await bank.ask()
        row = await question(app, job)

        async def is_late() -> bool:
            assert row.deadline is not None
            return await app.engine.now_ms() > row.deadline.timestamp() * 1000

        await eventually(is_late, "the deadline")
        with pytest.raises(Conflict, match="expired"):
            await vote(app, ANN, row.approval_id)
        await Operations.for_app(app).approvals.expire(10)
        await Operations.for_app(app).approvals.deliver_pending(10)
        with pytest.raises(JobCancelled):
            await job.result(60)


async def test_a_quorum_is_of_different_people(app: Holdfast) -> None:
    bank = Bank(app, quorum=2)
    async with working(app):
        job = await bank.ask()
        row = await question(app, job)
        assert (await vote(app, ANN, row.approval_id)).status is ApprovalStatus.REQUESTED
        with pytest.raises(Conflict, match="ann has already voted"):
            await vote(app, ANN, row.approval_id)
        # One name is one person, whatever else the token says.
        with pytest.raises(Conflict):
            await vote(app, person("ann", Role.ADMIN), row.approval_id)
        assert await job.state() is State.WAITING_APPROVAL
        decided = await vote(app, BOB, row.approval_id)
        assert (decided.status, [each.voter for each in decided.votes]) == (APPROVED, ["ann", "bob"])
        assert await job.result(60) == "paid 101"
        with pytest.raises(Conflict, match="already approved"):
            await vote(app, CYD, row.approval_id)


async def test_one_no_is_enough_and_stands(app: Holdfast) -> None:
    bank = Bank(app, quorum=2)
    async with working(app):
        job = await bank.ask()
        row = await question(app, job)
        await vote(app, ANN, row.approval_id)
        await vote(app, BOB, row.approval_id, approve=False)
        for late in (True, False):
            with pytest.raises(Conflict, match="already rejected"):
                await vote(app, CYD, row.approval_id, approve=late)
        with pytest.raises(JobCancelled):
            await job.result(60)


async def test_of_two_at_once_one_decides(app: Holdfast) -> None:
    bank = Bank(app)
    async with working(app):
        for _ in range(5):
            job = await bank.ask()
            row = await question(app, job)
            answers = await asyncio.gather(
                vote(app, ANN, row.approval_id),
                vote(app, BOB, row.approval_id, approve=False),
                return_exceptions=True,
            )
            (decided,) = [answer for answer in answers if not isinstance(answer, BaseException)]
            (refused,) = [answer for answer in answers if isinstance(answer, BaseException)]
            assert isinstance(refused, Conflict)
            (ended,) = await asyncio.gather(job.result(60), return_exceptions=True)
            assert (ended == "paid 101") is (decided.status is APPROVED)


# Who may ---------------------------------------------------------------------------------------------


async def test_who_may_not_answer(app: Holdfast) -> None:
    bank = Bank(app)
    async with working(app):
        job = await bank.ask(tenant_id="acme")
        row = await question(app, job)
        for role in (Role.VIEWER, Role.OPERATOR):
            with pytest.raises(Forbidden, match="may not approve"):
                await vote(app, person("dan", role), row.approval_id)
        with pytest.raises(Forbidden, match="token"):
            await vote(app, person("local:dan", Role.ADMIN, proven=False), row.approval_id)
        stranger = person("eve", Role.ADMIN, "globex")
        with pytest.raises(NotFound):
            await vote(app, stranger, row.approval_id)
        with pytest.raises(NotFound):
            await Operations.for_app(app).approvals.show(stranger, row.approval_id)
        assert (await Operations.for_app(app).approvals.list(stranger)).approvals == []
        with pytest.raises(NotFound):
            await vote(app, ANN, "no-such-approval")
        assert (await question(app, job)).votes == ()
        neighbour = person("fay", Role.APPROVER, "acme")
        assert (await Operations.for_app(app).approvals.show(neighbour, row.approval_id)).approval == row
        assert (await vote(app, neighbour, row.approval_id)).status is APPROVED


async def test_who_submitted_it_may_not_approve_it(app: Holdfast) -> None:
    from holdfast.core.job import Envelope, Meta, new_job_ids

    bank = Bank(app)
    async with working(app):
        envelope = Envelope(
            job_id=new_job_ids(1)[0], task="pay", payload=b'{"amount":200}', meta=Meta(submitted_by="ann")
        )
        receipt = await (await backend_of(app).submitter()).submit(envelope)
        row = await question(app, app.job(receipt.job_id))
        assert row.requested_by == "ann"
        with pytest.raises(Forbidden, match="another person"):
            await vote(app, ANN, row.approval_id)
        assert (await vote(app, BOB, row.approval_id)).status is APPROVED
        await eventually(lambda: bank.paid == [200], "the payment")


async def test_what_is_shown(app: Holdfast) -> None:
    bank = Bank(app)
    async with working(app):
        job = await bank.ask()
        row = await question(app, job)
        sheet = await Operations.for_app(app).approvals.show(person("dan", Role.VIEWER), row.approval_id)
        assert sheet.job is not None
        assert sheet.job.payload.value == {"amount": 101}
        assert [event.type for event in sheet.events] == ["approval.requested"]


# What an answer is bound to ----------------------------------------------------------------------------


async def test_a_changed_payload_voids_the_approval(app: Holdfast) -> None:
    bank = Bank(app)
    async with working(app):
        job = await bank.ask()
        row = await question(app, job)
        await change_in_store(app, job, "101", "999")
        with pytest.raises(ApprovalVoid, match="payload was changed"):
            await vote(app, ANN, row.approval_id)
        assert (await question(app, job, WITHDRAWN)).approval_id == row.approval_id
        # The guard sees what would run now, and asks for that.
        again = await question(app, job)
        assert again.payload_hash != row.payload_hash
        assert bank.paid == []
        with pytest.raises(Conflict, match="withdrawn"):
            await vote(app, ANN, row.approval_id)
        await vote(app, ANN, again.approval_id)
        assert await job.result(60) == "paid 999"
        told = await events(app, job)
    assert told == [
        "approval.requested",
        "approval.withdrawn",
        "task.claimed",
        "approval.requested",
        "approval.approved",
        "task.claimed",
        "task.succeeded",
    ]


async def test_a_payload_that_is_changed_after_the_yes_is_asked_about_again(app: Holdfast) -> None:
    bank = Bank(app)
    async with working(app):
        job = await bank.ask(delay=3600)
        row = await question(app, job)
        await vote(app, ANN, row.approval_id)
        assert (await job.info()).meta.approved_hash == row.payload_hash
        await change_in_store(app, job, "101", "999")
        await app.engine.expedite(job.queue, job.id, actor="test", reason="now")
        again = await question(app, job)
        assert bank.paid == []
        await vote(app, BOB, again.approval_id)
        assert await job.result(60) == "paid 999"


async def test_a_changed_payload_may_be_harmless(app: Holdfast) -> None:
    bank = Bank(app)
    async with working(app):
        job = await bank.ask()
        row = await question(app, job)
        await change_in_store(app, job, "101", "001".replace("00", "  "))
        with pytest.raises(ApprovalVoid):
            await vote(app, ANN, row.approval_id)
        assert await job.result(60) == "paid 1"


async def test_a_no_is_for_whatever_the_job_may_be(app: Holdfast) -> None:
    bank = Bank(app)
    async with working(app):
        job = await bank.ask()
        row = await question(app, job)
        await change_in_store(app, job, "101", "999")
        assert (await vote(app, ANN, row.approval_id, approve=False)).status is REJECTED
        with pytest.raises(JobCancelled):
            await job.result(60)
    assert bank.paid == []


async def test_a_cleared_job_that_was_changed_does_not_run_where_no_guard_is(
    stores: dict[str, Any], make_app: MakeApp
) -> None:
    """The worker's code may be older than the submitter's: what was cleared is still what may run, and no more."""
    bank, blind = Bank(make_app(**stores)), make_app(**stores)
    paid: list[int] = []

    @blind.task
    async def pay(amount: int) -> None:
        paid.append(amount)

    job = await bank.pay.options(delay=3600).submit(100)
    assert (await job.info()).meta.approved_hash
    await change_in_store(bank.app, job, "100", "999")
    await blind.open()
    await blind.engine.expedite(job.queue, job.id, actor="test", reason="now")
    async with working(blind):
        with pytest.raises(JobFailed, match="not the one that was cleared"):
            await job.result(60)
    assert paid == []


# A job that leaves in another way ------------------------------------------------------------------------


async def test_a_job_that_is_cancelled_while_it_waits(app: Holdfast) -> None:
    bank = Bank(app)
    async with working(app):
        job = await bank.ask()
        row = await question(app, job)
        await job.cancel("not needed", actor="ops")
        assert (await question(app, job, WITHDRAWN)).approval_id == row.approval_id
        with pytest.raises(Conflict):
            await vote(app, ANN, row.approval_id)
        with pytest.raises(JobCancelled) as caught:
            await job.result(60)
        assert caught.value.error_code == CANCELLED
    assert bank.paid == []


# A task's own question -------------------------------------------------------------------------------------


async def test_a_task_asks_in_the_middle_of_its_run(app: Holdfast) -> None:
    drafts: list[str] = []

    async def write(topic: str) -> str:
        drafts.append(topic)
        return f"all about {topic}, draft {len(drafts)}"

    @app.task
    async def publish(ctx: Context, topic: str) -> str:
        draft = await ctx.step("draft", write, topic)
        consent = await ctx.approval("publish", {"draft": draft}, reason="it is public", quorum=2, deadline=3600)
        await ctx.step("after", write, "the yes")
        return f"{draft}, by {'+'.join(consent.by)}"

    async with working(app, concurrency=1) as worker:
        job = await publish.submit("whales")
        row = await question(app, job)
        assert (row.name, row.reason, row.quorum) == ("publish", "it is public", 2)
        assert row.details == {"draft": "all about whales, draft 1"}
        assert row.deadline is not None
        assert timedelta(minutes=59) < row.deadline - row.requested_at < timedelta(minutes=61)
        # The worker was given back: its only slot is free.
        await eventually(lambda: worker.in_flight == 0, "the worker to let go")
        await vote(app, ANN, row.approval_id)
        await vote(app, BOB, row.approval_id)
        assert await job.result(60) == "all about whales, draft 1, by ann+bob"
    assert drafts == ["whales", "the yes"]
    view = await job.info()
    assert view.meta.retry_count == 0


async def test_a_task_learns_who_said_yes_and_why(app: Holdfast) -> None:
    @app.task
    async def ask(ctx: Context) -> Approval:
        return await ctx.approval("ship it")

    async with working(app):
        job = await ask.submit()
        row = await question(app, job)
        await vote(app, ANN, row.approval_id, reason="tested")
        consent = await job.result(60)
        assert isinstance(consent, Approval)
        assert (consent.approval_id, consent.by, consent.reason) == (row.approval_id, ("ann",), "tested")
        assert abs(consent.at_ms - await app.engine.now_ms()) < 60_000


async def test_several_questions_one_after_the_other(app: Holdfast) -> None:
    @app.task
    async def ask(ctx: Context) -> list[str]:
        first = await ctx.approval("first")
        second = await ctx.approval("second")
        again = await ctx.approval("first")
        assert again == first
        return [*first.by, *second.by]

    async with working(app):
        job = await ask.submit()
        for who in (ANN, BOB):
            row = await question(app, job)
            await vote(app, who, row.approval_id)
        assert await job.result(60) == ["ann", "bob"]


async def test_a_yes_is_for_the_details_that_were_shown(app: Holdfast) -> None:
    shown: list[int] = []

    @app.task
    async def ask(ctx: Context) -> str:
        # Not in a step: it is another one in every run but the third.
        shown.append(min(len(shown), 2))
        return (await ctx.approval("transfer", {"amount": shown[-1]})).by[0]

    async with working(app):
        job = await ask.submit()
        for who in (ANN, BOB, CYD):
            row = await question(app, job)
            await vote(app, who, row.approval_id)
        assert await job.result(60) == "cyd"
    assert shown == [0, 1, 2, 2]


async def test_a_decision_that_is_delivered_late_does_not_answer_the_next_request(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes deliver it at once: one has looked before the job went on, and moves after it asked again."""

    @app.task
    async def ask(ctx: Context) -> str:
        return (await ctx.approval("transfer", {"attempt": ctx.attempt})).by[0]

    async with working(app) as worker:
        job = await ask.submit()
        first = await question(app, job)
        seen = await app.engine.get(job.queue, [job.id])
        await vote(app, ANN, first.approval_id)
        second = await question(app, job)
        assert second.approval_id != first.approval_id
        decided = await app.ledger.queries.approval(None, first.approval_id)
        runs = worker.finished

        async def get_stale(*_: object) -> Any:
            return seen

        with monkeypatch.context() as patched:
            patched.setattr(app.engine, "get", get_stale)
            await ApprovalOperations(app.engine, backend_of(app).ledger)._deliver(decided)  # type: ignore[arg-type]
        view = await job.info()
        assert (view.state, view.meta.approval_request and view.meta.approval_request.approval_id) == (
            State.WAITING_APPROVAL,
            second.approval_id,
        )
        assert worker.finished == runs


async def test_a_no_and_a_deadline_end_a_run_for_good(app: Holdfast) -> None:
    runs: list[str] = []

    @app.task
    async def ask(ctx: Context, deadline: float | None) -> None:
        runs.append("ran")
        await ctx.approval("sure?", deadline=deadline)
        runs.append("went on")

    async with working(app):
        late, refused = await ask.submit(0.3), await ask.submit(None)
        await vote(app, ANN, (await question(app, refused)).approval_id, approve=False, reason="no")
        for job in (late, refused):
            with pytest.raises(JobCancelled):
                await job.result(60)
        assert (await events(app, late))[-1] == "approval.expired"
        assert (await events(app, refused))[-1] == "approval.rejected"
    assert runs == ["ran", "ran"]


async def test_a_plain_function_asks_from_its_thread(app: Holdfast) -> None:
    @app.task
    def ask(ctx: Context, what: str) -> str:
        try:
            return ctx.blocking.approval("thread", {"what": what}).by[0]
        except Exception:  # noqa: BLE001 - what tasks do
            return "swallowed"

    async with working(app):
        job = await ask.submit("x")
        row = await question(app, job)
        assert row.details == {"what": "x"}
        await vote(app, BOB, row.approval_id)
        assert await job.result(60) == "bob"


@pytest.mark.parametrize("task", ["asks_in_child", "awaits_in_child"])
async def test_a_child_process_asks(stores: dict[str, Any], task: str) -> None:
    app = process_tasks.app
    # The module's own app: an earlier test may have left it a ledger.
    app.configure(**({"ledger": ""} | stores))
    try:
        async with working(app):
            job = await app.tasks[task].submit("x")
            row = await question(app, job)
            assert (row.name, row.details) == ("child", {"what": "x"})
            await vote(app, CYD, row.approval_id)
            assert await job.result(60) == "cyd"
    finally:
        await app.close()


async def test_a_question_that_cannot_be_asked_is_an_error_of_the_task(app: Holdfast) -> None:
    @app.task
    async def ask(ctx: Context, wrong: str) -> None:
        match wrong:
            case "name":
                await ctx.approval("")
            case "quorum":
                await ctx.approval("x", quorum=0)
            case "deadline":
                await ctx.approval("x", deadline=-1)
            case "details":
                await ctx.approval("x", object())
            case "large":
                await ctx.approval("x", "x" * 70_000)
            case "nested":
                await ctx.step("step", ctx.approval, "x")

    async with working(app):
        for wrong in ("name", "quorum", "deadline", "details", "large", "nested"):
            with pytest.raises(JobFailed) as caught:
                await (await ask.submit(wrong)).result(60)
            assert caught.value.error_code == "TASK_FATAL", wrong


async def test_questions_at_the_same_time_are_asked_one_by_one(app: Holdfast) -> None:
    @app.task
    async def ask(ctx: Context) -> list[str]:
        async def one(name: str) -> str:
            return (await ctx.approval(name)).by[0]

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(name)) for name in ("left", "right")]
        return [task.result() for task in tasks]

    async with working(app):
        job = await ask.submit()
        for who in (ANN, BOB):
            row = await question(app, job)
            await vote(app, who, row.approval_id)
        assert await job.result(60) == ["ann", "bob"]


async def test_without_a_ledger_a_task_cannot_ask(lonely: Holdfast) -> None:
    @lonely.task
    async def ask(ctx: Context) -> None:
        await ctx.approval("sure?")

    async with working(lonely):
        with pytest.raises(JobFailed) as caught:
            await (await ask.submit()).result(60)
    assert caught.value.error_code == NoLedger.code
    with pytest.raises(NoLedger):
        _ = Operations.for_app(lonely).approvals
