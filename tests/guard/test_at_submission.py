"""Guards at submission: allowed jobs are marked, those to be asked about are held, denied ones are not accepted."""

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
def memory(make_app: MakeApp) -> Holdfast:
    """For what does not depend on the store."""
    return make_app(url="sqlite://")


def payments(app: Holdfast) -> Any:
    @app.task
    async def pay(to: str, amount: int = 10) -> str:
        return f"{amount} to {to}"

    return pay


def watch(app: Holdfast) -> list[GuardRequest]:
    seen: list[GuardRequest] = []

    @app.guard
    async def watcher(request: GuardRequest) -> Decision | None:
        seen.append(request)
        return None

    return seen


async def test_without_guards_nothing_is_different_on_the_wire(memory: Holdfast) -> None:
    job = await payments(memory).submit("ann")
    assert (await job.info()).meta == EMPTY_META


async def test_an_allowed_job_is_marked_with_what_was_seen(app: Holdfast) -> None:
    pay, seen = payments(app), watch(app)
    job = await pay.options(tenant_id="acme", idempotency_key="k1", context={"user": 7}).submit("ann", amount=3)
    view = await job.info()
    assert view.state is State.QUEUED
    assert view.meta.approved_hash == payload_hash("pay", "acme", view.payload)
    assert seen == [
        GuardRequest(
            task="pay",
            tenant_id="acme",
            queue="default",
            arguments={"to": "ann", "amount": 3},
            payload=view.payload,
            context={"user": 7},
            source="submit",
            submitted_by="",
            idempotency_key="k1",
        )
    ]


async def test_every_way_in_is_guarded(memory: Holdfast) -> None:
    pay, seen = payments(memory), watch(memory)
    await pay.submit("a")
    await pay.submit_many([("b",), ("c", 2)])
    await memory.submit_raw("pay", b'["d", 4]')
    assert [request.arguments for request in seen] == [
        {"to": "a", "amount": 10},
        {"to": "b", "amount": 10},
        {"to": "c", "amount": 2},
        {"to": "d", "amount": 4},
    ]


def test_the_blocking_door_is_guarded(memory: Holdfast) -> None:
    pay = payments(memory)
    memory.guard.rule("none", then=Deny("closed today"))
    with pytest.raises(Denied, match="closed today"):
        pay.submit_sync("a")
    backend_of(memory).portal.close(memory.close)


async def test_arguments_are_as_the_function_gets_them(memory: Holdfast) -> None:
    @memory.task
    async def buy(order: Order) -> None: ...

    memory.guard.rule("large", task="buy", when=lambda args: args["order"].amount > 1000, then=Deny("too much"))
    await memory.submit_raw("buy", b'{"order":{"amount":"999"}}')
    with pytest.raises(Denied, match="too much"):
        await memory.submit_raw("buy", b'{"order":{"amount":"1001"}}')


async def test_an_app_that_only_passes_on_is_guarded_by_names(memory: Holdfast) -> None:
    seen = watch(memory)
    await memory.submit_raw("elsewhere", b'{"amount":1}')
    assert seen[0].arguments == {"amount": 1}
    # Nobody here knows which argument is which: a rule about one of them would be blind.
    with pytest.raises(GuardFailed, match="by name"):
        await memory.submit_raw("elsewhere", b"[1]")


async def test_denied_is_an_error_a_log_line_and_an_event(app: Holdfast, caplog: pytest.LogCaptureFixture) -> None:
    pay = payments(app)
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


async def test_a_ledger_that_is_away_changes_nothing_about_a_denial(
    memory: Holdfast, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pay = payments(memory)
    memory.guard.rule("none", then=Deny("no"))
    await memory.open()

    async def away(actions: object) -> None:
        raise LedgerUnavailable("made to fail by the test")

    backend = backend_of(memory)
    assert backend.ledger is not None
    monkeypatch.setattr(backend.ledger.operators, "record_audit", away)
    with pytest.raises(Denied):
        await pay.submit("ann")
    assert "not recorded in the audit log" in caplog.text


async def test_of_many_none_is_accepted_if_one_is_denied(memory: Holdfast) -> None:
    pay = payments(memory)
    memory.guard.rule("small amounts", when=lambda args: args["amount"] > 100, then=Deny("too much"))
    with pytest.raises(Denied):
        await pay.submit_many([("a", 1), ("b", 2), ("c", 101)])
    assert await memory.engine.queues() == []
    assert len(await pay.submit_many([("a", 1), ("b", 2)])) == 2


async def test_a_broken_guard_accepts_nothing(memory: Holdfast) -> None:
    pay = payments(memory)

    @memory.guard
    def broken(request: GuardRequest) -> Decision | None:
        raise RuntimeError("oops")

    with pytest.raises(GuardFailed, match="oops"):
        await pay.submit("ann")
    assert await memory.engine.queues() == []


async def test_people_are_asked_by_holding_the_job(app: Holdfast) -> None:
    pay = payments(app)
    app.guard.rule("large", when=lambda args: args["amount"] > 100, then=RequireApproval("much money", quorum=2))
    app.guard.rule("hurry", then=RequireApproval("always", deadline=timedelta(hours=1)))
    job = await pay.submit("ann", 101)
    view = await job.info()
    assert (view.state, view.meta.approved_hash) == (State.WAITING_APPROVAL, "")
    ask = view.meta.approval_request
    assert ask is not None
    assert (ask.name, ask.quorum, ask.policies) == ("", 2, ("large", "hurry"))
    assert (ask.reason, ask.requested_by) == ("much money; always", "")
    assert ask.payload_hash == payload_hash("pay", "default", view.payload)
    assert abs(ask.deadline_at_ms - view.created_at_ms - 3_600_000) < 60_000


async def test_who_holds_a_job_back_asks_people_too(app: Holdfast) -> None:
    job = await payments(app).options(hold=True).submit("ann")
    many = await payments_of_another_name(app).options(hold=True).submit_many([("bob",)])
    for held in (job, *many):
        view = await held.info()
        assert view.state is State.WAITING_APPROVAL
        assert view.meta.approval_request is not None
        assert view.meta.approval_request.policies == ("hold",)


def payments_of_another_name(app: Holdfast) -> Any:
    @app.task
    async def pay_again(to: str) -> None: ...

    return pay_again


async def test_without_a_ledger_nobody_can_be_asked(lonely: Holdfast) -> None:
    pay = payments(lonely)
    lonely.guard.rule("large", when=lambda args: args["amount"] > 100, then=RequireApproval("much money"))
    with pytest.raises(NoLedger, match="large"):
        await pay.submit("ann", 101)
    assert await lonely.engine.queues() == []
    held: Job[str] = await pay.options(hold=True).submit("ann")
    view = await held.info()
    # As ever: an operator moves it on.
    assert (view.state, view.meta.approval_request) == (State.WAITING_APPROVAL, None)


async def test_inline_mode_has_the_same_guards(memory: Holdfast) -> None:
    pay = payments(memory)
    memory.guard.rule("none", when=lambda args: args["amount"] > 1000, then=Deny("too much"))
    memory.guard.rule("large", when=lambda args: args["amount"] > 100, then=RequireApproval("much money"))
    with inline(memory):
        assert await (await pay.submit("ann")).result() == "10 to ann"
        assert await (await pay.submit("ann", 101)).state() is State.WAITING_APPROVAL
        with pytest.raises(Denied):
            await pay.submit("ann", 1001)
