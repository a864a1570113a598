"""Votes on approval requests: permissions, what a decision covers, and the resulting moves of the job."""

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
from tests.guard.support import ANN, BOB, CYD, change_in_store, event_types, principal, vote, wait_approval
from tests.worker.support import eventually, working

APPROVED, REJECTED = ApprovalStatus.APPROVED, ApprovalStatus.REJECTED
EXPIRED, WITHDRAWN = ApprovalStatus.EXPIRED, ApprovalStatus.WITHDRAWN


class Bank:
    """Payments of more than 100 need approval."""

    def __init__(self, app: Holdfast, **terms: Any) -> None:
        self.app = app
        self.paid: list[int] = []
        app.guard.rule("large", when=lambda args: args["amount"] > 100, then=RequireApproval("much money", **terms))

        @app.task
        async def pay(amount: int) -> str:
            self.paid.append(amount)
            return f"paid {amount}"

        self.pay = pay

    async def submit(self, amount: int = 101, **options: Any) -> Job[str]:
        return await self.pay.options(**options).submit(amount)


# Requests by guards -----------------------------------------------------------------------------------


async def test_an_approved_job_runs(app: Holdfast) -> None:
    bank = Bank(app)
    async with working(app):
        job = await bank.submit()
        row = await wait_approval(app, job)
        assert (row.job_type, row.policies, row.reason, row.quorum) == ("pay", ("large",), "much money", 1)
        assert (row.name, row.details, row.deadline, row.votes) == ("", None, None, ())
        assert bank.paid == []
        decided = await vote(app, ANN, row.approval_id, reason="fine with me")
        assert (decided.status, decided.decided_by, decided.decision_reason) == (APPROVED, "ann", "fine with me")
        assert await job.result(60) == "paid 101"
        types = await event_types(app, job)
    assert types == ["approval.requested", "approval.approved", "task.claimed", "task.succeeded"]
    entries = (await app.ledger.queries.audit_log()).entries
    assert [(entry.type, entry.actor, entry.target_id) for entry in entries] == [
        ("operator.approve", "ann", row.approval_id)
    ]


async def test_a_rejection_cancels_the_job(app: Holdfast) -> None:
    bank = Bank(app)
    async with working(app):
        job = await bank.submit()
        row = await wait_approval(app, job)
        assert (await vote(app, ANN, row.approval_id, approve=False, reason="no way")).status is REJECTED
        with pytest.raises(JobCancelled, match="no way"):
            await job.result(60)
        assert await event_types(app, job) == ["approval.requested", "approval.rejected"]
    assert bank.paid == []


async def test_a_request_past_its_deadline_expires(app: Holdfast) -> None:
    bank = Bank(app, deadline=timedelta(milliseconds=300))
    async with working(app):
        job = await bank.submit()
        with pytest.raises(JobCancelled):
            await job.result(60)
        row = await wait_approval(app, job, EXPIRED)
        with pytest.raises(Conflict, match="expired"):
            await vote(app, ANN, row.approval_id)
        assert await event_types(app, job) == ["approval.requested", "approval.expired"]
    assert bank.paid == []


async def test_a_vote_after_the_deadline_is_refused_before_upkeep_runs(app: Holdfast) -> None:
    bank = Bank(app, deadline=timedelta(milliseconds=300))
    async with working(app, upkeep=app.settings.ledger is not None) as _:
        job = await bank.submit()
        row = await wait_approval(app, job)

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


async def test_a_quorum_needs_different_voters(app: Holdfast) -> None:
    bank = Bank(app, quorum=2)
    async with working(app):
        job = await bank.submit()
        row = await wait_approval(app, job)
        assert (await vote(app, ANN, row.approval_id)).status is ApprovalStatus.REQUESTED
        with pytest.raises(Conflict, match="ann has already voted"):
            await vote(app, ANN, row.approval_id)
        # Voters are distinguished by name only, not by role.
        with pytest.raises(Conflict):
            await vote(app, principal("ann", Role.ADMIN), row.approval_id)
        assert await job.state() is State.WAITING_APPROVAL
        decided = await vote(app, BOB, row.approval_id)
        assert (decided.status, [each.voter for each in decided.votes]) == (APPROVED, ["ann", "bob"])
        assert await job.result(60) == "paid 101"
        with pytest.raises(Conflict, match="already approved"):
            await vote(app, CYD, row.approval_id)


