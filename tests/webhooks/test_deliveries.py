"""From a finished job, an approval or an alert to a signed request: ledger, dispatcher and webhook worker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import Holdfast
from holdfast.core.principal import AuditEntry
from holdfast.core.states import State
from holdfast.core.webhook_url import ANY_SUBSCRIBER
from holdfast.engine.port.operators import QueueControl, TenantControl
from holdfast.errors import InvalidOption, JobFailed, LedgerUnavailable, NoLedger
from holdfast.execution.backend import backend_of
from holdfast.upkeep import dispatch
from holdfast.upkeep.dispatch import WebhookDispatcher
from holdfast.upkeep.ledger_tasks import LedgerTasks
from holdfast.webhooks import verify
from holdfast.webhooks.deliveries import QUEUE, TASK
from tests.webhooks.receiver import OTHER_SECRET, SECRET, Receiver, is_signed, run_receiver, status
from tests.webhooks.support import list_deliveries, make_app
from tests.worker.support import eventually, working


@pytest.fixture(autouse=True)
def long_record_timeout() -> Iterator[None]:
    """On a loaded machine the ledger may take longer than one pass of a dispatcher waits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "_RECORD_TIMEOUT_MS", 60_000)
        yield


async def test_a_finished_job_is_delivered(stores: dict[str, Any], receiver: Receiver) -> None:
    app = make_app(stores)
    async with app, working(app):
        job = await app.tasks["add"].options(webhook=receiver.url, trace_id="t-1").submit(1, 2)
        assert await job.result(timeout=60) == 3
        await eventually(lambda: receiver.requests, "the webhook")
        await eventually(lambda: list_deliveries(app, State.SUCCEEDED), "the delivery's own end")
    [request] = receiver.requests
    assert is_signed(request, SECRET)
    message = verify(request.headers, request.body, SECRET)
    assert message.type == "job.succeeded"
    data = message.data
    assert (data["job_id"], data["task"], data["state"], data["result"]) == (job.id, "add", "succeeded", 3)
    assert (data["queue"], data["tenant_id"], data["trace_id"]) == ("default", "default", "t-1")
    assert data["finished_at"] is not None


async def test_a_failure_is_delivered_without_internals(stores: dict[str, Any], receiver: Receiver) -> None:
    app = make_app(stores)
    async with app, working(app):
        job = await app.tasks["fail"].options(webhook=receiver.url).submit("db password is hunter2")
        with pytest.raises(JobFailed):
            await job.result(timeout=60)
        await eventually(lambda: receiver.requests, "the webhook")
    [request] = receiver.requests
    assert request.json["type"] == "job.failed"
    data = request.json["data"]
    assert data["error"]["code"] == "TASK_FATAL"
    assert data["error"]["message"]
    assert data["dlq_id"]
    for secret in (b"hunter2", b"Traceback", b"worker", b"payload"):
        assert secret not in request.body


async def test_a_cancelled_job_is_delivered(stores: dict[str, Any], receiver: Receiver) -> None:
    app = make_app(stores)
    async with app, working(app):
        job = await app.tasks["add"].options(webhook=receiver.url, delay=600).submit(1, 2)
        await job.cancel()
        await eventually(lambda: receiver.requests, "the webhook")
    assert receiver.requests[0].json["type"] == "job.cancelled"


async def test_a_delivery_is_retried_until_it_is_accepted(stores: dict[str, Any], receiver: Receiver) -> None:
    receiver.answers = [status(500), status(503)]
    app = make_app(stores)
    async with app, working(app):
        await app.tasks["add"].options(webhook=receiver.url).submit(1, 2)
        [done] = await eventually(lambda: list_deliveries(app, State.SUCCEEDED), "the delivery's end")
    assert done.retry_count == 2
    assert len(receiver.requests) == 3
    assert len({request.headers["webhook-id"] for request in receiver.requests}) == 1
    assert len({request.body for request in receiver.requests}) == 1
    assert all(is_signed(request, SECRET) for request in receiver.requests)


async def test_a_delivery_is_dead_lettered_after_the_last_attempt(stores: dict[str, Any], receiver: Receiver) -> None:
    receiver.answers = [status(500)] * 10
    app = make_app(stores, webhook_attempts=3)
    async with app, working(app):
        await app.tasks["add"].options(webhook=receiver.url).submit(1, 2)
        [dead] = await eventually(lambda: list_deliveries(app, State.FAILED), "the delivery's end")
    assert len(receiver.requests) == 3
    assert dead.dlq_id
    assert "answered 500" in dead.last_error
    assert "s3cret" not in dead.last_error
    assert dead.job_type == TASK


