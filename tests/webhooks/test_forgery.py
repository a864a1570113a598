"""Deliveries are jobs. A principal that may submit or replay jobs must not get other content signed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from holdfast import Holdfast
from holdfast.core.job import Envelope
from holdfast.core.principal import Principal, Role
from holdfast.core.states import State
from holdfast.ledger.queries.operator_filters import DeadLetterFilter
from holdfast.operations.operations import Operations
from holdfast.webhooks.deliveries import QUEUE, TASK
from tests.webhooks.receiver import SECRET, Receiver, status
from tests.webhooks.support import list_deliveries, make_app
from tests.worker.support import eventually, working

EVE = Principal(name="eve", role=Role.OPERATOR, tenants=frozenset({"acme"}))


@pytest.fixture
def app(tmp_path: Path, receiver: Receiver) -> Holdfast:
    """An app with a subscriber whose address contains a secret."""
    hook = {"url": receiver.url, "events": ["job.*"], "secret": SECRET}
    return make_app({"url": f"sqlite:///{tmp_path / 'holdfast.db'}"}, webhooks=[hook], webhook_attempts=1)


def _forge_payload(url: str, **more: str) -> bytes:
    return msgspec.json.encode({"url": url, "webhook_id": "msg_1", "event": "job.succeeded", "body": "{}"} | more)


@pytest.mark.parametrize(
    "more", [{}, {"signature": ""}, {"signature": "0" * 64}, {"signature": "é"}, {"seal": "0" * 64}]
)
async def test_a_forged_delivery_is_not_sent(app: Holdfast, receiver: Receiver, more: dict[str, str]) -> None:
    async with app, working(app):
        job = Envelope(
            job_id="forged", task=TASK, queue=QUEUE, tenant_id="acme", payload=_forge_payload(receiver.url, **more)
        )
        await app.engine.submit([job])
        info = await app.engine.wait_final(QUEUE, "forged", 20_000)
        assert info is not None
        assert info.state is State.FAILED
    assert receiver.requests == []


async def test_an_edited_replay_is_not_sent(app: Holdfast, receiver: Receiver) -> None:
    """An unchanged delivery may be sent again, but not with another body, address or id."""
    async with app, working(app):
        receiver.answers.append(status(410))
        job = await app.tasks["add"].options(tenant_id="acme").submit(1, 2)
        assert await job.result(timeout=60) == 3
        await eventually(lambda: _is_failed(app))
        dead_letters = Operations.for_app(app).dead_letters
        (dead_letter,) = (await dead_letters.list(EVE, DeadLetterFilter())).dead_letters
        genuine = msgspec.json.decode(dead_letter.payload.text)
        request_count = len(receiver.requests)
        for changed in ({"body": "{}"}, {"url": f"http://127.0.0.1:{receiver.port}/other"}, {"webhook_id": "msg_2"}):
            edited = msgspec.json.encode(genuine | changed)
            replay = await dead_letters.replay(EVE, dead_letter.dlq_id, reason="to try", payload=edited)
            info = await app.engine.wait_final(QUEUE, replay.job_id, 20_000)
            assert info is not None
            assert info.state is State.FAILED
        assert len(receiver.requests) == request_count
        replay = await dead_letters.replay(EVE, dead_letter.dlq_id, reason="it is back")
        info = await app.engine.wait_final(QUEUE, replay.job_id, 20_000)
        assert info is not None
        assert info.state is State.SUCCEEDED


async def _is_failed(app: Holdfast) -> bool:
    return bool(await list_deliveries(app, State.FAILED))


async def test_a_subscribers_address_is_not_in_the_jobs_of_tenants(app: Holdfast, receiver: Receiver) -> None:
    async with app, working(app):
        job = await app.tasks["add"].options(tenant_id="acme").submit(1, 2)
        await job.result(timeout=60)
        await eventually(lambda: receiver.requests)
        assert "s3cret" in receiver.requests[0].line
        (row,) = await list_deliveries(app)
        info = await Operations.for_app(app).jobs.find(EVE, row.job_id)
    assert "s3cret" not in repr(info)