async def test_one_rejection_decides_despite_the_quorum(app: Holdfast) -> None:
    bank = Bank(app, quorum=2)
    async with working(app):
        job = await bank.submit()
        row = await wait_approval(app, job)
        await vote(app, ANN, row.approval_id)
        await vote(app, BOB, row.approval_id, approve=False)
        for approve in (True, False):
            with pytest.raises(Conflict, match="already rejected"):
                await vote(app, CYD, row.approval_id, approve=approve)
        with pytest.raises(JobCancelled):
            await job.result(60)


async def test_one_of_two_concurrent_votes_decides(app: Holdfast) -> None:
    bank = Bank(app)
    async with working(app):
        for _ in range(5):
            job = await bank.submit()
            row = await wait_approval(app, job)
            results = await asyncio.gather(
                vote(app, ANN, row.approval_id),
                vote(app, BOB, row.approval_id, approve=False),
                return_exceptions=True,
            )
            (decided,) = [result for result in results if not isinstance(result, BaseException)]
            (refused,) = [result for result in results if isinstance(result, BaseException)]
            assert isinstance(refused, Conflict)
            (ended,) = await asyncio.gather(job.result(60), return_exceptions=True)
            assert (ended == "paid 101") is (decided.status is APPROVED)


# Permissions -----------------------------------------------------------------------------------------


async def test_votes_need_permission_tenant_and_token(app: Holdfast) -> None:
    bank = Bank(app)
    async with working(app):
        job = await bank.submit(tenant_id="acme")
        row = await wait_approval(app, job)
        for role in (Role.VIEWER, Role.OPERATOR):
            with pytest.raises(Forbidden, match="may not approve"):
                await vote(app, principal("dan", role), row.approval_id)
        with pytest.raises(Forbidden, match="token"):
            await vote(app, principal("local:dan", Role.ADMIN, verified=False), row.approval_id)
        other_tenant = principal("eve", Role.ADMIN, "globex")
        with pytest.raises(NotFound):
            await vote(app, other_tenant, row.approval_id)
        with pytest.raises(NotFound):
            await Operations.for_app(app).approvals.show(other_tenant, row.approval_id)
        assert (await Operations.for_app(app).approvals.list(other_tenant)).approvals == []
        with pytest.raises(NotFound):
            await vote(app, ANN, "no-such-approval")
        assert (await wait_approval(app, job)).votes == ()
        same_tenant = principal("fay", Role.APPROVER, "acme")
        assert (await Operations.for_app(app).approvals.show(same_tenant, row.approval_id)).approval == row
        assert (await vote(app, same_tenant, row.approval_id)).status is APPROVED


async def test_the_submitter_may_not_approve_its_own_job(app: Holdfast) -> None:
    from holdfast.core.job import Envelope, Meta, new_job_ids

    bank = Bank(app)
    async with working(app):
        envelope = Envelope(
            job_id=new_job_ids(1)[0], task="pay", payload=b'{"amount":200}', meta=Meta(submitted_by="ann")
        )
        receipt = await (await backend_of(app).connections.submitter()).submit(envelope)
        row = await wait_approval(app, app.job(receipt.job_id))
        assert row.requested_by == "ann"
        with pytest.raises(Forbidden, match="another person"):
            await vote(app, ANN, row.approval_id)
        assert (await vote(app, BOB, row.approval_id)).status is APPROVED
        await eventually(lambda: bank.paid == [200], "the payment")


async def test_a_request_is_shown_with_its_job_and_events(app: Holdfast) -> None:
    bank = Bank(app)
    async with working(app):
        job = await bank.submit()
        row = await wait_approval(app, job)
        detail = await Operations.for_app(app).approvals.show(principal("dan", Role.VIEWER), row.approval_id)
        assert detail.job is not None
        assert detail.job.payload.value == {"amount": 101}
        assert [event.type for event in detail.events] == ["approval.requested"]