async def test_status_410_dead_letters_a_delivery_at_once(stores: dict[str, Any], receiver: Receiver) -> None:
    receiver.answers = [status(410)]
    app = make_app(stores)
    async with app, working(app):
        await app.tasks["add"].options(webhook=receiver.url).submit(1, 2)
        await eventually(lambda: list_deliveries(app, State.FAILED), "the delivery's end")
    assert len(receiver.requests) == 1


async def test_a_dispatcher_that_fails_before_its_mark_repeats_nothing(
    stores: dict[str, Any], receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app(stores)
    # The worker projects but has no dispatcher: the one of the test fails half-way.
    monkeypatch.setattr(WebhookDispatcher, "run", _wait_forever)
    async with app, working(app):
        job = await app.tasks["add"].options(webhook=receiver.url).submit(1, 2)
        await job.result(timeout=60)
        ledger = backend_of(app).ledger
        assert ledger is not None
        await app.ledger.wait_caught_up()
        dispatcher = WebhookDispatcher(app.engine, ledger, app.settings)
        real = ledger.notifications.mark.jobs

        async def fail(*_: Any) -> None:
            raise LedgerUnavailable("killed")

        monkeypatch.setattr(ledger.notifications.mark, "jobs", fail)
        for _ in range(2):
            with pytest.raises(LedgerUnavailable):
                await dispatcher.run_once()
        await eventually(lambda: receiver.requests, "the webhook")
        monkeypatch.setattr(ledger.notifications.mark, "jobs", real)
        assert await dispatcher.run_once() == 1
        assert await dispatcher.run_once() == 0
        await app.ledger.wait_caught_up()
        await eventually(lambda: list_deliveries(app, State.SUCCEEDED), "the delivery's end")
        assert len(await list_deliveries(app)) == 1
    assert len(receiver.requests) == 1


async def test_a_row_is_marked_only_after_the_ledger_has_its_delivery(
    stores: dict[str, Any], receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app(stores)
    monkeypatch.setattr(WebhookDispatcher, "run", _wait_forever)
    async with app, working(app):
        job = await app.tasks["add"].options(webhook=receiver.url).submit(1, 2)
        await job.result(timeout=60)
        ledger = backend_of(app).ledger
        assert ledger is not None
        await app.ledger.wait_caught_up()
        dispatcher = WebhookDispatcher(app.engine, ledger, app.settings)
        if ledger.projection is not None:
            # If the engine lost its data now, the delivery would be lost.
            monkeypatch.setattr(ledger.projection, "wait_recorded", _record_nothing)
            assert await dispatcher.run_once() == 0
            monkeypatch.undo()
        assert await dispatcher.run_once() == 1
        assert await dispatcher.run_once() == 0
        await eventually(lambda: list_deliveries(app, State.SUCCEEDED), "the delivery's end")
    assert len(receiver.requests) == 1


async def test_a_tenant_at_its_intake_limit_does_not_delay_the_webhooks_of_others(
    stores: dict[str, Any], receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app(stores)
    monkeypatch.setattr(WebhookDispatcher, "run", _wait_forever)
    async with app, working(app):
        jobs = [
            await app.tasks["add"].options(webhook=receiver.url, tenant_id=tenant).submit(1, 2)
            for tenant in ("acme", "zeta", "acme")
        ]
        for job in jobs:
            await job.result(timeout=60)
        ledger = backend_of(app).ledger
        assert ledger is not None
        await app.ledger.wait_caught_up()
        dispatcher = WebhookDispatcher(app.engine, ledger, app.settings)
        await app.engine.set_control(QUEUE, QueueControl(tenants={"acme": TenantControl(intake_limit=0)}))
        assert await dispatcher.run_once() == 1
        await eventually(lambda: receiver.requests, "the webhook of the other tenant")
        assert [request.json["data"]["job_id"] for request in receiver.requests] == [jobs[1].id]
        await app.engine.set_control(QUEUE, QueueControl())
        assert await dispatcher.run_once() == 2
        await eventually(lambda: len(receiver.requests) == 3, "all webhooks")


async def test_a_page_of_a_limited_tenant_does_not_delay_the_webhooks_of_others(
    stores: dict[str, Any], receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are read by tenant: those of "acme" fill every page until their limit is lifted."""
    monkeypatch.setattr(dispatch, "_LIMIT", 2)
    app = make_app(stores)
    monkeypatch.setattr(WebhookDispatcher, "run", _wait_forever)
    async with app, working(app):
        jobs = [
            await app.tasks["add"].options(webhook=receiver.url, tenant_id=tenant).submit(1, 2)
            for tenant in ("acme", "acme", "acme", "bolt", "zeta", "zeta")
        ]
        for job in jobs:
            await job.result(timeout=60)
        ledger = backend_of(app).ledger
        assert ledger is not None
        await app.ledger.wait_caught_up()
        dispatcher = WebhookDispatcher(app.engine, ledger, app.settings)
        none = TenantControl(intake_limit=0)
        await app.engine.set_control(QUEUE, QueueControl(tenants={"acme": none, "bolt": none}))
        assert [await dispatcher.run_once() for _ in range(2)] == [2, 0]
        await eventually(lambda: len(receiver.requests) == 2, "the webhooks of the other tenant")
        assert {request.json["data"]["job_id"] for request in receiver.requests} == {job.id for job in jobs[4:]}
        await app.engine.set_control(QUEUE, QueueControl())
        assert [await dispatcher.run_once() for _ in range(3)] == [2, 2, 0]


async def _record_nothing(*_: Any) -> set[Any]:
    return set()


async def test_concurrent_dispatchers_deliver_once(
    stores: dict[str, Any], receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app(stores)
    async with app, working(app):
        ledger = backend_of(app).ledger
        assert ledger is not None
        others = [LedgerTasks(app.engine, ledger, app.settings, project=False) for _ in range(3)]
        for other in others:
            other.start()
        jobs = [await app.tasks["add"].options(webhook=receiver.url).submit(1, number) for number in range(20)]
        for job in jobs:
            await job.result(timeout=60)
        await eventually(lambda: len(receiver.requests) >= 20, "all webhooks")

        async def all_done() -> bool:
            return len(await list_deliveries(app, State.SUCCEEDED)) == 20

        await eventually(all_done, "the deliveries' ends")
        for other in others:
            await other.stop()
    assert sorted(request.json["data"]["job_id"] for request in receiver.requests) == sorted(job.id for job in jobs)


async def test_subscribers_receive_the_jobs_of_their_tenants(stores: dict[str, Any], receiver: Receiver) -> None:
    async with run_receiver() as other:
        hooks = [
            {"url": receiver.url, "events": ["job.*"], "tenants": ["acme"], "secret": OTHER_SECRET},
            {"url": other.url, "events": ["job.failed"]},
        ]
        app = make_app(stores, webhooks=hooks)
        async with app, working(app):
            matching = await app.tasks["add"].options(tenant_id="acme").submit(1, 2)
            await app.tasks["add"].options(tenant_id="umbrella").submit(1, 2)
            failed = await app.tasks["fail"].options(tenant_id="umbrella").submit("no")
            await eventually(lambda: receiver.requests and other.requests, "the webhooks")
            assert (await matching.info()).meta.webhook == ANY_SUBSCRIBER

            async def all_delivered() -> bool:
                return len(await list_deliveries(app, State.SUCCEEDED)) == 2

            await eventually(all_delivered, "the deliveries' ends")
        assert [request.json["data"]["job_id"] for request in receiver.requests] == [matching.id]
        assert is_signed(receiver.requests[0], OTHER_SECRET)
        assert [request.json["data"]["job_id"] for request in other.requests] == [failed.id]
        assert is_signed(other.requests[0], SECRET)


async def test_alerts_are_delivered(stores: dict[str, Any], receiver: Receiver) -> None:
    app = make_app(stores, webhooks=[{"url": receiver.url, "events": ["alert.*"]}])
    async with app, working(app):
        ledger = backend_of(app).ledger
        assert ledger is not None
        alert = AuditEntry(
            type="alert.backlog", actor="holdfast", tenant_id="default", target="queue", target_id="mail", queue="mail",
            reason="1,500 jobs wait", after={"backlog": 1500},
        )  # fmt: skip
        assert await ledger.operators.raise_alert("backlog:mail", alert)
        await eventually(lambda: receiver.requests, "the webhook")
    [request] = receiver.requests
    assert request.json["type"] == "alert.backlog"
    assert request.json["data"]["queue"] == "mail"
    assert request.json["data"]["message"] == "1,500 jobs wait"
    assert request.json["data"]["details"] == {"backlog": 1500}


async def test_each_step_of_an_approval_is_delivered(stores: dict[str, Any], receiver: Receiver) -> None:
    app = make_app(stores, webhooks=[{"url": receiver.url, "events": ["approval.*"]}])
    async with app, working(app):
        job = await app.tasks["add"].options(hold=True).submit(1, 2)
        await eventually(lambda: receiver.requests, "the approval request")
        ledger = backend_of(app).ledger
        assert ledger is not None
        requested = receiver.requests[0].json
        assert (requested["type"], requested["data"]["job_id"]) == ("approval.requested", job.id)
        await ledger.operators.vote(
            None, requested["data"]["approval_id"], actor="ada", approve=False, reason="too dear"
        )
        await eventually(lambda: len(receiver.requests) == 2, "the decision")
    decided = receiver.requests[1].json
    assert decided["type"] == "approval.rejected"
    assert (decided["data"]["decided_by"], decided["data"]["decision_reason"]) == ("ada", "too dear")
    assert receiver.requests[0].headers["webhook-id"] != receiver.requests[1].headers["webhook-id"]


async def test_a_long_result_is_left_out(stores: dict[str, Any], receiver: Receiver) -> None:
    app = make_app(stores)

    @app.task
    async def long() -> str:
        return "x" * 100_000

    async with app, working(app):
        await long.options(webhook=receiver.url).submit()
        await eventually(lambda: receiver.requests, "the webhook")
    data = receiver.requests[0].json["data"]
    assert (data["result"], data["result_omitted"]) == (None, True)


# At submission -------------------------------------------------------------------------------------


@pytest.fixture
async def app(tmp_path: Path) -> AsyncIterator[Holdfast]:
    async with make_app({"url": f"sqlite:///{tmp_path / 'holdfast.db'}"}) as app:
        yield app


@pytest.mark.parametrize(
    "url", ["http://169.254.169.254/", "http://10.0.0.1/", "ftp://example.org/", "https://u:p@example.org/", "*", ""]
)
async def test_a_bad_address_is_refused_at_submission(app: Holdfast, url: str) -> None:
    with pytest.raises(InvalidOption, match="webhook"):
        await app.tasks["add"].options(webhook=url).submit(1, 2)
    with pytest.raises(InvalidOption, match="webhook"):
        await app.tasks["add"].options(webhook=url).submit_many([(1, 2), (3, 4)])
    assert (await app.ledger.queries.jobs()).jobs == []


async def test_without_a_secret_there_are_no_webhooks(tmp_path: Path) -> None:
    async with make_app({"url": f"sqlite:///{tmp_path / 'h.db'}"}, webhook_secret=None) as app:
        with pytest.raises(InvalidOption, match="HOLDFAST_WEBHOOK_SECRET"):
            await app.tasks["add"].options(webhook="https://example.org/").submit(1, 2)


@pytest.mark.redis
async def test_without_a_ledger_there_are_no_webhooks(redis_url: str, namespace: str) -> None:
    async with make_app({"url": redis_url, "namespace": namespace}) as app:
        with pytest.raises(NoLedger, match="HOLDFAST_LEDGER"):
            await app.tasks["add"].options(webhook="https://example.org/").submit(1, 2)
        assert (await app.tasks["add"].submit(1, 2)).id


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"webhook_secret": "secret"}, "whsec_"),
        ({"webhook_allow": ["10.0.0.0/99"]}, "neither a host name"),
        ({"webhooks": [{"url": "https://example.org/", "events": ["job.*"]}]}, "secret"),
        ({"webhooks": [{"url": "http://10.0.0.1/", "events": ["job.*"], "secret": SECRET}]}, "public internet"),
        ({"webhooks": [{"url": "https://example.org/", "events": ["jobs"], "secret": SECRET}]}, "not one of job"),
        ({"webhooks": [{"url": "https://example.org/", "events": [], "secret": SECRET}]}, "webhooks"),
        ({"webhooks": [{"url": "https://example.org/", "event": ["job.*"]}]}, "webhooks"),
    ],
)
def test_invalid_settings_are_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidOption, match=reason):
        Holdfast("sqlite://", **given)


def test_settings_do_not_show_the_secret() -> None:
    app = Holdfast("sqlite://", webhook_secret=SECRET)
    assert SECRET not in repr(app.settings)
    assert SECRET not in str(app.settings.model_dump())


async def test_no_webhook_worker_runs_without_webhooks(tmp_path: Path) -> None:
    app = make_app({"url": f"sqlite:///{tmp_path / 'h.db'}"}, webhook_secret=None)
    async with app, working(app):
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "holdfast-webhook-worker"]


async def test_logs_do_not_contain_the_secret_of_the_address(
    tmp_path: Path, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "holdfast")
    receiver.answers = [status(500)]
    app = make_app({"url": f"sqlite:///{tmp_path / 'h.db'}"})
    async with app, working(app):
        await app.tasks["add"].options(webhook=receiver.url).submit(1, 2)
        await eventually(lambda: list_deliveries(app, State.SUCCEEDED), "the delivery's end")
    assert "delivered" in caplog.text
    assert "s3cret" not in caplog.text
    assert SECRET not in caplog.text


async def _wait_forever(_: WebhookDispatcher) -> None:
    await asyncio.Event().wait()
