"""Guards at submission: allowed jobs are marked, jobs that need approval are held, denied jobs are not accepted."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import pytest
from pydantic import BaseModel

from holdfast import Deny, GuardRequest, Holdfast, Job, RequireApproval, State
from holdfast.core.job import EMPTY_META
from holdfast.errors import Denied, GuardFailed, LedgerUnavailable, NoLedger
from holdfast.execution.backend import backend_of
from holdfast.guard.decisions import Decision, payload_hash
from holdfast.testing import inline
from tests.guard.conftest import MakeApp


class Order(BaseModel):
    amount: int
    currency: str = "EUR"


@pytest.fixture
def memory_app(make_app: MakeApp) -> Holdfast:
    """An app in memory, for behaviour that does not depend on the store."""
    return make_app(url="sqlite://")


def define_pay(app: Holdfast) -> Any:
    @app.task
    async def pay(to: str, amount: int = 10) -> str:
        return f"{amount} to {to}"

    return pay


def record_requests(app: Holdfast) -> list[GuardRequest]:
    requests: list[GuardRequest] = []

    @app.guard
    async def recorder(request: GuardRequest) -> Decision | None:
        requests.append(request)
        return None

    return requests


async def test_without_guards_the_job_carries_no_metadata(memory_app: Holdfast) -> None:
    job = await define_pay(memory_app).submit("ann")
    assert (await job.info()).meta == EMPTY_META


async def test_an_allowed_job_carries_the_hash_of_its_payload(app: Holdfast) -> None:
    pay, requests = define_pay(app), record_requests(app)
    job = await pay.options(tenant_id="acme", idempotency_key="k1", context={"user": 7}).submit("ann", amount=3)
    info = await job.info()
    assert info.state is State.QUEUED
    assert info.meta.approved_hash == payload_hash("pay", "acme", info.payload)
    assert requests == [
        GuardRequest(
            task="pay",
            tenant_id="acme",
            queue="default",
            arguments={"to": "ann", "amount": 3},
            payload=info.payload,
            context={"user": 7},
            source="submit",
            submitted_by="",
            idempotency_key="k1",
        )
    ]


async def test_every_submit_method_is_guarded(memory_app: Holdfast) -> None:
    pay, requests = define_pay(memory_app), record_requests(memory_app)
    await pay.submit("a")
    await pay.submit_many([("b",), ("c", 2)])
    await memory_app.submit_raw("pay", b'["d", 4]')
    assert [request.arguments for request in requests] == [
        {"to": "a", "amount": 10},
        {"to": "b", "amount": 10},
        {"to": "c", "amount": 2},
        {"to": "d", "amount": 4},
    ]


def test_the_blocking_submit_is_guarded(memory_app: Holdfast) -> None:
    pay = define_pay(memory_app)
    memory_app.guard.rule("none", then=Deny("closed today"))
    with pytest.raises(Denied, match="closed today"):
        pay.submit_sync("a")
    backend_of(memory_app).portal.close(memory_app.close)


async def test_guards_get_decoded_arguments(memory_app: Holdfast) -> None:
    @memory_app.task
    async def buy(order: Order) -> None: ...

    memory_app.guard.rule("large", task="buy", when=lambda args: args["order"].amount > 1000, then=Deny("too much"))
    await memory_app.submit_raw("buy", b'{"order":{"amount":"999"}}')
    with pytest.raises(Denied, match="too much"):
        await memory_app.submit_raw("buy", b'{"order":{"amount":"1001"}}')


async def test_arguments_of_an_unregistered_task_must_have_names(memory_app: Holdfast) -> None:
    requests = record_requests(memory_app)
    await memory_app.submit_raw("elsewhere", b'{"amount":1}')
    assert requests[0].arguments == {"amount": 1}
    # Without the function's signature, positional arguments have no names for rules to match.
    with pytest.raises(GuardFailed, match="by name"):
        await memory_app.submit_raw("elsewhere", b"[1]")


async def test_a_denial_raises_is_logged_and_is_audited(app: Holdfast, caplog: pytest.LogCaptureFixture) -> None:
    pay = define_pay(app)
    app.guard.rule("small amounts", task="pay", when=lambda args: args["amount"] > 100, then=Deny("too much"))
    app.guard.rule("friends only", tenant="acme", then=Deny("no friend"))
    with caplog.at_level(logging.WARNING, "holdfast.guard"), pytest.raises(Denied) as caught:
        await pay.options(tenant_id="acme").submit("ann", amount=101)
    assert (caught.value.task, caught.value.reasons) == ("pay", ("too much", "no friend"))
    assert caught.value.policies == ("small amounts", "friends only")
    assert "too much" in caplog.text
    assert "ann" not in caplog.text
    assert await app.engine.queues() == []
    page = await app.ledger.queries.audit_log()
    (entry,) = [each for each in page.entries if each.type == "guard.denied"]
    assert (entry.tenant_id, entry.target, entry.target_id) == ("acme", "task", "pay")
    assert entry.reason == "too much; no friend"


async def test_a_denial_does_not_need_the_ledger(
    memory_app: Holdfast, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pay = define_pay(memory_app)
    memory_app.guard.rule("none", then=Deny("no"))
    await memory_app.open()

    async def fail(entries: object) -> None:
        raise LedgerUnavailable("made to fail by the test")

    ledger = backend_of(memory_app).ledger
    assert ledger is not None
    monkeypatch.setattr(ledger.operators, "record_audit", fail)
    with pytest.raises(Denied):
        await pay.submit("ann")
    assert "not recorded in the audit log" in caplog.text


async def test_submit_many_accepts_nothing_if_one_job_is_denied(memory_app: Holdfast) -> None:
    pay = define_pay(memory_app)
    memory_app.guard.rule("small amounts", when=lambda args: args["amount"] > 100, then=Deny("too much"))
    with pytest.raises(Denied):
        await pay.submit_many([("a", 1), ("b", 2), ("c", 101)])
    assert await memory_app.engine.queues() == []
    assert len(await pay.submit_many([("a", 1), ("b", 2)])) == 2


async def test_a_guard_that_raises_accepts_nothing(memory_app: Holdfast) -> None:
    pay = define_pay(memory_app)

    @memory_app.guard
    def broken(request: GuardRequest) -> Decision | None:
        raise RuntimeError("oops")

    with pytest.raises(GuardFailed, match="oops"):
        await pay.submit("ann")
    assert await memory_app.engine.queues() == []


async def test_a_job_that_needs_approval_is_held(app: Holdfast) -> None:
    pay = define_pay(app)
    app.guard.rule("large", when=lambda args: args["amount"] > 100, then=RequireApproval("much money", quorum=2))
    app.guard.rule("urgent", then=RequireApproval("always", deadline=timedelta(hours=1)))
    job = await pay.submit("ann", 101)
    info = await job.info()
    assert (info.state, info.meta.approved_hash) == (State.WAITING_APPROVAL, "")
    request = info.meta.approval_request
    assert request is not None
    assert (request.name, request.quorum, request.policies) == ("", 2, ("large", "urgent"))
    assert (request.reason, request.requested_by) == ("much money; always", "")
    assert request.payload_hash == payload_hash("pay", "default", info.payload)
    assert abs(request.deadline_at_ms - info.created_at_ms - 3_600_000) < 60_000


async def test_a_job_submitted_on_hold_has_an_approval_request(app: Holdfast) -> None:
    job = await define_pay(app).options(hold=True).submit("ann")
    more_jobs = await define_pay_again(app).options(hold=True).submit_many([("bob",)])
    for held_job in (job, *more_jobs):
        info = await held_job.info()
        assert info.state is State.WAITING_APPROVAL
        assert info.meta.approval_request is not None
        assert info.meta.approval_request.policies == ("hold",)


def define_pay_again(app: Holdfast) -> Any:
    @app.task
    async def pay_again(to: str) -> None: ...

    return pay_again


async def test_without_a_ledger_approval_cannot_be_requested(app_without_ledger: Holdfast) -> None:
    pay = define_pay(app_without_ledger)
    app_without_ledger.guard.rule("large", when=lambda args: args["amount"] > 100, then=RequireApproval("much money"))
    with pytest.raises(NoLedger, match="large"):
        await pay.submit("ann", 101)
    assert await app_without_ledger.engine.queues() == []
    held: Job[str] = await pay.options(hold=True).submit("ann")
    info = await held.info()
    # Without a ledger there is no approval request; an operator moves the job.
    assert (info.state, info.meta.approval_request) == (State.WAITING_APPROVAL, None)


async def test_inline_mode_applies_the_same_guards(memory_app: Holdfast) -> None:
    pay = define_pay(memory_app)
    memory_app.guard.rule("none", when=lambda args: args["amount"] > 1000, then=Deny("too much"))
    memory_app.guard.rule("large", when=lambda args: args["amount"] > 100, then=RequireApproval("much money"))
    with inline(memory_app):
        assert await (await pay.submit("ann")).result() == "10 to ann"
        assert await (await pay.submit("ann", 101)).state() is State.WAITING_APPROVAL
        with pytest.raises(Denied):
            await pay.submit("ann", 1001)