# What a decision covers --------------------------------------------------------------------------------


async def test_a_changed_payload_voids_the_approval(app: Holdfast) -> None:
    bank = Bank(app)
    async with working(app):
        job = await bank.submit()
        row = await wait_approval(app, job)
        await change_in_store(app, job, "101", "999")
        with pytest.raises(ApprovalVoid, match="payload was changed"):
            await vote(app, ANN, row.approval_id)
        assert (await wait_approval(app, job, WITHDRAWN)).approval_id == row.approval_id
        # The guard reviews the changed payload and requests approval for it.
        again = await wait_approval(app, job)
        assert again.payload_hash != row.payload_hash
        assert bank.paid == []
        with pytest.raises(Conflict, match="withdrawn"):
            await vote(app, ANN, row.approval_id)
        await vote(app, ANN, again.approval_id)
        assert await job.result(60) == "paid 999"
        types = await event_types(app, job)
    assert types == [
        "approval.requested",
        "approval.withdrawn",
        "task.claimed",
        "approval.requested",
        "approval.approved",
        "task.claimed",
        "task.succeeded",
    ]


async def test_a_payload_changed_after_approval_needs_a_new_one(app: Holdfast) -> None:
    bank = Bank(app)
    async with working(app):
        job = await bank.submit(delay=3600)
        row = await wait_approval(app, job)
        await vote(app, ANN, row.approval_id)
        assert (await job.info()).meta.approved_hash == row.payload_hash
        await change_in_store(app, job, "101", "999")
        await app.engine.expedite(job.queue, job.id, actor="test", reason="now")
        again = await wait_approval(app, job)
        assert bank.paid == []
        await vote(app, BOB, again.approval_id)
        assert await job.result(60) == "paid 999"


async def test_a_changed_payload_that_needs_no_approval_runs(app: Holdfast) -> None:
    bank = Bank(app)
    async with working(app):
        job = await bank.submit()
        row = await wait_approval(app, job)
        await change_in_store(app, job, "101", "001".replace("00", "  "))
        with pytest.raises(ApprovalVoid):
            await vote(app, ANN, row.approval_id)
        assert await job.result(60) == "paid 1"


async def test_a_rejection_applies_to_a_changed_payload(app: Holdfast) -> None:
    bank = Bank(app)
    async with working(app):
        job = await bank.submit()
        row = await wait_approval(app, job)
        await change_in_store(app, job, "101", "999")
        assert (await vote(app, ANN, row.approval_id, approve=False)).status is REJECTED
        with pytest.raises(JobCancelled):
            await job.result(60)
    assert bank.paid == []


async def test_a_changed_payload_does_not_run_on_a_worker_without_guards(
    stores: dict[str, Any], make_app: MakeApp
) -> None:
    """A worker may run older code without the guard: only the payload that was allowed at submission may run."""
    bank, unguarded = Bank(make_app(**stores)), make_app(**stores)
    paid: list[int] = []

    @unguarded.task
    async def pay(amount: int) -> None:
        paid.append(amount)

    job = await bank.pay.options(delay=3600).submit(100)
    assert (await job.info()).meta.approved_hash
    await change_in_store(bank.app, job, "100", "999")
    await unguarded.open()
    await unguarded.engine.expedite(job.queue, job.id, actor="test", reason="now")
    async with working(unguarded):
        with pytest.raises(JobFailed, match="not the one that was cleared"):
            await job.result(60)
    assert paid == []


# Jobs that stop waiting without a decision ---------------------------------------------------------------


async def test_cancelling_a_waiting_job_withdraws_its_request(app: Holdfast) -> None:
    bank = Bank(app)
    async with working(app):
        job = await bank.submit()
        row = await wait_approval(app, job)
        await job.cancel("not needed", actor="ops")
        assert (await wait_approval(app, job, WITHDRAWN)).approval_id == row.approval_id
        with pytest.raises(Conflict):
            await vote(app, ANN, row.approval_id)
        with pytest.raises(JobCancelled) as caught:
            await job.result(60)
        assert caught.value.error_code == CANCELLED
    assert bank.paid == []


