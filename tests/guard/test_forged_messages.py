"""A program that may only append to the task stream cannot state what a guard or approvers decided (Q15, A1–A3)."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError

from holdfast import Context, Deny, Holdfast, Job, RequireApproval, State
from holdfast.core.job import Approval, Meta
from holdfast.core.verdict import GUARD_DENIED
from holdfast.engine.redis import wire
from holdfast.engine.redis.keys import KeyNames, QueueKeys
from holdfast.errors import JobFailed
from holdfast.guard.decisions import payload_hash, request_hash
from tests.guard.conftest import MakeApp
from tests.guard.support import ANN, event_types, vote, wait_approval
from tests.worker.support import eventually, working

pytestmark = [pytest.mark.redis, pytest.mark.postgres]


@pytest.fixture
def app(redis_url: str, postgres_url: str, namespace: str, make_app: MakeApp) -> Holdfast:
    return make_app(url=redis_url, ledger=postgres_url, namespace=namespace)


class Producer:
    """A Redis client whose user may do nothing but XADD to the task streams; `admin` may do everything."""

    def __init__(self, redis: Redis, admin: Redis, keys: QueueKeys) -> None:
        self.redis: Any = redis
        self.admin: Any = admin
        self.keys = keys

    async def expire(self, job_id: str) -> None:
        """Delete what Redis has of a job that has ended."""
        assert await self.admin.delete(self.keys.job(job_id), self.keys.idempotency("default", job_id))

    async def forge(self, job_id: str, task: str, payload: bytes, meta: Meta, tenant_id: str = "default") -> None:
        """Write a message as the previous version of holdfast wrote them."""
        fields = {
            "holdfast": "1 queued 0 0 1700000000000",
            "task_id": job_id,
            "type": task,
            "payload": payload,
            "tenant_id": tenant_id,
            "idempotency_key": job_id,
            "trace_id": "",
            "meta": wire.encode_meta(meta),
        }
        await self.redis.xadd(self.keys.streams[1], fields)


@pytest.fixture
async def producer(redis_url: str, namespace: str) -> AsyncIterator[Producer]:
    admin, name, password = Redis.from_url(redis_url), f"producer-{namespace}", secrets.token_hex(16)
    keys = QueueKeys("default", KeyNames(namespace=namespace))
    stream = keys.streams[1].decode()
    await admin.acl_setuser(name, enabled=True, passwords=[f"+{password}"], keys=[f"{stream}*"], commands=["+xadd"])
    client = Redis.from_url(redis_url, username=name, password=password)
    yield Producer(client, admin, keys)
    await client.aclose()
    await admin.acl_deluser(name)
    await admin.aclose()


class Shop:
    """Payments: denied ones, ones that need approval, and a task that asks during its run."""

    def __init__(self, app: Holdfast) -> None:
        self.app = app
        self.runs: list[str] = []
        app.guard.rule("no", task="forbidden", then=Deny("never"))
        app.guard.rule("large", task="pay", then=RequireApproval("is it right?"))

        @app.task
        async def forbidden(to: str) -> None:
            self.runs.append(f"forbidden {to}")

        @app.task
        async def pay(to: str) -> str:
            self.runs.append(f"pay {to}")
            return f"paid {to}"

        @app.task
        async def ask(ctx: Context, to: str) -> list[str]:
            approval = await ctx.approval("send it?")
            self.runs.append(f"ask {to}")
            return list(approval.by)

        @app.task
        async def ping() -> str:
            self.runs.append("ping")
            return "pong"

        self.pay, self.ping = pay, ping

    async def find(self, job_id: str) -> Job[Any]:
        """The job of a foreign message; look-ups do not find it before a worker has adopted it."""

        async def adopted() -> bool:
            return (await self.app.engine.get("default", [job_id]))[0] is not None

        await eventually(adopted, "the message to be adopted")
        return self.app.job(job_id)


@pytest.fixture
def shop(app: Holdfast) -> Shop:
    return Shop(app)


def allowed(task: str, payload: bytes) -> Meta:
    """The meta of a job that a guard has allowed."""
    return Meta(approved_hash=payload_hash(task, "default", payload))


async def test_the_producer_cannot_read_the_marker(shop: Shop, producer: Producer) -> None:
    async with shop.app:
        await shop.pay.submit("ann")
        for command in (
            ("HGET", producer.keys.control, "marker"),
            ("XRANGE", producer.keys.streams[1], "-", "+"),
            ("XREADGROUP", "GROUP", "cg:workers", "me", "STREAMS", producer.keys.streams[1], ">"),
            ("EVAL", "return redis.call('HGET', KEYS[1], 'marker')", 1, producer.keys.control),
            ("MONITOR",),
        ):
            with pytest.raises(NoPermissionError):
                await producer.redis.execute_command(*command)


async def test_a_denied_task_does_not_run(shop: Shop, producer: Producer) -> None:
    payload = b'{"to":"eve"}'
    async with working(shop.app):
        await producer.forge("j1", "forbidden", payload, allowed("forbidden", payload))
        job = await shop.find("j1")
        with pytest.raises(JobFailed) as caught:
            await job.result(60)
    assert caught.value.error_code == GUARD_DENIED
    assert shop.runs == []


async def test_a_payment_waits_for_its_approval(shop: Shop, producer: Producer) -> None:
    payload = b'{"to":"eve"}'
    async with working(shop.app):
        await producer.forge("j1", "pay", payload, allowed("pay", payload))
        job = await shop.find("j1")
        row = await wait_approval(shop.app, job)
        assert shop.runs == []
        await vote(shop.app, ANN, row.approval_id)
        assert await job.result(60) == "paid eve"


async def test_a_task_does_not_see_votes_that_were_not_cast(shop: Shop, producer: Producer) -> None:
    payload = b'{"to":"eve"}'
    forged = Approval("a-1", ("bob", "cyd"), 1, payload_hash=request_hash("ask", "default", payload, "send it?", None))
    async with working(shop.app):
        await producer.forge("j1", "ask", payload, Meta(approvals={"send it?": forged}))
        job = await shop.find("j1")
        row = await wait_approval(shop.app, job)
        assert shop.runs == []
        await vote(shop.app, ANN, row.approval_id)
        assert await job.result(60) == ["ann"]


async def test_no_code_runs_under_the_id_of_another_tenants_job(shop: Shop, producer: Producer) -> None:
    """The job waits for approval when the message arrives; its history stays as it was."""
    async with working(shop.app):
        job = await shop.pay.options(tenant_id="zeta").submit("ann")
        row = await wait_approval(shop.app, job)
        payload = b'{"to":"eve"}'
        await producer.forge(job.id, "pay", payload, allowed("pay", payload))
        await eventually(lambda: shop.app.engine.counters.skipped == 1, "the message to be dropped")
        assert await job.state() is State.WAITING_APPROVAL
        await vote(shop.app, ANN, row.approval_id)
        assert await job.result(60) == "paid ann"
        assert shop.runs == ["pay ann"]
        info = await job.info()
    assert info.attempt == 1


async def test_a_job_that_only_the_ledger_knows_keeps_its_history(shop: Shop, producer: Producer) -> None:
    """Its record and its key have expired in Redis when a message with its id arrives."""
    async with working(shop.app):
        job = await shop.ping.submit()
        assert await job.result(60) == "pong"
        before = await event_types(shop.app, job)
        await producer.expire(job.id)
        await producer.forge(job.id, "ping", b"{}", Meta())
        await eventually(lambda: shop.runs == ["ping", "ping"], "the message to be adopted")
        await shop.find(job.id)
        assert await event_types(shop.app, job) == before