# Requests by tasks -----------------------------------------------------------------------------------------


async def test_a_task_can_request_approval_during_its_run(app: Holdfast) -> None:
    drafts: list[str] = []

    async def write(topic: str) -> str:
        drafts.append(topic)
        return f"all about {topic}, draft {len(drafts)}"

    @app.task
    async def publish(ctx: Context, topic: str) -> str:
        draft = await ctx.step("draft", write, topic)
        approval = await ctx.approval("publish", {"draft": draft}, reason="it is public", quorum=2, deadline=3600)
        await ctx.step("after", write, "the end")
        return f"{draft}, by {'+'.join(approval.by)}"

    async with working(app, concurrency=1) as worker:
        job = await publish.submit("whales")
        row = await wait_approval(app, job)
        assert (row.name, row.reason, row.quorum) == ("publish", "it is public", 2)
        assert row.details == {"draft": "all about whales, draft 1"}
        assert row.deadline is not None
        assert timedelta(minutes=59) < row.deadline - row.requested_at < timedelta(minutes=61)
        # The job does not occupy the worker's only slot while it waits.
        await eventually(lambda: worker.in_flight == 0, "the claim to be released")
        await vote(app, ANN, row.approval_id)
        await vote(app, BOB, row.approval_id)
        assert await job.result(60) == "all about whales, draft 1, by ann+bob"
    assert drafts == ["whales", "the end"]
    info = await job.info()
    assert info.meta.retry_count == 0


async def test_a_task_gets_the_voters_and_the_reason(app: Holdfast) -> None:
    @app.task
    async def needs_approval(ctx: Context) -> Approval:
        return await ctx.approval("ship it")

    async with working(app):
        job = await needs_approval.submit()
        row = await wait_approval(app, job)
        await vote(app, ANN, row.approval_id, reason="tested")
        approval = await job.result(60)
        assert isinstance(approval, Approval)
        assert (approval.approval_id, approval.by, approval.reason) == (row.approval_id, ("ann",), "tested")
        assert abs(approval.at_ms - await app.engine.now_ms()) < 60_000


async def test_a_task_can_request_several_approvals_in_sequence(app: Holdfast) -> None:
    @app.task
    async def needs_approval(ctx: Context) -> list[str]:
        first = await ctx.approval("first")
        second = await ctx.approval("second")
        again = await ctx.approval("first")
        assert again == first
        return [*first.by, *second.by]

    async with working(app):
        job = await needs_approval.submit()
        for voter in (ANN, BOB):
            row = await wait_approval(app, job)
            await vote(app, voter, row.approval_id)
        assert await job.result(60) == ["ann", "bob"]


async def test_an_approval_covers_the_details_of_its_request(app: Holdfast) -> None:
    amounts: list[int] = []

    @app.task
    async def needs_approval(ctx: Context) -> str:
        # Not in a step, so that the first three runs have different amounts.
        amounts.append(min(len(amounts), 2))
        return (await ctx.approval("transfer", {"amount": amounts[-1]})).by[0]

    async with working(app):
        job = await needs_approval.submit()
        for voter in (ANN, BOB, CYD):
            row = await wait_approval(app, job)
            await vote(app, voter, row.approval_id)
        assert await job.result(60) == "cyd"
    assert amounts == [0, 1, 2, 2]


async def test_a_decision_delivered_late_does_not_decide_the_next_request(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes deliver at once: one reads the job before it continues and moves it after its next request."""

    @app.task
    async def needs_approval(ctx: Context) -> str:
        return (await ctx.approval("transfer", {"attempt": ctx.attempt})).by[0]

    async with working(app) as worker:
        job = await needs_approval.submit()
        first = await wait_approval(app, job)
        stale = await app.engine.get(job.queue, [job.id])
        await vote(app, ANN, first.approval_id)
        second = await wait_approval(app, job)
        assert second.approval_id != first.approval_id
        decided = await app.ledger.queries.approval(None, first.approval_id)
        runs = worker.finished

        async def get_stale(*_: object) -> Any:
            return stale

        with monkeypatch.context() as patched:
            patched.setattr(app.engine, "get", get_stale)
            await ApprovalOperations(app.engine, backend_of(app).ledger)._deliver(decided)  # type: ignore[arg-type]
        info = await job.info()
        assert (info.state, info.meta.approval_request and info.meta.approval_request.approval_id) == (
            State.WAITING_APPROVAL,
            second.approval_id,
        )
        assert worker.finished == runs


async def test_a_rejection_and_an_expiry_end_the_job(app: Holdfast) -> None:
    runs: list[str] = []

    @app.task
    async def needs_approval(ctx: Context, deadline: float | None) -> None:
        runs.append("ran")
        await ctx.approval("sure?", deadline=deadline)
        runs.append("continued")

    async with working(app):
        late, refused = await needs_approval.submit(0.3), await needs_approval.submit(None)
        await vote(app, ANN, (await wait_approval(app, refused)).approval_id, approve=False, reason="no")
        for job in (late, refused):
            with pytest.raises(JobCancelled):
                await job.result(60)
        assert (await event_types(app, late))[-1] == "approval.expired"
        assert (await event_types(app, refused))[-1] == "approval.rejected"
    assert runs == ["ran", "ran"]


async def test_a_synchronous_task_can_request_approval(app: Holdfast) -> None:
    @app.task
    def needs_approval(ctx: Context, what: str) -> str:
        try:
            return ctx.blocking.approval("thread", {"what": what}).by[0]
        except Exception:  # noqa: BLE001 - what tasks do
            return "swallowed"

    async with working(app):
        job = await needs_approval.submit("x")
        row = await wait_approval(app, job)
        assert row.details == {"what": "x"}
        await vote(app, BOB, row.approval_id)
        assert await job.result(60) == "bob"


@pytest.mark.parametrize("task", ["approval_in_child", "async_approval_in_child"])
async def test_a_child_process_can_request_approval(stores: dict[str, Any], task: str) -> None:
    app = process_tasks.app
    # The app is a module global: an earlier test may have configured a ledger.
    app.configure(**({"ledger": ""} | stores))
    try:
        async with working(app):
            job = await app.tasks[task].submit("x")
            row = await wait_approval(app, job)
            assert (row.name, row.details) == ("child", {"what": "x"})
            await vote(app, CYD, row.approval_id)
            assert await job.result(60) == "cyd"
    finally:
        await app.close()


async def test_an_invalid_request_fails_the_task(app: Holdfast) -> None:
    @app.task
    async def needs_approval(ctx: Context, wrong: str) -> None:
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
                await (await needs_approval.submit(wrong)).result(60)
            assert caught.value.error_code == "TASK_FATAL", wrong


async def test_concurrent_requests_are_made_one_at_a_time(app: Holdfast) -> None:
    @app.task
    async def needs_approval(ctx: Context) -> list[str]:
        async def one(name: str) -> str:
            return (await ctx.approval(name)).by[0]

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(name)) for name in ("left", "right")]
        return [task.result() for task in tasks]

    async with working(app):
        job = await needs_approval.submit()
        for voter in (ANN, BOB):
            row = await wait_approval(app, job)
            await vote(app, voter, row.approval_id)
        assert await job.result(60) == ["ann", "bob"]


async def test_without_a_ledger_a_task_cannot_request_approval(app_without_ledger: Holdfast) -> None:
    @app_without_ledger.task
    async def needs_approval(ctx: Context) -> None:
        await ctx.approval("sure?")

    async with working(app_without_ledger):
        with pytest.raises(JobFailed) as caught:
            await (await needs_approval.submit()).result(60)
    assert caught.value.error_code == NoLedger.code
    with pytest.raises(NoLedger):
        _ = Operations.for_app(app_without_ledger).approvals
